// Package cluster queries the API server and the kubelet for the pods, claims and slices of a node,
// without changing anything.
package cluster

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/podclaims"
	"chandler.dev/internal/podevents"
)

// AskTimeout limits a request to the API server if other work waits for the answer.
const AskTimeout = 10 * time.Second

// Node is the agent's view of its node in the cluster.
type Node struct {
	name    string
	client  kubernetes.Interface
	claims  *draclient.Client
	ownPod  string // the agent's own pod, "" outside of a pod
	kubelet func(ctx context.Context) (*kubeletapi.Listing, error)

	// ReadCheckpoint returns the devices of containers by the kubelet's checkpoint, which is used if
	// the kubelet has no PodResources API. It is nil if the checkpoint cannot be read.
	ReadCheckpoint func() ([]kubeletapi.Holding, error)
	logAbsence     sync.Once // the absence of a PodResources API was logged

	lastListing atomic.Pointer[kubeletapi.Listing] // the kubelet's last answer, nil if there was none

	reading  chan struct{} // has a value while the Node is read, and guards lastNode
	lastNode *seenNode     // the Node that was read last, nil before the first

	mu             sync.Mutex
	listedPods     map[string]bool               // the pods of the kubelet's last complete answer, nil if there was none
	podsWithGrants map[types.NamespacedName]term // pods that have grants
}

// NewNode returns a node. own is the agent's own pod, as "namespace/name", or "" outside of a pod.
// kubelet queries the PodResources API.
func NewNode(name string, client kubernetes.Interface, own string, kubelet func(ctx context.Context) (*kubeletapi.Listing, error)) *Node {
	return &Node{name: name, client: client, claims: draclient.New(client), ownPod: own, kubelet: kubelet, reading: make(chan struct{}, 1), podsWithGrants: make(map[types.NamespacedName]term)}
}

// LastListing returns the kubelet's last answer to [Node.ListDevices], nil if there was none. The
// caller must not modify it.
func (n *Node) LastListing() *kubeletapi.Listing { return n.lastListing.Load() }

// pods lists all pods of the node from the API server, including ended pods.
func (n *Node) pods(ctx context.Context) ([]corev1.Pod, error) {
	return n.listPods(ctx, "spec.nodeName")
}

// listPods lists the pods with the node's name in a field.
func (n *Node) listPods(ctx context.Context, field string) ([]corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, AskTimeout)
	defer cancel()
	pods, err := n.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(field, n.name).String(),
	})
	if err != nil {
		return nil, fmt.Errorf("list pods of node %s: %w", n.name, err)
	}
	return pods.Items, nil
}

// unendedPods lists the node's pods from the API server, except ended pods.
func (n *Node) unendedPods(ctx context.Context) ([]corev1.Pod, error) {
	pods, err := n.pods(ctx)
	return slices.DeleteFunc(pods, isTerminal), err
}

func isTerminal(pod corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// Pods lists the node's pods with their claims from the API server, except ended pods.
func (n *Node) Pods(ctx context.Context) (pods []podevents.Pod, err error) {
	all, err := n.unendedPods(ctx)
	for i := range all {
		pods = append(pods, podevents.Pod{NamespacedName: nameOf(&all[i]), UID: all[i].UID, Claims: podclaims.ClaimsOf(&all[i])})
	}
	return pods, err
}

// Pending reports whether a pod of the node that has not ended requests an extended resource in an
// init container. PodResources does not list init containers.
func (n *Node) Pending(ctx context.Context, resource string) (bool, error) {
	pods, err := n.unendedPods(ctx)
	return slices.ContainsFunc(pods, func(pod corev1.Pod) bool { return requestsResource(pod.Spec.InitContainers, resource) }), err
}

// AskForBoth reports whether exactly one pod of the node requests two resources in one container,
// among the pods that have not ended and that PodResources does not list yet.
func (n *Node) AskForBoth(ctx context.Context, resource, other string) (bool, error) {
	pods, err := n.unendedPods(ctx)
	if err != nil {
		return false, err
	}
	listed := make(map[types.NamespacedName]bool)
	if said := n.LastListing(); said != nil {
		for _, pod := range said.Pods {
			listed[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}] = true
		}
	}
	count := 0
	for i := range pods {
		if listed[nameOf(&pods[i])] {
			continue
		}
		for _, c := range slices.Concat(pods[i].Spec.InitContainers, pods[i].Spec.Containers) {
			if one := []corev1.Container{c}; requestsResource(one, resource) && requestsResource(one, other) {
				count++
				break
			}
		}
	}
	return count == 1, nil
}

// requestsResource reports whether a container requests an extended resource.
func requestsResource(containers []corev1.Container, resource string) bool {
	return slices.ContainsFunc(containers, func(c corev1.Container) bool {
		_, asks := c.Resources.Limits[corev1.ResourceName(resource)]
		return asks
	})
}

// ResourcesOf returns the names of the resources in the limits of a pod's containers.
func ResourcesOf(pod *corev1.Pod) (names []string) {
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for name := range c.Resources.Limits {
			names = append(names, string(name))
		}
	}
	return names
}

// passesCDI is the first version of the kubelet that by default passes on the CDI device names of
// device plugins (pkg/features/kube_features.go, DevicePluginCDIDevices, in 1.28 to 1.31).
var passesCDI = version.MajorMinor(1, 29)

// PassesCDI reports whether the kubelet passes on the CDI device names of device plugins, by the
// kubelet's version in the API server.
func (n *Node) PassesCDI(ctx context.Context) (bool, error) {
	node, err := n.readNode(ctx)
	if err != nil {
		return false, fmt.Errorf("get node %s, for the kubelet's version: %w", n.name, err)
	}
	kubelet, err := version.ParseGeneric(node.info.KubeletVersion)
	if err != nil {
		return false, fmt.Errorf("the kubelet's version: %w", err)
	}
	return kubelet.AtLeast(passesCDI), nil
}

// Runtime returns the name and version of the container runtime in the node's status, such as
// "containerd://2.1.4".
func (n *Node) Runtime(ctx context.Context) (string, error) {
	node, err := n.readNode(ctx)
	if err != nil {
		return "", fmt.Errorf("get node %s, for the container runtime's version: %w", n.name, err)
	}
	return node.info.ContainerRuntimeVersion, nil
}

// UID returns the UID of the node in the API server.
func (n *Node) UID(ctx context.Context) (types.UID, error) {
	node, err := n.readNode(ctx)
	if err != nil {
		return "", fmt.Errorf("get node %s: %w", n.name, err)
	}
	return node.uid, nil
}

// nodeFresh is the maximum age of a Node in use. An agent needs the UID and the versions of the Node
// at about the same time, and a Node may have tens of kilobytes.
const nodeFresh = 10 * time.Second

// seenNode has the UID and the versions of a Node.
type seenNode struct {
	uid  types.UID
	info corev1.NodeSystemInfo
	at   time.Time
}

// readNode returns the node of the API server, as it was at most ten seconds ago. A concurrent call
// waits for the first one.
func (n *Node) readNode(ctx context.Context) (*seenNode, error) {
	ctx, cancel := context.WithTimeout(ctx, AskTimeout)
	defer cancel()
	select {
	case n.reading <- struct{}{}:
		defer func() { <-n.reading }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if last := n.lastNode; last != nil && time.Since(last.at) < nodeFresh {
		return last, nil
	}
	node, err := n.client.CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	n.lastNode = &seenNode{node.UID, node.Status.NodeInfo, time.Now()}
	return n.lastNode, nil
}

func nameOf(pod *corev1.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
}
