package ondemand

import (
	"maps"
	"slices"
	"strings"
	"time"

	"chandler.dev/discovery"
)

// DescribeDevices returns the snapshot with stable devices for units in change: each device is
// either present and healthy, or not created yet. The kernel's view during a change is not
// meaningful. Devices that could not be created are unhealthy for a while, with the reason.
func (m *Manager) DescribeDevices(s *discovery.Snapshot) *discovery.Snapshot {
	m.mu.Lock()
	defer m.mu.Unlock()
	scanned := make(map[string][]discovery.Device)
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Creation != nil {
			scanned[d.Creation.Unit] = append(scanned[d.Creation.Unit], *d)
		}
	}
	for unit := range m.lastScan {
		if !m.inProgress[unit] && len(scanned[unit]) == 0 && m.journal.Get(unit) == nil {
			delete(m.lastScan, unit)
		}
	}
	for unit, devices := range scanned {
		if !m.inProgress[unit] || len(devices) > len(m.lastScan[unit]) {
			m.lastScan[unit] = devices
		}
	}
	// During a change, a device of another family is incomplete too: a network function has its
	// interface before its RDMA device.
	instead := make(map[string]*discovery.Device)
	for unit := range m.inProgress {
		for i := range m.lastScan[unit] {
			instead[m.lastScan[unit][i].Name] = &m.lastScan[unit][i]
		}
	}
	if len(instead) == 0 && len(m.failures) == 0 {
		return s
	}
	now := *s
	now.Devices = make([]discovery.Device, 0, len(s.Devices)+len(instead))
	for _, d := range s.Devices {
		if before := instead[d.Name]; before != nil {
			if d.Creation == nil && (isUnfinished(d.Health) || m.awaitingScan[before.Creation.Unit] && d.Family != before.Family) {
				d = *before
			}
			delete(instead, d.Name)
		}
		now.Devices = append(now.Devices, m.withFailure(d))
	}
	for _, d := range instead {
		now.Devices = append(now.Devices, m.withFailure(*d))
	}
	slices.SortStableFunc(now.Devices, func(a, b discovery.Device) int { return strings.Compare(a.Name, b.Name) })
	return &now
}

// isUnfinished reports whether a device looks as if the kernel or a driver were still setting it
// up.
func isUnfinished(h discovery.Health) bool {
	return h.Status == discovery.Unknown || h.Condition == discovery.ConditionDriverUnbound || h.Condition == discovery.ConditionNodeMissing
}

// withFailure returns a device that does not exist, with the reason if its creation failed
// recently.
func (m *Manager) withFailure(d discovery.Device) discovery.Device {
	if d.Creation == nil || d.Health.Status != discovery.Healthy {
		return d
	}
	failed := m.failures[d.Creation.Unit]
	if failed.err != nil && !failed.afterCreation && maps.Equal(failed.parameters, d.Creation.How) && time.Since(failed.at) < failureMemory {
		d.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "it could not be created: " + failed.err.Error()}
	}
	return d
}
