package legacy

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger"
	"chandler.dev/legacy/list"
)

// offering is what the kubelet is offered.
type offering struct {
	plugin   *Plugin
	group    sync.WaitGroup
	lists    list.Lists
	running  map[string]func() // ends the server of a resource, and waits for it
	problems []string          // as they were logged last

	seen *list.Stock // by which the ledger has adopted what pods have, nil before the first
}

// serve keeps the servers and their lists as they should be, until the context
// ends. Only it adds servers and ends them.
func (o *offering) serve(ctx context.Context) {
	p := o.plugin
	defer o.group.Wait()
	ticker := time.NewTicker(p.config.Poll)
	defer ticker.Stop()
	for ctx.Err() == nil {
		if what := p.offered.Load(); what != nil {
			o.update(ctx, what)
		}
		select {
		case <-ctx.Done():
		case <-p.changed:
		case <-ticker.C:
		}
	}
}

// update makes the lists say what follows from what is offered and from what
// containers have.
func (o *offering) update(ctx context.Context, what *offered) {
	p, err := o.plugin, error(nil)
	servers := maps.Clone(*p.servers.Load())
	in := list.Input{Snapshot: what.snapshot, Withheld: what.withheld, Beliefs: make(map[string]list.Belief, len(servers)), Now: time.Now(), Grace: p.config.Grace}
	for resource, one := range servers {
		in.Beliefs[resource] = one.belief(p.config.Ledger.Asked())
	}
	if in.Written, err = o.written(); err != nil {
		klog.FromContext(ctx).V(2).Info("What the kubelet has written down is not known", "reason", err.Error())
	}
	lists, problems := o.next(ctx, in)
	if err := p.keepSpecs(); err != nil {
		problems = append(slices.Clone(problems), discovery.Problem{Device: "CDI", Err: err})
	}
	o.report(ctx, problems)
	for resource, l := range lists.Resources() {
		if servers[resource] == nil {
			servers[resource] = newServer(resource, p.config.Grace, p.allocate, p.config.Observe)
			servers[resource].tracer = p.config.Tracer
		}
		servers[resource].publish(l)
		if servers[resource].done(in.Now) {
			delete(servers, resource)
		}
	}
	p.servers.Store(&servers)
	o.start(ctx, servers)
	o.stop(ctx, servers)
}

// written returns what the kubelet has written down, as long as it does not answer, or the
// grants cannot be read of init containers, of which it says nothing.
func (o *offering) written() (map[string][]string, error) {
	p := o.plugin
	if p.config.Allocated == nil || !p.config.Ledger.Asked().IsZero() {
		return nil, nil
	}
	return p.config.Allocated()
}

// next computes the lists that follow. The ledger adopts what pods have of new
// resources before the kubelet is told of them: a list without that would fail
// the pods.
func (o *offering) next(ctx context.Context, in list.Input) (list.Lists, []discovery.Problem) {
	l := o.plugin.config.Ledger
	before := o.lists
	o.look(&in)
	lists, problems := before.Next(in)
	if !maps.Equal(lists.Resources(), before.Resources()) {
		o.plugin.restock(func(s *list.Stock) *list.Stock { return s.With(lists) })
	}
	if stock := o.plugin.stock.Load(); stock != o.seen {
		o.seen = stock
		if err := l.Adopt(o.plugin.present()); err != nil {
			klog.FromContext(ctx).Error(err, "The devices of pods are not saved")
		}
		o.look(&in)
		lists, problems = before.Next(in)
	}
	o.lists = lists
	return lists, problems
}

// look makes the lists follow from what the host has and from who has it now.
func (o *offering) look(in *list.Input) {
	in.Host = o.plugin.present()
	in.View = o.plugin.config.Ledger.View(in.Host)
	in.Perhaps = perhaps(in)
}

// perhaps returns what containers may have by IDs that the kubelet has written down, nil if
// that is nothing, or the ledger knows what containers have. To a kubelet an ID that
// another plugin gave is another device, though it stands for one of ours.
func perhaps(in *list.Input) *ledger.View {
	if in.View.Perhaps() == "" || len(in.Written) == 0 {
		return nil
	}
	known := make(map[string]bool)
	for _, g := range in.View.Grants() {
		known[g.Key()] = true
	}
	var held []ledger.Entry
	for resource, ids := range in.Written {
		for _, id := range ids {
			if g, _ := in.Host.WithID(resource, id); g != nil && !known[ledger.GrantKey(resource, id)] {
				held = append(held, g)
			}
		}
	}
	if len(held) == 0 {
		return nil
	}
	return ledger.ViewOf(in.Host, held...)
}

// start runs the servers that do not run yet.
func (o *offering) start(ctx context.Context, servers map[string]*server) {
	for resource, one := range servers {
		if o.running[resource] != nil {
			continue
		}
		gone, ended := make(chan struct{}), make(chan struct{})
		o.running[resource] = func() { close(gone); <-ended }
		o.group.Go(func() {
			defer close(ended)
			o.plugin.config.Kubelet.Serve(ctx, resource, one, gone)
		})
	}
}

// stop ends the servers that have nothing left to offer.
func (o *offering) stop(ctx context.Context, servers map[string]*server) {
	for resource, end := range o.running {
		if servers[resource] == nil {
			end()
			delete(o.running, resource)
			klog.FromContext(ctx).Info("Device plugin ended, since its last device has gone", "resource", resource)
		}
	}
}

// report logs the problems that it has not logged the last time.
func (o *offering) report(ctx context.Context, problems []discovery.Problem) {
	var words []string
	for _, problem := range problems {
		words = append(words, problem.Error())
		if !slices.Contains(o.problems, problem.Error()) {
			klog.FromContext(ctx).Error(problem.Err, "Cannot be offered", "device", problem.Device)
		}
	}
	o.problems = words
}
