package pool

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

const (
	firstFunction, secondFunction = "pci-0000-03-00-0", "pci-0000-03-00-1"
	firstSource, secondSource     = "sys/devices/pci0000:00/0000:03:00.0", "sys/devices/pci0000:00/0000:03:00.1"
)

// grouped is a function in an IOMMU group with a second function.
func grouped(name, source, other string) rules.Offered {
	one := pooltest.Quantities(discovery.GroupCounter, 1)
	return rules.Offered{Device: discovery.Device{
		Name: name, Source: source, Takes: one, PartOf: &discovery.Silicon{Name: "iommu-group-3", Counters: one},
		Passthrough: &discovery.PassthroughOption{Driver: "vfio-pci", Others: []string{other}},
	}}
}

// A claim has a function recorded before the function and another became an IOMMU group. The
// scheduler can allocate no other function of the group.
func TestNoFunctionOfAGroupIsFreeWhileAClaimHasOneFromBefore(t *testing.T) {
	first, second := grouped(firstFunction, firstSource, secondSource), grouped(secondFunction, secondSource, firstSource)
	alone := rules.Offered{Device: discovery.Device{Name: firstFunction, Source: firstSource}}
	separate := rules.Offered{Device: discovery.Device{Name: secondFunction, Source: secondSource, Passthrough: second.Passthrough}}
	claim := hold(firstFunction, firstFunction, true, nil)
	for name, test := range map[string]struct {
		after []rules.Offered
		free  bool
	}{
		"both are offered":                   {[]rules.Offered{first, second}, false},
		"the first is left out":              {[]rules.Offered{second}, false},
		"the first is left out, not a group": {[]rules.Offered{separate}, true},
	} {
		for _, kept := range pooltest.FeatureSets() {
			before, _ := BuildPools(Input{Node: "node", Snapshot: &rules.Snapshot{Devices: []rules.Offered{alone}}, Features: kept})
			scheduler := pooltest.NewScheduler(t, kept).Publish(before)
			if _, ok := scheduler.AllocateDevice("pod", resourceapi.ExactDeviceRequest{}); !ok {
				t.Fatalf("%s: the first function is not allocated", name)
			}
			after, problems := BuildPools(Input{Node: "node",
				Snapshot: &rules.Snapshot{Devices: test.after}, Features: kept, Last: before, Claims: []*allocation.Claim{claim},
			})
			if got, ok := scheduler.Publish(after).AllocateDevice("vm", resourceapi.ExactDeviceRequest{}); ok != test.free || len(problems) > 0 {
				t.Errorf("%s, %+v: allocated %t, %v; problems %v; slices %q", name, kept, ok, got, problems, pooltest.SketchPools(after))
			}
		}
	}
}
