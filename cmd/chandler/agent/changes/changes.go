// Package changes changes devices for the agent, and undoes the changes: VFIO passthrough, on-demand
// creation, reclaim, and the daemons of claims. It joins the packages of these changes with the
// ledger, and publishes nothing.
//
//   - A leaseGuard refuses writes to PCI functions without a lease.
//   - A useChecker finds the users of functions before a change.
//   - One undoLoop returns functions under vfio to their drivers, and another removes devices that
//     were created on demand (createdUnits).
//   - diskUse marks devices whose disks the host uses.
package changes

import (
	"context"
	"fmt"
	"net/http"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/ondemand"
	"chandler.dev/internal/passthrough"
	"chandler.dev/internal/reclaim"
	"chandler.dev/internal/sharing"
)

// Config holds the settings and dependencies of a [Manager].
type Config struct {
	Host     *discovery.Host
	Families []*discovery.Family
	Ledger   *ledger.Ledger
	Cluster  *cluster.Node

	// Write writes an attribute of the host, nil if the agent may not change the host. HostService
	// changes devices and finds their users instead of this process; optional.
	Write       func(name, value string) error
	HostService HostService

	// Programs run the programs of families, by name; see [discovery.Tools]. SharingPrograms sends
	// requests to the families' programs that run sharing daemons; see [sharing.Config].
	Programs        map[string]func(context.Context, discovery.PartitionChange) ([]byte, error)
	SharingPrograms http.RoundTripper

	Journal    journal.Config
	StateDir   string // directory of the records of earlier versions
	SharingDir string // directory for the daemons of family programs

	Reclaim      func() []discovery.Selection[reclaim.Rule] // the rules in force
	IdleTime     func() time.Duration                       // how long devices created on demand remain without a consumer
	DiskInterval time.Duration                              // time between checks of the disks that the host uses

	Snapshot    func() *discovery.Snapshot // the devices with their settled states, nil before the first scan
	Placed      func() *placement.Placed   // nil before devices are placed
	RequestScan func()                     // begins a scan of all families
}

// Manager changes devices and undoes the changes.
type Manager struct {
	Reclaim        *reclaim.Manager
	SharingDaemons *sharing.Manager

	config      Config
	uses        useChecker
	guard       leaseGuard
	write       func(name, value string) error // refuses writes without a lease; nil if the agent may not change the host
	passthrough *passthrough.Manager
	onDemand    *ondemand.Manager
	created     createdUnits
	disks       diskUse
	returns     undoLoop // returns functions under vfio to their drivers
	removals    undoLoop // removes devices that were created on demand
}

// New returns a [Manager].
func New(config Config) *Manager {
	c := &Manager{
		config: config,
		uses:   useChecker{host: config.Host, finder: inuse.HostFinder{Host: config.Host}, snapshot: config.Snapshot},
		guard:  leaseGuard{host: config.Host, leases: config.Ledger.Leases, service: config.HostService},
		disks:  diskUse{host: config.Host, snapshot: config.Snapshot, interval: config.DiskInterval, requestScan: config.RequestScan},
	}
	if config.HostService != nil {
		c.uses.finder = config.HostService
	}
	c.write = c.guard.guardWrites(config.Write)
	c.passthrough, c.onDemand = c.newPassthrough(), c.newOnDemand()
	c.created = createdUnits{
		manager: c.onDemand, ledger: config.Ledger, placed: config.Placed, idleTime: config.IdleTime, idleSince: make(map[string]time.Time),
	}
	c.returns = undoLoop{
		records: c.passthrough, recovering: "Reading the records of passthrough", changed: "functions under vfio", failing: "A device is not returned to its driver",
		ledger: config.Ledger, due: make(chan struct{}, 1), list: c.unitsToReturn,
	}
	c.removals = undoLoop{
		records: c.onDemand, recovering: "Recovering devices that were created on demand", changed: "devices that were created on demand", failing: "Devices that were created on demand are not removed",
		ledger: config.Ledger, due: make(chan struct{}, 1), list: c.created.list,
	}
	c.Reclaim, c.SharingDaemons = c.newReclaim(), c.newSharingDaemons()
	return c
}

// LedgerOutputs returns the outputs of the ledger, in the order in which they are written.
func (c *Manager) LedgerOutputs() []ledger.Output {
	return []ledger.Output{&c.created, c.Reclaim, c.SharingDaemons}
}

// Parts returns the parts of the manager that run until their context ends.
func (c *Manager) Parts() []func(context.Context) {
	return []func(context.Context){c.returns.run, c.removals.run, c.Reclaim.Run, c.SharingDaemons.Run, c.disks.watch}
}

// OpenRecords loads the records of devices that an earlier agent bound to vfio or created.
func (c *Manager) OpenRecords(ctx context.Context) {
	c.returns.open(ctx)
	c.removals.open(ctx)
}

// CheckUndo makes the manager check soon which changes can be undone.
func (c *Manager) CheckUndo() {
	c.returns.checkSoon()
	c.removals.checkSoon()
}

// CreatedUnit reports whether a unit was created on demand; see [discovery.Host].
func (c *Manager) CreatedUnit(unit string) (how map[string]string, created bool) {
	return c.onDemand.Has(unit)
}

// VFIOUser returns the process that has a device under vfio open; see [ledger.Config].
func (c *Manager) VFIOUser(d *discovery.Device, own []types.UID) string {
	return c.uses.vfioUser(d, own)
}

// Configurer returns the steps that prepare devices for a consumer: the device is created, then
// bound to a driver, and then configured by its family.
func (c *Manager) Configurer() discovery.Configurer {
	return c.onDemand.Configurer(c.passthrough.Configurer(c.guard.requireLease(discovery.JoinConfigurers(c.config.Host, c.config.Families), c.stock)))
}

// NoteClaim records a claim that is about to be prepared.
func (c *Manager) NoteClaim(claim *resourceapi.ResourceClaim) {
	c.Reclaim.NoteUsers(claim.UID, cluster.PodsOf(claim))
}

// DescribeDevices returns a snapshot that shows devices in change as their consumers see them, before
// the states of devices are settled. On-demand creation comes first, because passthrough may change a
// created device. Faults come last, because the health of a device in change is part of its
// description.
func (c *Manager) DescribeDevices(s *discovery.Snapshot) *discovery.Snapshot {
	s = c.passthrough.DescribeDevices(c.onDemand.DescribeDevices(s))
	return s.MarkUnhealthy(c.disks.deviceFaults(s), c.SharingDaemons.DeviceFaults())
}

// WithheldDevices returns a snapshot with settled states that shows the devices that reclaim
// withholds.
func (c *Manager) WithheldDevices(s *discovery.Snapshot, severity discovery.Severity) *discovery.Snapshot {
	return s.MarkUnhealthy(c.Reclaim.WithheldHealth(severity))
}

// PendingUndo returns the first change that is not undone yet, with the reason, or "".
func (c *Manager) PendingUndo(view *ledger.View) string {
	if left := c.passthrough.LeftUnits(); len(left) > 0 {
		return withReason(fmt.Sprintf("device %s is not returned to its driver yet", left[0].Devices[0]), view.KeptReason(left[0].Devices...), left[0].Err)
	}
	if made := c.onDemand.CreatedUnits(); len(made) > 0 {
		return withReason(fmt.Sprintf("%s was created on demand and is not removed yet", made[0].Unit), view.KeptReason(made[0].Devices...), made[0].Err)
	}
	return ""
}

// withReason appends to the text of a pending step which consumer delays it, or its last error.
func withReason(text, kept string, failed error) string {
	switch {
	case kept != "":
		return text + ": it is in use by " + kept
	case failed != nil:
		return text + ": " + failed.Error()
	}
	return text
}

// stock returns the devices of the host as both APIs offer them.
func (c *Manager) stock() exclusion.Stock {
	if p := c.config.Placed(); p != nil {
		return &exclusion.Present{Snapshot: p.Snapshot}
	}
	return &exclusion.Present{}
}

// describedAs returns a device as both APIs offer the device.
func (c *Manager) describedAs(name string) (discovery.Device, bool) {
	p := c.config.Placed()
	if p == nil {
		return discovery.Device{}, false
	}
	d, found := p.Snapshot.Lookup(name)
	return d.Device, found
}
