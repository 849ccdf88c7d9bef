package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
)

// AbandonedClaims returns the claims that no longer exist in the API server or are no longer
// allocated on the node, and that neither a pod of the node nor a container in the kubelet's list
// refers to. If the API server or the kubelet does not answer, AbandonedClaims returns an error,
// and no claim counts as abandoned.
func (n *Node) AbandonedClaims(ctx context.Context, claims []ledger.Owner) ([]types.UID, error) {
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
	var abandoned []types.UID
	for _, claim := range claims {
		if inContainer(listed, claim.UID) {
			continue
		}
		referred := n.isReferred
		if claim.Name == "" {
			referred = n.referredByUID
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

// isReferred reports whether the claim is allocated on the node, or one of the pods refers to the
// claim.
func (n *Node) isReferred(ctx context.Context, claim ledger.Owner, pods []corev1.Pod) (bool, error) {
	now, err := n.claims.ResourceClaims(claim.Namespace).Get(ctx, claim.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return inPod(pods, claim, nil), nil
	case err != nil:
		return true, fmt.Errorf("get ResourceClaim %s/%s: %w", claim.Namespace, claim.Name, err)
	case now.UID != claim.UID:
		return inPod(pods, claim, now), nil
	}
	return n.allocatedHere(now) || inPod(pods, claim, nil), nil
}

// referredByUID is like referred, for a claim with only a UID. A pod with an unknown claim, or with
// a claim reserved for other pods, may refer to the given claim.
func (n *Node) referredByUID(ctx context.Context, claim ledger.Owner, pods []corev1.Pod) (bool, error) {
	all, err := n.claims.ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return true, fmt.Errorf("list ResourceClaims: %w", err)
	}
	byName := make(map[types.NamespacedName]*resourceapi.ResourceClaim)
	for i := range all.Items {
		now := &all.Items[i]
		if now.UID == claim.UID {
			return n.isReferred(ctx, ledger.Owner{UID: now.UID, Namespace: now.Namespace, Name: now.Name}, pods)
		}
		byName[types.NamespacedName{Namespace: now.Namespace, Name: now.Name}] = now
	}
	for _, pod := range pods {
		for _, name := range ClaimsOf(&pod) {
			if !reservedFor(byName[types.NamespacedName{Namespace: pod.Namespace, Name: name}], pod.UID) {
				return true, nil
			}
		}
	}
	return false, nil
}

// allocatedHere reports whether a device of the node's pool is allocated to the claim.
func (n *Node) allocatedHere(claim *resourceapi.ResourceClaim) bool {
	return claim.Status.Allocation != nil && slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(result resourceapi.DeviceRequestAllocationResult) bool {
		return result.Driver == discovery.Domain && result.Pool == n.name
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
func inPod(pods []corev1.Pod, claim ledger.Owner, successor *resourceapi.ResourceClaim) bool {
	return slices.ContainsFunc(pods, func(pod corev1.Pod) bool {
		return pod.Namespace == claim.Namespace && slices.Contains(ClaimsOf(&pod), claim.Name) && !reservedFor(successor, pod.UID)
	})
}

// PodsOf returns the names of the pods with a claim, by the kubelet's last answer. Unlike the
// claim's status, the answer also contains the pods of a claim with a reservation for a PodGroup.
func (n *Node) PodsOf(claim ledger.Owner) (pods []string) {
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

// Named maps the names of the node's devices to the ResourceClaim that has the device, or else the
// ResourceSlice that still offers it. The map is empty if the API server has no resource.k8s.io.
func (n *Node) Named(ctx context.Context) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, AskTimeout)
	defer cancel()
	by := make(map[string]string)
	slices, err := n.claims.ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: fields.SelectorFromSet(fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   discovery.Domain,
		resourceapi.ResourceSliceSelectorNodeName: n.name,
	}).String()})
	if apierrors.IsNotFound(err) {
		return by, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices: %w", err)
	}
	for _, slice := range slices.Items {
		for _, device := range slice.Spec.Devices {
			by[device.Name] = "ResourceSlice " + slice.Name
		}
	}
	claims, err := n.claims.ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list ResourceClaims: %w", err)
	}
	for _, claim := range claims.Items {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			admin := result.AdminAccess != nil && *result.AdminAccess // does not exclude other consumers
			if result.Driver == discovery.Domain && result.Pool == n.name && !admin {
				by[result.Device] = fmt.Sprintf("ResourceClaim %s/%s", claim.Namespace, claim.Name)
			}
		}
	}
	return by, nil
}
