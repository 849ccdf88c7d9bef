package driver

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"chandler.dev/discovery"
)

func quantities(pairs ...any) map[string]resource.Quantity {
	out := make(map[string]resource.Quantity)
	for i := 0; i < len(pairs); i += 2 {
		out[pairs[i].(string)] = *resource.NewQuantity(int64(pairs[i+1].(int)), resource.DecimalSI)
	}
	return out
}

// part is a device that takes slices of a piece of silicon with 7 of them.
func part(silicon, name string, takes int) discovery.Device {
	return discovery.Device{
		Name:   name,
		PartOf: &discovery.Whole{Name: silicon, Counters: quantities("slices", 7)},
		Takes:  quantities("slices", takes),
	}
}

// sketch writes a pool in a few words, a line for each slice.
func sketch(resources resourceslice.DriverResources) []string {
	var lines []string
	for _, slice := range resources.Pools["node"].Slices {
		var words []string
		for _, set := range slice.SharedCounters {
			words = append(words, "set:"+set.Name)
		}
		for _, device := range slice.Devices {
			word := device.Name
			for _, taint := range device.Taints {
				word += "!" + strings.TrimPrefix(taint.Key, "chandler.dev/")
				if taint.TimeAdded != nil {
					word += fmt.Sprintf("@%d", taint.TimeAdded.Unix())
				}
				word += ":" + string(taint.Effect)
			}
			for _, consumed := range device.ConsumesCounters {
				word += fmt.Sprintf("<%s", consumed.CounterSet)
			}
			if ptr.Deref(device.AllowMultipleAllocations, false) {
				word += "*"
			}
			words = append(words, word)
		}
		lines = append(lines, strings.Join(words, " "))
	}
	return lines
}

func TestDriverResources(t *testing.T) {
	unhealthy := discovery.Health{Status: discovery.Unhealthy, Reason: "fell off the bus"}
	unknown := discovery.Health{Status: discovery.Unknown}
	hot := discovery.Health{
		Status: discovery.Unhealthy, Condition: discovery.ConditionOverTemperature,
		Effect: resourceapi.DeviceTaintEffectNoExecute, Since: metav1.Unix(60, 0),
	}
	slow := discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionLinkDegraded, Effect: resourceapi.DeviceTaintEffectNone}
	sick := func(d discovery.Device) discovery.Device {
		d.Health = unhealthy
		return d
	}
	taking3 := []resourceapi.DeviceCounterConsumption{{CounterSet: "g0", Counters: counters(quantities("slices", 3))}}
	tests := map[string]struct {
		devices []discovery.Device
		offer   offer
		want    []string
		left    []string // devices left out with a problem
	}{
		"nothing is an empty slice": {want: []string{""}},
		"name order, whatever the order found in the maps": {
			devices: []discovery.Device{{Name: "a"}, {Name: "b"}, {Name: "c"}},
			want:    []string{"a b c"},
		},
		"what the classic API is to have is not in slices": {
			devices: []discovery.Device{{Name: "a", Withheld: "moves to the other API"}, {Name: "b", Mode: discovery.ModeDRA}},
			want:    []string{"b"},
		},
		"shared": {
			devices: []discovery.Device{{Name: "kvm", Shareable: true}},
			want:    []string{"kvm*"},
		},
		"health": {
			devices: []discovery.Device{{Name: "a", Health: unhealthy}, {Name: "b", Health: hot}, {Name: "c", Health: unknown}, {Name: "d", Health: slow}},
			want:    []string{"a!unhealthy:NoSchedule b!over-temperature@60:NoExecute c!unknown:NoSchedule d!link-degraded:None"},
		},
		"health without taints": {
			devices: []discovery.Device{{Name: "a", Health: unhealthy}, {Name: "b"}, {Name: "c", Health: unknown}, {Name: "d", Health: slow}},
			offer:   offer{without: Without{Taints: true}},
			want:    []string{"b d"},
		},
		"health without taints, of what is held": {
			devices: []discovery.Device{
				{Name: "a", Health: unhealthy}, {Name: "kvm", Shareable: true, Health: unhealthy},
				part("g0", "g0", 7), sick(part("g0", "g0-a", 3)),
			},
			offer: offer{
				without: Without{Taints: true},
				held:    map[string]string{"a": "a", "kvm": "kvm", "g0-a": "g0-a"}, taken: map[string]holding{"a": {silicon: "a", whole: true}, "g0-a": {silicon: "g0", whole: true}},
			},
			want: []string{"set:g0", "a g0<g0 g0-a<g0"},
		},
		"health without taints that have no effect": {
			devices: []discovery.Device{{Name: "a", Health: unhealthy}, {Name: "d", Health: slow}},
			offer:   offer{without: Without{Told: true}},
			want:    []string{"a!unhealthy:NoSchedule d"},
		},
		"unknown because it is configured": {
			devices: []discovery.Device{{Name: "a", Health: unknown}, {Name: "b", Health: unhealthy}},
			offer:   offer{excused: map[string]bool{"a": true, "b": true}},
			want:    []string{"a b!unhealthy:NoSchedule"},
		},
		"counters in slices of their own": {
			devices: []discovery.Device{part("g0", "g0-a", 7), part("g0", "g0-b", 3), part("g1", "g1-a", 7), {Name: "x"}},
			want:    []string{"set:g0 set:g1", "g0-a<g0 g0-b<g0 g1-a<g1 x"},
		},
		"without counters only what fits together": {
			devices: []discovery.Device{part("g0", "g0-a", 7), part("g0", "g0-b", 3), part("g0", "g0-c", 3), {Name: "x"}},
			offer:   offer{without: Without{Counters: true}},
			want:    []string{"g0-a x"},
		},
		"without counters what is held stays": {
			devices: []discovery.Device{part("g0", "g0-a", 7), part("g0", "g0-b", 3), part("g0", "g0-c", 3)},
			offer:   offer{without: Without{Counters: true}, held: map[string]string{"g0-c": "g0-c"}},
			want:    []string{"g0-b g0-c"},
		},
		"without counters what can be used comes before what cannot": {
			devices: []discovery.Device{{Name: "g0", PartOf: part("g0", "", 7).PartOf, Takes: quantities("slices", 7), Health: unhealthy}, part("g0", "g0-a", 3)},
			offer:   offer{without: Without{Counters: true}},
			want:    []string{"g0-a"},
		},
		"a part that takes what is not there is left out alone": {
			devices: []discovery.Device{part("g0", "g0-a", 7), {Name: "g0-b", PartOf: &discovery.Whole{Name: "g0", Counters: quantities("slices", 7)}, Takes: quantities("engines", 1)}},
			want:    []string{"set:g0", "g0-a<g0"},
			left:    []string{"g0-b"},
		},
		"gone but held, of silicon that is another now": {
			devices: []discovery.Device{part("g0", "g0-b", 1)},
			offer: offer{
				held: map[string]string{"g0-a": "g0-a"},
				last: published{devices: map[string]resourceapi.Device{"g0-a": {Name: "g0-a", ConsumesCounters: []resourceapi.DeviceCounterConsumption{
					{CounterSet: "g0", Counters: counters(quantities("engines", 1))}}}}},
			},
			want: []string{"set:g0", "g0-a!gone:NoSchedule g0-b<g0"},
		},
		"a part is gone but held, and the whole is one device now": {
			devices: []discovery.Device{{Name: "g0"}, {Name: "g1"}},
			offer: offer{
				held: map[string]string{"g0-a": "g0-a", "g1-a": "g1-a"}, taken: map[string]holding{"g0-a": {silicon: "g0", whole: true}},
			},
			want: []string{"g0-a!gone:NoSchedule g1 g1-a!gone:NoSchedule"},
		},
		"a part that takes of nothing is gone but held": {
			devices: []discovery.Device{{Name: "pf-vf-1", PartOf: &discovery.Whole{Name: "pf"}}, {Name: "pf2"}},
			offer: offer{
				held:  map[string]string{"pf-vf-0": "pf-vf-0", "pf2-vf-0": "pf2-vf-0"},
				taken: map[string]holding{"pf-vf-0": {silicon: "pf"}, "pf2-vf-0": {silicon: "pf2"}},
			},
			want: []string{"pf-vf-0!gone:NoSchedule pf-vf-1 pf2-vf-0!gone:NoSchedule"},
		},
		"a part is gone but held, without counters": {
			devices: []discovery.Device{part("g0", "g0", 7), part("g0", "g0-b", 1), part("g0", "g0-c", 1)},
			offer: offer{
				without: Without{Counters: true},
				held:    map[string]string{"g0-a": "g0-a", "g0-c": "g0-c"}, taken: map[string]holding{"g0-a": {"g0", false, quantities("slices", 1)}, "g0-c": {"g0", false, quantities("slices", 1)}},
			},
			want: []string{"g0-a!gone:NoSchedule g0-c"},
		},
		"a part is gone but held, after a restart": {
			devices: []discovery.Device{part("g0", "g0", 7), part("g1", "g1", 7), part("g2", "g2", 7)},
			offer: offer{
				held: map[string]string{"g0-a": "g0-a", "g1-a": "g1-a", "g2-a": "g2-a"},
				taken: map[string]holding{
					"g0-a": {"g0", false, quantities("slices", 1)}, "g1-a": {silicon: "g1", whole: true},
					"g2-a": {"g2", false, quantities("engines", 1)}, // which g2 is not counted in any more
				},
			},
			want: []string{"set:g0 set:g1", "g0<g0 g0-a!gone:NoSchedule<g0 g1<g1 g1-a!gone:NoSchedule<g1 g2-a!gone:NoSchedule"},
		},
		"gone but held, without taints": {
			devices: []discovery.Device{part("g0", "g0", 7)},
			offer: offer{
				without: Without{Taints: true},
				held:    map[string]string{"a": "a", "g0-a": "g0-a", "g0-b": "g0-b"},
				taken:   map[string]holding{"a": {silicon: "a", whole: true}, "g0-a": {"g0", false, quantities("slices", 3)}},
				last: published{devices: map[string]resourceapi.Device{
					"a":    {Name: "a"},
					"g0-a": {Name: "g0-a", ConsumesCounters: taking3},
					"g0-b": {Name: "g0-b", ConsumesCounters: taking3},
				}},
			},
			want: []string{"set:g0", "g0<g0 g0-a<g0"},
		},
		"gone but held": {
			devices: []discovery.Device{{Name: "b"}},
			offer: offer{
				held: map[string]string{"a": "a", "g0-a": "g0-a", "z": "z"},
				last: published{
					devices: map[string]resourceapi.Device{
						"a":    {Name: "a", Taints: []resourceapi.DeviceTaint{{Key: "chandler.dev/unhealthy", Effect: resourceapi.DeviceTaintEffectNoSchedule}}},
						"c":    {Name: "c"},
						"g0-a": {Name: "g0-a", ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: "g0"}}},
					},
					counters: map[string]resourceapi.CounterSet{"g0": {Name: "g0"}},
				},
			},
			want: []string{"set:g0", "a!gone:NoSchedule b g0-a!gone:NoSchedule<g0 z!gone:NoSchedule"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			test.offer.pool = "node"
			test.offer.snapshot = &discovery.Snapshot{Devices: test.devices}
			test.offer.gone = resourceapi.DeviceTaintEffectNoSchedule
			got, problems := test.offer.driverResources()
			if diff := cmp.Diff(test.want, sketch(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			var left []string
			for _, problem := range problems {
				left = append(left, problem.Device)
			}
			if diff := cmp.Diff(test.left, left); diff != "" {
				t.Errorf("left out (-want +got):\n%s", diff)
			}
		})
	}
}

// Since when a held device is gone is said where it is known.
func TestGoneSince(t *testing.T) {
	gone := discovery.Gone(resourceapi.DeviceTaintEffectNoExecute)
	gone.Since = metav1.Unix(7, 0)
	o := offer{
		pool: "node", snapshot: &discovery.Snapshot{Gone: map[string]discovery.Health{"a": gone, "nobody-has": gone}},
		held: map[string]string{"a-share-0": "a", "b": "b"}, gone: resourceapi.DeviceTaintEffectNoSchedule,
	}
	got, _ := o.driverResources()
	if diff := cmp.Diff([]string{"a-share-0!gone@7:NoExecute b!gone:NoSchedule"}, sketch(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestSliceSizes(t *testing.T) {
	var devices []discovery.Device
	for i := range 130 {
		devices = append(devices, discovery.Device{Name: fmt.Sprintf("d%03d", i)})
	}
	o := offer{pool: "node", snapshot: &discovery.Snapshot{Devices: devices}}
	sizes := func() (sizes []int) {
		resources, _ := o.driverResources()
		for _, slice := range resources.Pools["node"].Slices {
			sizes = append(sizes, len(slice.Devices)+len(slice.SharedCounters))
		}
		return sizes
	}
	if diff := cmp.Diff([]int{64, 64, 2}, sizes()); diff != "" {
		t.Error(diff)
	}
	devices[100].Health.Status = discovery.Unhealthy
	if diff := cmp.Diff([]int{64, 64, 2}, sizes()); diff != "" {
		t.Errorf("the first taint moves devices: %s", diff)
	}
	devices = nil
	for i := range 9 {
		silicon := fmt.Sprintf("g%d", i)
		devices = append(devices, part(silicon, silicon+"-a", 1))
	}
	o.snapshot = &discovery.Snapshot{Devices: devices}
	if diff := cmp.Diff([]int{8, 1, 9}, sizes()); diff != "" {
		t.Errorf("counter sets: %s", diff)
	}
	many := make(map[string]resource.Quantity)
	for i := range 33 {
		many[fmt.Sprintf("c%d", i)] = resource.MustParse("1")
	}
	o.snapshot = &discovery.Snapshot{Devices: []discovery.Device{{Name: "a", PartOf: &discovery.Whole{Name: "g", Counters: many}}, {Name: "b"}}}
	resources, problems := o.driverResources()
	if got := sketch(resources); !slices.Equal(got, []string{"b"}) || len(problems) != 1 {
		t.Errorf("33 counters: published %v, problems %v", got, problems)
	}
}

func TestSharedWithoutSharing(t *testing.T) {
	long := strings.Repeat("x", 60)
	devices := []discovery.Device{{Name: "kvm", Shareable: true}, {Name: long, Shareable: true}}
	o := offer{pool: "node", snapshot: &discovery.Snapshot{Devices: devices}, without: Without{Sharing: true}}
	resources, problems := o.driverResources()
	published := resources.Pools["node"].Slices[0].Devices
	if len(published) != numberedShares || published[0].Name != "kvm-share-00" || published[63].Name != "kvm-share-63" {
		t.Errorf("published %v", sketch(resources))
	}
	if rest := resources.Pools["node"].Slices[1].Devices; len(rest) != 1 || rest[0].Name != long {
		t.Errorf("of a name without room for numbers: %v", rest)
	}
	if len(problems) > 0 {
		t.Errorf("problems: %v", problems)
	}
	v := &view{snapshot: o.snapshot}
	for name, want := range map[string]bool{"kvm": true, "kvm-share-07": true, "kvm-share-": false, "kvm-share-x": false, "other-share-1": false} {
		if device, found := v.allocated(name); found != want || found && device.Name != "kvm" {
			t.Errorf("%s: found %v %s", name, found, device.Name)
		}
	}
}

// Who has a share is charged like who has all, however the share is published.
func TestOverhead(t *testing.T) {
	memory, cpu := resource.MustParse("512Mi"), resource.MustParse("100m")
	needed := discovery.HostResources{"memory": {PerPod: &memory}, "cpu": {PerContainer: &cpu}}
	want := map[corev1.ResourceName]resourceapi.NodeAllocatableResource{
		"memory": {Overhead: &resourceapi.NodeAllocatableOverhead{PerPod: &memory}},
		"cpu":    {Overhead: &resourceapi.NodeAllocatableOverhead{PerContainer: &cpu}},
	}
	shared, alone := byNumber("shared", 2), gpu("alone", 1)
	shared.Overhead, alone.Overhead = needed, needed
	snapshot := &discovery.Snapshot{Devices: []discovery.Device{alone, gpu("other", 2), shared}}
	tests := map[string]struct {
		without Without
		charged int
	}{
		"all":           {Without{}, 2},
		"no sharing":    {Without{Sharing: true}, 3},
		"no overhead":   {Without{Overhead: true}, 0},
		"neither of it": {Without{Overhead: true, Sharing: true}, 0},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			resources, problems := Slices("node", snapshot, test.without)
			charged := 0
			for _, device := range resources.Pools["node"].Slices[0].Devices {
				if device.NodeAllocatableResources == nil {
					continue
				}
				charged++
				if diff := cmp.Diff(want, device.NodeAllocatableResources); diff != "" || device.Name == "other" {
					t.Errorf("%s (-want +got):\n%s", device.Name, diff)
				}
			}
			if charged != test.charged || len(problems) > 0 {
				t.Errorf("%d devices with overhead, want %d; problems %v", charged, test.charged, problems)
			}
		})
	}
	// One that is gone goes on to be charged for, unless the server has forgotten how.
	o := &offer{pool: "node", snapshot: &discovery.Snapshot{}, held: map[string]string{"alone": "alone"}}
	o.last = published{devices: map[string]resourceapi.Device{"alone": {Name: "alone", NodeAllocatableResources: want}}}
	for _, without := range []Without{{}, {Overhead: true}} {
		o.without = without
		resources, _ := o.driverResources()
		if got := resources.Pools["node"].Slices[0].Devices[0].NodeAllocatableResources; (got == nil) != without.Overhead {
			t.Errorf("%+v: %v", without, got)
		}
	}
}

func TestAttributesAndCapacityAreCopied(t *testing.T) {
	d := discovery.Device{Name: "a", Attributes: discovery.Attributes{}, Capacity: discovery.Capacity{}}
	d.Attributes.SetString("model", "MI300X")
	d.Attributes.SetInt("resource.kubernetes.io/numaNode", 1)
	d.Capacity.Set("memory", 192<<30)
	o := offer{pool: "node", snapshot: &discovery.Snapshot{Devices: []discovery.Device{d}}}
	resources, _ := o.driverResources()
	want := resourceapi.Device{Name: "a", Attributes: d.Attributes, Capacity: d.Capacity}
	if diff := cmp.Diff(want, resources.Pools["node"].Slices[0].Devices[0]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
