package making

import (
	"maps"
	"slices"
	"strings"
	"time"

	"chandler.dev/discovery"
)

// Describe returns the snapshot with stable devices for units in change: each device is either
// present and healthy, or not created yet. The kernel's view during a change is not meaningful.
// Devices that could not be created are unhealthy for a while, with the reason.
func (m *Maker) Describe(s *discovery.Snapshot) *discovery.Snapshot {
	m.mu.Lock()
	defer m.mu.Unlock()
	scanned := make(map[string][]discovery.Device)
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Making != nil {
			scanned[d.Making.Unit] = append(scanned[d.Making.Unit], *d)
		}
	}
	for unit := range m.seen {
		if !m.working[unit] && len(scanned[unit]) == 0 && m.made.Get(unit) == nil {
			delete(m.seen, unit)
		}
	}
	for unit, devices := range scanned {
		if !m.working[unit] || len(devices) > len(m.seen[unit]) {
			m.seen[unit] = devices
		}
	}
	// During a change, a device of another family is incomplete too: a network function has its
	// interface before its RDMA device.
	instead := make(map[string]*discovery.Device)
	for unit := range m.working {
		for i := range m.seen[unit] {
			instead[m.seen[unit][i].Name] = &m.seen[unit][i]
		}
	}
	if len(instead) == 0 && len(m.failed) == 0 {
		return s
	}
	now := *s
	now.Devices = make([]discovery.Device, 0, len(s.Devices)+len(instead))
	for _, d := range s.Devices {
		if before := instead[d.Name]; before != nil {
			if d.Making == nil && (unfinished(d.Health) || m.awaited[before.Making.Unit] && d.Family != before.Family) {
				d = *before
			}
			delete(instead, d.Name)
		}
		now.Devices = append(now.Devices, m.failing(d))
	}
	for _, d := range instead {
		now.Devices = append(now.Devices, m.failing(*d))
	}
	slices.SortStableFunc(now.Devices, func(a, b discovery.Device) int { return strings.Compare(a.Name, b.Name) })
	return &now
}

// unfinished reports whether a device looks as if the kernel or a driver were still setting it up.
func unfinished(h discovery.Health) bool {
	return h.Status == discovery.Unknown || h.Condition == discovery.ConditionDriverUnbound || h.Condition == discovery.ConditionNodeMissing
}

// failing returns a device that does not exist, with the reason if its creation failed recently.
func (m *Maker) failing(d discovery.Device) discovery.Device {
	if d.Making == nil || d.Health.Status != discovery.Healthy {
		return d
	}
	failed := m.failed[d.Making.Unit]
	if failed.err != nil && !failed.made && maps.Equal(failed.how, d.Making.How) && time.Since(failed.at) < remember {
		d.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "it could not be created: " + failed.err.Error()}
	}
	return d
}
