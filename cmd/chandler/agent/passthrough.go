package agent

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/overdue"
	"chandler.dev/internal/passthrough"
)

// refuseInterval is the time until the next attempt after the return of a device to its driver, or
// the removal of a unit, has failed. After the same time the agent also checks again for consumers,
// in case no release was reported.
const refuseInterval = 10 * time.Second

// earlierPassthroughDir is the directory of the records of bound functions of earlier versions.
const earlierPassthroughDir = "rebound"

// newBinder creates the [passthrough.Manager], which binds functions to vfio and returns them to
// their drivers.
func (a *agent) newPassthrough() *passthrough.Manager {
	config := passthrough.Config{
		Host:  a.host,
		Write: a.Write,
		Busy:  a.checkBusy,

		Journal: a.journalConfig(),
		Earlier: filepath.Join(a.StateDir, earlierPassthroughDir),

		Ledger: a.ledger,
		Stock:  a.stock,
		Changed: func() {
			a.requestScan()
			notify(a.returnDue)
		},
	}
	for _, f := range a.Families {
		if f.AllowsPassthrough {
			config.Family = f.Name
		}
	}
	return passthrough.New(config)
}

// checkBusy returns the users of the functions as an error, nil if all are free.
func (a *agent) checkBusy(functions ...sysfs.Device) error { return a.checkUse(false, functions...) }

// vfioUser returns the process that has a device under vfio open, or another function of the
// device's IOMMU group. vfioUser ignores the consumer's own pods, and returns "" if no such process
// is visible. VFIO lets one process at a time open a group (vfio_group_fops_open in drivers/vfio,
// EBUSY, Linux 5.16 to 6.18) or bind a device to its iommufd, and a group belongs to one iommufd
// (iommu_device_claim_dma_owner in drivers/iommu/iommu.c, since Linux 6.2).
func (a *agent) vfioUser(d *discovery.Device, own []types.UID) string {
	function := sysfs.At(a.host.FS, d.Source)
	if !sysfs.IsPCIAddress(function.Name()) || !discovery.IsVFIO(function.Driver()) {
		return ""
	}
	functions := []sysfs.Device{function}
	others, _ := pci.GroupOthers(a.host, function) // an error means that the function has no group
	for _, other := range others {
		if sibling := sysfs.At(a.host.FS, other); discovery.IsVFIO(sibling.Driver()) {
			functions = append(functions, sibling)
		}
	}
	err := a.checkLimited(function, func(options inuse.Options) error {
		options.Except = own
		for _, uses := range a.finder.FunctionUses(options, functions...) {
			if err := uses.KnownUses().Err(); err != nil {
				return err
			}
			if err := uses.Err(); errors.Is(err, inuse.ErrUnanswered) {
				return err
			}
		}
		return nil
	})
	if err == nil || errors.Is(err, overdue.Err) {
		return ""
	}
	return "an earlier consumer or a program of the host: " + err.Error()
}

// checkUnderVFIO returns an error if an extended resource requires a device under vfio, and the device
// has another driver.
func (a *agent) checkUnderVFIO(d *rules.Offered) error {
	driver := sysfs.At(a.host.FS, d.Source).Driver()
	if d.Want[discovery.Driver] != discovery.DriverVFIO || discovery.IsVFIO(driver) {
		return nil
	}
	return fmt.Errorf("it is bound to %q and no longer to a vfio driver", driver)
}

// lookLimit is the time limit of a check for the users of a function. A process that hangs in the
// kernel can block the check for as long.
const lookLimit = 10 * time.Second

// checkLimited returns the result of a check for the users of a function, or an error if the check
// takes too long. No check starts while another check of the function hangs.
func (a *agent) checkLimited(function sysfs.Device, look func(inuse.Options) error) error {
	var options inuse.Options
	if s := a.settledSnapshot.Load(); s != nil {
		options.Known = s.Devices
	}
	err := a.useChecks.OverdueCall(function.Path)
	if err == nil {
		err = a.useChecks.Do(lookLimit, function.Path, "looking at what processes have open", func() error { return look(options) })
	}
	if errors.Is(err, overdue.Err) {
		return fmt.Errorf("%s: the agent cannot find out who uses it: %w", function.Name(), err)
	}
	return err
}

// openPassthrough loads the records of functions that an earlier agent bound to vfio.
func (a *agent) openPassthrough(ctx context.Context) {
	for _, problem := range a.passthrough.Open() {
		klog.FromContext(ctx).Error(problem, "Reading the records of passthrough")
	}
	notify(a.returnDue)
}

// giveBack returns devices under vfio to their previous drivers once they have no consumer and no
// extended resource wants them under vfio. Until then, only requests for the present driver can get
// these devices. A device with an unreadable record is returned even if an extended resource wants
// the device: its own driver is needed to describe the device, and afterwards the device is bound
// to vfio again.
func (a *agent) giveBack(ctx context.Context) {
	attempts := newAttempts("A device is not returned to its driver")
	unwritten := false
	for {
		freed := a.ledger.FreedSignal()
		problems, unread := a.passthrough.ReadAgain()
		for _, problem := range problems {
			klog.FromContext(ctx).Error(problem, "Reading the records of passthrough")
		}
		unwritten = restoreRecords(ctx, a.passthrough.RestoreRecords, "functions under vfio", unwritten)
		left, waiting := a.passthrough.LeftUnits(), make(map[string]bool) // by unit
		if p := a.placedDevices.Load(); p != nil && len(left) > 0 {
			wanted := unitsUnderVFIO(p)
			for _, l := range left {
				if wanted[l.Unit] && !l.DriverUnknown {
					continue
				}
				if waiting[l.Unit] = true; attempts.isDue(l.Unit) {
					attempts.recordResult(ctx, l.Unit, a.giveUnit(ctx, l))
				}
			}
		}
		var again <-chan time.Time
		if len(left) > 0 || unread {
			again = time.After(attempts.pause(waiting))
		} else {
			freed = nil
		}
		select {
		case <-ctx.Done():
			return
		case <-a.returnDue:
		case <-freed:
		case <-again:
		}
	}
}

// restoreRecords rewrites records that another program has removed. It logs a failure once, since
// the errors contain varying names of temporary files.
func restoreRecords(ctx context.Context, restore func() error, of string, failing bool) (fails bool) {
	err := restore()
	if err != nil && !failing {
		klog.FromContext(ctx).Error(err, "Records could not be written; trying again", "of", of, "interval", refuseInterval)
	}
	return err != nil
}

// giveUnit returns all functions of a unit to their drivers, unless a device of the unit has a
// consumer.
func (a *agent) giveUnit(ctx context.Context, left passthrough.LeftUnit) error {
	var blocked *ledger.Blocked
	switch err := a.passthrough.ReturnUnit(ctx, left.Unit); {
	case errors.As(err, &blocked):
		return nil
	case err != nil:
		return err
	}
	klog.FromContext(ctx).Info("Returned devices to their drivers", "devices", left.Devices)
	return nil
}

// unitsUnderVFIO returns the units that extended resources want under vfio.
func unitsUnderVFIO(p *placement.Placed) map[string]bool {
	wanted := make(map[string]bool)
	if p.IsLeaving {
		return wanted
	}
	for _, d := range p.Placement.ListedDevices(p.Snapshot.Devices) {
		if wantsVFIO(&d) {
			wanted[passthrough.UnitOf(&d.Device)] = true
		}
	}
	return wanted
}

func wantsVFIO(d *rules.Offered) bool {
	return d.Want[discovery.Driver] == discovery.DriverVFIO && len(d.Offers) > 0
}
