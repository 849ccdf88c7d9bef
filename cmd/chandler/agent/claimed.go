package agent

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool"
)

// askTimeout is how long the API server has for an answer if other work waits for it.
const askTimeout = 10 * time.Second

// nodeClaims asks the API server what it says of a node's devices.
type nodeClaims struct {
	client *draclient.Client
	node   string
}

// published returns which ResourceSlice still offers each silicon of a snapshot, or
// which ResourceClaim has any of it. Slices and claims name devices, or numbered
// shares of devices. An API server without resource.k8s.io names none.
func (c nodeClaims) published(ctx context.Context, s *rules.Snapshot) *Published {
	names, err := c.names(ctx)
	said := &Published{By: make(map[string]string), Err: err}
	for name, who := range names {
		if silicon, found := pool.Silicon(s, name); found {
			said.By[silicon] = who
		}
	}
	return said
}

// names returns which ResourceClaim has the device of a name allocated, or which
// ResourceSlice still offers it.
func (c nodeClaims) names(ctx context.Context) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	by := make(map[string]string)
	slices, err := c.client.ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: fields.SelectorFromSet(fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   discovery.Domain,
		resourceapi.ResourceSliceSelectorNodeName: c.node,
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
	claims, err := c.client.ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list ResourceClaims: %w", err)
	}
	for _, claim := range claims.Items {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			admin := result.AdminAccess != nil && *result.AdminAccess // keeps nobody out
			if result.Driver == discovery.Domain && result.Pool == c.node && !admin {
				by[result.Device] = fmt.Sprintf("ResourceClaim %s/%s", claim.Namespace, claim.Name)
			}
		}
	}
	return by, nil
}

// initContainers asks the API server about init containers, which the kubelet's
// PodResources API leaves out.
type initContainers struct {
	client kubernetes.Interface
	node   string
}

// Pending reports whether a pod of the node that has not ended asks for a
// resource in an init container.
func (c initContainers) Pending(ctx context.Context, resource string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	pods, err := podsOf(ctx, c.client, c.node)
	if err != nil {
		return false, err
	}
	for _, pod := range pods {
		if ended(&pod) {
			continue
		}
		for _, container := range pod.Spec.InitContainers {
			if _, asks := container.Resources.Limits[corev1.ResourceName(resource)]; asks {
				return true, nil
			}
		}
	}
	return false, nil
}

// podsOf asks the API server for all pods of a node, ended ones included.
func podsOf(ctx context.Context, client kubernetes.Interface, node string) ([]corev1.Pod, error) {
	pods, err := client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		FieldSelector: fields.SelectorFromSet(fields.Set{"spec.nodeName": node}).String(),
	})
	if err != nil {
		return nil, fmt.Errorf("list pods of node %s: %w", node, err)
	}
	return pods.Items, nil
}
