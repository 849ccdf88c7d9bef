package list

import (
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/legacy/list/listtest"
)

// large returns GPUs in units of 1 GiB, and a view with half of the units allocated to containers.
func large(gpus, units int) (*rules.Snapshot, *ledger.View) {
	s := &rules.Snapshot{}
	for i := range gpus {
		d := listtest.GPU(fmt.Sprint(i))
		o := discovery.Offer{Resource: listtest.MemoryResource, Counts: "memory"}
		for n := range units {
			o.IDs = append(o.IDs, fmt.Sprintf("GPU-%d-_-%d", i, n))
		}
		d.Offers = []discovery.Offer{o}
		d.Sharing = &rules.Sharing{Capacity: "memory", Unit: resource.MustParse("1Gi")}
		s.Devices = append(s.Devices, d)
	}
	var had []*allocation.Grant
	for _, u := range BuildOffers(s).Units[listtest.MemoryResource] {
		for _, id := range u.IDs[:units/2] {
			had = append(had, hadAs(id, u, listtest.MemoryResource))
		}
	}
	return s, viewOf(StockOf(rules.PlainDevices(s.Devices), Lists{}), had, nil)
}

// BenchmarkNext computes the lists of 8 GPUs of 320 GiB each, and of one GPU with as many units as
// fit into a list. Containers have half of the units.
func BenchmarkNext(b *testing.B) {
	for name, size := range map[string]struct{ gpus, units int }{"gibibytes": {8, 320}, "mebibytes": {1, 55000}} {
		b.Run(name, func(b *testing.B) {
			s, v := large(size.gpus, size.units)
			in := Input{Snapshot: s, View: v, Now: listtest.Time, Grace: grace}
			lists, _ := Lists{}.Next(in)
			i := 0
			for b.Loop() {
				i++
				in.Withheld = map[string]string{"gpu-0": fmt.Sprint(i)} // a change
				if lists, _ = lists.Next(in); len(lists.lists[listtest.MemoryResource].rows) != size.gpus*size.units {
					b.Fatal("IDs are missing")
				}
			}
		})
	}
}

// BenchmarkAtRest computes the lists of 3,000 shareable IDs without a change.
func BenchmarkAtRest(b *testing.B) {
	d := listtest.GPU("kvm")
	d.Shareable, d.Offers[0].IDs = true, nil
	for n := range 3000 {
		d.Offers[0].IDs = append(d.Offers[0].IDs, fmt.Sprintf("kvm-%d", n))
	}
	in := Input{Snapshot: listtest.Snapshot(d), View: viewOf(StockOf(listtest.FoundDevices([]rules.Offered{d}), Lists{}), nil, nil), Now: listtest.Time, Grace: grace}
	lists, _ := Lists{}.Next(in)
	for b.Loop() {
		next, _ := lists.Next(in)
		if next.lists[listtest.Resource] != lists.lists[listtest.Resource] {
			b.Fatal("computed anew")
		}
	}
}

// BenchmarkBlocked checks each unit of a host once, like a call of Allocate for its units.
func BenchmarkBlocked(b *testing.B) {
	s, v := large(8, 320)
	offers := BuildOffers(s)
	for b.Loop() {
		for _, u := range offers.Units[listtest.MemoryResource] {
			if blocked := u.blockedBy(listtest.MemoryResource, v); blocked != nil {
				b.Fatal(blocked)
			}
		}
	}
}

// Four times as many IDs take about four times as long, not sixteen times. The test counts memory
// allocations, since durations are not reliable.
func TestNextIsLinear(t *testing.T) {
	allocations := func(units int) float64 {
		s, v := large(8, units)
		in := Input{Snapshot: s, View: v, Now: listtest.Time, Grace: grace}
		return testing.AllocsPerRun(3, func() { Lists{}.Next(in) })
	}
	if small, big := allocations(80), allocations(320); big > 6*small {
		t.Errorf("%.0f allocations for 640 IDs, %.0f for 2560", small, big)
	}
}
