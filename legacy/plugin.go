// Package legacy speaks the classic device-plugin API (v1beta1): a server for
// each resource, its lists, allocate and preferred allocation. It knows no
// vendor, reads no host and opens no socket.
package legacy

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
	"chandler.dev/legacy/list"
)

// Config is what a Plugin needs to know. StateDir must be set.
type Config struct {
	// Kubelet takes the servers of resources. Package sockets has the real one.
	Kubelet Kubelet

	// Pods asks the kubelet which containers have what. An answer that leaves out
	// pods with running containers is not whole, and nothing ends by it.
	Pods func(ctx context.Context) (*kubeletapi.Listing, error)

	// Allocated is asked while Pods does not answer in full. Nobody else gets the devices
	// of its IDs until Pods has answered once. A first list without what
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

	// AsksForBoth reports whether exactly one pod of this node, which PodResources does not list yet, asks for two resources in
	// one container. The kubelet allocates the resources of a container one after the other, and names no pod. Nil means
	// that no pod does.
	AsksForBoth func(ctx context.Context, resource, other string) (bool, error)

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

// signal tells a channel of capacity 1 that there is something to do.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
