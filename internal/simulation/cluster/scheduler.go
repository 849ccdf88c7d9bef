package cluster

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/klog/v2"
)

// celCache caches compiled selectors of classes and requests. All simulations share the cache.
var celCache = cel.NewCache(64, cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true})

// classes has a single class with all devices of the driver.
type classes struct{}

// Get implements [structured.DeviceClassLister].
func (classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if name != className {
		return nil, apierrors.NewNotFound(resourceapi.Resource("deviceclasses"), name)
	}
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: className}, Spec: resourceapi.DeviceClassSpec{
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "chandler.dev"`}}},
	}}, nil
}

// List implements [structured.DeviceClassLister].
func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	class, err := c.Get(className)
	return []*resourceapi.DeviceClass{class}, err
}

// allocatedState returns the allocations of all claims in the API server.
func allocatedState(claims []*resourceapi.ResourceClaim) structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, claim := range claims {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, r := range claim.Status.Allocation.Devices.Results {
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			switch {
			case r.AdminAccess != nil && *r.AdminAccess:
			case r.ShareID != nil:
				state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
				state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
			default:
				state.AllocatedDevices.Insert(id)
			}
		}
	}
	return state
}

// slicesAge is the largest age of the slices in the scheduler's cache.
const slicesAge = 20 * time.Second

// SchedulePod allocates the unallocated claims of a pod, like a scheduler whose cache of slices
// lags behind by some changes, and reserves all claims for the pod. SchedulePod reports whether the
// pod can be bound.
func (c *Cluster) SchedulePod(pod *Pod) bool {
	var open []*resourceapi.ResourceClaim
	for _, name := range pod.Claims {
		claim := c.Server.Claim(pod.Namespace, name)
		if claim == nil {
			return false
		}
		if claim.Status.Allocation == nil {
			open = append(open, claim.DeepCopy())
		}
	}
	var results []resourceapi.AllocationResult
	published := c.Server.PastSlices(c.Lag, slicesAge)
	if len(open) > 0 {
		version := c.Server.Version() - c.Lag
		if version == pod.tried {
			return false // nothing has changed since the last attempt
		}
		pod.tried = version
		keeps := c.Server.Features()
		allocator, err := structured.NewAllocator(quiet, structured.Features{
			AdminAccess: true, PrioritizedList: true, DeviceTaints: keeps.Taints, PartitionableDevices: keeps.Counters,
			ConsumableCapacity: keeps.Sharing, CompatibilityGroups: keeps.Counters && keeps.Groups, ListTypeAttributes: keeps.Lists,
		}, allocatedState(c.Server.Claims()), classes{}, published, celCache)
		if err == nil {
			results, err = allocator.Allocate(quiet, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.Node}}, open)
		}
		if err != nil || len(results) != len(open) {
			return false
		}
	}
	for i, claim := range open {
		results[i].AllocationTimestamp = nil
		if c.Minor >= 36 {
			now := metav1.Now()
			results[i].AllocationTimestamp = &now
		}
		claim.Status.Allocation = &results[i]
		c.Allocated(claim.UID, results[i].Devices.Results, published)
		c.Server.Put(claim)
		for _, r := range results[i].Devices.Results {
			c.History.Log("scheduler: claim %s/%s is allocated %s%s", claim.Namespace, claim.Name, r.Device, amountText(r.ConsumedCapacity))
		}
	}
	for _, name := range pod.Claims {
		claim := c.Server.Claim(pod.Namespace, name).DeepCopy()
		if consumer := consumerOf(pod); !isReserved(claim, consumer.UID) {
			claim.Status.ReservedFor = append(claim.Status.ReservedFor, consumer)
			c.Server.Put(claim)
		}
	}
	return true
}

// amountText returns the consumed capacity of a device as text.
func amountText(taken map[resourceapi.QualifiedName]resource.Quantity) (all string) {
	for _, name := range slices.Sorted(maps.Keys(taken)) {
		amount := taken[name]
		all += fmt.Sprintf(", %s of its %s", amount.String(), name)
	}
	return all
}

// consumerOf returns the reference in the reservations of the pod's claims: the pod's PodGroup, or
// else the pod.
func consumerOf(p *Pod) resourceapi.ResourceClaimConsumerReference {
	if p.Group != "" {
		return resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: p.Group, UID: types.UID(p.Group)}
	}
	return resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: p.Name, UID: p.UID}
}

func isReserved(claim *resourceapi.ResourceClaim, uid types.UID) bool {
	return slices.ContainsFunc(claim.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == uid })
}

// release does the work of the claim controller for a pod that is gone or has ended: release
// removes the reservations of the claims, deallocates claims without a reservation, and deletes
// claims that belong to the pod (pkg/controller/resourceclaim). A PodGroup keeps its claims until
// its last pod is gone.
func (c *Cluster) release(pod *Pod) {
	if pod.Group != "" && c.hasMore(pod) {
		return
	}
	consumer := consumerOf(pod)
	for _, name := range pod.Claims {
		claim := c.Server.Claim(pod.Namespace, name)
		if claim == nil || !isReserved(claim, consumer.UID) && !pod.Own {
			continue
		}
		claim = claim.DeepCopy()
		claim.Status.ReservedFor = slices.DeleteFunc(claim.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == consumer.UID })
		if len(claim.Status.ReservedFor) == 0 {
			claim.Status.Allocation, claim.Status.Devices = nil, nil
		}
		c.Server.Put(claim)
		if pod.Own {
			c.Server.Delete(claim)
		}
	}
}

// hasMore reports whether a pod's PodGroup has other pods.
func (c *Cluster) hasMore(p *Pod) bool {
	return slices.ContainsFunc(c.AllPods(), func(other *Pod) bool { return other != p && other.Group == p.Group })
}

// quiet is a context with a logger that discards all messages.
var quiet = klog.NewContext(context.Background(), klog.Logger{})
