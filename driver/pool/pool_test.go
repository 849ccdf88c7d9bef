package pool

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

// without returns the features of a server that lacks the named ones.
func without(names ...string) features.Set { return features.All().WithoutFeatures(names...) }

// hold is a claim with an exclusive allocation.
func hold(name, silicon string, whole bool, takes map[string]resource.Quantity) *allocation.Claim {
	return &allocation.Claim{Results: []allocation.Result{{Pool: "node/other", Device: name, Source: name, Silicon: silicon, Whole: whole, Takes: takes}}}
}

// some is a claim with a shared device.
func some(name, device string) *allocation.Claim {
	return &allocation.Claim{Results: []allocation.Result{{Pool: "node/other", Device: name, Source: device, Shared: true}}}
}

// published are pools with one slice, of devices without a kind.
func published(devices []resourceapi.Device, sets ...resourceapi.CounterSet) resourceslice.DriverResources {
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{"node/other": {Slices: []resourceslice.Slice{{Devices: devices, SharedCounters: sets}}}}}
}

func TestDriverResources(t *testing.T) {
	unhealthy := discovery.Health{Status: discovery.Unhealthy, Reason: "fell off the bus"}
	unknown := discovery.Health{Status: discovery.Unknown}
	hot := discovery.Health{
		Status: discovery.Unhealthy, Condition: discovery.ConditionOverTemperature,
		Effect: resourceapi.DeviceTaintEffectNoExecute, Since: metav1.Unix(60, 0),
	}
	slow := discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionLinkDegraded, Effect: resourceapi.DeviceTaintEffectNone}
	sick := func(d rules.Offered) rules.Offered {
		d.Health = unhealthy
		return d
	}
	taking3 := []resourceapi.DeviceCounterConsumption{{CounterSet: "g0", Counters: toCounters(pooltest.Quantities("slices", 3))}}
	tests := map[string]struct {
		devices  []rules.Offered
		withheld map[string]string
		holds    []*allocation.Claim
		last     resourceslice.DriverResources
		excused  map[string]bool
		dropped  []string // by the server
		want     []string
		left     []string // devices left out with a problem
	}{
		"nothing is an empty slice": {want: []string{""}},
		"name order, whatever the order found in the maps": {
			devices: []rules.Offered{{Device: discovery.Device{Name: "a"}}, {Device: discovery.Device{Name: "b"}}, {Device: discovery.Device{Name: "c"}}},
			want:    []string{"a b c"},
		},
		"what the classic API is to have is not in slices": {
			devices:  []rules.Offered{{Device: discovery.Device{Name: "a"}}, pooltest.PartDevice("g0", "g0-a", 3), {Device: discovery.Device{Name: "b"}, Mode: discovery.ModeDRA}},
			withheld: map[string]string{"a": "moves to the other API", "g0": "likewise"},
			want:     []string{"b"},
		},
		"shared": {
			devices: []rules.Offered{{Device: discovery.Device{Name: "kvm", Shareable: true}}},
			want:    []string{"kvm*"},
		},
		"health": {
			devices: []rules.Offered{{Device: discovery.Device{Name: "a", Health: unhealthy}}, {Device: discovery.Device{Name: "b", Health: hot}}, {Device: discovery.Device{Name: "c", Health: unknown}}, {Device: discovery.Device{Name: "d", Health: slow}}},
			want:    []string{"a!unhealthy:NoSchedule b!over-temperature@60:NoExecute c!unknown:NoSchedule d!link-degraded:None"},
		},
		"health without taints": {
			devices: []rules.Offered{{Device: discovery.Device{Name: "a", Health: unhealthy}}, {Device: discovery.Device{Name: "b"}}, {Device: discovery.Device{Name: "c", Health: unknown}}, {Device: discovery.Device{Name: "d", Health: slow}}},
			dropped: []string{"DRADeviceTaints"},
			want:    []string{"b d"},
		},
		"health without taints, of what is held": {
			devices: []rules.Offered{
				{Device: discovery.Device{Name: "a", Health: unhealthy}}, {Device: discovery.Device{Name: "kvm", Shareable: true, Health: unhealthy}},
				pooltest.PartDevice("g0", "g0", 7), sick(pooltest.PartDevice("g0", "g0-a", 3)),
			},
			holds:   []*allocation.Claim{hold("a", "a", true, nil), hold("g0-a", "g0", true, nil), some("kvm", "kvm")},
			dropped: []string{"DRADeviceTaints"},
			want:    []string{"set:g0", "a g0<g0 g0-a<g0"},
		},
		"health without taints that have no effect": {
			devices: []rules.Offered{{Device: discovery.Device{Name: "a", Health: unhealthy}}, {Device: discovery.Device{Name: "d", Health: slow}}},
			dropped: []string{"DeviceTaintEffectNone"},
			want:    []string{"a!unhealthy:NoSchedule d"},
		},
		"unknown because it is configured": {
			devices: []rules.Offered{{Device: discovery.Device{Name: "a", Health: unknown}}, {Device: discovery.Device{Name: "b", Health: unhealthy}}},
			excused: map[string]bool{"a": true, "b": true},
			want:    []string{"a b!unhealthy:NoSchedule"},
		},
		"counters in slices of their own": {
			devices: []rules.Offered{pooltest.PartDevice("g0", "g0-a", 7), pooltest.PartDevice("g0", "g0-b", 3), pooltest.PartDevice("g1", "g1-a", 7), {Device: discovery.Device{Name: "x"}}},
			want:    []string{"set:g0 set:g1", "g0-a<g0 g0-b<g0 g1-a<g1 x"},
		},
		"without counters only what fits together": {
			devices: []rules.Offered{pooltest.PartDevice("g0", "g0-a", 7), pooltest.PartDevice("g0", "g0-b", 3), pooltest.PartDevice("g0", "g0-c", 3), {Device: discovery.Device{Name: "x"}}},
			dropped: []string{"DRAPartitionableDevices"},
			want:    []string{"g0-a x"},
		},
		"without counters what is held stays": {
			devices: []rules.Offered{pooltest.PartDevice("g0", "g0-a", 7), pooltest.PartDevice("g0", "g0-b", 3), pooltest.PartDevice("g0", "g0-c", 3)},
			holds:   []*allocation.Claim{some("g0-c", "g0-c")}, dropped: []string{"DRAPartitionableDevices"},
			want: []string{"g0-b g0-c"},
		},
		"without counters what can be used comes before what cannot": {
			devices: []rules.Offered{{Device: discovery.Device{Name: "g0", PartOf: pooltest.PartDevice("g0", "", 7).PartOf, Takes: pooltest.Quantities("slices", 7), Health: unhealthy}}, pooltest.PartDevice("g0", "g0-a", 3)},
			dropped: []string{"DRAPartitionableDevices"},
			want:    []string{"g0-a"},
		},
		"a part that takes what is not there is left out alone": {
			devices: []rules.Offered{pooltest.PartDevice("g0", "g0-a", 7), {Device: discovery.Device{Name: "g0-b", PartOf: &discovery.Silicon{Name: "g0", Counters: pooltest.Quantities("slices", 7)}, Takes: pooltest.Quantities("engines", 1)}}},
			want:    []string{"set:g0", "g0-a<g0"},
			left:    []string{"g0-b"},
		},
		"gone but held, of silicon that is another now": {
			devices: []rules.Offered{pooltest.PartDevice("g0", "g0-b", 1)},
			holds:   []*allocation.Claim{some("g0-a", "g0-a")},
			last: published([]resourceapi.Device{{Name: "g0-a", ConsumesCounters: []resourceapi.DeviceCounterConsumption{
				{CounterSet: "g0", Counters: toCounters(pooltest.Quantities("engines", 1))}}}}),
			want: []string{"set:g0", "g0-a!gone:NoSchedule g0-b<g0"},
		},
		"a part is gone but held, and the whole is one device now": {
			devices: []rules.Offered{{Device: discovery.Device{Name: "g0"}}, {Device: discovery.Device{Name: "g1"}}},
			holds:   []*allocation.Claim{hold("g0-a", "g0", true, nil), some("g1-a", "g1-a")},
			want:    []string{"g0-a!gone:NoSchedule g1 g1-a!gone:NoSchedule"},
		},
		"a part that takes of nothing is gone but held": {
			devices: []rules.Offered{{Device: discovery.Device{Name: "pf-vf-1", PartOf: &discovery.Silicon{Name: "pf"}}}, {Device: discovery.Device{Name: "pf2"}}},
			holds:   []*allocation.Claim{hold("pf-vf-0", "pf", false, nil), hold("pf2-vf-0", "pf2", false, nil)},
			want:    []string{"pf-vf-0!gone:NoSchedule pf-vf-1 pf2-vf-0!gone:NoSchedule"},
		},
		"a part is gone but held, without counters": {
			devices: []rules.Offered{pooltest.PartDevice("g0", "g0", 7), pooltest.PartDevice("g0", "g0-b", 1), pooltest.PartDevice("g0", "g0-c", 1)},
			holds:   []*allocation.Claim{hold("g0-a", "g0", false, pooltest.Quantities("slices", 1)), hold("g0-c", "g0", false, pooltest.Quantities("slices", 1))},
			dropped: []string{"DRAPartitionableDevices"},
			want:    []string{"g0-a!gone:NoSchedule g0-c"},
		},
		"a part is gone but held, after a restart": {
			devices: []rules.Offered{pooltest.PartDevice("g0", "g0", 7), pooltest.PartDevice("g1", "g1", 7), pooltest.PartDevice("g2", "g2", 7)},
			holds: []*allocation.Claim{
				hold("g0-a", "g0", false, pooltest.Quantities("slices", 1)), hold("g1-a", "g1", true, nil),
				hold("g2-a", "g2", false, pooltest.Quantities("engines", 1)), // g2 no longer has this counter
			},
			want: []string{"set:g0 set:g1", "g0<g0 g0-a!gone:NoSchedule<g0 g1<g1 g1-a!gone:NoSchedule<g1 g2-a!gone:NoSchedule"},
		},
		"gone but held, without taints": {
			devices: []rules.Offered{pooltest.PartDevice("g0", "g0", 7)},
			holds:   []*allocation.Claim{hold("a", "a", true, nil), hold("g0-a", "g0", false, pooltest.Quantities("slices", 3)), some("g0-b", "g0-b")},
			last:    published([]resourceapi.Device{{Name: "a"}, {Name: "g0-a", ConsumesCounters: taking3}, {Name: "g0-b", ConsumesCounters: taking3}}),
			dropped: []string{"DRADeviceTaints"},
			want:    []string{"set:g0", "g0<g0 g0-a<g0"},
		},
		"gone but held": {
			devices: []rules.Offered{{Device: discovery.Device{Name: "b"}}},
			holds:   []*allocation.Claim{some("a", "a"), some("g0-a", "g0-a"), some("z", "z")},
			last: published([]resourceapi.Device{
				{Name: "a", Taints: []resourceapi.DeviceTaint{{Key: "chandler.dev/unhealthy", Effect: resourceapi.DeviceTaintEffectNoSchedule}}},
				{Name: "c"},
				{Name: "g0-a", ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: "g0"}}},
			}, resourceapi.CounterSet{Name: "g0"}),
			want: []string{"set:g0", "a!gone:NoSchedule b g0-a!gone:NoSchedule<g0 z!gone:NoSchedule"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, problems := BuildPools(Input{Node: "node",
				Snapshot: &rules.Snapshot{Devices: test.devices}, Withheld: test.withheld, Claims: test.holds, Last: test.last, ExcusedHealth: test.excused,
				Features: without(test.dropped...), GoneEffect: resourceapi.DeviceTaintEffectNoSchedule,
			})
			if diff := cmp.Diff(test.want, pooltest.SketchPools(got)); diff != "" {
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

// The taint of a vanished device has the time of the disappearance, if known.
func TestGoneSince(t *testing.T) {
	gone := discovery.GoneHealth(resourceapi.DeviceTaintEffectNoExecute)
	gone.Since = metav1.Unix(7, 0)
	got, _ := BuildPools(Input{Node: "node",
		Snapshot: &rules.Snapshot{Gone: map[string]discovery.Health{"a": gone, "unallocated": gone}}, Features: features.All(),
		Claims: []*allocation.Claim{some("a-share-0", "a"), some("b", "b")}, GoneEffect: resourceapi.DeviceTaintEffectNoSchedule,
	})
	if diff := cmp.Diff([]string{"a-share-0!gone@7:NoExecute b!gone:NoSchedule"}, pooltest.SketchPools(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestSliceSizes(t *testing.T) {
	var devices []rules.Offered
	for i := range 130 {
		devices = append(devices, rules.Offered{Device: discovery.Device{Name: fmt.Sprintf("d%03d", i)}})
	}
	in := Input{Node: "node", Snapshot: &rules.Snapshot{Devices: devices}, Features: features.All()}
	sizes := func() (sizes []int) {
		resources, _ := BuildPools(in)
		for _, slice := range SlicesOf(resources) {
			sizes = append(sizes, len(slice.Devices)+len(slice.SharedCounters))
		}
		return sizes
	}
	if diff := cmp.Diff([]int{44, 44, 42}, sizes()); diff != "" {
		t.Error(diff)
	}
	devices[100].Health.Status = discovery.Unhealthy
	if diff := cmp.Diff([]int{44, 44, 42}, sizes()); diff != "" {
		t.Errorf("the first taint moves devices: %s", diff)
	}
	devices = nil
	for i := range 9 {
		silicon := fmt.Sprintf("g%d", i)
		devices = append(devices, pooltest.PartDevice(silicon, silicon+"-a", 1))
	}
	in.Snapshot = &rules.Snapshot{Devices: devices}
	if diff := cmp.Diff([]int{8, 1, 9}, sizes()); diff != "" {
		t.Errorf("counter sets: %s", diff)
	}
	many := make(map[string]resource.Quantity)
	for i := range 33 {
		many[fmt.Sprintf("c%d", i)] = resource.MustParse("1")
	}
	in.Snapshot = &rules.Snapshot{Devices: []rules.Offered{{Device: discovery.Device{Name: "a", PartOf: &discovery.Silicon{Name: "g", Counters: many}}}, {Device: discovery.Device{Name: "b"}}}}
	resources, problems := BuildPools(in)
	if got := pooltest.SketchPools(resources); !slices.Equal(got, []string{"b"}) || len(problems) != 1 {
		t.Errorf("33 counters: published %v, problems %v", got, problems)
	}
}

// A device that comes or goes changes one slice: on a host with 136 devices, if each goes and comes
// back, and if one more comes after each.
func TestOneChangedSlice(t *testing.T) {
	device := func(name string) rules.Offered { return rules.Offered{Device: discovery.Device{Name: name}} }
	var devices []rules.Offered
	for i := range 136 {
		devices = append(devices, device(fmt.Sprintf("d%03d", i)))
	}
	publish := func(last resourceslice.DriverResources, devices []rules.Offered) (next resourceslice.DriverResources, changed int) {
		next, _ = BuildPools(Input{Node: "node", Snapshot: &rules.Snapshot{Devices: devices}, Features: features.All(), Last: last})
		now, before := SlicesOf(next), SlicesOf(last)
		if len(now) != len(before) {
			return next, len(now)
		}
		for i := range now {
			if !reflect.DeepEqual(now[i], before[i]) {
				changed++
			}
		}
		return next, changed
	}
	all, _ := publish(resourceslice.DriverResources{}, devices)
	for i, d := range devices {
		fewer, changed := publish(all, slices.Delete(slices.Clone(devices), i, i+1))
		if changed != 1 {
			t.Fatalf("%s goes: %d slices change", d.Name, changed)
		}
		if _, changed := publish(fewer, devices); changed != 1 {
			t.Fatalf("%s comes back: %d slices change", d.Name, changed)
		}
		if _, changed := publish(all, slices.Insert(slices.Clone(devices), i+1, device(d.Name+"-new"))); changed != 1 {
			t.Fatalf("a device comes after %s: %d slices change", d.Name, changed)
		}
	}
	if few, _ := publish(all, devices[:40]); len(SlicesOf(few)) != 1 {
		t.Errorf("40 devices that are left are in %d slices", len(SlicesOf(few)))
	}
	for i := range 200 {
		devices = append(devices, device(fmt.Sprintf("more-%03d", i)))
		all, _ = publish(all, devices)
	}
	names := make(map[string]bool)
	for _, slice := range SlicesOf(all) {
		for _, d := range slice.Devices {
			names[d.Name] = true
		}
		if len(slice.Devices) > devicesPerSlice {
			t.Errorf("a slice of %d devices", len(slice.Devices))
		}
	}
	if len(names) != len(devices) || len(SlicesOf(all)) > 8 {
		t.Errorf("%d of %d devices are in %d slices", len(names), len(devices), len(SlicesOf(all)))
	}
}

func TestSharedWithoutSharing(t *testing.T) {
	long := strings.Repeat("x", 60)
	devices := []rules.Offered{{Device: discovery.Device{Name: "kvm", Shareable: true}}, {Device: discovery.Device{Name: long, Shareable: true}}}
	snapshot := &rules.Snapshot{Devices: devices}
	resources, problems := BuildPools(Input{Node: "node", Snapshot: snapshot, Features: without("DRAConsumableCapacity")})
	published := slices.Concat(SlicesOf(resources)[0].Devices, SlicesOf(resources)[1].Devices)
	if len(published) != numberedShares+1 || published[0].Name != "kvm-share-00" || published[63].Name != "kvm-share-63" {
		t.Errorf("published %v", pooltest.SketchPools(resources))
	}
	if last := published[len(published)-1]; last.Name != long {
		t.Errorf("of a name without room for numbers: %v", last)
	}
	if len(problems) > 0 {
		t.Errorf("problems: %v", problems)
	}
	for name, want := range map[string]bool{"kvm": true, "kvm-share-07": true, "kvm-share-": false, "kvm-share-x": false, "other-share-1": false} {
		if device, found := LookupDevice(snapshot, name); found != want || found && device.Name != "kvm" {
			t.Errorf("%s: found %v %s", name, found, device.Name)
		}
	}
}

// A share costs as much as the whole device, however the share is published.
func TestOverhead(t *testing.T) {
	memory, cpu := resource.MustParse("512Mi"), resource.MustParse("100m")
	needed := rules.HostResources{"memory": {PerPod: &memory}, "cpu": {PerContainer: &cpu}}
	want := map[corev1.ResourceName]resourceapi.NodeAllocatableResource{
		"memory": {Overhead: &resourceapi.NodeAllocatableOverhead{PerPod: &memory}},
		"cpu":    {Overhead: &resourceapi.NodeAllocatableOverhead{PerContainer: &cpu}},
	}
	shared, alone := byNumber("shared", 2), rules.Offered{Device: discovery.Device{Name: "alone"}}
	shared.Overhead, alone.Overhead = needed, needed
	snapshot := &rules.Snapshot{Devices: []rules.Offered{alone, {Device: discovery.Device{Name: "other"}}, shared}}
	tests := map[string]struct {
		kept    features.Set
		charged int
	}{
		"all":           {features.All(), 2},
		"no sharing":    {without("DRAConsumableCapacity"), 3},
		"no overhead":   {without("DRANodeAllocatableResources"), 0},
		"neither of it": {without("DRANodeAllocatableResources", "DRAConsumableCapacity"), 0},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			resources, problems := BuildPools(Input{Node: "node", Snapshot: snapshot, Features: test.kept})
			charged := 0
			for _, device := range SlicesOf(resources)[0].Devices {
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
	// A vanished device keeps its overhead, unless the server no longer keeps overhead.
	in := Input{Node: "node", Snapshot: &rules.Snapshot{}, Claims: []*allocation.Claim{some("alone", "alone")}}
	in.Last = published([]resourceapi.Device{{Name: "alone", NodeAllocatableResources: want}})
	for _, in.Features = range []features.Set{features.All(), without("DRANodeAllocatableResources")} {
		resources, _ := BuildPools(in)
		if got := SlicesOf(resources)[0].Devices[0].NodeAllocatableResources; (got != nil) != in.Features.Overhead {
			t.Errorf("%+v: %v", in.Features, got)
		}
	}
}

func TestAttributesAndCapacityAreCopied(t *testing.T) {
	d := rules.Offered{Device: discovery.Device{Name: "a", Attributes: discovery.Attributes{}, Capacity: discovery.Capacity{}}}
	d.Attributes.SetString("model", "MI300X")
	d.Attributes.SetInt("resource.kubernetes.io/numaNode", 1)
	d.Capacity.Set("memory", 192<<30)
	resources, _ := BuildPools(Input{Node: "node", Snapshot: &rules.Snapshot{Devices: []rules.Offered{d}}, Features: features.All()})
	want := resourceapi.Device{Name: "a", Attributes: d.Attributes.ForSlice(), Capacity: d.Capacity}
	if diff := cmp.Diff(want, SlicesOf(resources)[0].Devices[0]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Devices near each other follow each other in a slice, since the scheduler allocates the first
// free devices. GPUs precede adapters. An allocated device keeps its position when it vanishes.
func TestDevicesInTopologyOrder(t *testing.T) {
	var devices []rules.Offered
	for i, name := range []string{"a0", "a1", "g0", "g1", "g2", "g3"} {
		d := discovery.Device{Name: name, Attributes: discovery.Attributes{}}
		d.Attributes.SetInt("resource.kubernetes.io/numaNode", int64(i%2))
		d.Attributes.SetString("kind", map[byte]string{'a': "network", 'g': "gpu"}[name[0]])
		devices = append(devices, rules.Offered{Device: d})
	}
	names := func(in Input) string {
		in.Features = features.All()
		made, problems := BuildPools(in)
		if len(problems) > 0 {
			t.Error(problems)
		}
		var names []string
		for _, slice := range SlicesOf(made) {
			for _, d := range slice.Devices {
				names = append(names, d.Name)
			}
		}
		return strings.Join(names, " ")
	}
	if got := names(Input{Node: "node", Snapshot: &rules.Snapshot{Devices: devices}}); got != "g0 g2 g1 g3 a0 a1" {
		t.Errorf("the devices are in the order %s", got)
	}
	holds := &allocation.Claim{UID: "c", Results: []allocation.Result{{Pool: "node", Device: "g2", Source: "g2", Silicon: "g2", Whole: true}}}
	if got := names(Input{Node: "node", Snapshot: &rules.Snapshot{Devices: slices.Delete(slices.Clone(devices), 4, 5)}, Claims: []*allocation.Claim{holds}}); got != "g0 g1 g2 g3 a0 a1" {
		t.Errorf("with one gone they are in the order %s", got)
	}
}
