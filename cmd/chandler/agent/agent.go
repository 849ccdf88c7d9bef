package agent

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/changes"
	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/cmd/chandler/agent/telemetry"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/reclaim"
	"chandler.dev/legacy"
)

// agent is the agent of a node.
type agent struct {
	Config
	host         *discovery.Host
	metrics      *telemetry.Metrics
	settings     *liveSettings
	watch        *hostWatch
	ledger       *ledger.Ledger
	changes      *changes.Manager
	removal      *removalOrders
	cluster      *cluster.Node
	driver       *driver.Driver
	devicePlugin *legacy.Plugin
	classes      *classCheck
	links        telemetry.LinkReader // reads the links of devices for metrics

	placedDevices atomic.Pointer[placement.Placed] // nil before devices are placed
	withoutDRA    atomic.Bool                      // the API server does not serve DRA, or the agent only reports devices
	lockHeld      chan struct{}                    // closed when this agent holds the lock
	releaseLock   func()                           // releases the lock if that waits for the end of the process; keeps the lock's files open
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
		Config:   config,
		host:     config.Settings.ScanHost(config.FS),
		metrics:  telemetry.NewMetrics(config.Version, config.Serve != nil),
		lockHeld: make(chan struct{}),
	}
	a.watch = newHostWatch(&a.Config, a.host)
	a.settings = newLiveSettings(&a.Config, a.metrics, a.watch.requestScan)
	a.classes = &classCheck{client: draclient.New(config.Client), offered: a.offeredDevices, unknown: make(chan struct{}, 1)}
	a.cluster = cluster.NewNode(config.NodeName, config.Client, config.Pod, config.Kubelet.Pods)
	a.cluster.ReadCheckpoint = config.Kubelet.Written
	a.ledger = ledger.New(ledger.Config{
		Dir: config.StateDir, Boot: config.BootID, Disk: config.Disk, Listings: true,
		OtherDirs:   []string{changes.EarlierPassthroughDir, changes.EarlierOnDemandDir, changes.EarlierReclaimDir},
		Termination: a.cluster.GracePeriod, RequestsResource: a.cluster.RequestsResource,
		OpenBy: func(d *discovery.Device, own []types.UID) string { return a.changes.VFIOUser(d, own) },
	})
	a.changes = changes.New(changes.Config{
		Host:            a.host,
		Families:        config.Families,
		Ledger:          a.ledger,
		Cluster:         a.cluster,
		Write:           config.Write,
		HostService:     config.HostService,
		Programs:        config.Programs,
		SharingPrograms: config.SharingPrograms,
		Journal:         config.journal(),
		StateDir:        config.StateDir,
		SharingDir:      config.sharingDir(),
		Reclaim:         func() []discovery.Selection[reclaim.Rule] { return a.settings.inForce().Reclaim },
		IdleTime:        func() time.Duration { return a.settings.inForce().IdleTime },
		DiskInterval:    config.RescanInterval,
		Snapshot:        a.watch.settled.Load,
		Placed:          a.placedDevices.Load,
		RequestScan:     a.watch.requestScan,
	})
	a.host.Hooks, a.host.RecoveryFailure, a.host.CreatedUnit = config.HookProgram, config.RecoveryFailure, a.changes.CreatedUnit
	a.watch.observe, a.watch.settings, a.watch.isHeld = a.metrics.ObserveScan, a.settings.inForce, a.isHeld
	a.watch.describe, a.watch.withhold = a.changes.DescribeDevices, a.changes.WithheldDevices
	a.removal = &removalOrders{config: &a.Config, ledger: a.ledger, placed: a.placedDevices.Load, pendingUndo: a.changes.PendingUndo, changed: make(chan struct{}, 1)}
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

		CheckConfigured: a.changes.CheckUnderVFIO,

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
		GoneEffect:       a.settings.goneEffect,
		Abandoned:        a.cluster.AbandonedClaims,
		NodeClaims:       a.cluster.NodeClaims,
		StartedPods:      a.cluster.StartedPods,
		OrderDaemons:     discovery.JoinOrderers(config.Families),
		StartDaemons:     a.changes.SharingDaemons.Begin,
		SharingDir:       config.sharingDir(),
		Configure:        a.changes.Configurer(),
		Rescan:           a.watch.requestScan,
		OnPrepare:        a.changes.NoteClaim,
		ResourceOf:       a.classes.resourceOf,
		OnClaimEnd:       a.changes.CheckUndo,
	})
	a.ledger.SetOutputs(a.outputs()...)
	return a
}

// outputs returns the outputs of the ledger, in the order in which they are written. They are removed
// in reverse order: after the CDI spec is removed, no further container gets the devices of a claim,
// so the sharing daemons can end, and finally reclaim withholds the devices.
func (a *agent) outputs() []ledger.Output {
	own := append(a.changes.LedgerOutputs(), ledger.HostFiles{Writer: a.HostFiles})
	return append(own, a.driver.LedgerOutputs()...)
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
		a.settings.reports <- a.ConfigError
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
		a.changes.LoadReclaim(ctx)
		if a.open(ctx) {
			a.changes.OpenRecords(ctx)
			parts := append([]func(context.Context){a.ledger.Run}, a.changes.Parts()...)
			parts = append(parts, a.settings.save, a.watch.run, a.runPlacement, a.classes.run, a.sendPodEvents, a.learnTerms, a.labelNode, a.warnLeftAlone, a.checkRuntime)
			for _, part := range parts {
				group.Go(func() error { part(ctx); return nil })
			}
		}
		return nil
	})
	for _, informant := range a.Informants {
		group.Go(func() error { informant.Run(ctx, a.watch.requestScan); return nil })
	}
	if a.KeepHooks != nil {
		group.Go(func() error { a.KeepHooks(ctx); return nil })
	}
	if a.Uevents != nil {
		group.Go(func() error { a.watch.listen(ctx); return nil })
	}
	group.Go(func() error { return a.runDRA(ctx) })
	group.Go(func() error { a.devicePlugin.Run(ctx); return nil })
	if a.Changes != nil {
		group.Go(func() error { a.settings.follow(ctx); return nil })
		group.Go(func() error { a.settings.reportInvalid(ctx); return nil })
	}
	if a.Orders != nil {
		group.Go(func() error { return a.removal.follow(ctx) })
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
		return a.removal.leave(parent)
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
		if a.settings.inForce().Rules.ReportOnly {
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
		interval := placement.ServedInterval()
		klog.FromContext(ctx).V(2).Info("The API server does not serve resource.k8s.io; asking again later", "interval", interval)
		waitFor(ctx, nil, interval)
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
		Configure: a.changes.Configurer(), Accept: discovery.JoinAcceptors(a.Families),
		DRA: a.driver, DevicePlugin: a.devicePlugin,
		AllocationsKnown: a.isReady, Leaving: a.removal.leavingReason, Decided: a.changes.CheckUndo,
		Snapshots: a.watch.snapshots, Changes: a.settings.rulesChanged, OrderChanged: a.removal.changed,
		Placed: &a.placedDevices,
	})
}

// hasRecords reports whether records of claims may exist.
func (a *agent) hasRecords() bool {
	records, err := a.files().ListDir(a.recordDir())
	return len(records) > 0 || err != nil
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

// isHeld reports whether a claim or a pod has the device.
func (a *agent) isHeld(device string) bool { return a.ledger.View(nil).Has(device) }

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
