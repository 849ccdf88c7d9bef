// Package legacy speaks the classic device-plugin API (v1beta1): a server for
// each resource, its lists, allocate and preferred allocation. It knows no
// vendor, reads no host and opens no socket.
package legacy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/traces"
	"chandler.dev/legacy/list"
)

// Config is what a Plugin needs to know. StateDir must be set.
type Config struct {
	// Kubelet takes the servers of resources. Package sockets has the real one.
	Kubelet Kubelet

	// Pods asks the kubelet which containers have what. An answer that leaves out
	// pods with running containers is not whole, and nothing ends by it.
	Pods func(ctx context.Context) (*kubeletapi.Listing, error)

	// Allocated is asked while Pods does not answer in full. What its IDs stand for is
	// nobody else's until Pods has answered once. A first list without what
	// containers have would make a kubelet with a topology policy panic that is starting
	// (pkg/kubelet/cm/devicemanager/topology_hints.go, generateDeviceTopologyHints, in
	// 1.34 to 1.37). Optional.
	Allocated func() (map[string][]string, error)

	// Written returns what containers have by the kubelet's checkpoint, and the device
	// nodes that they were given. By those an ID is understood that the host does not
	// tell of. Optional.
	Written func() ([]kubeletapi.Holding, error)

	// Ledger says who has what. It is opened by the caller, and nothing is served
	// before.
	Ledger *ledger.Ledger

	// CDI is where the spec of devices goes that are given by CDI, and says where the
	// container runtime sees the root of the host that was scanned.
	CDI cdi.Dir

	// PassesCDI reports whether the kubelet passes names of CDI devices on to the
	// container runtime. Nil means that it does not.
	PassesCDI func(ctx context.Context) (bool, error)

	// Grant returns what a container needs for a set of devices beyond their
	// own edits. Nil means nothing.
	Grant discovery.Granter

	// Pending reports whether a pod of this node that has not ended asks for a
	// resource in an init container. PodResources leaves init containers out, so a
	// grant that it never names may be for one. Such a grant ends after the time
	// Unconfirmed if Pending says no. If Pending is nil it stays until its ID is
	// handed out again.
	Pending func(ctx context.Context, resource string) (bool, error)

	// Ended reports whether a pod of this node has ended. PodResources may list one
	// that has, as it lists one whose devices the kubelet has forgotten. Nil means
	// that none has.
	Ended func(ctx context.Context, namespace, pod string) (bool, error)

	// Observe is told how long the kubelet's calls take. Optional.
	Observe Observer

	// Tracer makes traces of calls of Allocate. Nil means none.
	Tracer trace.Tracer

	Grace       time.Duration // how long the kubelet may still hand out what it was told is unhealthy; 10 s if 0
	Poll        time.Duration // how often PodResources is asked; 5 s if 0
	Unconfirmed time.Duration // see Pending; 5 min if 0
}

// Kubelet is the node's kubelet, as the servers of resources meet it.
type Kubelet interface {
	// Run does what goes on beside the servers until the context ends. It is
	// called once, by the active instance.
	Run(ctx context.Context)

	// Serve has the kubelet call the server of a resource: it registers it, and
	// again whenever the kubelet has lost it. It ends with the context, when the
	// agent does and another instance may take over, or when the last device of
	// the resource has gone. No call is in flight when it returns.
	Serve(ctx context.Context, resource string, server pluginapi.DevicePluginServer, gone <-chan struct{})

	// Linger keeps what the kubelet needs until another instance has taken over,
	// or the context ends. It is called after Run, when this instance is the active
	// one no more.
	Linger(ctx context.Context)

	// Probe says which servers cannot be reached in the kubelet's way.
	Probe(ctx context.Context) error
}

// Plugin offers snapshots to the kubelet as extended resources.
type Plugin struct {
	config Config

	known   atomic.Pointer[[]discovery.Device]  // of the host, whichever API offers them
	offered atomic.Pointer[offered]             // nil until there is something to offer
	stock   atomic.Pointer[list.Stock]          // what the host has, and the lists
	given   atomic.Pointer[map[string][]string] // by key of a grant that the stock does not know: nodes; the map is never modified
	told    atomic.Pointer[told]                // of both, nil before the first
	servers atomic.Pointer[map[string]*server]  // by resource; the map is never modified
	specs   atomic.Pointer[specsOf]             // of devices that are given by CDI names, nil before there is one

	restocking sync.Mutex // is held while the stock becomes another

	ready   chan struct{} // closed when PodResources was asked
	changed chan struct{} // what the lists are computed from may have changed
	ask     chan struct{} // PodResources may have something new to say
}

// New returns a Plugin, which does nothing until it runs.
func New(config Config) *Plugin {
	if config.Observe == nil {
		config.Observe = func(Operation, time.Duration, error) {}
	}
	if config.Grace == 0 {
		config.Grace = 10 * time.Second
	}
	if config.Poll == 0 {
		config.Poll = 5 * time.Second
	}
	if config.Unconfirmed == 0 {
		config.Unconfirmed = 5 * time.Minute
	}
	p := &Plugin{
		config:  config,
		ready:   make(chan struct{}),
		changed: make(chan struct{}, 1),
		ask:     make(chan struct{}, 1),
	}
	p.servers.Store(&map[string]*server{})
	p.stock.Store(list.StockOf(nil, list.Lists{}))
	p.given.Store(&map[string][]string{})
	return p
}

// present returns what the ledger is told of the host: the same one as long as nothing of it
// changes, so that lists are left alone at rest.
func (p *Plugin) present() *list.Stock {
	stock, given := p.stock.Load(), p.given.Load()
	if last := p.told.Load(); last != nil && last.stock == stock && last.given == given {
		return last.knowing
	}
	knowing := stock.Knowing(*given)
	p.told.Store(&told{stock, given, knowing})
	return knowing
}

// host is present, for the ledger to ask.
func (p *Plugin) host() ledger.Stock { return p.present() }

// told is what the ledger was told of the host last, and of what that was made.
type told struct {
	stock   *list.Stock
	given   *map[string][]string
	knowing *list.Stock
}

// offered is what the classic API is to offer.
type offered struct {
	snapshot *rules.Snapshot
	withheld map[string]string // by silicon: why nobody new may have it
}

// Publish says what the classic API is to offer from now on, and which silicon
// of it is withheld, with the reason. Each snapshot is the whole truth; to
// publish the same again changes nothing.
func (p *Plugin) Publish(s *rules.Snapshot, withheld map[string]string) {
	if before := p.offered.Load(); before != nil && rules.Same(before.snapshot, s) && maps.Equal(before.withheld, withheld) {
		return
	}
	p.offered.Store(&offered{s, withheld})
	signal(p.changed)
}

// Know says which devices the host has and what each could be offered as: all
// of them, whichever API offers them, with the offers that their families gave.
// By those the ledger recognises what containers have from a plugin that was
// replaced, and has done so when Know returns: claims may wait for devices that
// are new. It offers nothing; to say the same again changes nothing.
func (p *Plugin) Know(all *discovery.Snapshot) {
	if p.known.Swap(&all.Devices) == &all.Devices {
		return
	}
	p.restock(func(s *list.Stock) *list.Stock { return s.Of(all.Devices) })
	p.config.Ledger.Recognise(p.present())
	signal(p.changed)
}

// restock makes the stock another one.
func (p *Plugin) restock(other func(*list.Stock) *list.Stock) {
	p.restocking.Lock()
	defer p.restocking.Unlock()
	p.stock.Store(other(p.stock.Load()))
}

// Ready is closed when the ledger is open and Run has asked the kubelet once,
// whether it answered or not.
func (p *Plugin) Ready() <-chan struct{} { return p.ready }

// Run serves what is published until the context ends, once the ledger is open.
// The kubelet keeps what pods have, for the next instance to take over.
func (p *Plugin) Run(ctx context.Context) {
	select {
	case <-p.config.Ledger.Opened():
	case <-ctx.Done():
		return
	}
	o := &offering{plugin: p, running: make(map[string]func())}
	// A first list without all that pods have would fail them. A kubelet that is
	// away has nothing to fail.
	lastError := p.poll(ctx, "")
	close(p.ready)

	var all sync.WaitGroup
	all.Go(func() { p.follow(ctx, lastError) })
	all.Go(func() { o.serve(ctx) })
	all.Go(func() { p.config.Kubelet.Run(ctx) })
	all.Wait()
}

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

// allocate answers the requests of containers for IDs of a resource: look up,
// edit, and have the ledger give them. All are given or none.
func (p *Plugin) allocate(ctx context.Context, l *list.List, resource string, requests [][]string) ([]*pluginapi.ContainerAllocateResponse, error) {
	var responses []*pluginapi.ContainerAllocateResponse
	var grants []*ledger.Grant
	now, stock := time.Now(), p.present()
	all := len(slices.Concat(requests...))
	if id, twice := repeated(slices.Concat(requests...)); twice {
		return nil, fmt.Errorf("%s: device %q: asked for twice in one call", resource, id)
	}
	for _, ids := range requests {
		units, err := l.LookUp(ids)
		if err != nil {
			return nil, unavailableError{err}
		}
		amount, err := l.Amount(ids, units)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", resource, err)
		}
		var variables []string
		if amount != nil {
			share := discovery.Share{Place: amount.Place, Container: amount.IDs, Call: all, Device: len(amount.Unit.IDs)}
			variables = share.Variables(resource)
		}
		grant := discovery.Grant{Resource: resource, All: l.All(units), Consumed: l.Consumed(ids)}
		r, err := p.respond(ctx, l.Allocation(), devicesOf(units), grant, variables)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", resource, err)
		}
		responses = append(responses, r)
		for _, id := range ids {
			g := l.Unit(id).Grant(resource, id, stock)
			g.Since, g.CDI = now, len(r.CdiDevices)+len(r.Annotations) > 0
			grants = append(grants, g)
		}
	}
	if err := p.give(ctx, stock, grants); err != nil {
		return nil, fmt.Errorf("%s: %w", resource, err)
	}
	signal(p.ask)
	klog.FromContext(ctx).V(2).Info("Devices allocated", "resource", resource, "ids", requests)
	return responses, nil
}

// passLimit is how long a call waits at most for devices that are handed over. The kubelet fails the pod
// of a call that fails, and sets no limit (pkg/kubelet/cm/devicemanager/endpoint.go, allocate, in 1.25
// to 1.37). But it calls from the loop in which it also sees other pods, and counts as unhealthy after
// five minutes without a turn of that (SyncLoopHealthCheck in pkg/kubelet/kubelet.go, likewise).
const passLimit = 10 * time.Second

// passInterval is how long a call that waits for that takes at most until it tries again.
const passInterval = time.Second

// give enters grants, once the pods have ended of which the kubelet has forgotten that
// they have the IDs, and once devices are handed over. It may be learnt only when they are
// entered that the kubelet has forgotten one, as when a pod comes again under its name:
// PodResources lists the new one before it has anything. The wait is then taken up again.
func (p *Plugin) give(ctx context.Context, stock *list.Stock, grants []*ledger.Grant) error {
	for began := time.Now(); ; {
		_ = traces.Do(ctx, "wait for pods that have ended", func() error { p.awaitEnd(ctx, grants, began.Add(endTimeout)); return nil })
		freed := p.config.Ledger.Freed()
		err := traces.Do(ctx, "write grants and files", func() error { return p.config.Ledger.GiveGrants(stock, grants) })
		var blocked *ledger.Blocked
		again := errors.As(err, &blocked) && (blocked.Forgotten && time.Since(began) <= endTimeout || blocked.Passing && time.Since(began) < passLimit)
		if !again || ctx.Err() != nil {
			return err
		}
		if blocked.Passing {
			_ = traces.Do(ctx, "wait until the device is free", func() error { waitFor(ctx, freed); return err })
		}
	}
}

// waitFor returns when something is closed, with the context, or after a while.
func waitFor(ctx context.Context, freed <-chan struct{}) {
	timer := time.NewTimer(passInterval)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-freed:
	case <-timer.C:
	}
}

// repeated returns an ID that is there twice.
func repeated(ids []string) (id string, twice bool) {
	seen := make(map[string]bool, len(ids))
	for _, id := range ids {
		if seen[id] {
			return id, true
		}
		seen[id] = true
	}
	return "", false
}

// signal tells a channel of capacity 1 that there is something to do.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
