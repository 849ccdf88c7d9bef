package main

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/settings"
	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/topology"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger"
	"chandler.dev/legacy/list"
)

// BenchmarkTopologyAwareAllocation starts and ends pods on recorded hosts, and counts how often a pod with
// several devices gets them from one NUMA node, PCIe root or fabric of private links: among all
// such pods ("numa-2-%"), and among the pods with enough free devices of that kind
// ("numa-2-found-%"). docs/testing.md has the result.
func BenchmarkTopologyAwareAllocation(b *testing.B) {
	for _, host := range []struct{ file, resource string }{
		{"amdgpu/testdata/mi210x8.host", "amd.com/gpu"},
		{"gaudi/testdata/gaudi2x8.host", "habana.ai/gaudi"},
		{"neuron/testdata/trn2.host", "aws.amazon.com/neuron"},
	} {
		config, err := settings.Load("", v1alpha1.Node{})
		if err != nil {
			b.Fatal(err, config)
		}
		snapshot := config.Rules.ApplyTo(scan.ReadHost(discoverytest.ReadHost(b, "../../discovery/families/"+host.file), families.All))
		snapshot.Attributes = []resourceapi.QualifiedName{"group2", "group4", "group8"}
		snapshot.Devices = slices.DeleteFunc(snapshot.Devices, func(d rules.Offered) bool { return d.Resource() != host.resource })
		for name, allocate := range map[string]allocator{
			"DevicePlugin":   byKubelet(snapshot, host.resource),
			"DRA":            byScheduler(b, snapshot, anyDevices),
			"DRA-constraint": byScheduler(b, snapshot, oneNode),
			"DRA-group":      byScheduler(b, snapshot, oneGroup),
			"DRA-preferred":  byScheduler(b, snapshot, preferGroup),
		} {
			b.Run(fmt.Sprintf("%s/%s", host.resource, name), func(b *testing.B) {
				seen := make(alignedSets)
				for seed := range b.N {
					seen.count(snapshot, allocate, uint64(seed))
				}
				seen.report(b)
			})
		}
	}
}

// allocator returns the names of size devices for a container, nil if there are not enough. inUse
// contains the names of allocated devices.
type allocator func(inUse map[string]bool, size int) []string

// byKubelet allocates by the device plugin API, with GetPreferredAllocation.
func byKubelet(s *rules.Snapshot, resource string) allocator {
	lists, _ := list.Lists{}.Next(list.Input{Snapshot: s, View: ledger.ViewOf(list.StockOf(rules.PlainDevices(s.Devices), list.Lists{}))})
	l := lists.Resources()[resource]
	return func(inUse map[string]bool, size int) (names []string) {
		var free []string
		for _, d := range l.Devices() {
			if !inUse[l.Unit(d.ID).DeviceNames()[0]] {
				free = append(free, d.ID)
			}
		}
		ids, err := l.PreferIDs(free, nil, size)
		if err != nil {
			return nil // not enough devices are free
		}
		for _, id := range ids {
			names = append(names, l.Unit(id).DeviceNames()...)
		}
		return names
	}
}

// byScheduler allocates by DRA, with the scheduler's own allocator. devices returns the request for a
// number of devices.
func byScheduler(b *testing.B, s *rules.Snapshot, devices func(size int) resourceapi.DeviceClaim) allocator {
	b.Helper()
	kept := features.All()
	made, problems := pool.BuildPools(pool.Input{Node: "node", Snapshot: s, Features: kept})
	if len(problems) > 0 {
		b.Fatal(problems)
	}
	return func(inUse map[string]bool, size int) (names []string) {
		scheduler := pooltest.NewScheduler(b, kept).Publish(made)
		scheduler.Claims["others"] = &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}}}
		for name := range inUse {
			results := &scheduler.Claims["others"].Status.Allocation.Devices.Results
			*results = append(*results, resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: discovery.Domain, Pool: "node", Device: name})
		}
		claim, allocated := scheduler.AllocateClaim(types.UID("own"), resourceapi.ResourceClaimSpec{Devices: devices(size)})
		if !allocated {
			return nil
		}
		for _, r := range claim.Status.Allocation.Devices.Results {
			names = append(names, r.Device)
		}
		return names
	}
}

// anyDevices requests any devices.
func anyDevices(size int) resourceapi.DeviceClaim {
	return resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "r", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: "any", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: int64(size),
	}}}}
}

// oneNode requests devices of one NUMA node.
func oneNode(size int) resourceapi.DeviceClaim {
	claim := anyDevices(size)
	claim.Constraints = matching(deviceattribute.StandardDeviceAttributeNUMANode)
	return claim
}

// oneGroup requests devices of one aligned group.
func oneGroup(size int) resourceapi.DeviceClaim {
	claim := anyDevices(size)
	if size > 1 {
		claim.Constraints = matching(discovery.Domain + "/" + topology.GroupAttribute(size))
	}
	return claim
}

// preferGroup requests devices of one aligned group, or else any devices.
func preferGroup(size int) resourceapi.DeviceClaim {
	claim := anyDevices(size)
	if size == 1 {
		return claim
	}
	r := &claim.Requests[0]
	for _, name := range []string{"together", "apart"} {
		r.FirstAvailable = append(r.FirstAvailable, resourceapi.DeviceSubRequest{
			Name: name, DeviceClassName: r.Exactly.DeviceClassName, AllocationMode: r.Exactly.AllocationMode, Count: r.Exactly.Count,
		})
	}
	r.Exactly = nil
	claim.Constraints = matching(discovery.Domain+"/"+topology.GroupAttribute(size), "r/together")
	return claim
}

// matching returns the constraint that all devices of the requests, or of all requests, have the
// same value of an attribute.
func matching(name resourceapi.QualifiedName, requests ...string) []resourceapi.DeviceConstraint {
	return []resourceapi.DeviceConstraint{{Requests: requests, MatchAttribute: new(resourceapi.FullyQualifiedName(name))}}
}

// alignedSets counts sets of devices, by common property and size. The set "waiting" counts the pods
// that got no devices as found, and "idle" counts the free devices after each pod.
type alignedSets map[string]*alignment

type alignment struct{ all, possible, found int }

// count simulates 200 pods.
func (n alignedSets) count(s *rules.Snapshot, allocate allocator, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 0))
	groups := topology.AlignedGroups(rules.PlainDevices(s.Devices))
	inUse := make(map[string]bool)
	ends := make(map[int][]string)
	for now := range 200 {
		for _, name := range ends[now] {
			delete(inUse, name)
		}
		size := []int{1, 1, 1, 1, 2, 2, 2, 4, 4, 8}[random.IntN(10)]
		end := now + 1 + random.IntN(10)
		names := allocate(maps.Clone(inUse), size)
		if size > 1 && names != nil {
			n.note(s, inUse, names)
			n.add(fmt.Sprintf("group-%d", size), haveGroup(groups, size, func(name string) bool { return !inUse[name] }),
				haveGroup(groups, size, func(name string) bool { return slices.Contains(names, name) }))
		}
		n.add(fmt.Sprintf("waiting-%d", size), false, names == nil)
		for _, name := range names {
			inUse[name] = true
		}
		for i := range s.Devices {
			n.add("idle", false, !inUse[s.Devices[i].Name])
		}
		ends[end] = append(ends[end], names...)
	}
}

// note counts a set of devices that was allocated while others were in use.
func (n alignedSets) note(s *rules.Snapshot, inUse map[string]bool, names []string) {
	for what, common := range map[string]func(d *discovery.Device) string{
		"numa": func(d *discovery.Device) string {
			if node := d.Attributes[deviceattribute.StandardDeviceAttributeNUMANode].IntValue; node != nil {
				return fmt.Sprint(*node)
			}
			return ""
		},
		"root": func(d *discovery.Device) string {
			return d.Attributes.String(deviceattribute.StandardDeviceAttributePCIeRoot)
		},
		"fabric": func(d *discovery.Device) string { return d.Attributes.String("fabric") },
	} {
		free, given, known := make(map[string]int), make(map[string]int), false
		for i := range s.Devices {
			d := &s.Devices[i].Device
			value := common(d)
			if value == "" {
				continue
			}
			known = true
			if !inUse[d.Name] {
				free[value]++
			}
			if slices.Contains(names, d.Name) {
				given[value]++
			}
		}
		if known {
			n.add(fmt.Sprintf("%s-%d", what, len(names)), largest(free) >= len(names), largest(given) == len(names))
		}
	}
	linked := func(d *discovery.Device) bool { return len(d.Names("linkedTo")) > 0 }
	if slices.ContainsFunc(rules.PlainDevices(s.Devices), func(d discovery.Device) bool { return linked(&d) }) {
		n.add(fmt.Sprintf("linked-%d", len(names)), true, connected(s, names))
	}
}

func (n alignedSets) add(what string, possible, found bool) {
	if n[what] == nil {
		n[what] = &alignment{}
	}
	n[what].all++
	if possible {
		n[what].possible++
	}
	if found {
		n[what].found++
	}
}

// haveGroup reports whether there is an aligned group of a size with the given members only.
func haveGroup(groups topology.Groups, size int, isMember func(name string) bool) bool {
	for _, own := range groups {
		for _, g := range own {
			if len(g) == size && !slices.ContainsFunc(g, func(name string) bool { return !isMember(name) }) {
				return true
			}
		}
	}
	return false
}

func largest(counts map[string]int) int {
	most := 0
	for _, n := range counts {
		most = max(most, n)
	}
	return most
}

// connected reports whether the devices are connected by private links among themselves.
func connected(s *rules.Snapshot, names []string) bool {
	reached := []string{names[0]}
	for i := 0; i < len(reached); i++ {
		d, _ := s.Lookup(reached[i])
		for _, other := range d.Names("linkedTo") {
			if slices.Contains(names, other) && !slices.Contains(reached, other) {
				reached = append(reached, other)
			}
		}
	}
	return len(reached) == len(names)
}

func (n alignedSets) report(b *testing.B) {
	b.ReportMetric(0, "ns/op")
	for what, t := range n {
		b.ReportMetric(100*float64(t.found)/float64(t.all), what+"-%")
		if t.possible > 0 && !strings.HasPrefix(what, "linked") {
			b.ReportMetric(100*float64(t.found)/float64(t.possible), what+"-found-%")
		}
	}
}
