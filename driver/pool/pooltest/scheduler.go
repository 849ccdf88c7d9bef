// Package pooltest provides helpers for tests of pools: a scheduler for published devices, devices
// competing for counters, and a short form of a pool.
package pooltest

import (
	"fmt"
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/dynamic-resource-allocation/structured"

	"chandler.dev/discovery"
	"chandler.dev/driver/features"
	"chandler.dev/internal/why"
)

// FeatureSets returns combinations of API server features, each with all alpha fields and without
// them.
func FeatureSets() (all []features.Set) {
	for i := range 8 {
		kept := features.All()
		kept.Taints, kept.Counters, kept.Sharing = i&1 == 0, i&2 == 0, i&4 == 0
		if kept.Taints {
			all = append(all, kept)
		}
		kept.Overhead, kept.Groups, kept.PartitionType, kept.Lists = false, false, false, false
		all = append(all, kept)
	}
	return all
}

// Scheduler allocates claims from the slices of a single node.
type Scheduler struct {
	t        testing.TB
	features structured.Features
	cache    *cel.Cache

	Slices []*resourceapi.ResourceSlice
	Claims map[types.UID]*resourceapi.ResourceClaim // allocated claims

	// Classes are the DeviceClasses by name. A class of any other name selects all devices.
	Classes map[string]*resourceapi.DeviceClass
}

// NewScheduler returns a scheduler without slices, with the feature gates of a server with the
// given features.
func NewScheduler(t testing.TB, kept features.Set) *Scheduler {
	return &Scheduler{
		t: t, Claims: make(map[types.UID]*resourceapi.ResourceClaim), cache: cel.NewCache(100, cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: kept.Lists}),
		features: structured.Features{
			AdminAccess: true, PrioritizedList: true,
			DeviceTaints: kept.Taints, PartitionableDevices: kept.Counters, ConsumableCapacity: kept.Sharing,
			CompatibilityGroups: kept.Counters && kept.Groups, ListTypeAttributes: kept.Lists,
		},
	}
}

// Publish replaces the slices with those of the pools, and returns the scheduler.
func (s *Scheduler) Publish(pools resourceslice.DriverResources) *Scheduler {
	s.Slices = nil
	for name, pool := range pools.Pools {
		for _, slice := range pool.Slices {
			s.Slices = append(s.Slices, &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("slice-", len(s.Slices))},
				Spec: resourceapi.ResourceSliceSpec{
					Driver: discovery.Domain, NodeName: new("node"), Devices: slice.Devices, SharedCounters: slice.SharedCounters, PartitionTypeAttribute: slice.PartitionTypeAttribute,
					Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(pool.Slices))},
				},
			})
		}
	}
	return s
}

// Get returns a class. Get and List implement DeviceClassLister.
func (s *Scheduler) Get(name string) (*resourceapi.DeviceClass, error) {
	if class := s.Classes[name]; class != nil {
		return class, nil
	}
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}, nil
}

// List returns no class, since no class has an extended resource.
func (s *Scheduler) List() ([]*resourceapi.DeviceClass, error) { return nil, nil }

// AllocateDevice allocates a claim for one device, and reports whether it could.
func (s *Scheduler) AllocateDevice(uid types.UID, request resourceapi.ExactDeviceRequest) (*resourceapi.ResourceClaim, bool) {
	s.t.Helper()
	request.DeviceClassName, request.AllocationMode, request.Count = "any", resourceapi.DeviceAllocationModeExactCount, 1
	return s.AllocateClaim(uid, resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "r", Exactly: &request}}}})
}

// AllocateClaim allocates a claim, and reports whether it could.
func (s *Scheduler) AllocateClaim(uid types.UID, spec resourceapi.ResourceClaimSpec) (*resourceapi.ResourceClaim, bool) {
	s.t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: string(uid), UID: uid}, Spec: spec}
	allocator, err := structured.NewAllocator(s.t.Context(), s.features, why.AllocatedState(maps.Values(s.Claims)), s, s.Slices, s.cache)
	if err != nil {
		s.t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}
	results, err := allocator.Allocate(s.t.Context(), node, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		s.t.Fatal(err)
	}
	if len(results) == 0 {
		return nil, false
	}
	claim.Status.Allocation = &results[0]
	s.Claims[uid] = claim
	return claim, true
}

// IsAdmin reports whether a result has admin access.
func IsAdmin(r *resourceapi.DeviceRequestAllocationResult) bool {
	return r.AdminAccess != nil && *r.AdminAccess
}

// ByUUID selects the device with a UUID.
func ByUUID(name string) []resourceapi.DeviceSelector {
	return []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
		Expression: fmt.Sprintf("device.attributes[%q].uuid == %q", discovery.Domain, name),
	}}}
}
