package changes

import (
	"context"
	"maps"
	"path"
	"slices"
	"sync/atomic"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/inuse"
)

// diskUse marks devices that are available only under vfio while the host uses a disk on them.
type diskUse struct {
	host        *discovery.Host
	snapshot    func() *discovery.Snapshot // the devices with their settled states, nil before the first scan
	interval    time.Duration              // time between checks
	requestScan func()

	reasons atomic.Pointer[map[string]string] // by device, why the use of disks prevents passthrough; nil before the first scan
}

// usedDisks returns, by device name, why passthrough would refuse a device with a disk that the
// host uses. It checks only devices that are available solely under vfio, because a pod may use any
// other device.
func (u *diskUse) usedDisks(s *discovery.Snapshot) map[string]string {
	functions := make(map[string][]sysfs.Device) // by device
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.Passthrough == nil || !d.Passthrough.Only || d.Passthrough.Why != "" {
			continue
		}
		for _, source := range append([]string{d.Source}, d.Passthrough.Others...) {
			functions[d.Name] = append(functions[d.Name], sysfs.At(u.host.FS, source))
		}
	}
	if len(functions) == 0 {
		return nil
	}
	used := inuse.DiskUses(u.host, slices.Concat(slices.Collect(maps.Values(functions))...))
	reasons := make(map[string]string)
	for device, functions := range functions {
		for _, function := range functions {
			if err := used[function.Path]; err != nil {
				reasons[device] = "it is available only under vfio, and function " + path.Base(function.Path) + " is " + err.Error()
				break
			}
		}
	}
	return reasons
}

// deviceFaults returns the health of the devices that passthrough would refuse because the host uses
// a disk on them, by name.
func (u *diskUse) deviceFaults(s *discovery.Snapshot) map[string]discovery.Health {
	reasons := u.usedDisks(s)
	u.reasons.Store(&reasons)
	faults := make(map[string]discovery.Health)
	for name, reason := range reasons {
		faults[name] = discovery.Health{Status: discovery.Unhealthy, Reason: reason}
	}
	return faults
}

// watch starts a scan when the set of used disks differs from the last scan. The kernel sends no
// event when a file system is mounted or unmounted.
func (u *diskUse) watch(ctx context.Context) {
	ticker := time.NewTicker(u.interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		s, last := u.snapshot(), u.reasons.Load()
		if s == nil || last == nil {
			continue // before the first scan
		}
		// A disk with several mounts may have a different reason each time.
		same := func(string, string) bool { return true }
		if !maps.EqualFunc(*last, u.usedDisks(s), same) {
			u.requestScan()
		}
	}
}
