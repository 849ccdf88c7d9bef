package list

import (
	"testing"

	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/legacy/list/listtest"
)

// A whole device and its partitions exclude each other. Partitions do not, as far as their counters
// reach.
func TestWholeAndParts(t *testing.T) {
	devices := listtest.Parts("gpu-a", 2, map[string]int64{"a": 2, "b": 1, "c": 1})
	whole, part, other := devices[0], devices[1], devices[2]
	unitOf := func(d rules.Offered) *Unit { return (*Unit)(nil).with(d.Device, d.Offers[0]) }
	stock := StockOf(listtest.FoundDevices(devices), Lists{})
	overlap := func(held, wanted rules.Offered) bool {
		v := viewOf(stock, []*allocation.Grant{hadAs(held.Offers[0].IDs[0], unitOf(held), listtest.OtherResource)}, nil)
		return unitOf(wanted).blockedBy(listtest.Resource, v) != nil
	}
	if !overlap(whole, part) {
		t.Error("a part is given out while the whole is held")
	}
	if !overlap(part, whole) {
		t.Error("the whole is given out while a part is held")
	}
	if overlap(part, other) || !overlap(part, part) {
		t.Error("parts: refused while another is held, or given out twice")
	}
}

// Allocations of one physical device add up, whatever their names: two functions of one IOMMU
// group, and partitions of different sizes.
func TestSiliconIsExhausted(t *testing.T) {
	for name, test := range map[string]struct {
		all    int64
		takes  map[string]int64
		held   []string
		wanted string
		free   bool
	}{
		"one group":            {1, map[string]int64{"a": 1, "xb": 1}, []string{"a"}, "xb", false},
		"another name":         {1, map[string]int64{"a": 1, "xb": 1}, nil, "xb", true},
		"enough is left":       {7, map[string]int64{"a": 3, "b": 2, "c": 2}, []string{"a", "b"}, "c", true},
		"two leave too little": {7, map[string]int64{"a": 3, "b": 2, "c": 4}, []string{"a", "b"}, "c", false},
		"its own":              {1, map[string]int64{"a": 1}, []string{"a"}, "a", true},
	} {
		t.Run(name, func(t *testing.T) {
			s := listtest.Snapshot(listtest.Parts("whole", test.all, test.takes)...)
			units := make(map[string]*Unit)
			for _, d := range listtest.FoundDevices(s.Devices) {
				units[d.PluginOffers[0].IDs[0]] = (*Unit)(nil).with(d, d.PluginOffers[0])
			}
			var had []*allocation.Grant
			for _, id := range test.held {
				had = append(had, hadAs(id, units[id], units[id].Devices[0].PluginOffers[0].Resource))
			}
			resource := units[test.wanted].Devices[0].PluginOffers[0].Resource
			v := viewOf(StockOf(listtest.FoundDevices(s.Devices), Lists{}), had, nil)
			if blocked := units[test.wanted].blockedBy(resource, v); (blocked == nil) != test.free {
				t.Errorf("%v", blocked)
			}
		})
	}
}
