package agent

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/cmd/chandler/agent/telemetry"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ondemand"
	"chandler.dev/internal/overdue"
	"chandler.dev/internal/passthrough"
	"chandler.dev/internal/reclaim"
	"chandler.dev/internal/removal"
	"chandler.dev/internal/sharing"
	"chandler.dev/legacy"
)

// agent holds the state of a node's agent.
type agent struct {
	Config
	host           *discovery.Host
	metrics        *telemetry.Metrics
	ledger         *ledger.Ledger
	passthrough    *passthrough.Manager
	onDemand       *ondemand.Manager
	reclaim        *reclaim.Manager
	sharingDaemons *sharing.Manager
	cluster        *cluster.Node
	driver         *driver.Driver
	devicePlugin   *legacy.Plugin

	settings        atomic.Pointer[Settings] // in force
	rulesChanged    chan *rules.Rules        // has a value when the rules of the settings changed
	settingsChanged chan struct{}            // has a value when the settings changed
	labelsChanged   chan struct{}            // has a value when the labels of the node may have changed
	firstValid      chan struct{}            // closed at the first valid configuration after the start
	lockHeld        chan struct{}            // closed when this agent holds the lock
	releaseLock     func()                   // releases the lock if that waits for the end of the process; keeps the lock's files open
	configFailure   atomic.Pointer[error]    // why the newest configuration is invalid
	configReports   chan error               // has a value to report: why the configuration is invalid, or nil
	events          chan scan.Changes        // changes of the host's devices since the last scan
	snapshots       chan *discovery.Snapshot // has a snapshot that was not placed yet

	eventsArrive     atomic.Bool                        // the kernel's events reach the channel events
	firstScanStarted atomic.Pointer[time.Time]          // start of the first scan
	settledSnapshot  atomic.Pointer[discovery.Snapshot] // the devices with their settled states, nil before the first scan
	diskUse          atomic.Pointer[map[string]string]  // why the host's use of disks prevents passthrough, by device; nil before the first scan
	settledChanged   chan struct{}                      // has a value when settled changed

	removalOrder atomic.Pointer[removal.Order] // the last removal order, nil before the first
	orderChanged chan struct{}                 // has a value when the order changed
	returnDue    chan struct{}                 // has a value when a device may be due for its return to its driver
	unitIdle     chan struct{}                 // has a value when a created unit may have lost its last consumer
	lastClaims   sync.Map                      // time of the last claim for a device, by device
	finder       inuse.Finder                  // finds the users of devices
	useChecks    overdue.Calls                 // checks for users of functions, by the functions' directories
	links        telemetry.LinkReader          // reads the links of devices for metrics

	placedDevices  atomic.Pointer[placement.Placed]  // nil before devices are placed
	classResources atomic.Pointer[map[string]string] // extended resource names by DeviceClass, nil before the classes were read
	classUnknown   chan struct{}                     // has a value when a claim had a class that is not among them
	withoutDRA     atomic.Bool                       // the API server does not serve DRA, or the agent only reports devices
}

// lingerLimit is the maximum time that a stopping agent waits for the next agent to take over the
// resources of the device plugin API.
const lingerLimit = 10 * time.Second

// Run runs an agent until the context ends or a part of the agent fails. When Run returns, only the
// files and devices that the agent's claims and grants need remain.
func Run(ctx context.Context, config Config) error {
	return newAgent(config).run(ctx)
}

// newAgent creates the agent and its parts.
func newAgent(config Config) *agent {
	if config.Disk != nil {
		config.CDI.Files.FS, config.HostFiles.Files.FS = config.Disk, config.Disk
	}
	a := &agent{
		Config:          config,
		host:            config.Settings.ScanHost(config.FS),
		metrics:         telemetry.NewMetrics(config.Version, config.Serve != nil),
		rulesChanged:    make(chan *rules.Rules, 1),
		settingsChanged: make(chan struct{}, 1),
		labelsChanged:   make(chan struct{}, 1),
		firstValid:      make(chan struct{}),
		lockHeld:        make(chan struct{}),
		configReports:   make(chan error, 1),
		events:          make(chan scan.Changes, 1),
		snapshots:       make(chan *discovery.Snapshot, 1),
		settledChanged:  make(chan struct{}, 1),
		orderChanged:    make(chan struct{}, 1),
		returnDue:       make(chan struct{}, 1),
		unitIdle:        make(chan struct{}, 1),
		classUnknown:    make(chan struct{}, 1),
	}
	a.settings.Store(&a.Settings)
	a.cluster = cluster.NewNode(config.NodeName, config.Client, config.Pod, config.Kubelet.Pods)
	a.cluster.ReadCheckpoint = config.Kubelet.Written
	a.ledger = ledger.New(ledger.Config{
		Dir: config.StateDir, Boot: config.BootID, Disk: config.Disk, Listings: true, OtherDirs: []string{earlierPassthroughDir, madeDir, earlierReclaimDir},
		Termination: a.cluster.GracePeriod, RequestsResource: a.cluster.RequestsResource, OpenBy: a.vfioUser,
	})
	a.Write, a.finder = a.guardWrites(config.Write), inuse.HostFinder{Host: a.host}
	if config.HostService != nil {
		a.finder = config.HostService
	}
	a.passthrough, a.onDemand = a.newPassthrough(), a.newOnDemand()
	a.host.Hooks, a.host.RecoveryFailure, a.host.CreatedUnit = config.HookProgram, config.RecoveryFailure, a.onDemand.Has
	a.reclaim = a.newReclaim()
	a.ledger.AddOutput(a.reclaim)
	a.sharingDaemons = a.newSharingDaemons()
	a.ledger.AddOutput(a.sharingDaemons)
	a.ledger.AddOutput(ledger.HostFiles{Writer: config.HostFiles})
	a.devicePlugin = legacy.New(legacy.Config{
		Kubelet:     config.Kubelet.DevicePlugins,
		ListPods:    a.cluster.ListDevices,
		Allocated:   config.Kubelet.Allocated,
		Written:     config.Kubelet.Written,
		Ledger:      a.ledger,
		CDI:         config.CDI,
		PassesCDI:   a.cluster.PassesCDI,
		Grant:       discovery.JoinGranters(config.Families),
		PendingPods: a.cluster.Pending,
		PodEnded:    a.cluster.HasEnded,

		AsksForBoth: a.cluster.AskForBoth,

		CheckConfigured: a.checkUnderVFIO,

		Observe: a.metrics.ObserveDevicePlugin,
		Tracer:  config.Tracer,
	})
	a.driver = driver.New(driver.Config{
		NodeName:         config.NodeName,
		NodeUID:          a.cluster.UID,
		PodUID:           config.PodUID,
		KubeClient:       config.Client,
		StatusClient:     config.StatusClient,
		KubeletRoot:      config.KubeletRoot,
		StartHelper:      config.Kubelet.StartDRA,
		Disk:             config.Disk,
		CDI:              config.CDI,
		Ledger:           a.ledger,
		HostFS:           config.FS,
		Granter:          discovery.JoinGranters(config.Families),
		Observe:          a.metrics.ObserveCall,
		Tracer:           config.Tracer,
		NoMetadata:       config.NoMetadata,
		ReadParameters:   config.ReadParameters,
		AcceptParameters: discovery.JoinAcceptors(config.Families),
		GoneEffect:       a.goneEffect,
		Abandoned:        a.cluster.AbandonedClaims,
		NodeClaims:       a.cluster.NodeClaims,
		OrderDaemons:     discovery.JoinOrderers(config.Families),
		StartDaemons:     a.sharingDaemons.Begin,
		SharingDir:       a.sharingDir(),
		Configure:        a.configurer(),
		Rescan:           a.requestScan,
		OnPrepare: func(claim *resourceapi.ResourceClaim) {
			a.reclaim.NoteUsers(claim.UID, cluster.PodsOf(claim))
			a.noteRequested(claim)
		},
		ResourceOf: a.resourceOf,
		OnClaimEnd: func() {
			notify(a.returnDue)
			notify(a.unitIdle)
		},
	})
	return a
}

func (a *agent) run(parent context.Context) error {
	ctx := parent
	klog.FromContext(ctx).Info("Chandler starts", "version", a.Version, "node", a.NodeName)
	if a.ConfigError != nil {
		inForce := "The configuration is invalid; the last valid one remains in effect"
		if why := a.Settings.Rules.Unknown; why != "" {
			inForce = "No further devices are offered, because " + why
		}
		klog.FromContext(ctx).Error(a.ConfigError, inForce)
		a.configReports <- a.ConfigError
	}
	release := make(chan func(), 1)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		unlock, err := a.Lock.Acquire(ctx)
		if err != nil {
			return ignoreEnd(ctx, err)
		}
		release <- unlock
		close(a.lockHeld)
		a.openReclaim(ctx)
		if a.open(ctx) {
			a.openPassthrough(ctx)
			a.openOnDemand(ctx)
			for _, part := range []func(context.Context){a.ledger.Run, a.giveBack, a.undoMade, a.reclaim.Run, a.sharingDaemons.Run, a.keepConfig, a.watchHost, a.watchDiskUse, a.runPlacement, a.checkClasses, a.tellPods, a.learnTerms, a.labelNode, a.warnLeftAlone, a.checkRuntime} {
				group.Go(func() error { part(ctx); return nil })
			}
		}
		return nil
	})
	for _, informant := range a.Informants {
		group.Go(func() error { informant.Run(ctx, a.requestScan); return nil })
	}
	if a.KeepHooks != nil {
		group.Go(func() error { a.KeepHooks(ctx); return nil })
	}
	if a.Uevents != nil {
		group.Go(func() error { a.listen(ctx); return nil })
	}
	group.Go(func() error { return a.runDRA(ctx) })
	group.Go(func() error { a.devicePlugin.Run(ctx); return nil })
	if a.Changes != nil {
		group.Go(func() error { a.followChanges(ctx); return nil })
		group.Go(func() error { a.reportInvalid(ctx); return nil })
	}
	if a.Orders != nil {
		group.Go(func() error { return a.followOrders(ctx) })
	}
	if a.Serve != nil {
		handler := a.handler()
		group.Go(func() error { return a.Serve(ctx, handler) })
	}
	if a.ServePage != nil {
		group.Go(func() error { a.ServePage(ctx, a.inventoryFacts); return nil })
	}
	err := group.Wait()
	a.unlock(ctx, release)
	if errors.Is(err, errLeave) && parent.Err() == nil {
		a.Kubelet.DevicePlugins.Linger(ctx) // returns at once, because ctx has ended: no other agent follows
		return a.leaveNode(parent)
	}
	lingering, cancel := context.WithTimeout(context.WithoutCancel(ctx), lingerLimit)
	defer cancel()
	a.Kubelet.DevicePlugins.Linger(lingering)
	klog.FromContext(ctx).Info("Chandler ends", "reason", context.Cause(ctx))
	if errors.Is(err, errLeave) { // the pod was deleted in the meantime
		return nil
	}
	return err
}

// unlock releases the lock to the next instance when all writes of this instance have ended. A
// write that hangs in the kernel cannot be cancelled. The lock then stays until the end of the
// process, which waits for the kernel too.
func (a *agent) unlock(ctx context.Context, held <-chan func()) {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), lingerLimit)
	defer cancel()
	select {
	case unlock := <-held:
		if a.ledger.Leases.EndLeases(limited) {
			unlock()
			return
		}
		a.releaseLock = unlock
		klog.FromContext(ctx).Info("The kernel has not answered a write to a device; the node's lock stays until this process has ended")
	default:
	}
}

// open opens the ledger, and retries while the ledger's directory cannot be read or written. open
// reports false if the context ended first.
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

// openInterval is the time until the next attempt to open the ledger.
const openInterval = time.Second

// runDRA runs the driver as soon as the cluster may have DRA. Existing records of claims show that
// the cluster had DRA before. The kubelet must then be able to unprepare those claims even while
// the API server does not answer. While the agent only reports devices and has no records, the
// driver is not registered.
func (a *agent) runDRA(ctx context.Context) error {
	a.awaitTurn(ctx)
	for {
		if a.hasRecords() {
			a.withoutDRA.Store(false)
			return a.driver.Run(ctx)
		}
		if a.settings.Load().Rules.ReportOnly {
			a.withoutDRA.Store(true)
			waitFor(ctx, nil, modeInterval)
			if ctx.Err() != nil {
				return nil
			}
			continue
		}
		served, err := a.servesDRA(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			klog.FromContext(ctx).Info("The API server does not answer whether it serves DRA; assuming that it may", "reason", err)
		}
		a.withoutDRA.Store(!served && err == nil)
		if !a.withoutDRA.Load() {
			return a.driver.Run(ctx)
		}
		klog.FromContext(ctx).V(2).Info("The API server does not serve resource.k8s.io; asking again later", "interval", placement.ServedInterval)
		waitFor(ctx, nil, placement.ServedInterval)
		if ctx.Err() != nil {
			return nil
		}
	}
}

// modeInterval is the time between checks whether the agent still only reports devices.
const modeInterval = time.Second

// runPlacement runs the placement of devices until the context ends.
func (a *agent) runPlacement(ctx context.Context) {
	placement.Run(ctx, placement.Config{
		Rules: a.Settings.Rules, Files: a.files(), StateDir: a.StateDir, Ledger: a.ledger, Cluster: a.cluster,
		ServesDRA: a.servesDRA, Registration: a.driver.Registration,
		Configure: a.configurer(), Accept: discovery.JoinAcceptors(a.Families),
		DRA: a.driver, DevicePlugin: a.devicePlugin,
		AllocationsKnown: a.isReady, Leaving: a.leavingReason, Decided: func() { notify(a.returnDue); notify(a.unitIdle) },
		Snapshots: a.snapshots, Changes: a.rulesChanged, OrderChanged: a.orderChanged,
		Placed: &a.placedDevices,
	})
}

// hasRecords reports whether records of claims may exist.
func (a *agent) hasRecords() bool {
	records, err := a.files().ListDir(a.recordDir())
	return len(records) > 0 || err != nil
}

func (a *agent) files() disk.Files { return disk.Files{FS: a.Disk} }

// journalConfig returns the configuration of the journal, whose records last until the next reboot.
func (a *agent) journalConfig() journal.Config {
	return journal.Config{Files: a.files(), Dir: filepath.Join(a.RunDir, "journal"), Boot: a.BootID}
}

func (a *agent) recordDir() string { return filepath.Join(a.StateDir, "claims") }

// checkClasses logs warnings about DeviceClasses.
func (a *agent) checkClasses(ctx context.Context) {
	listed := func(classes []resourceapi.DeviceClass) {
		of := resourcesOf(classes)
		a.classResources.Store(&of)
	}
	check := classCheck{client: draclient.New(a.Client), offered: a.offeredDevices, listed: listed, unknown: a.classUnknown}
	check.run(ctx)
}

// resourceOf returns the extended resource name of a DeviceClass, according to the last read of the
// classes. If the class is unknown, resourceOf returns "" and requests another read.
func (a *agent) resourceOf(class string) string {
	if of := a.classResources.Load(); of != nil {
		if resource, known := (*of)[class]; known {
			return resource
		}
	}
	notify(a.classUnknown)
	return ""
}

// learnTerms gives the ledger the facts about pods that the ledger needs.
func (a *agent) learnTerms(ctx context.Context) { a.cluster.LearnTerms(ctx, a.ledger) }

// offeredDevices returns the devices that DRA offers, and reports false before devices are placed.
func (a *agent) offeredDevices() ([]rules.Offered, bool) {
	p := a.placedDevices.Load()
	if p == nil {
		return nil, false
	}
	withheld := p.Placement.OfDRA()
	return slices.DeleteFunc(slices.Clone(p.Snapshot.Devices), func(d rules.Offered) bool { return withheld[d.Silicon()] != "" }), true
}

// goneEffect returns the taint effect for devices that are gone.
func (a *agent) goneEffect() resourceapi.DeviceTaintEffect {
	return a.settings.Load().Severity.EffectOf(discovery.ConditionGone)
}

// isReady reports whether the agent has read the containers' allocations from the kubelet.
func (a *agent) isReady() bool {
	select {
	case <-a.devicePlugin.Ready():
		return true
	default:
		return false
	}
}

// notify sends a value to a channel with a buffer of one, unless the buffer is full.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// waitFor returns when the channel is closed, after the duration, or when the context ends.
func waitFor(ctx context.Context, c <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-c:
	case <-timer.C:
	}
}

// replace puts a value into a channel with a buffer of one, in place of any waiting value. It must
// not be called concurrently.
func replace[T any](c chan T, value T) {
	select {
	case <-c:
	default:
	}
	c <- value
}

// ignoreEnd returns nil if the context has ended, and err otherwise.
func ignoreEnd(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}
