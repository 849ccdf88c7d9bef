// Package legacy speaks the classic device-plugin API (v1beta1): a server for
// each resource, its lists, allocate and preferred allocation. It knows no
// vendor, reads no host and opens no socket.
package legacy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/hostfile"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/legacy/list"
)

// Config is what a Plugin needs to know. StateDir must be set.
type Config struct {
	// Kubelet takes the servers of resources. Package sockets has the real one.
	Kubelet Kubelet

	// Pods asks the kubelet which containers have what. An answer that leaves out
	// pods with running containers is not whole, and nothing ends by it.
	Pods func(ctx context.Context) (*kubeletapi.Listing, error)

	// StateDir is a directory of ours that outlives the process. What was
	// handed out is written there before the kubelet is told.
	StateDir string

	// RuntimeRoot is where the container runtime sees the root of the host
	// that was scanned, "/" if empty.
	RuntimeRoot string

	// Grant returns what a container needs for a set of devices beyond their
	// own edits. Nil means nothing.
	Grant discovery.Granter

	// HostFiles writes the files of the host that go with devices. They are
	// there before Allocate answers, and until nothing held needs them.
	HostFiles hostfile.Writer

	// Elsewhere tells what is held through the other API. Nil means nothing.
	Elsewhere Elsewhere

	// Active is closed once this instance is the one that serves. Nothing is
	// served or written before. Nil means at once.
	Active <-chan struct{}

	// Pending reports whether a pod of this node that has not ended asks for a
	// resource in an init container. Those are left out by PodResources, so
	// that a grant which is never confirmed may be one's; only who can ask the
	// API server knows. A grant that is unconfirmed for the time of that name
	// is dropped when Pending says no. Where Pending is nil it is kept, since
	// nothing else is safe, until its ID is handed out again.
	Pending func(ctx context.Context, resource string) (bool, error)

	Grace       time.Duration // how long the kubelet may still hand out what it was told is unhealthy; 10 s if 0
	Poll        time.Duration // how often PodResources is asked; 5 s if 0
	Unconfirmed time.Duration // see Pending; 5 min if 0
}

// Elsewhere is what must be known of the other API: that of package driver.
type Elsewhere interface {
	// Holder names what holds a piece of silicon, if anything does.
	Holder(silicon string) (holder string, held bool)
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
	config   Config
	holdings *holdings

	snapshot atomic.Pointer[discovery.Snapshot] // nil until there is one to offer
	servers  atomic.Pointer[map[string]*server] // by resource; the map is never modified
	ready    chan struct{}                      // closed when the holdings are known
	changed  chan struct{}                      // what the lists are computed from may have changed
	ask      chan struct{}                      // PodResources may have something new to say
}

// New returns a Plugin, which does nothing until it runs.
func New(config Config) *Plugin {
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
		config:   config,
		holdings: &holdings{file: filepath.Join(config.StateDir, grantsFile), held: make(map[key]*holding), disk: disk.Files{FS: config.HostFiles.Files.FS}, files: config.HostFiles, filed: make(map[string]bool)},
		ready:    make(chan struct{}),
		changed:  make(chan struct{}, 1),
		ask:      make(chan struct{}, 1),
	}
	p.servers.Store(&map[string]*server{})
	return p
}

// Publish says what the classic API is to offer from now on. Each snapshot is
// the whole truth; to publish the same one again changes nothing.
func (p *Plugin) Publish(s *discovery.Snapshot) {
	if discovery.Same(p.snapshot.Load(), s) {
		return
	}
	p.snapshot.Store(s)
	signal(p.changed)
}

// Know says which devices the host has and what each could be offered as: all
// of them, whichever API offers them, with the offers that their families gave.
// By those Holder recognises what containers have from a plugin that was
// replaced. It offers nothing; to say the same again changes nothing.
func (p *Plugin) Know(all *discovery.Snapshot) {
	p.holdings.know(all.Devices)
	signal(p.changed)
}

// Holder names the container that holds a piece of silicon, if one does or is
// about to: by an ID that was handed out here, or by one that the kubelet
// lists, under whatever resource, and that the devices which Know named have. A
// shareable device is never held. What was held before this instance became
// the active one is known when Ready is; what the kubelet lists, once it has
// answered. Until then all silicon is held by somebody unknown.
func (p *Plugin) Holder(silicon string) (holder string, held bool) {
	return p.holdings.holder(silicon)
}

// Ready is closed when Run has read what was held before this instance became
// the active one, and has asked the kubelet once, whether it answered or not.
func (p *Plugin) Ready() <-chan struct{} { return p.ready }

// Run serves what is published until the context ends. The kubelet keeps what
// pods have, for the next instance to take over. While the state directory
// cannot be made, nothing is served, since nothing that is handed out could be
// written down; this is logged and tried again. What containers have is followed
// all the same, so that Holder stays right.
func (p *Plugin) Run(ctx context.Context) {
	if p.config.Active != nil {
		select {
		case <-p.config.Active:
		case <-ctx.Done():
			return
		}
	}
	p.restore(ctx)
	// A first list without all that pods have would fail them. A kubelet that is
	// away has nothing to fail.
	lastError := p.poll(ctx, "")
	close(p.ready)

	var all sync.WaitGroup
	all.Go(func() { p.follow(ctx, lastError) })
	all.Go(func() { p.serve(ctx) })
	all.Go(func() { p.config.Kubelet.Run(ctx) })
	all.Wait()
}

// makeState makes the state directory, and tries again until the context ends.
func (p *Plugin) makeState(ctx context.Context) {
	lastError := ""
	for wait := firstRetry; ctx.Err() == nil; wait = min(2*wait, maxRetry) {
		err := os.MkdirAll(p.config.StateDir, 0o700)
		if err == nil {
			return
		}
		if err.Error() != lastError {
			lastError = err.Error()
			klog.FromContext(ctx).Error(err, "Nothing is offered to the kubelet: make state directory")
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// How long until the state directory is tried again.
const (
	firstRetry = 100 * time.Millisecond
	maxRetry   = 5 * time.Second
)

// restore reads what was held before, and clears away what a crash has left.
func (p *Plugin) restore(ctx context.Context) {
	logger := klog.FromContext(ctx)
	if err := p.holdings.load(); err != nil {
		logger.Error(err, "Grants of before are lost")
	}
	if err := p.holdings.restoreFiles(); err != nil {
		logger.Error(err, "Host files of what is held are missing")
	}
	if err := p.holdings.sweep(); err != nil {
		logger.Error(err, "Temporary files are left over")
	}
}

// serve keeps the servers and their lists as they should be, until the context
// ends. Only it adds servers and ends them.
func (p *Plugin) serve(ctx context.Context) {
	p.makeState(ctx)
	o := &offering{plugin: p, running: make(map[string]func())}
	defer o.group.Wait()
	ticker := time.NewTicker(p.config.Poll)
	defer ticker.Stop()
	for ctx.Err() == nil {
		if s := p.snapshot.Load(); s != nil {
			o.update(ctx, s)
		}
		select {
		case <-ctx.Done():
		case <-p.changed:
		case <-ticker.C:
		}
	}
}

// offering is the state of serve.
type offering struct {
	plugin   *Plugin
	group    sync.WaitGroup
	lists    list.Lists
	running  map[string]func() // ends the server of a resource, and waits for it
	problems []string          // as they were logged last

	view      *list.View
	changes   int               // of the holdings that the view shows
	elsewhere map[string]string // that it shows
}

// update makes the lists say what follows from a snapshot and from what
// containers have.
func (o *offering) update(ctx context.Context, s *discovery.Snapshot) {
	p := o.plugin
	servers := maps.Clone(*p.servers.Load())
	beliefs := make(map[string]list.Belief, len(servers))
	heard := p.holdings.askedAt()
	for resource, one := range servers {
		beliefs[resource] = one.belief(heard)
	}
	in := list.Input{Snapshot: s, Withheld: withheld(s), Beliefs: beliefs, Now: time.Now(), Grace: p.config.Grace}
	in.View = o.look(s)
	lists, problems := o.lists.Next(in)
	if p.adopt(ctx, lists) {
		in.View = o.look(s)
		lists, problems = o.lists.Next(in)
	}
	o.lists = lists
	o.report(ctx, problems)
	for resource, l := range lists.Resources() {
		if servers[resource] == nil {
			servers[resource] = newServer(resource, p.config.Grace, p.allocate)
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

// look returns what is had now. It returns the same view where that has not
// changed.
func (o *offering) look(s *discovery.Snapshot) *list.View {
	elsewhere := o.plugin.elsewhere(s.Devices)
	if o.view == nil || o.changes != o.plugin.holdings.changed() || !maps.Equal(o.elsewhere, elsewhere) {
		had, changes := o.plugin.holdings.had()
		o.view, o.changes, o.elsewhere = list.NewView(had, elsewhere), changes, elsewhere
	}
	return o.view
}

// withheld says which silicon of a snapshot is withheld, and why.
func withheld(s *discovery.Snapshot) map[string]string {
	why := make(map[string]string)
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Withheld != "" {
			why[d.Silicon()] = d.Withheld
		}
	}
	return why
}

// adopt enters what PodResources says pods have of our resources and we did not
// hand out: the plugin that we replace did. It reports whether there was any.
func (p *Plugin) adopt(ctx context.Context, lists list.Lists) bool {
	adopted := p.holdings.adopt(func(k key) (*list.Unit, bool) {
		l := lists.Resources()[k.resource]
		if l == nil {
			return nil, false // other plugins' devices are none of our business
		}
		return l.Unit(k.id), true
	})
	if adopted {
		if err := errors.Join(p.holdings.save(), p.holdings.restoreFiles()); err != nil {
			klog.FromContext(ctx).Error(err, "What pods hold is not saved")
		}
	}
	return adopted
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

// elsewhere returns what the other API holds of the silicon of devices.
func (p *Plugin) elsewhere(devices []discovery.Device) map[string]string {
	holders := make(map[string]string)
	if p.config.Elsewhere == nil {
		return holders
	}
	asked := make(map[string]bool, len(devices))
	for i := range devices {
		silicon := devices[i].Silicon()
		if devices[i].Shareable || asked[silicon] {
			continue
		}
		asked[silicon] = true
		if holder, held := p.config.Elsewhere.Holder(silicon); held {
			holders[silicon] = holder
		}
	}
	return holders
}

// allocate answers the requests of containers for IDs of a resource: look up,
// edit, record, check that nobody has taken the same meanwhile through the
// other API or by another name. All are granted or none.
func (p *Plugin) allocate(ctx context.Context, l *list.List, resource string, requests [][]string) ([]*pluginapi.ContainerAllocateResponse, error) {
	var responses []*pluginapi.ContainerAllocateResponse
	var granted []*holding
	var given []*list.Unit
	now := time.Now()
	all := len(slices.Concat(requests...))
	for _, ids := range requests {
		units, err := l.LookUp(ids)
		if err != nil {
			return nil, err
		}
		amount, err := l.Amount(ids, units)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", resource, err)
		}
		edits := editsOf(devicesOf(units), resource, l.Consumed(ids), p.config.Grant)
		edits = discovery.Join(edits, amountEdits(amount, resource, all))
		r, err := response(cdi.Rebase(edits, p.config.RuntimeRoot))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", resource, err)
		}
		responses = append(responses, r)
		for _, id := range ids {
			granted = append(granted, newHolding(resource, id, l.Unit(id), now))
		}
		given = append(given, units...)
	}
	unread, err := p.holdings.grant(granted, func() error {
		had, _ := p.holdings.had()
		return l.Blocked(list.NewView(had, p.elsewhere(devicesOf(given))), given)
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", resource, err)
	}
	if len(unread) > 0 {
		klog.FromContext(ctx).V(2).Info("Host files are not written, since nobody made their directory", "files", unread)
	}
	signal(p.ask)
	klog.FromContext(ctx).V(2).Info("Devices allocated", "resource", resource, "ids", requests)
	return responses, nil
}

// signal tells a channel of capacity 1 that there is something to do.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
