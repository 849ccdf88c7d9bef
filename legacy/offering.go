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
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/legacy/list"
)

// offering manages the servers for the kubelet and their lists.
type offering struct {
	plugin   *Plugin
	group    sync.WaitGroup
	lists    list.Lists
	running  map[string]func() // functions that end the server of a resource and wait for its end
	problems []string          // the last logged problems

	seen *list.Stock // stock of the last adoption by the ledger, nil before the first
}

// serve updates the servers and their lists until the context ends. No other function adds or ends
// servers.
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

// update computes the lists from the offers and the allocations of containers.
func (o *offering) update(ctx context.Context, what *offered) {
	p, err := o.plugin, error(nil)
	servers := maps.Clone(*p.servers.Load())
	in := list.Input{Snapshot: what.snapshot, Withheld: what.withheld, Beliefs: make(map[string]list.Belief, len(servers)), Now: time.Now(), Grace: p.config.Grace}
	for resource, one := range servers {
		in.Beliefs[resource] = one.kubeletBelief(p.config.Ledger.Grants.LastListing())
	}
	if in.CheckpointIDs, err = o.checkpointIDs(); err != nil {
		klog.FromContext(ctx).V(2).Info("The kubelet's checkpoint is unknown", "reason", err.Error())
	}
	lists, problems := o.next(ctx, in)
	if err := p.keepSpecs(); err != nil {
		problems = append(slices.Clone(problems), discovery.Problem{Device: "CDI", Err: err})
	}
	o.reportProblems(ctx, problems)
	for resource, l := range lists.Resources() {
		if servers[resource] == nil {
			servers[resource] = newServer(resource, p.config.Grace, p.allocateIDs, p.config.Observe)
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

// checkpointIDs returns the IDs in the kubelet's checkpoint, as long as PodResources does not
// answer. It also does so while the grants of init containers cannot be read, since PodResources
// does not list init containers.
func (o *offering) checkpointIDs() (map[string][]string, error) {
	p := o.plugin
	if p.config.Allocated == nil || !p.config.Ledger.Grants.LastListing().IsZero() {
		return nil, nil
	}
	return p.config.Allocated()
}

// next computes the following lists. Before the kubelet receives the list of a new resource, the
// ledger adopts the allocations of pods. A list without their IDs would make these pods fail.
func (o *offering) next(ctx context.Context, in list.Input) (list.Lists, []discovery.Problem) {
	l := o.plugin.config.Ledger
	before := o.lists
	o.refreshInput(&in)
	lists, problems := before.Next(in)
	if !maps.Equal(lists.Resources(), before.Resources()) {
		o.plugin.replaceStock(func(s *list.Stock) *list.Stock { return s.With(lists) })
	}
	if stock := o.plugin.stock.Load(); stock != o.seen {
		o.seen = stock
		if err := l.Grants.AdoptListed(o.plugin.presentStock()); err != nil {
			klog.FromContext(ctx).Error(err, "The devices of pods are not saved")
		}
		o.refreshInput(&in)
		lists, problems = before.Next(in)
	}
	o.lists = lists
	return lists, problems
}

// refreshInput sets the present devices and allocations in the input.
func (o *offering) refreshInput(in *list.Input) {
	in.Host = o.plugin.presentStock()
	in.View = o.plugin.config.Ledger.View(in.Host)
	in.PossibleHolders = possibleHolders(in)
}

// possibleHolders returns a view of the devices that containers may have by IDs in the kubelet's
// checkpoint. It returns nil if there are none, or if the ledger knows the containers' allocations.
// For the kubelet, an ID from another plugin is a different device, even if both IDs stand for the
// same device.
func possibleHolders(in *list.Input) *ledger.View {
	if in.View.UnknownOwnerReason() == "" || len(in.CheckpointIDs) == 0 {
		return nil
	}
	known := make(map[string]bool)
	for _, g := range in.View.Grants() {
		known[g.Key()] = true
	}
	var held []allocation.Entry
	for resource, ids := range in.CheckpointIDs {
		for _, id := range ids {
			if g, _ := in.Host.WithID(resource, id); g != nil && !known[allocation.GrantKey(resource, id)] {
				held = append(held, g)
			}
		}
	}
	if len(held) == 0 {
		return nil
	}
	return ledger.ViewOf(in.Host, held...)
}

// start runs the servers that are not running yet.
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

// reportProblems logs problems that were not logged the last time.
func (o *offering) reportProblems(ctx context.Context, problems []discovery.Problem) {
	var words []string
	for _, problem := range problems {
		words = append(words, problem.Error())
		if !slices.Contains(o.problems, problem.Error()) {
			klog.FromContext(ctx).Error(problem.Err, "Cannot be offered", "device", problem.Device)
		}
	}
	o.problems = words
}
