package ondemand

import (
	"maps"
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
	for i := range s.Devices {
		d := &s.Devices[i]
		before := instead[d.Name]
		if before != nil && (d.Creation != nil || !isUnfinished(d.Health) && (!m.awaitingScan[before.Creation.Unit] || d.Family == before.Family)) {
			delete(instead, d.Name)
		}
	}
	now := s.ReplaceDevices(instead)
	return now.MarkUnhealthy(m.creationFaults(now))
}

// isUnfinished reports whether a device looks as if the kernel or a driver were still setting it
// up.
func isUnfinished(h discovery.Health) bool {
	return h.Status == discovery.Unknown || h.Condition == discovery.ConditionDriverUnbound || h.Condition == discovery.ConditionNodeMissing
}

// creationFaults returns the health of the devices that do not exist because their creation failed
// recently, by name.
func (m *Manager) creationFaults(s *discovery.Snapshot) map[string]discovery.Health {
	faults := make(map[string]discovery.Health)
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.Creation == nil {
			continue
		}
		failed := m.failures[d.Creation.Unit]
		if failed.err != nil && !failed.afterCreation && maps.Equal(failed.parameters, d.Creation.How) && time.Since(failed.at) < failureMemory {
			faults[d.Name] = discovery.Health{Status: discovery.Unhealthy, Reason: "it could not be created: " + failed.err.Error()}
		}
	}
	return faults
}
