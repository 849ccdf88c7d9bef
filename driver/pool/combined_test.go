package pool

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

func TestCombined(t *testing.T) {
	large := func(name string, counters int) rules.Offered {
		d := rules.Offered{Device: discovery.Device{Name: name, PartOf: &discovery.Silicon{Name: name, Counters: make(map[string]resource.Quantity)}}}
		for i := range counters {
			d.PartOf.Counters[fmt.Sprintf("c%02d", i)] = resource.MustParse("1")
		}
		d.Takes = d.PartOf.Counters
		return d
	}
	var crowd []rules.Offered
	for i := range 130 {
		crowd = append(crowd, pooltest.PartDevice("g0", fmt.Sprintf("g0-%03d", i), 1))
	}
	tests := map[string]struct {
		devices []rules.Offered
		holds   []*allocation.Claim
		want    []string
		left    int
	}{
		"nothing is an empty slice": {want: []string{""}},
		"counters with their devices": {
			devices: []rules.Offered{pooltest.PartDevice("g0", "g0", 7), pooltest.PartDevice("g0", "g0-a", 3), pooltest.PartDevice("g1", "g1", 7), {Device: discovery.Device{Name: "x"}}},
			want:    []string{"set:g0 set:g1 g0<g0 g0-a<g0 g1<g1 x"},
		},
		"what competes stays together, whatever is named in between": {
			devices: []rules.Offered{pooltest.PartDevice("g0", "a", 7), {Device: discovery.Device{Name: "b"}}, pooltest.PartDevice("g0", "c", 3)},
			want:    []string{"set:g0 b a<g0 c<g0"},
		},
		"no more counters than there may be": {
			devices: []rules.Offered{large("g0", 20), large("g1", 12), large("g2", 1)},
			want:    []string{"set:g0 set:g1 g0<g0 g1<g1", "set:g2 g2<g2"},
		},
		"no more devices than there may be": {
			devices: append([]rules.Offered{{Device: discovery.Device{Name: "a"}}}, crowd[:128]...),
			want:    []string{"a", "set:g0 " + names(crowd[:128], "<g0")},
		},
		"what a slice has no room for is left out": {
			devices: crowd,
			want:    []string{"set:g0 " + names(crowd[:128], "<g0")},
			left:    2,
		},
		"but not what is held": {
			devices: crowd,
			holds:   []*allocation.Claim{some("g0-129", "g0-129")},
			want:    []string{"set:g0 " + names(append(crowd[:127:127], crowd[129]), "<g0")},
			left:    2,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			resources, problems := BuildPools(Input{Node: "node", Snapshot: &rules.Snapshot{Devices: test.devices}, Features: without("SeparateCounters"), Claims: test.holds})
			if diff := cmp.Diff(test.want, pooltest.SketchPools(resources)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if len(problems) != test.left {
				t.Errorf("problems: %v", problems)
			}
		})
	}
}

// names joins device names, each with the suffix, in the format of a sketch.
func names(devices []rules.Offered, suffix string) (out string) {
	for i, d := range devices {
		if i > 0 {
			out += " "
		}
		out += d.Name + suffix
	}
	return out
}

// Combined slices contain the same devices and counters as separate slices, and pass the validation
// of Kubernetes 1.34.
func TestCombinedOfRandomHosts(t *testing.T) {
	for seed := range uint64(20) {
		snapshot := discoverytest.RandomHost(rand.New(rand.NewPCG(seed, 1)), 200)
		want, _ := BuildPools(Input{Node: "node", Snapshot: snapshot, Features: features.All()})
		got, problems := BuildPools(Input{Node: "node", Snapshot: snapshot, Features: without("SeparateCounters")})
		if len(problems) > 0 {
			t.Fatalf("problems: %v", problems)
		}
		if diff := cmp.Diff(devicesOf(want), devicesOf(got)) + cmp.Diff(countersOf(want), countersOf(got)); diff != "" {
			t.Fatalf("(-separate +combined):\n%s", diff)
		}
		for i, slice := range SlicesOf(got) {
			if err := validBefore135(slice); err != nil {
				t.Errorf("slice %d: %v", i, err)
			}
		}
	}
}

// validBefore135 repeats the checks of pkg/apis/resource/validation/validation.go of Kubernetes
// 1.34 without an equivalent in later versions (validateResourceSliceSpec and validateDevice).
func validBefore135(slice resourceslice.Slice) error {
	counters, taken := sets.New[string](), 0
	for _, set := range slice.SharedCounters {
		for counter := range set.Counters {
			counters.Insert(set.Name + "/" + counter)
		}
	}
	for _, device := range slice.Devices {
		for _, consumed := range device.ConsumesCounters {
			taken += len(consumed.Counters)
			for counter := range consumed.Counters {
				if !counters.Has(consumed.CounterSet + "/" + counter) {
					return fmt.Errorf("%s takes of %s of %s, which is not in the slice", device.Name, counter, consumed.CounterSet)
				}
			}
		}
	}
	if len(slice.Devices) > 128 || len(counters) > 32 || taken > 1024 {
		return fmt.Errorf("%d devices, %d counters, %d taken", len(slice.Devices), len(counters), taken)
	}
	return nil
}
