package legacy

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/legacy/kubelettest"
)

// A device and what is made of it are not handed out together where they
// compete, whichever of them is held.
func TestWholeAndParts(t *testing.T) {
	counters := map[string]resource.Quantity{"mediated": resource.MustParse("2")}
	for name, silicon := range map[string]*discovery.Whole{"compete": {Name: "gpu-a", Counters: counters}, "do not compete": {Name: "gpu-a"}} {
		t.Run(name, func(t *testing.T) {
			whole, part, other := gpu("a"), gpu("b"), gpu("c")
			part.PartOf, other.PartOf = silicon, silicon
			if len(silicon.Counters) > 0 {
				whole.PartOf = silicon
			}
			unitOf := func(d discovery.Device) *unit { return (*unit)(nil).with(d, d.Offers[0]) }
			present := taken{present: map[string]bool{"gpu-a": true, "gpu-b": true, "gpu-c": true}}
			overlap := func(held, wanted discovery.Device) bool {
				return present.overlap(newHolding(gpuResource, held.Offers[0].IDs[0], unitOf(held), time.Time{}), unitOf(wanted)) != ""
			}
			competes := len(silicon.Counters) > 0
			if got := overlap(whole, part); got != competes {
				t.Errorf("part while the whole is held: refused %t", got)
			}
			if got := overlap(part, whole); got != competes {
				t.Errorf("whole while a part is held: refused %t", got)
			}
			if overlap(part, other) || !overlap(part, part) {
				t.Error("parts: refused while another is held, or given out twice")
			}
		})
	}
}

// silicon returns devices that take so much of a Whole, by their IDs: a unit
// each, of a resource of its own if the ID has an "x".
func silicon(whole string, all int64, takes map[string]int64) []discovery.Device {
	counters := map[string]resource.Quantity{"cores": *resource.NewQuantity(all, resource.DecimalSI)}
	var devices []discovery.Device
	for _, id := range slices.Sorted(maps.Keys(takes)) {
		d := gpu(id)
		d.PartOf = &discovery.Whole{Name: whole, Counters: counters}
		d.Takes = map[string]resource.Quantity{"cores": *resource.NewQuantity(takes[id], resource.DecimalSI)}
		if strings.HasPrefix(id, "x") {
			d.Offers = []discovery.Offer{{Resource: otherResource, IDs: []string{id}}}
		}
		devices = append(devices, d)
	}
	return devices
}

const otherResource = "example.com/other"

// Of two granularities of one piece of silicon, what one takes the other shows
// Unhealthy, and Allocate refuses.
func TestTwoGranularities(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := New(configFor(k))
	// "w" and "v" are whole devices, "x…" their two cores each.
	p.Publish(snapshot(append(silicon("gpu-w", 2, map[string]int64{"w": 2, "xw0": 1, "xw1": 1}), silicon("gpu-v", 2, map[string]int64{"v": 2, "xv0": 1, "xv1": 1})...)...))
	run(t, p)
	wholes, cores := k.Plugin(gpuResource, 1), k.Plugin(otherResource, 1)
	wholes.Says(t, "v w")
	cores.Says(t, "xv0 xv1 xw0 xw1")
	if _, err := wholes.Allocate("w"); err != nil {
		t.Fatal(err)
	}
	k.Hold("train", gpuResource, "w")
	cores.Says(t, "xv0 xv1 xw0! xw1!")
	if _, err := cores.Allocate("xw1"); err == nil || !strings.Contains(err.Error(), "gpu-w is held by") {
		t.Errorf("a core of a device that is held: %v", err)
	}
	if _, err := cores.Allocate("xv1"); err != nil {
		t.Fatal(err)
	}
	k.Hold("infer", otherResource, "xv1")
	wholes.Says(t, "v! w")
	cores.Says(t, "xv0 xv1 xw0! xw1!")
	if _, err := wholes.Allocate("v"); err == nil || !strings.Contains(err.Error(), "gpu-xv1 is held by") {
		t.Errorf("a device of which a core is held: %v", err)
	}
	for silicon, pod := range map[string]string{"gpu-w": "default/train main", "gpu-v": "default/infer main"} {
		kubelettest.Eventually(t, func() bool { who, _ := p.Holder(silicon); return who == pod }, func() string { return silicon + " is not confirmed" })
	}
	k.Hold("train", gpuResource)
	k.Hold("infer", otherResource)
	wholes.Says(t, "v w")
	cores.Says(t, "xv0 xv1 xw0 xw1")
}

// Holdings add up, whatever they are called: two functions of one IOMMU group,
// and parts of different sizes.
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
			s := snapshot(silicon("whole", test.all, test.takes)...)
			present := taken{present: make(map[string]bool), takes: make(map[string]map[string]resource.Quantity)}
			units := make(map[string]*unit)
			for _, d := range s.Devices {
				present.present[d.Name], present.takes[d.Name] = true, d.Takes
				units[d.Offers[0].IDs[0]] = (*unit)(nil).with(d, d.Offers[0])
			}
			for _, id := range test.held {
				present.holdings = append(present.holdings, newHolding(units[id].devices[0].Offers[0].Resource, id, units[id], time.Time{}))
			}
			resource := units[test.wanted].devices[0].Offers[0].Resource
			if holder := present.from(resource, units[test.wanted]); (holder == "") != test.free {
				t.Errorf("%q", holder)
			}
		})
	}
}
