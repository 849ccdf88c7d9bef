// Package legacy implements the device plugin API (v1beta1): a server for each resource, with its
// list, Allocate and preferred allocation. The package has no vendor-specific code, does not read
// the host and opens no sockets.
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
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/legacy/list"
)

// Config is the configuration of a Plugin.
type Config struct {
	// Kubelet serves the resources. Package sockets has the real implementation.
	Kubelet Kubelet

	// ListPods lists the allocations of containers from the kubelet. If an answer may lack pods with
	// running containers, the answer is not whole, and no grant ends because of it.
	ListPods func(ctx context.Context) (*kubeletapi.Listing, error)

	// Allocated returns the IDs of containers in the kubelet's checkpoint, by resource. It is
	// called while Pods does not return a whole answer. Until then, the devices of these IDs are
	// not allocated to others. If a first list lacked IDs of containers, a starting kubelet with a
	// topology policy would panic (pkg/kubelet/cm/devicemanager/topology_hints.go,
	// generateDeviceTopologyHints, in 1.34 to 1.37). Optional.
	Allocated func() (map[string][]string, error)

	// Written returns the allocations in the kubelet's checkpoint with their device nodes. The
	// nodes identify IDs unknown on the host. Optional.
	Written func() ([]kubeletapi.Holding, error)

	// Ledger contains the allocations. The caller opens it, and the Plugin serves nothing before.
	Ledger *ledger.Ledger

	// CDI is the directory for the specs of devices that are allocated by CDI. It also contains the
	// path of the scanned host's root as seen by the container runtime.
	CDI cdi.Dir

	// PassesCDI reports whether the kubelet passes names of CDI devices to the container runtime.
	// Nil means no.
	PassesCDI func(ctx context.Context) (bool, error)

	// Grant returns the edits for a set of devices in addition to their own edits. Nil means none.
	Grant discovery.Granter

	// PendingPods reports whether a pod of this node that has not ended requests a resource in an init
	// container. PodResources does not list init containers, so a grant that is never listed may
	// belong to one. Such a grant ends after UnconfirmedAfter if PendingPods returns false. If
	// PendingPods is nil, the grant remains until the kubelet allocates its ID again.
	PendingPods func(ctx context.Context, resource string) (bool, error)

	// AsksForBoth reports whether exactly one pod of this node that PodResources does not list yet
	// requests two resources in one container. The kubelet allocates the resources of a container
	// one after another, and its calls do not name the pod. Nil means that no pod does.
	AsksForBoth func(ctx context.Context, resource, other string) (bool, error)

	// CheckConfigured returns an error if a device is no longer configured as its resource requires.
	// The kubelet can allocate an ID for a while after the ID was withdrawn, and in that time the agent
	// may return the device to its driver. The device cannot change while the call lasts. Optional.
	CheckConfigured func(d *rules.Offered) error

	// PodEnded reports whether a pod of this node has ended. PodResources may list an ended pod, in
	// the same way as a pod whose devices the kubelet has forgotten. Nil means that no pod has
	// ended.
	PodEnded func(ctx context.Context, namespace, pod string) (bool, error)

	// Observe receives the durations of the kubelet's calls. Optional.
	Observe Observer

	// Tracer traces calls of Allocate. Nil means no traces.
	Tracer trace.Tracer

	Grace            time.Duration // how long the kubelet may still allocate an ID after it received the ID as unhealthy; 10 s if 0
	Poll             time.Duration // interval of PodResources calls; 5 s if 0
	UnconfirmedAfter time.Duration // see Pending; 5 min if 0
}

// Kubelet connects the servers of resources with the node's kubelet.
type Kubelet interface {
	// Run does the work that is common to all servers, until the context ends. It is called once,
	// by the active instance.
	Run(ctx context.Context)

	// Serve registers the server of a resource with the kubelet, and again whenever the kubelet has
	// lost the registration. It returns when the context ends, since the agent stops and another
	// instance may take over, or when gone is closed, since the resource has lost its last device.
	// No call is in flight when it returns.
	Serve(ctx context.Context, resource string, server pluginapi.DevicePluginServer, gone <-chan struct{})

	// Linger keeps the sockets until another instance has taken over, or the context ends. It is
	// called after Run, when this instance is no longer active.
	Linger(ctx context.Context)

	// Probe returns an error that names the servers that the kubelet cannot reach.
	Probe(ctx context.Context) error
}

// Plugin offers snapshots to the kubelet as extended resources.
type Plugin struct {
	config Config

	hostDevices  atomic.Pointer[[]discovery.Device]  // all devices of the host, whichever API offers them
	offered      atomic.Pointer[offered]             // nil until there is something to offer
	stock        atomic.Pointer[list.Stock]          // the devices of the host, and the lists
	foreignNodes atomic.Pointer[map[string][]string] // nodes of IDs unknown to the stock, by grant key; the map is never modified
	lastPresent  atomic.Pointer[presentResult]       // the last result of present, nil before the first
	servers      atomic.Pointer[map[string]*server]  // by resource; the map is never modified
	specs        atomic.Pointer[specsOf]             // the last specs of devices, nil before there are any

	stockLock sync.Mutex // held while the stock is replaced

	pendingRequests requestPauses // of PendingPods, by resource; used by pollOnce only
	endRequests     requestPauses // of PodEnded, by grant key; used by pollOnce only

	ready    chan struct{} // closed after the first PodResources call
	changed  chan struct{} // receives a value when the input of the lists may have changed
	pollSoon chan struct{} // receives a value when PodResources may have a new answer
}

// New returns a Plugin. It does nothing until Run is called.
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
	if config.UnconfirmedAfter == 0 {
		config.UnconfirmedAfter = 5 * time.Minute
	}
	p := &Plugin{
		config:          config,
		pendingRequests: make(requestPauses),
		endRequests:     make(requestPauses),
		ready:           make(chan struct{}),
		changed:         make(chan struct{}, 1),
		pollSoon:        make(chan struct{}, 1),
	}
	p.servers.Store(&map[string]*server{})
	p.stock.Store(list.StockOf(nil, list.Lists{}))
	p.foreignNodes.Store(&map[string][]string{})
	return p
}

// presentStock returns the present stock for the ledger. It returns the same pointer until a
// change, so that lists are not computed again without a change.
func (p *Plugin) presentStock() *list.Stock {
	stock, given := p.stock.Load(), p.foreignNodes.Load()
	if last := p.lastPresent.Load(); last != nil && last.stock == stock && last.given == given {
		return last.result
	}
	knowing := stock.WithNodes(*given)
	p.lastPresent.Store(&presentResult{stock, given, knowing})
	return knowing
}

// hostStock returns the same as present, as a [exclusion.Stock].
func (p *Plugin) hostStock() exclusion.Stock { return p.presentStock() }

// presentResult is the last stock returned by present, with its sources.
type presentResult struct {
	stock  *list.Stock
	given  *map[string][]string
	result *list.Stock
}

// offered is the input of Publish.
type offered struct {
	snapshot *rules.Snapshot
	withheld map[string]string // by physical device: why no new consumer can have it
}

// Publish sets the devices to offer, and the withheld physical devices with reasons. Each snapshot
// replaces the last one. It does nothing if nothing has changed.
func (p *Plugin) Publish(s *rules.Snapshot, withheld map[string]string) {
	if before := p.offered.Load(); before != nil && rules.SameSnapshots(before.snapshot, s) && maps.Equal(before.withheld, withheld) {
		return
	}
	p.offered.Store(&offered{s, withheld})
	signal(p.changed)
}

// SetHostDevices sets all devices of the host, whichever API offers them, with the offers of their
// families. From these offers the ledger recognises allocations by a replaced plugin. It has done
// so when SetHostDevices returns, since claims may be waiting for new devices. SetHostDevices
// offers nothing, and does nothing if the snapshot has not changed.
func (p *Plugin) SetHostDevices(all *discovery.Snapshot) {
	if p.hostDevices.Swap(&all.Devices) == &all.Devices {
		return
	}
	p.replaceStock(func(s *list.Stock) *list.Stock { return s.WithDevices(all.Devices) })
	p.config.Ledger.Grants.RecogniseListed(p.presentStock())
	signal(p.changed)
}

// replaceStock replaces the stock.
func (p *Plugin) replaceStock(other func(*list.Stock) *list.Stock) {
	p.stockLock.Lock()
	defer p.stockLock.Unlock()
	p.stock.Store(other(p.stock.Load()))
}

// Ready is closed when the ledger is open and Run has called the kubelet once, whether or not it
// answered.
func (p *Plugin) Ready() <-chan struct{} { return p.ready }

// Run serves the published devices until the context ends, once the ledger is open. The kubelet
// keeps the allocations of pods for the next instance.
func (p *Plugin) Run(ctx context.Context) {
	select {
	case <-p.config.Ledger.WaitOpen():
	case <-ctx.Done():
		return
	}
	o := &offering{plugin: p, running: make(map[string]func())}
	// A first list without all IDs of pods would make these pods fail. If the kubelet does not
	// answer, there is no such risk.
	lastError := p.pollOnce(ctx, "")
	close(p.ready)

	var all sync.WaitGroup
	all.Go(func() { p.followKubelet(ctx, lastError) })
	all.Go(func() { o.serve(ctx) })
	all.Go(func() { p.config.Kubelet.Run(ctx) })
	all.Wait()
}

// signal sends a value to a channel with a buffer of one, unless the buffer is full.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
