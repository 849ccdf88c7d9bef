package why

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"chandler.dev/internal/fleet"
)

// features are those of a scheduler with all feature gates on. Users do not know the feature gates
// of their cluster, but an API server drops or refuses the fields of disabled features.
var features = structured.Features{
	AdminAccess: true, CompatibilityGroups: true, ConsumableCapacity: true, DerivedAttributes: true, DeviceBindingAndStatus: true,
	DeviceTaints: true, FractionalCapacityRange: true, ListTypeAttributes: true, OptionalNodeOperations: true,
	PartitionableDevices: true, PrioritizedList: true,
}

// celCacheSize is the number of compiled expressions in the cache.
const celCacheSize = 1000

// library is the scheduler's code with the state of the cluster.
type library struct {
	cel     *cel.Cache
	state   structured.AllocatedState
	slices  []*resourceapi.ResourceSlice
	byPool  map[fleet.ID][]*resourceapi.ResourceSlice
	classes map[string]*resourceapi.DeviceClass
}

func newLibrary(f *fleet.Fleet) *library {
	l := &library{
		cel:     cel.NewCache(celCacheSize, cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true}),
		state:   AllocatedState(eachClaim(f.Claims)),
		byPool:  make(map[fleet.ID][]*resourceapi.ResourceSlice),
		classes: make(map[string]*resourceapi.DeviceClass),
	}
	for i := range f.Slices {
		slice := &f.Slices[i]
		l.slices = append(l.slices, slice)
		pool := fleet.ID{Driver: slice.Spec.Driver, Pool: slice.Spec.Pool.Name}
		l.byPool[pool] = append(l.byPool[pool], slice)
	}
	for i := range f.Classes {
		l.classes[f.Classes[i].Name] = &f.Classes[i]
	}
	return l
}

// AllocatedState returns the allocations of claims in the form of the scheduler
// (pkg/scheduler/framework/plugins/ dynamicresources/allocateddevices.go of 1.37,
// foreachAllocatedDevice).
func AllocatedState(claims iter.Seq[*resourceapi.ResourceClaim]) structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for claim := range claims {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, r := range claim.Status.Allocation.Devices.Results {
			if ptr.Deref(r.AdminAccess, false) {
				continue
			}
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			if r.ShareID == nil {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
		}
	}
	return state
}

func eachClaim(claims []resourceapi.ResourceClaim) iter.Seq[*resourceapi.ResourceClaim] {
	return func(yield func(*resourceapi.ResourceClaim) bool) {
		for i := range claims {
			if !yield(&claims[i]) {
				return
			}
		}
	}
}

// Get returns a class. Get and List implement the allocator's DeviceClassLister. The error does not
// name the class, since the allocator adds the name.
func (l *library) Get(name string) (*resourceapi.DeviceClass, error) {
	if class := l.classes[name]; class != nil {
		return class, nil
	}
	return nil, errors.New("it is not there")
}

// List returns all classes.
func (l *library) List() ([]*resourceapi.DeviceClass, error) {
	return slices.Collect(maps.Values(l.classes)), nil
}

// fitsNode reports whether the allocator allocates the claims on a node. After an error the
// scheduler would give up.
func (l *library) fitsNode(ctx context.Context, node *corev1.Node, claims []*resourceapi.ResourceClaim) (bool, error) {
	results, err := l.allocateOn(ctx, l.slices, node, claims)
	return err == nil && len(results) == len(claims), err
}

func (l *library) allocateOn(ctx context.Context, of []*resourceapi.ResourceSlice, node *corev1.Node, claims []*resourceapi.ResourceClaim) ([]resourceapi.AllocationResult, error) {
	allocator, err := structured.NewAllocator(ctx, features, l.state, l, of, l.cel)
	if err != nil {
		return nil, err
	}
	results, err := allocator.Allocate(ctx, node, claims)
	if errors.Is(err, structured.ErrFailedAllocationOnNode) {
		return nil, nil // another node may fit
	}
	return results, err
}

// canAllocate reports whether the allocator allocates a device to a request for a single device,
// given all present allocations. It is for devices whose availability depends on more than their
// consumers. The device comes first in its slice, so that the allocator prefers it.
func (l *library) canAllocate(ctx context.Context, d *fleet.Device, node *corev1.Node, alt *alternative) bool {
	one, exactly := *alt, *alt.exactly
	exactly.AllocationMode, exactly.Count = resourceapi.DeviceAllocationModeExactCount, 1
	one.exactly = &exactly
	var of []*resourceapi.ResourceSlice
	for _, slice := range l.byPool[fleet.ID{Driver: d.Driver, Pool: d.Pool}] {
		lone := *slice
		lone.Spec.Devices = nil
		for _, other := range slice.Spec.Devices {
			id := structured.MakeDeviceID(d.Driver, d.Pool, other.Name)
			_, shared := l.state.AggregatedCapacity[id]
			switch {
			case other.Name == d.Device:
				lone.Spec.Devices = slices.Insert(lone.Spec.Devices, 0, other)
				lone.Name = "" // the allocator sorts slices by name
			case shared || l.state.AllocatedDevices.Has(id):
				lone.Spec.Devices = append(lone.Spec.Devices, other)
			}
		}
		of = append(of, &lone)
	}
	results, err := l.allocateOn(ctx, of, node, []*resourceapi.ResourceClaim{one.claimAlone(func(*resourceapi.DeviceConstraint) bool { return false })})
	return err == nil && len(results) == 1 && results[0].Devices.Results[0].Device == d.Device
}

// matchesSelector reports whether a device satisfies a selector.
func (l *library) matchesSelector(ctx context.Context, d *fleet.Device, selector *resourceapi.DeviceSelector) (bool, error) {
	if selector.CEL == nil {
		return false, errors.New("a selector that is no CEL")
	}
	compiled := l.cel.GetOrCompile(selector.CEL.Expression)
	if compiled.Error != nil {
		return false, fmt.Errorf("compile: %s", compiled.Error.Detail)
	}
	matches, _, err := compiled.DeviceMatches(ctx, cel.Device{
		Driver: d.Driver, AllowMultipleAllocations: d.Spec.AllowMultipleAllocations, Attributes: d.Spec.Attributes, Capacity: d.Spec.Capacity,
	})
	return matches, err
}

// incompletePools returns for each pool whether slices are missing.
func (l *library) incompletePools() map[fleet.ID]bool {
	out := make(map[fleet.ID]bool)
	for pool, of := range l.byPool {
		newest, n, want := int64(-1), int64(0), int64(0)
		for _, slice := range of {
			switch g := slice.Spec.Pool.Generation; {
			case g > newest:
				newest, n, want = g, 1, slice.Spec.Pool.ResourceSliceCount
			case g == newest:
				n++
			}
		}
		out[pool] = n != want
	}
	return out
}
