package agent

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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
)

// references knows who refers to claims that were prepared.
type references struct {
	client kubernetes.Interface
	claims *draclient.Client
	node   string
	listed func(ctx context.Context) (*kubeletapi.Listing, error) // by the kubelet
}

// Abandoned returns which of the claims are gone from the API server, or are not
// allocated on the node any more, and are referred to by no pod of the node and
// by no container that the kubelet lists. If one of these cannot be asked, that is an
// error, and no claim counts as abandoned.
func (r references) Abandoned(ctx context.Context, claims []ledger.Owner) ([]types.UID, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	listed, err := r.listed(ctx)
	if err != nil {
		return nil, err
	}
	if !listed.Whole {
		return nil, errors.New("PodResources does not list all pods yet")
	}
	pods, err := podsOf(ctx, r.client, r.node)
	if err != nil {
		return nil, err
	}
	var abandoned []types.UID
	for _, claim := range claims {
		if inContainer(listed, claim.UID) {
			continue
		}
		referred := r.referred
		if claim.Name == "" {
			referred = r.referredByUID
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

// referred reports whether the claim is allocated on the node, or one of the
// pods refers to it.
func (r references) referred(ctx context.Context, claim ledger.Owner, pods []corev1.Pod) (bool, error) {
	now, err := r.claims.ResourceClaims(claim.Namespace).Get(ctx, claim.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return inPod(pods, claim, nil), nil
	case err != nil:
		return true, fmt.Errorf("get ResourceClaim %s/%s: %w", claim.Namespace, claim.Name, err)
	case now.UID != claim.UID:
		return inPod(pods, claim, now), nil
	}
	return r.allocatedHere(now) || inPod(pods, claim, nil), nil
}

// referredByUID is for a claim of which only the UID is known. Any pod may refer to
// the claim if it refers to one that is not there or is not reserved for that pod.
func (r references) referredByUID(ctx context.Context, claim ledger.Owner, pods []corev1.Pod) (bool, error) {
	all, err := r.claims.ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return true, fmt.Errorf("list ResourceClaims: %w", err)
	}
	byName := make(map[types.NamespacedName]*resourceapi.ResourceClaim)
	for i := range all.Items {
		now := &all.Items[i]
		if now.UID == claim.UID {
			return r.referred(ctx, ledger.Owner{UID: now.UID, Namespace: now.Namespace, Name: now.Name}, pods)
		}
		byName[types.NamespacedName{Namespace: now.Namespace, Name: now.Name}] = now
	}
	for _, pod := range pods {
		for _, name := range claimsOf(&pod) {
			if !reservedFor(byName[types.NamespacedName{Namespace: pod.Namespace, Name: name}], pod.UID) {
				return true, nil
			}
		}
	}
	return false, nil
}

// allocatedHere reports whether the claim has anything of the node's pool.
func (r references) allocatedHere(claim *resourceapi.ResourceClaim) bool {
	return claim.Status.Allocation != nil && slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(result resourceapi.DeviceRequestAllocationResult) bool {
		return result.Driver == discovery.Domain && result.Pool == r.node
	})
}

// inContainer reports whether the kubelet gave a container a CDI device of the
// claim. Names of CDI devices begin with the claim's UID, which is never used again.
func inContainer(listed *kubeletapi.Listing, uid types.UID) bool {
	prefix := cdi.ID(string(uid) + "-")
	return slices.ContainsFunc(listed.CDIDevices(), func(name string) bool { return strings.HasPrefix(name, prefix) })
}

// inPod reports whether a pod refers to the claim by its name. If the name now belongs
// to a successor that is reserved for the pod, the pod means the successor.
func inPod(pods []corev1.Pod, claim ledger.Owner, successor *resourceapi.ResourceClaim) bool {
	return slices.ContainsFunc(pods, func(pod corev1.Pod) bool {
		return pod.Namespace == claim.Namespace && slices.Contains(claimsOf(&pod), claim.Name) && !reservedFor(successor, pod.UID)
	})
}

func reservedFor(claim *resourceapi.ResourceClaim, pod types.UID) bool {
	return claim != nil && slices.ContainsFunc(claim.Status.ReservedFor, func(consumer resourceapi.ResourceClaimConsumerReference) bool {
		return consumer.UID == pod
	})
}

// claimsOf returns the names of the claims that a pod refers to.
func claimsOf(pod *corev1.Pod) []string {
	var names []string
	for _, claim := range pod.Spec.ResourceClaims {
		if claim.ResourceClaimName != nil {
			names = append(names, *claim.ResourceClaimName)
		}
	}
	for _, status := range pod.Status.ResourceClaimStatuses {
		if status.ResourceClaimName != nil {
			names = append(names, *status.ResourceClaimName)
		}
	}
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil {
		names = append(names, extended.ResourceClaimName)
	}
	return names
}
