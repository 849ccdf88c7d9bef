// Package agent is the agent of a node. It watches the devices of a host, decides
// which API offers which of them, and runs the two APIs, the health checks and the
// Events. It reads no flags and no configuration files, knows no vendor, and
// reaches its surroundings only through its Config, so that a test can run a whole
// agent.
package agent

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	kubediscovery "k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"chandler.dev/cdi"
	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/hostfile"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/rebind"
	"chandler.dev/internal/removal"
	"chandler.dev/legacy"
)

// Config is everything that an agent works with.
type Config struct {
	Version  string
	NodeName string

	// PodUID is that of the agent's own pod. Without it no two agents can run
	// while one takes over. Optional.
	PodUID types.UID

	// Pod is the agent's own pod as "namespace/name", "" if it is none. A kubelet
	// that does not list it is not believed about other pods either.
	Pod string

	// BootID is the kernel's. Claims that were prepared in another boot hold
	// nothing.
	BootID string

	FS       fs.FS               // the root of the host, with what informants say laid over it
	Families []*discovery.Family // what to look for on it
	Settings Settings            // what the administrator wants
	Changes  <-chan Change       // of that, while the agent runs; optional

	// Orders are those to remove Chandler, the first if there is one when the agent starts,
	// and then each other. Optional.
	Orders <-chan removal.Order

	// Wrong is why the configuration is wrong, so that the Settings are those of an
	// earlier one. Optional.
	Wrong error

	// RescanInterval is the time between scans while the kernel reports nothing.
	RescanInterval time.Duration

	// Uevents sends a value to events when it begins to hear the kernel, and whenever
	// the kernel reports a change of the host's devices, until the context ends. Nil
	// means that nothing does; see [discovery.Listen].
	Uevents func(ctx context.Context, events chan<- struct{}) error

	// HearsAll says that these are all events of the host, so that little of it need be
	// looked at while there are none; see [discovery.Watch].
	HearsAll bool

	Informants []Informant

	// Write writes an attribute of the host, as of fs.FS. It rebinds devices where the
	// administrator allows it. Nil means that the agent may not change the host.
	Write func(name, value string) error

	Client kubernetes.Interface

	// StatusClient writes Events and the status of claims. It should have a limit
	// of its own, so that nothing else waits for it.
	StatusClient kubernetes.Interface

	// Groups is asked whether the API server serves resource.k8s.io.
	Groups kubediscovery.ServerGroupsInterfaceWithContext

	Kubelet Kubelet
	Lock    Lock

	Disk        disk.FS         // where files are written, that of the operating system if nil
	KubeletRoot string          // the kubelet's data directory
	StateDir    string          // where the agent keeps what must outlive it
	CDI         cdi.Dir         // where the specs of claims go
	HostFiles   hostfile.Writer // writes files of the host that go with devices

	// FeatureDir is the directory in which Node Feature Discovery finds files with labels
	// of the node, "" for no labels. None are written while it does not exist.
	FeatureDir string

	// NoMetadata leaves out the files in which containers read the attributes of
	// their devices.
	NoMetadata bool

	// ReadParameters decodes what claims say to the driver.
	ReadParameters func(raw []byte) (discovery.Parameters, error)

	// Tracer makes traces of the kubelet's calls. Nil means none.
	Tracer trace.Tracer

	// HookProgram is as [discovery.Host.Hooks].
	HookProgram string

	// Serve answers HTTP requests for /healthz, /readyz and /metrics with the
	// handler until the context ends. Optional.
	Serve func(ctx context.Context, handler http.Handler) error

	// ServePage shows the node's inventory, less what only others know of it, until the
	// context ends. There is none before devices are placed. Optional.
	ServePage func(ctx context.Context, facts func() (inventory.Facts, bool))
}

// Settings are what the administrator wants, compiled.
type Settings struct {
	Rules    *rules.Rules
	Severity discovery.Severity       // of conditions of devices
	Roots    map[string]string        // as in [discovery.Host]
	Paths    []discovery.PathResource // likewise
	Pools    bool                     // likewise
	NoHooks  bool                     // container runtimes are to call none
	Rebind   []discovery.Rebinding    // likewise

	// Text is the configuration that they were compiled from. It is kept as
	// [KeptConfig]. Optional.
	Text []byte

	// Labels are those of the node by which they were chosen, kept as [KeptLabels]. Nil
	// if they are not known.
	Labels map[string]string
}

// Change is a change of the configuration.
type Change struct {
	Settings Settings

	// Err is why the new configuration is wrong. The old one stays in force then.
	Err error
}

// Kubelet is how the agent and the kubelet reach each other.
type Kubelet struct {
	// StartDRA registers the DRA driver with the kubelet. The plugin is a
	// [driver.Driver]; see [driver.StartHelper].
	StartDRA driver.Starter

	// DevicePlugins takes the servers of classic resources.
	DevicePlugins legacy.Kubelet

	// Pods asks the PodResources API which containers have what. Whether the answer
	// is whole is for the agent to find out.
	Pods func(ctx context.Context) (*kubeletapi.Listing, error)

	// Allocated returns the classic IDs that the kubelet has written down as those of
	// containers, by resource; see [legacy.Allocated].
	Allocated func() (map[string][]string, error)

	// Written returns what containers have by the kubelet's checkpoint, for a kubelet
	// without a PodResources API, and for IDs that the host does not tell of; see
	// [legacy.Written]. Optional.
	Written func() ([]kubeletapi.Holding, error)
}

// Lock is held by one agent of a node at a time. While an upgrade surges two run at
// once, and only the holder may write records, specs and slices.
type Lock interface {
	// Acquire waits until this agent holds the lock or the context ends.
	Acquire(ctx context.Context) (release func(), err error)

	// Awaited reports whether another agent waits for the lock.
	Awaited() bool
}

// Informant tells, by means of the file system of the host, something about
// devices that no file of the kernel says.
type Informant interface {
	// Run keeps telling until the context ends. It calls changed whenever it has
	// told something new.
	Run(ctx context.Context, changed func())

	// Ready is closed when it has told something, or has nothing to tell yet.
	Ready() <-chan struct{}
}

// agent is a whole agent.
type agent struct {
	Config
	host    *discovery.Host
	metrics *agentMetrics
	ledger  *ledger.Ledger
	binder  *rebind.Binder
	cluster *cluster.Node
	driver  *driver.Driver
	classic *legacy.Plugin

	settings  atomic.Pointer[Settings] // in force
	rules     chan *rules.Rules        // has one when the rules of the settings changed
	accepted  chan struct{}            // has one when the settings changed
	righted   chan struct{}            // closed when a right configuration came since the agent started
	locked    chan struct{}            // closed when this agent holds the lock
	because   atomic.Pointer[error]    // why a configuration that came since is wrong
	wrong     chan error               // has one that was not told yet: why the configuration is wrong, or nil
	events    chan struct{}            // has one when something about the host's devices changed
	snapshots chan *discovery.Snapshot // has one that was not placed yet

	hearing  atomic.Bool                        // the kernel's events come to events
	watching atomic.Pointer[time.Time]          // when the first scan began
	settled  atomic.Pointer[discovery.Snapshot] // its devices with their states, nil until they are known
	resaid   chan struct{}                      // has one when that says something else

	order   atomic.Pointer[removal.Order] // that was heard last, nil before the first
	ordered chan struct{}                 // has one when it is another
	rebound chan struct{}                 // has one when a device may be to be given back

	placed     atomic.Pointer[placed] // nil before devices are placed
	withoutDRA atomic.Bool            // the API server said that it does not serve DRA
}

// lingerLimit is how long an agent that has ended waits at most for the next one
// to offer what it did through the device-plugin API.
const lingerLimit = 10 * time.Second

// Run runs an agent until the context ends or a part of the agent fails. When it
// returns, nothing of the agent is left but what its claims and grants need.
func Run(ctx context.Context, config Config) error {
	return newAgent(config).run(ctx)
}

// newAgent makes the parts.
func newAgent(config Config) *agent {
	if config.Disk != nil {
		config.CDI.Files.FS, config.HostFiles.Files.FS = config.Disk, config.Disk
	}
	a := &agent{
		Config:    config,
		host:      &discovery.Host{FS: config.FS, Roots: config.Settings.Roots, Paths: config.Settings.Paths, Pools: config.Settings.Pools, Hooks: config.HookProgram, Rebind: config.Settings.Rebind},
		metrics:   newAgentMetrics(config.Version),
		rules:     make(chan *rules.Rules, 1),
		accepted:  make(chan struct{}, 1),
		righted:   make(chan struct{}),
		locked:    make(chan struct{}),
		wrong:     make(chan error, 1),
		events:    make(chan struct{}, 1),
		snapshots: make(chan *discovery.Snapshot, 1),
		resaid:    make(chan struct{}, 1),
		ordered:   make(chan struct{}, 1),
		rebound:   make(chan struct{}, 1),
	}
	a.settings.Store(&a.Settings)
	a.binder = a.newBinder()
	a.cluster = cluster.NewNode(config.NodeName, config.Client, config.Pod, config.Kubelet.Pods)
	a.cluster.Written = config.Kubelet.Written
	a.ledger = ledger.New(ledger.Config{
		Dir: config.StateDir, Boot: config.BootID, Disk: config.Disk, Listings: true,
		Termination: a.cluster.Termination, Asks: a.cluster.Asks,
	})
	a.ledger.AddOutput(ledger.HostFiles{Writer: config.HostFiles})
	a.classic = legacy.New(legacy.Config{
		Kubelet:   config.Kubelet.DevicePlugins,
		Pods:      a.cluster.Listing,
		Allocated: config.Kubelet.Allocated,
		Written:   config.Kubelet.Written,
		Ledger:    a.ledger,
		CDI:       config.CDI,
		PassesCDI: a.cluster.PassesCDI,
		Grant:     discovery.Granters(config.Families),
		Pending:   a.cluster.Pending,
		Ended:     a.cluster.Ended,
		Observe:   a.metrics.observeClassic,
		Tracer:    config.Tracer,
	})
	a.driver = driver.New(driver.Config{
		NodeName:       config.NodeName,
		PodUID:         config.PodUID,
		KubeClient:     config.Client,
		StatusClient:   config.StatusClient,
		KubeletRoot:    config.KubeletRoot,
		Start:          config.Kubelet.StartDRA,
		Disk:           config.Disk,
		CDI:            config.CDI,
		Ledger:         a.ledger,
		HostFS:         config.FS,
		Granter:        discovery.Granters(config.Families),
		Observe:        a.metrics.observe,
		Tracer:         config.Tracer,
		NoMetadata:     config.NoMetadata,
		ReadParameters: config.ReadParameters,
		Accept:         discovery.Acceptors(config.Families),
		Gone:           a.gone,
		Abandoned:      a.cluster.Abandoned,
		Configure:      a.binder.Configurer(discovery.Configurers(a.host, config.Families)),
		Rescan:         func() { notify(a.events) },
		Ended:          func() { notify(a.rebound) },
	})
	return a
}

func (a *agent) run(parent context.Context) error {
	ctx := parent
	klog.FromContext(ctx).Info("Chandler starts", "version", a.Version, "node", a.NodeName)
	if a.Wrong != nil {
		inForce := "The configuration is wrong; the last one that was right is in force"
		if why := a.Settings.Rules.Unknown; why != "" {
			inForce = "Nothing is offered anew, since " + why
		}
		klog.FromContext(ctx).Error(a.Wrong, inForce)
		a.wrong <- a.Wrong
	}
	release := make(chan func(), 1)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		unlock, err := a.Lock.Acquire(ctx)
		if err != nil {
			return ignoreEnd(ctx, err)
		}
		release <- unlock
		close(a.locked)
		if a.open(ctx) {
			a.openBinder(ctx)
			for _, part := range []func(context.Context){a.ledger.Run, a.giveBack, a.keepConfig, a.watch, a.place, a.checkClasses, a.tellPods, a.learnTerms, a.labelNode} {
				group.Go(func() error { part(ctx); return nil })
			}
		}
		return nil
	})
	for _, informant := range a.Informants {
		group.Go(func() error { informant.Run(ctx, func() { notify(a.events) }); return nil })
	}
	if a.Uevents != nil {
		group.Go(func() error { a.listen(ctx); return nil })
	}
	group.Go(func() error { return a.runDRA(ctx) })
	group.Go(func() error { a.classic.Run(ctx); return nil })
	if a.Changes != nil {
		group.Go(func() error { a.follow(ctx); return nil })
		group.Go(func() error { a.complain(ctx); return nil })
	}
	if a.Orders != nil {
		group.Go(func() error { return a.obey(ctx) })
	}
	if a.Serve != nil {
		handler := a.handler()
		group.Go(func() error { return a.Serve(ctx, handler) })
	}
	if a.ServePage != nil {
		group.Go(func() error { a.ServePage(ctx, a.inventory); return nil })
	}
	err := group.Wait()
	select {
	case unlock := <-release: // the next instance may begin, now that nothing of this one writes
		unlock()
	default:
	}
	if errors.Is(err, errLeave) && parent.Err() == nil {
		a.Kubelet.DevicePlugins.Linger(ctx) // not at all, since no other agent follows
		return a.leave(parent)
	}
	lingering, cancel := context.WithTimeout(context.WithoutCancel(ctx), lingerLimit)
	defer cancel()
	a.Kubelet.DevicePlugins.Linger(lingering)
	klog.FromContext(ctx).Info("Chandler ends", "reason", context.Cause(ctx))
	if errors.Is(err, errLeave) { // the pod was deleted meanwhile
		return nil
	}
	return err
}

// open opens the ledger, and tries again while its directory cannot be read or
// written. It reports false if the context ended before.
func (a *agent) open(ctx context.Context) bool {
	lastError := ""
	for ctx.Err() == nil {
		problems, err := a.ledger.Open(ctx)
		for _, problem := range problems {
			klog.FromContext(ctx).Error(problem, "Recovering what is prepared")
		}
		if err == nil {
			return true
		}
		if err.Error() != lastError {
			lastError = err.Error()
			klog.FromContext(ctx).Error(err, "Nothing is offered to the kubelet; trying again", "interval", openInterval)
		}
		select {
		case <-ctx.Done():
		case <-time.After(openInterval):
		}
	}
	return false
}

// openInterval is how long until the ledger is tried again.
const openInterval = time.Second

// listen hears the kernel's events.
func (a *agent) listen(ctx context.Context) {
	heard, ended := make(chan struct{}, 1), make(chan struct{})
	relayed := make(chan struct{})
	go func() {
		defer close(relayed)
		for {
			select {
			case <-heard:
				a.hearing.Store(true)
				notify(a.events)
			case <-ended:
				a.hearing.Store(false)
				return
			}
		}
	}()
	err := a.Uevents(ctx, heard)
	close(ended)
	<-relayed
	if err != nil {
		klog.FromContext(ctx).Error(err, "The kernel's events cannot be heard; changes are seen at the next scan", "interval", a.RescanInterval)
	}
}

// firstWord is how long the first scan waits for informants, so that an agent that
// starts does not take back what the last one published.
const firstWord = 30 * time.Second

// watch scans the host and hands the snapshots on, with the states that devices
// have settled in.
func (a *agent) watch(ctx context.Context) {
	for _, informant := range a.Informants {
		waitFor(ctx, informant.Ready(), firstWord)
	}
	watch := discovery.Watch{Host: a.host, Families: a.Families, Interval: a.RescanInterval, Events: a.events, Observe: a.metrics.observeScan}
	if a.HearsAll {
		watch.Hears = a.hearing.Load
	}
	var last *discovery.Snapshot
	settling := newSettling(ctx, a.Settings.Severity, a.files(), a.StateDir, func() { notify(a.events) })
	defer settling.stop()
	settling.settler.Held = a.held
	begun := time.Now()
	a.watching.Store(&begun)
	watch.Run(ctx, func(s *discovery.Snapshot) {
		settling.settler.Severity = a.settings.Load().Severity
		s = settling.settle(ctx, a.binder.Describe(s))
		if discovery.Same(last, s) {
			return
		}
		last = s
		klog.FromContext(ctx).V(2).Info("The host's devices changed", "devices", len(s.Devices), "problems", len(s.Problems))
		if len(s.Devices) == 0 {
			klog.FromContext(ctx).Info("This host has no accelerators at present; one that appears is offered")
		}
		a.settled.Store(s)
		notify(a.resaid)
		replace(a.snapshots, s)
	})
}

// held reports whether a claim or a pod has the device.
func (a *agent) held(device string) bool {
	return a.ledger.View(nil).Has(device)
}

// runDRA runs the driver as soon as the cluster may have DRA. If there are records
// of claims, the cluster had DRA before, and the kubelet must be able to unprepare
// those claims even while the API server does not answer.
func (a *agent) runDRA(ctx context.Context) error {
	a.awaitTurn(ctx)
	for {
		if a.hasRecords() {
			return a.driver.Run(ctx)
		}
		served, err := servesDRA(ctx, a.Groups)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			klog.FromContext(ctx).Info("The API server cannot be asked whether it serves DRA; taking it that it may", "reason", err)
		}
		a.withoutDRA.Store(!served && err == nil)
		if !a.withoutDRA.Load() {
			return a.driver.Run(ctx)
		}
		klog.FromContext(ctx).V(2).Info("The API server does not serve resource.k8s.io; asking again later", "interval", askInterval)
		waitFor(ctx, nil, askInterval)
		if ctx.Err() != nil {
			return nil
		}
	}
}

// hasRecords reports whether there may be records of claims.
func (a *agent) hasRecords() bool {
	records, err := a.files().List(a.recordDir())
	return len(records) > 0 || err != nil
}

func (a *agent) files() disk.Files { return disk.Files{FS: a.Disk} }

func (a *agent) recordDir() string { return filepath.Join(a.StateDir, "claims") }

// checkClasses warns of DeviceClasses.
func (a *agent) checkClasses(ctx context.Context) {
	check := classCheck{client: draclient.New(a.Client), offered: a.offered}
	check.run(ctx)
}

// learnTerms keeps what the ledger needs to know of pods.
func (a *agent) learnTerms(ctx context.Context) { a.cluster.LearnTerms(ctx, a.ledger) }

// offered returns the devices that DRA offers, and whether that is known.
func (a *agent) offered() ([]rules.Offered, bool) {
	p := a.placed.Load()
	if p == nil {
		return nil, false
	}
	withheld := p.placement.OfDRA()
	return slices.DeleteFunc(slices.Clone(p.snapshot.Devices), func(d rules.Offered) bool { return withheld[d.Silicon()] != "" }), true
}

// gone returns what it means that a device is gone.
func (a *agent) gone() resourceapi.DeviceTaintEffect {
	return a.settings.Load().Severity.Effect(discovery.ConditionGone)
}

// ready reports whether the kubelet was asked what containers have.
func (a *agent) ready() bool {
	select {
	case <-a.classic.Ready():
		return true
	default:
		return false
	}
}

// notify puts a value into a channel with room for one, unless one waits in it.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// waitFor returns when the channel is closed, after a time, or when the context
// ends.
func waitFor(ctx context.Context, c <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-c:
	case <-timer.C:
	}
}

// replace puts a value into a channel with room for one, in place of one that
// waits in it. It has one caller at a time.
func replace[T any](c chan T, value T) {
	select {
	case <-c:
	default:
	}
	c <- value
}

// ignoreEnd returns nil for the error of a context that was ended from outside.
func ignoreEnd(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}
