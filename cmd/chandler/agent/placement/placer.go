package placement

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/exclusion"
)

// Intervals between decisions without a change of a device: until both APIs are ready, while a
// device waits, and otherwise.
const (
	readyInterval    = 50 * time.Millisecond
	waitingInterval  = time.Second // doubled up to longWaitInterval
	longWaitInterval = 10 * time.Second
	quietInterval    = 30 * time.Second
)

// Publisher offers devices through one API: package driver or legacy.
type Publisher interface {
	// Publish sets the devices to offer: those of a snapshot without the withheld physical devices.
	// The values of withheld are the reasons.
	Publish(s *rules.Snapshot, withheld map[string]string)
}

// DevicePluginPublisher offers devices through the device plugin API: package legacy.
type DevicePluginPublisher interface {
	Publisher

	// SetHostDevices receives all devices with their extended resource IDs, whichever API offers them.
	// Containers may have some of these devices from another plugin.
	SetHostDevices(*discovery.Snapshot)
}

// Config is the configuration of [Run]. All fields are required.
type Config struct {
	Rules    *rules.Rules // the rules at the start
	Files    disk.Files
	StateDir string // the agent's directory
	Ledger   *ledger.Ledger
	Cluster  *cluster.Node

	ServesDRA    func(context.Context) (bool, error) // whether the API server serves DRA
	Registration func() driver.Registration          // the kubelet's answer to the registration of the driver

	// Configure and Accept configure devices for the device plugin API.
	Configure discovery.Configurer
	Accept    discovery.Acceptor

	DRA          Publisher
	DevicePlugin DevicePluginPublisher

	AllocationsKnown func() bool   // whether the allocations of both APIs are known
	Leaving          func() string // the reason to withhold all devices, "" if there is none
	Decided          func()        // called after each decision

	Snapshots    <-chan *discovery.Snapshot // the newest snapshot of the watch
	Changes      <-chan *rules.Rules        // new configurations
	OrderChanged <-chan struct{}            // signals that the result of Leaving may have changed

	Placed *atomic.Pointer[Placed] // receives each decision
}

// Placed is a snapshot with the placement of its devices.
type Placed struct {
	Snapshot     *rules.Snapshot
	Placement    Placement
	IsLeaving    bool                 // all devices are withheld, because Chandler is being removed
	WaitingSince map[string]time.Time // when the wait of a physical device began, if this agent saw the beginning
}

// placer chooses the API for each device, and publishes the devices.
type placer struct {
	Config

	devices     *ruledDevices
	auto        *autoMode
	places      *placements
	forms       *shareForms
	draDevices  map[string]bool    // devices whose physical device was with DRA at the last decision
	stock       *exclusion.Present // the devices of the last decision
	withdrawals *withdrawals
	configuring *configurator

	moveReasons  map[string]string    // physical devices that wait for their API, with the reasons
	waitingSince map[string]time.Time // when the wait began, if this agent saw the beginning
	problems     map[string]bool      // problems that were logged and persist
}

// Run places devices until the context ends. It reads the earlier decisions from the agent's
// directory first.
func Run(ctx context.Context, config Config) {
	forms := loadForms(ctx, config.Files, config.StateDir)
	p := &placer{
		Config:      config,
		devices:     newRuled(config.Rules, forms.forms),
		forms:       forms,
		auto:        newAuto(ctx, config.ServesDRA, config.Registration, config.Files, config.StateDir),
		places:      loadPlacements(ctx, config.Files, config.StateDir),
		withdrawals: newWithdrawals(config.Cluster, config.Ledger.IsPrepared),
		draDevices:  make(map[string]bool),
		configuring: newConfiguring(config.Configure, config.Accept, config.Ledger),
	}
	p.run(ctx)
}

// run publishes until the context ends. It decides again when a device changes, and at intervals,
// because allocations and the cluster change too.
func (p *placer) run(ctx context.Context) {
	timer := time.NewTimer(readyInterval)
	defer timer.Stop()
	defer p.configuring.wait()
	wait := waitingInterval
	for {
		select {
		case <-ctx.Done():
			return
		case raw := <-p.Snapshots:
			p.DevicePlugin.SetHostDevices(raw)
			p.devices.applyScan(raw) //nolint:contextcheck // evaluating an expression does not block
			p.reportProblems(ctx, p.devices.snapshot.Problems)
		case changed := <-p.Changes:
			p.devices.changeRules(changed) //nolint:contextcheck // evaluating an expression does not block
			wait = waitingInterval
			p.withdrawals.hurry()
			if p.devices.snapshot != nil {
				p.reportProblems(ctx, p.devices.snapshot.Problems)
			}
		case <-p.configuring.workEnded:
		case <-p.OrderChanged:
			wait = waitingInterval
			p.withdrawals.hurry()
		case <-timer.C:
		}
		if p.devices.snapshot == nil || !p.AllocationsKnown() {
			timer.Reset(readyInterval)
			continue
		}
		mode := p.auto.last
		if !p.devices.rules.ReportOnly {
			mode = p.auto.chooseMode(ctx)
		}
		leaving := p.Leaving()
		placement := p.decidePlacement(ctx, mode, leaving)
		snapshot := p.devices.snapshot
		withheld := placement.OfDRA()
		p.DRA.Publish(snapshot, withheld)
		p.withdrawals.forgetOffered(withheld)
		devices := placement.ListedDevices(snapshot.Devices)
		if p.devices.rules.ReportOnly { // only the devices of pods remain listed
			devices = slices.DeleteFunc(devices, func(d rules.Offered) bool { return placement.Moving[d.Silicon()] != "" })
		}
		listed := &rules.Snapshot{Devices: devices, Gone: snapshot.Gone, Allocation: snapshot.Allocation}
		listed, soon := p.configuring.listableDevices(ctx, listed, p.stock, placement.Moving)
		p.DevicePlugin.Publish(listed, placement.Moving)
		p.Placed.Store(&Placed{snapshot, placement, leaving != "", p.waitingSince})
		p.Decided()
		if len(placement.Moving) > 0 || soon || mode == discovery.ModeAuto {
			timer.Reset(wait)
			wait = min(2*wait, longWaitInterval) // a consumer may have the physical device for days
		} else {
			timer.Reset(quietInterval)
			wait = waitingInterval
		}
	}
}

// decidePlacement places the devices, and records a new placement. A physical device that changes
// and is free gets its new configuration.
func (p *placer) decidePlacement(ctx context.Context, auto discovery.Mode, leaving string) Placement {
	p.stock = &exclusion.Present{Snapshot: p.devices.snapshot}
	view := p.Ledger.View(p.stock)
	p.devices.keepExcluded(view) //nolint:contextcheck // evaluating an expression does not block
	p.devices.keepSplit(view)    //nolint:contextcheck // evaluating an expression does not block
	facts := Facts{AutoMode: auto, Unknown: cmp.Or(leaving, p.devices.rules.WithheldReason())}
	ask := func(waiting map[string]bool) *Published {
		return p.withdrawals.published(ctx, p.devices.snapshot, waiting, p.isNew)
	}
	placement := p.devices.placeDevices(p.places.api, view, facts, ask) //nolint:contextcheck // evaluating an expression does not block
	earlier := p.places.api
	p.places.set(ctx, &placement)
	if facts.Unknown == "" { // otherwise nothing is offered
		p.forms.set(ctx, p.devices.snapshot, &placement)
	}
	for silicon, reason := range placement.Moving {
		if p.moveReasons[silicon] != reason {
			klog.FromContext(ctx).V(2).Info("Silicon waits for its API", "silicon", silicon, "reason", reason)
		}
	}
	for silicon, api := range placement.API {
		if earlier[silicon] != api {
			klog.FromContext(ctx).V(2).Info("Silicon is offered by another API", "silicon", silicon, "from", earlier[silicon], "to", api)
		}
	}
	p.waitingSince = waitBeginnings(p.moveReasons, placement.Moving, p.waitingSince, time.Now())
	p.moveReasons = placement.Moving
	for i := range p.devices.snapshot.Devices {
		if d := &p.devices.snapshot.Devices[i]; placement.API[d.Silicon()] == discovery.ModeDRA {
			p.draDevices[d.Name] = true
		} else {
			delete(p.draDevices, d.Name)
		}
	}
	return placement
}

// isNew reports whether no API has offered a physical device yet, as far as the agent knows. The
// physical device of a device may change: a resource joins the functions of an IOMMU group.
func (p *placer) isNew(silicon string) bool {
	return p.places.api[silicon] == discovery.ModeAuto && !slices.ContainsFunc(p.devices.snapshot.Devices, func(d rules.Offered) bool {
		return d.Silicon() == silicon && (p.draDevices[d.Name] || p.places.api[d.Name] == discovery.ModeDRA)
	})
}

// waitBeginnings returns when the wait of each physical device began. The beginning is unknown for
// a device that waits when the agent starts, because an earlier agent may have withheld the device
// already.
func waitBeginnings(before, now map[string]string, since map[string]time.Time, at time.Time) map[string]time.Time {
	begun := make(map[string]time.Time, len(now))
	for silicon := range now {
		if known, is := since[silicon]; is {
			begun[silicon] = known
		} else if _, waited := before[silicon]; before != nil && !waited {
			begun[silicon] = at
		}
	}
	return begun
}

// reportProblems logs the problems that are new since the last snapshot.
func (p *placer) reportProblems(ctx context.Context, problems []discovery.Problem) {
	now := make(map[string]bool, len(problems))
	for _, problem := range problems {
		text := problem.Error()
		if !p.problems[text] && !now[text] {
			klog.FromContext(ctx).Info("Discovery problem", "device", problem.Device, "error", problem.Err)
		}
		now[text] = true
	}
	p.problems = now
}
