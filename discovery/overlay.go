package discovery

import (
	"slices"
	"strings"
)

// ReplaceDevices returns a copy of the snapshot with other descriptions of some devices, by name. A
// nil description removes a device, and a description of an unknown name is added. Without
// descriptions, ReplaceDevices returns the snapshot itself.
func (s *Snapshot) ReplaceDevices(described map[string]*Device) *Snapshot {
	if len(described) == 0 {
		return s
	}
	now := *s
	now.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(d Device) bool { _, is := described[d.Name]; return is })
	for _, d := range described {
		if d != nil {
			now.Devices = append(now.Devices, *d)
		}
	}
	slices.SortFunc(now.Devices, func(a, b Device) int { return strings.Compare(a.Name, b.Name) })
	return &now
}

// MarkUnhealthy returns a copy of the snapshot in which healthy devices have the health of the first
// map that contains their name. A device that is not healthy keeps its health. Without such a
// device, MarkUnhealthy returns the snapshot itself.
func (s *Snapshot) MarkUnhealthy(faults ...map[string]Health) *Snapshot {
	now := s
	for i := range s.Devices {
		if s.Devices[i].Health.Status != Healthy {
			continue
		}
		for _, f := range faults {
			fault, is := f[s.Devices[i].Name]
			if !is {
				continue
			}
			if now == s {
				marked := *s
				marked.Devices = slices.Clone(s.Devices)
				now = &marked
			}
			now.Devices[i].Health = fault
			break
		}
	}
	return now
}
