package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/driver/publish"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/podclaims"
)

// AbandonedClaims returns the claims that no longer exist in the API server or are no longer
// allocated on the node, and that neither a pod of the node nor a container in the kubelet's list
// refers to. If the API server or the kubelet does not answer, AbandonedClaims returns an error,
// and no claim counts as abandoned.
func (n *Node) AbandonedClaims(ctx context.Context, claims []allocation.Owner) ([]types.UID, error) {
	ctx, cancel := context.WithTimeout(ctx, AskTimeout)
	defer cancel()
	listed, err := n.ListDevices(ctx)
	if err != nil {
		return nil, err
	}
	if !listed.Whole {
		return nil, errors.New("PodResources does not list all pods yet")
	}
	pods, err := n.pods(ctx)
	if err != nil {
		return nil, err
	}
	reader := n.newClaimReader()
	var abandoned []types.UID
	for _, claim := range claims {
		if inContainer(listed, claim.UID) {
			continue
		}
		referred := reader.isReferred
		if claim.Name == "" {
			referred = reader.referredByUID
		}
		still, err := referred(ctx, claim, pods)
		if err != nil {
			return nil, err
		}
		if !still {
			abandoned = append(abandoned, claim.UID)
		}
	}
	return abandoned, nil
}

// claimReader reads claims by name, each at most once.
type claimReader struct {
	node *Node
	read map[types.NamespacedName]*resourceapi.ResourceClaim // nil for claims that do not exist
}

func (n *Node) newClaimReader() claimReader {
	return claimReader{node: n, read: make(map[types.NamespacedName]*resourceapi.ResourceClaim)}
}

// get returns a claim, or nil if there is none.
func (r claimReader) get(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	key := types.NamespacedName{Namespace: namespace, Name: name}
	if claim, read := r.read[key]; read {
		return claim, nil
	}
	claim, err := r.node.claims.ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		claim, err = nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("get ResourceClaim %s: %w", key, err)
	}
	r.read[key] = claim
	return claim, nil
}

// isReferred reports whether the claim is allocated on the node, or one of the pods refers to the
// claim.
func (r claimReader) isReferred(ctx context.Context, claim allocation.Owner, pods []corev1.Pod) (bool, error) {
	now, err := r.get(ctx, claim.Namespace, claim.Name)
	switch {
	case err != nil:
		return true, err
	case now == nil || now.UID != claim.UID:
		return inPod(pods, claim, now), nil
	}
	return r.node.allocatedHere(now) || inPod(pods, claim, nil), nil
}

// referredByUID is like isReferred, for a claim with only a UID. Such a claim can only be compared
// with the claims of the node's pods. A pod with a claim that does not exist, or with a claim
// reserved for other pods, may refer to the given claim. A claim that remains allocated on the node
// without a pod of the node is not found: the kubelet prepares the claim again before the next pod
// can use it.
func (r claimReader) referredByUID(ctx context.Context, claim allocation.Owner, pods []corev1.Pod) (bool, error) {
	for _, pod := range pods {
		for _, name := range podclaims.ClaimsOf(&pod) {
			now, err := r.get(ctx, pod.Namespace, name)
			if err != nil {
				return true, err
			}
			if now != nil && now.UID == claim.UID || !reservedFor(now, pod.UID) {
				return true, nil
			}
		}
	}
	return false, nil
}

// NodeClaims returns the claims of the node's pods that have not ended: of the pods that are bound
// to the node, and of those that the scheduler is about to bind to it.
//
// These are all claims whose allocation leads to a Prepare on the node, with the exceptions below:
// the scheduler stores an allocation and binds the pod in one binding cycle, and since Kubernetes
// 1.35 it nominates the node for the pod before it stores the allocation (bindingCycle in
// pkg/scheduler/schedule_one.go and PreBind in
// pkg/scheduler/framework/plugins/dynamicresources/dynamicresources.go, 1.37). A nomination outlives
// a restart of the scheduler. A bound pod names all its claims, because the status with the names of
// claims from templates and for extended resources precedes the binding too.
//
// The exceptions are pods that wait after a failed binding cycle while their claim stays allocated,
// and, up to Kubernetes 1.34, pods between the allocation and the binding.
func (n *Node) NodeClaims(ctx context.Context) ([]*resourceapi.ResourceClaim, error) {
	claims, _, err := n.readClaims(ctx)
	return claims, err
}

// readClaims returns the claims of [Node.NodeClaims], and a pod that is nominated for the node and
// whose devices are not allocated, "" if there is none. The scheduler may have chosen the devices of
// such a pod long before it stores the allocation, for example while the pod waits for the other pods
// of its group at the extension point Permit.
func (n *Node) readClaims(ctx context.Context) (claims []*resourceapi.ResourceClaim, undecided string, err error) {
	ctx, cancel := context.WithTimeout(ctx, AskTimeout)
	defer cancel()
	// First the nominated pods: a pod may be bound between the two requests.
	nominated, err := n.listPods(ctx, "status.nominatedNodeName")
	if err != nil {
		return nil, "", err
	}
	bound, err := n.pods(ctx)
	if err != nil {
		return nil, "", err
	}
	reader := n.newClaimReader()
	for _, pod := range slices.Concat(nominated, bound) {
		if isTerminal(pod) {
			continue
		}
		isAllocated := !requestsExtended(&pod) || pod.Status.ExtendedResourceClaimStatus != nil
		for _, name := range podclaims.ClaimsOf(&pod) {
			claim, err := reader.get(ctx, pod.Namespace, name)
			if err != nil {
				return nil, "", err
			}
			isAllocated = isAllocated && claim != nil && claim.Status.Allocation != nil
		}
		if !isAllocated && pod.Spec.NodeName == "" && undecided == "" {
			undecided = nameOf(&pod).String()
		}
	}
	claims = slices.DeleteFunc(slices.Collect(maps.Values(reader.read)), func(claim *resourceapi.ResourceClaim) bool { return claim == nil })
	slices.SortFunc(claims, func(a, b *resourceapi.ResourceClaim) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	return claims, undecided, nil
}

// requestsExtended reports whether a container of the pod requests an extended resource, which DRA
// may serve by a claim that the scheduler creates.
func requestsExtended(pod *corev1.Pod) bool {
	return slices.ContainsFunc(ResourcesOf(pod), func(name string) bool { return strings.Contains(name, "/") })
}

// allocatedHere reports whether a device of the node's pools is allocated to the claim.
func (n *Node) allocatedHere(claim *resourceapi.ResourceClaim) bool {
	return claim.Status.Allocation != nil && slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(result resourceapi.DeviceRequestAllocationResult) bool {
		return result.Driver == discovery.Domain && discovery.IsPoolOf(n.name, result.Pool)
	})
}

// inContainer reports whether the kubelet gave a container a CDI device of the claim. Names of CDI
// devices begin with the claim's UID, which is never reused.
func inContainer(listed *kubeletapi.Listing, uid types.UID) bool {
	prefix := cdi.ID(string(uid) + "-")
	return slices.ContainsFunc(listed.CDIDevices(), func(name string) bool { return strings.HasPrefix(name, prefix) })
}

// inPod reports whether a pod refers to the claim by name. If the name now belongs to a successor
// with a reservation for the pod, the pod refers to the successor.
func inPod(pods []corev1.Pod, claim allocation.Owner, successor *resourceapi.ResourceClaim) bool {
	return slices.ContainsFunc(pods, func(pod corev1.Pod) bool {
		return pod.Namespace == claim.Namespace && slices.Contains(podclaims.ClaimsOf(&pod), claim.Name) && !reservedFor(successor, pod.UID)
	})
}

// PodsOf returns the names of the pods with a claim, by the kubelet's last answer. Unlike the
// claim's status, the answer also contains the pods of a claim with a reservation for a PodGroup.
func (n *Node) PodsOf(claim allocation.Owner) (pods []string) {
	said := n.LastListing()
	if said == nil {
		return nil
	}
	for _, pod := range said.Pods {
		if pod.Namespace == claim.Namespace && slices.ContainsFunc(pod.Containers, func(c *podresourcesapi.ContainerResources) bool {
			return slices.ContainsFunc(c.DynamicResources, func(r *podresourcesapi.DynamicResource) bool {
				return r.ClaimName == claim.Name && r.ClaimNamespace == claim.Namespace
			})
		}) {
			pods = append(pods, pod.Name)
		}
	}
	return pods
}

// StartedPods returns the names of the node's pods with a claim and a started container that have not
// ended, from the API server.
func (n *Node) StartedPods(ctx context.Context, claim *resourceapi.ResourceClaim) (started []string, err error) {
	pods, err := n.unendedPods(ctx)
	for i := range pods {
		pod := &pods[i]
		if pod.Namespace == claim.Namespace && slices.Contains(podclaims.ClaimsOf(pod), claim.Name) && hasStarted(pod) {
			started = append(started, nameOf(pod).String())
		}
	}
	return started, err
}

// hasStarted reports whether a container of the pod has started, also an init container.
func hasStarted(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodRunning || slices.ContainsFunc(pod.Status.InitContainerStatuses, func(status corev1.ContainerStatus) bool {
		return status.State.Running != nil || status.State.Terminated != nil
	})
}

// ByName returns the node's pods in the API server, by name.
func (n *Node) ByName(ctx context.Context) (map[types.NamespacedName]*corev1.Pod, error) {
	pods, err := n.pods(ctx)
	byName := make(map[types.NamespacedName]*corev1.Pod, len(pods))
	for i := range pods {
		byName[nameOf(&pods[i])] = &pods[i]
	}
	return byName, err
}

// PodsOf returns the pods in the reservations of a claim.
func PodsOf(claim *resourceapi.ResourceClaim) (pods []types.UID) {
	for _, consumer := range claim.Status.ReservedFor {
		if consumer.APIGroup == "" && consumer.Resource == "pods" {
			pods = append(pods, consumer.UID)
		}
	}
	return pods
}

func reservedFor(claim *resourceapi.ResourceClaim, pod types.UID) bool {
	return claim != nil && slices.ContainsFunc(claim.Status.ReservedFor, func(consumer resourceapi.ResourceClaimConsumerReference) bool {
		return consumer.UID == pod
	})
}

// SliceDevice is a device in a ResourceSlice.
type SliceDevice struct {
	Slice  string // name of the ResourceSlice
	Shares int64  // capacity [discovery.Shares] of the device, 0 if it has none
}

// OfferedDevices returns the devices in the node's ResourceSlices by name. The map is empty if the
// API server has no resource.k8s.io.
func (n *Node) OfferedDevices(ctx context.Context) (map[string]SliceDevice, error) {
	ctx, cancel := context.WithTimeout(ctx, AskTimeout)
	defer cancel()
	offered := make(map[string]SliceDevice)
	slices, err := n.claims.ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: publish.SelectSlices(n.name)})
	if apierrors.IsNotFound(err) {
		return offered, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices of node %s: %w", n.name, err)
	}
	for _, slice := range slices.Items {
		for _, device := range slice.Spec.Devices {
			shares := device.Capacity[discovery.Shares].Value
			offered[device.Name] = SliceDevice{slice.Name, shares.Value()}
		}
	}
	return offered, nil
}

// ClaimedDevices returns the claims of the node's pods by the names of the node's devices that they
// are allocated; see [Node.NodeClaims]. Admin access is left out, because it does not exclude other
// consumers. undecided is a pod for which the scheduler may have chosen any device of the node without
// an allocation so far, "" if there is none.
func (n *Node) ClaimedDevices(ctx context.Context) (claimed map[string][]*resourceapi.ResourceClaim, undecided string, err error) {
	claims, undecided, err := n.readClaims(ctx)
	if err != nil {
		return nil, "", err
	}
	claimed = make(map[string][]*resourceapi.ResourceClaim)
	for _, claim := range claims {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			admin := result.AdminAccess != nil && *result.AdminAccess
			if result.Driver == discovery.Domain && discovery.IsPoolOf(n.name, result.Pool) && !admin {
				claimed[result.Device] = append(claimed[result.Device], claim)
			}
		}
	}
	return claimed, undecided, nil
}
