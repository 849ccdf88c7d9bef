package driver

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
)

func TestCombined(t *testing.T) {
	without := Without{Separate: true}
	large := func(name string, counters int) discovery.Device {
		d := discovery.Device{Name: name, PartOf: &discovery.Whole{Name: name, Counters: make(map[string]resource.Quantity)}}
		for i := range counters {
			d.PartOf.Counters[fmt.Sprintf("c%02d", i)] = resource.MustParse("1")
		}
		d.Takes = d.PartOf.Counters
		return d
	}
	var crowd []discovery.Device
	for i := range 130 {
		crowd = append(crowd, part("g0", fmt.Sprintf("g0-%03d", i), 1))
	}
	tests := map[string]struct {
		devices []discovery.Device
		held    map[string]string
		want    []string
		left    int
	}{
		"nothing is an empty slice": {want: []string{""}},
		"counters with their devices": {
			devices: []discovery.Device{part("g0", "g0", 7), part("g0", "g0-a", 3), part("g1", "g1", 7), {Name: "x"}},
			want:    []string{"set:g0 set:g1 g0<g0 g0-a<g0 g1<g1 x"},
		},
		"what competes stays together, whatever is named in between": {
			devices: []discovery.Device{part("g0", "a", 7), {Name: "b"}, part("g0", "c", 3)},
			want:    []string{"set:g0 a<g0 c<g0 b"},
		},
		"no more counters than there may be": {
			devices: []discovery.Device{large("g0", 20), large("g1", 12), large("g2", 1)},
			want:    []string{"set:g0 set:g1 g0<g0 g1<g1", "set:g2 g2<g2"},
		},
		"no more devices than there may be": {
			devices: append([]discovery.Device{{Name: "a"}}, crowd[:128]...),
			want:    []string{"a", "set:g0 " + names(crowd[:128], "<g0")},
		},
		"what a slice has no room for is left out": {
			devices: crowd,
			want:    []string{"set:g0 " + names(crowd[:128], "<g0")},
			left:    2,
		},
		"but not what is held": {
			devices: crowd,
			held:    map[string]string{"g0-129": "g0-129"},
			want:    []string{"set:g0 " + names(append(crowd[:127:127], crowd[129]), "<g0")},
			left:    2,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			o := &offer{pool: "node", snapshot: &discovery.Snapshot{Devices: test.devices}, without: without, held: test.held}
			resources, problems := o.driverResources()
			if diff := cmp.Diff(test.want, sketch(resources)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if len(problems) != test.left {
				t.Errorf("problems: %v", problems)
			}
		})
	}
}

// names writes the names of devices as a sketch does.
func names(devices []discovery.Device, suffix string) (out string) {
	for i, d := range devices {
		if i > 0 {
			out += " "
		}
		out += d.Name + suffix
	}
	return out
}

// Combined slices say the same of the same devices as separate ones, and keep
// what the validation of 1.34 wants.
func TestCombinedOfRandomHosts(t *testing.T) {
	for seed := range uint64(20) {
		snapshot := discoverytest.RandomHost(rand.New(rand.NewPCG(seed, 1)), 200)
		want, _ := Slices("node", snapshot, Without{})
		got, problems := Slices("node", snapshot, Without{Separate: true})
		if len(problems) > 0 {
			t.Fatalf("problems: %v", problems)
		}
		if diff := cmp.Diff(remember(want), remember(got), cmp.AllowUnexported(published{})); diff != "" {
			t.Fatalf("(-separate +combined):\n%s", diff)
		}
		for i, slice := range got.Pools["node"].Slices {
			if err := validBefore135(slice); err != nil {
				t.Errorf("slice %d: %v", i, err)
			}
		}
	}
}

// validBefore135 checks what only pkg/apis/resource/validation/validation.go of
// Kubernetes 1.34 does (validateResourceSliceSpec and validateDevice).
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

// A slice that the server refuses may mean that it is another server by now: it
// is asked again, and not only when it is time to.
func TestRefusedSlicesAreAskedAbout(t *testing.T) {
	b := newBench(t).restart()
	invalid := apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "slice", nil)
	b.HandleError(t.Context(), errors.Join(fmt.Errorf("update resource slice: %w", invalid), kubeletplugin.ErrRecoverable), "publish")
	select {
	case <-b.ask:
	default:
		t.Error("a refused slice: the server is not asked what it takes")
	}
	// Neither is it known what becomes of a field that the library has no name for.
	slice := func(d resourceapi.Device) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{d}}}
	}
	dropped := &resourceslice.DroppedFieldsError{
		DesiredSlice: slice(resourceapi.Device{Name: "a", NodeAllocatableResources: map[corev1.ResourceName]resourceapi.NodeAllocatableResource{"cpu": {}}}),
		ActualSlice:  slice(resourceapi.Device{Name: "a"}),
	}
	b.HandleError(t.Context(), errors.Join(dropped, kubeletplugin.ErrRecoverable), "publish")
	select {
	case <-b.ask:
	default:
		t.Error("a dropped field: the server is not asked what it takes")
	}
}
