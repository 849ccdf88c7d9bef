package pool

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

// ofKind returns a device with a kind.
func ofKind(kind string, d rules.Offered) rules.Offered {
	d.Attributes = discovery.Attributes{}
	d.Attributes.SetString("kind", kind)
	return d
}

func named(kind, name string) rules.Offered {
	return ofKind(kind, rules.Offered{Device: discovery.Device{Name: name}})
}

// sketch returns a line for each slice, with the name of its pool.
func sketch(pools resourceslice.DriverResources) (lines []string) {
	for name, p := range pools.Pools {
		for _, line := range pooltest.SketchPools(resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{name: p}}) {
			lines = append(lines, strings.TrimSpace(name+": "+line))
		}
	}
	slices.Sort(lines)
	return lines
}

// GPUs and NPUs are in the main pool, with their partitions and counters, and all other devices in the
// other pool. A pool without devices does not exist, except the main pool of a node without devices.
func TestPoolsByKind(t *testing.T) {
	gpu, part := ofKind("gpu", pooltest.PartDevice("gpu-1", "gpu-1", 7)), ofKind("gpu", pooltest.PartDevice("gpu-1", "gpu-1-a", 3))
	core := ofKind("fpga", pooltest.PartDevice("fpga-1", "fpga-1-a", 3))
	sibling := ofKind("other", rules.Offered{Device: discovery.Device{Name: "audio", PartOf: &discovery.Silicon{Name: "npu"}}})
	nic, npu := named("nic", "nic"), named("npu", "npu")
	for name, test := range map[string]struct {
		devices  []rules.Offered
		combined bool
		want     []string
	}{
		"both":                  {[]rules.Offered{nic, gpu, part, core, npu}, false, []string{"node/other: fpga-1-a<fpga-1 nic", "node/other: set:fpga-1", "node: gpu-1<gpu-1 gpu-1-a<gpu-1 npu", "node: set:gpu-1"}},
		"both, combined":        {[]rules.Offered{nic, gpu, part, core}, true, []string{"node/other: set:fpga-1 fpga-1-a<fpga-1 nic", "node: set:gpu-1 gpu-1<gpu-1 gpu-1-a<gpu-1"}},
		"of a physical device":  {[]rules.Offered{npu, sibling}, false, []string{"node: audio npu"}},
		"only the main pool":    {[]rules.Offered{npu}, false, []string{"node: npu"}},
		"only the other pool":   {[]rules.Offered{nic}, false, []string{"node/other: nic"}},
		"a node without device": {nil, false, []string{"node:"}},
	} {
		t.Run(name, func(t *testing.T) {
			in := Input{Node: "node", Snapshot: &rules.Snapshot{Devices: test.devices}, Features: features.All()}
			if test.combined {
				in.Features = without("SeparateCounters")
			}
			made, problems := BuildPools(in)
			if diff := cmp.Diff(test.want, sketch(made)); diff != "" || len(problems) > 0 {
				t.Errorf("%v (-want +got):\n%s", problems, diff)
			}
		})
	}
}

// While a claim has a device, the device is in the pool that the claim names, with all other devices of
// its physical device, also after it has vanished. Unlimited sharing and admin access do not keep a
// device in a pool.
func TestPoolOfAllocatedDevices(t *testing.T) {
	of := func(pool string, r allocation.Result) *allocation.Claim {
		r.Pool = pool
		return &allocation.Claim{Namespace: "default", Name: "c", Results: []allocation.Result{r}}
	}
	nic := allocation.Result{Device: "nic", Source: "nic", Silicon: "nic", Whole: true}
	share, byTwo := nic, byNumber("nic", 2)
	share.Consumes = allocation.Amounts{byTwo.Sharing.Capacity: byTwo.Sharing.Unit}
	open, admin := nic, nic
	open.Shared, admin.Admin = true, true
	part := allocation.Result{Device: "gpu-1-a", Source: "gpu-1-a", Silicon: "gpu-1", Takes: pooltest.Quantities("slices", 3)}
	other := part
	other.Device, other.Source = "gpu-1-b", "gpu-1-b"
	vf := allocation.Result{Device: "adapter-vfs", Source: "function-1", Silicon: "adapter"}
	parts := []rules.Offered{ofKind("gpu", pooltest.PartDevice("gpu-1", "gpu-1", 7)), ofKind("gpu", pooltest.PartDevice("gpu-1", "gpu-1-a", 3)), ofKind("gpu", pooltest.PartDevice("gpu-1", "gpu-1-b", 3))}
	adapter := named("nic", "nic")
	adminPart := part
	adminPart.Admin = true
	channel := allocation.Result{Device: "channels", Source: "channel-1", Silicon: "channel-1", Whole: true}
	otherChannel := channel
	otherChannel.Source, otherChannel.Silicon = "channel-2", "channel-2"
	first := allocation.Result{Device: firstFunction, Source: firstFunction, Silicon: firstFunction, Whole: true}
	group := []rules.Offered{grouped(firstFunction, firstSource, secondSource), grouped(secondFunction, secondSource, firstSource)}
	for name, test := range map[string]struct {
		devices []rules.Offered
		claims  []*allocation.Claim
		want    []string
	}{
		"no claim":               {[]rules.Offered{adapter}, nil, []string{"node/other: nic"}},
		"its own pool":           {[]rules.Offered{adapter}, []*allocation.Claim{of("node/other", nic)}, []string{"node/other: nic"}},
		"another pool":           {[]rules.Offered{adapter}, []*allocation.Claim{of("node", nic)}, []string{"node: nic"}},
		"a pool of another node": {[]rules.Offered{adapter}, []*allocation.Claim{of("node-2", nic)}, []string{"node/other: nic"}},
		"an amount":              {[]rules.Offered{byTwo}, []*allocation.Claim{of("node", share)}, []string{"node: nic*"}},
		"unlimited sharing":      {[]rules.Offered{adapter}, []*allocation.Claim{of("node", open)}, []string{"node/other: nic"}},
		"admin access":           {[]rules.Offered{adapter}, []*allocation.Claim{of("node", admin)}, []string{"node/other: nic"}},
		"gone":                   {nil, []*allocation.Claim{of("node/other", nic)}, []string{"node/other: nic!gone:NoSchedule"}},
		"gone, of another pool":  {nil, []*allocation.Claim{of("node", nic)}, []string{"node: nic!gone:NoSchedule"}},
		"gone, unlimited":        {nil, []*allocation.Claim{of("node/other", open)}, []string{"node/other: nic!gone:NoSchedule"}},
		"a partition":            {parts, []*allocation.Claim{of("node/other", part)}, []string{"node/other: gpu-1<gpu-1 gpu-1-a<gpu-1 gpu-1-b<gpu-1", "node/other: set:gpu-1"}},
		"a partition that is gone": {parts[2:], []*allocation.Claim{of("node/other", part)}, []string{
			"node/other: gpu-1-a!gone:NoSchedule<gpu-1 gpu-1-b<gpu-1", "node/other: set:gpu-1"}},
		"a partition that is gone, by admin access": {parts[2:], []*allocation.Claim{of("node/other", adminPart)}, []string{
			"node: gpu-1-a!gone:NoSchedule<gpu-1 gpu-1-b<gpu-1", "node: set:gpu-1"}},
		"one of a group, recorded alone": {group, []*allocation.Claim{of("node", first)}, []string{
			"node: pci-0000-03-00-0<iommu-group-3 pci-0000-03-00-1<iommu-group-3", "node: set:iommu-group-3"}},
		"one of a group, recorded alone and gone": {group[1:], []*allocation.Claim{of("node", first)}, []string{
			"node: pci-0000-03-00-0!gone:NoSchedule<iommu-group-3 pci-0000-03-00-1<iommu-group-3", "node: set:iommu-group-3"}},
		"one of several with a common name":         {channels(3), []*allocation.Claim{of("node", channel)}, []string{"node: channels*"}},
		"several with a common name, by both pools": {channels(3), []*allocation.Claim{of("node", channel), of("node/other", otherChannel)}, []string{"node:"}},
		"partitions of both pools":                  {slices.Concat(parts, []rules.Offered{adapter}), []*allocation.Claim{of("node/other", part), of("node", other)}, []string{"node/other: nic"}},
		"partitions of both pools, one gone":        {parts[2:], []*allocation.Claim{of("node/other", part), of("node", other)}, []string{"node:"}},
		"a common name":                             {functions(3), []*allocation.Claim{of("node", vf)}, []string{"node: adapter-vfs*"}},
		"a common name, by its pool":                {functions(3), nil, []string{"node/other: adapter-vfs*"}},
	} {
		t.Run(name, func(t *testing.T) {
			last, _ := BuildPools(Input{Node: "node", Snapshot: &rules.Snapshot{Devices: parts}, Features: features.All()})
			made, _ := BuildPools(Input{
				Node: "node", Snapshot: &rules.Snapshot{Devices: test.devices}, Last: last, Claims: test.claims, Features: features.All(), GoneEffect: resourceapi.DeviceTaintEffectNoSchedule,
			})
			if diff := cmp.Diff(test.want, sketch(made)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// On any host and with claims that name any of the node's pools, each allocated device is in the pool
// of its claim or in none, and a physical device is in one pool with its counters.
func TestOnePoolForEachPhysicalDevice(t *testing.T) {
	for seed := range uint64(60) {
		random := rand.New(rand.NewPCG(seed, 2))
		before := discoverytest.RandomHost(random, 30)
		for i := range before.Devices {
			d := &before.Devices[i]
			d.Attributes.SetString("kind", []string{"gpu", "nic"}[len(d.Silicon())%2])
		}
		in := Input{Node: "node", Snapshot: before, Features: features.All(), GoneEffect: resourceapi.DeviceTaintEffectNoSchedule}
		in.Last, _ = BuildPools(in)
		present := *before
		present.Devices = nil
		for _, d := range before.Devices {
			if !d.Shareable && d.Sharing == nil && d.Interchangeable == "" && random.IntN(3) == 0 {
				c := hold(d.Name, d.Silicon(), d.PartOf == nil, d.Takes)
				c.Results[0].Pool = discovery.PoolName("node", random.IntN(2) == 0)
				in.Claims = append(in.Claims, c)
			}
			if random.IntN(4) > 0 {
				present.Devices = append(present.Devices, d)
			}
		}
		in.Snapshot = &present
		made, _ := BuildPools(in)
		poolOf, silicon := make(map[string]string), make(map[string]string)
		for name, p := range made.Pools {
			sets := make(map[string]bool)
			for _, slice := range p.Slices {
				for _, set := range slice.SharedCounters {
					sets[set.Name] = true
				}
			}
			for _, slice := range p.Slices {
				for _, device := range slice.Devices {
					poolOf[device.Name] = name
					if consumesCounters(device) && !sets[device.ConsumesCounters[0].CounterSet] {
						t.Errorf("seed %d: %s is in pool %s without its counters", seed, device.Name, name)
					}
				}
			}
		}
		for _, d := range before.Devices {
			pool, published := poolOf[d.Name]
			if other, known := silicon[d.Silicon()]; published && known && other != pool {
				t.Errorf("seed %d: %s is in pool %s and in pool %s", seed, d.Silicon(), other, pool)
			}
			if published {
				silicon[d.Silicon()] = pool
			}
		}
		for _, c := range in.Claims {
			if r := c.Results[0]; poolOf[r.Device] != "" && poolOf[r.Device] != r.Pool {
				t.Errorf("seed %d: %s is allocated by pool %s, and in pool %s", seed, r.Device, r.Pool, poolOf[r.Device])
			}
		}
		if len(in.Claims) == 0 {
			t.Errorf("seed %d: no device is allocated", seed)
		}
	}
}

// A device that comes or goes in one pool leaves the slices of the other pool unchanged.
func TestPoolsChangeApart(t *testing.T) {
	var devices []rules.Offered
	for i := range 100 {
		devices = append(devices, named("gpu", fmt.Sprintf("gpu-%03d", i)), named("nic", fmt.Sprintf("nic-%03d", i)))
	}
	in := Input{Node: "node", Snapshot: &rules.Snapshot{Devices: devices}, Features: features.All()}
	in.Last, _ = BuildPools(in)
	for i := range devices {
		in.Snapshot = &rules.Snapshot{Devices: slices.Delete(slices.Clone(devices), i, i+1)}
		made, _ := BuildPools(in)
		changed := make(map[string]int)
		for name, p := range made.Pools {
			for j := range p.Slices {
				if cmp.Diff(p.Slices[j], in.Last.Pools[name].Slices[j]) != "" {
					changed[name]++
				}
			}
		}
		if pool := discovery.PoolName("node", devices[i].InMainPool()); len(changed) != 1 || changed[pool] != 1 {
			t.Fatalf("%s goes: changed slices %v", devices[i].Name, changed)
		}
	}
}
