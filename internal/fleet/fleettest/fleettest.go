// Package fleettest provides clusters for tests: nodes from recorded hosts with the driver's
// slices, claims and pods.
package fleettest

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/internal/fleet"
)

// Now is the time in these clusters.
var Now = time.Date(2026, 11, 20, 9, 50, 21, 0, time.UTC)

// Cluster contains the objects of an API server.
type Cluster struct {
	fleet.Input
	t testing.TB
}

// New returns a cluster without nodes, with a class for all devices and one for each kind.
func New(t testing.TB) *Cluster {
	c := &Cluster{t: t}
	c.AddClass("any", "", "device.driver == 'chandler.dev'")
	for _, kind := range []string{"gpu", "nic", "crypto"} {
		c.AddClass(kind, "", fmt.Sprintf("device.driver == 'chandler.dev' && device.attributes['chandler.dev'].kind == '%s'", kind))
	}
	return c
}

// AddClass adds a class. The extended resource may be "".
func (c *Cluster) AddClass(name, extended, expression string) {
	class := resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
	class.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
	if extended != "" {
		class.Spec.ExtendedResourceName = &extended
	}
	c.Classes = append(c.Classes, class)
}

// Node adds a node from a recorded host. The function change may modify the devices.
func (c *Cluster) Node(name, host string, change func(*discovery.Device)) {
	c.t.Helper()
	found := scan.ReadHost(discoverytest.ReadHost(c.t, host), families.All)
	for i := range found.Devices {
		if change != nil {
			change(&found.Devices[i])
		}
	}
	made, _ := pool.BuildPools(pool.Input{Node: name, Snapshot: new(rules.Rules).ApplyTo(found), Features: features.All()})
	c.Publish(name, made)
}

// Publish adds a node with pools.
func (c *Cluster) Publish(name string, made resourceslice.DriverResources) {
	for i, slice := range pool.SliceObjects(name, made).Items {
		slice.Name = fmt.Sprintf("%s-%02d", name, i)
		c.Slices = append(c.Slices, slice)
	}
	for i := range c.Nodes {
		if c.Nodes[i].Name == name {
			return
		}
	}
	c.Nodes = append(c.Nodes, corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}},
		Status:     corev1.NodeStatus{Capacity: corev1.ResourceList{}, Allocatable: corev1.ResourceList{}},
	})
}

// AddPlugin adds a resource of a device plugin to a node.
func (c *Cluster) AddPlugin(node, name string, capacity, allocatable int64) {
	for i := range c.Nodes {
		if c.Nodes[i].Name == node {
			c.Nodes[i].Status.Capacity[corev1.ResourceName(name)] = *resource.NewQuantity(capacity, resource.DecimalSI)
			c.Nodes[i].Status.Allocatable[corev1.ResourceName(name)] = *resource.NewQuantity(allocatable, resource.DecimalSI)
		}
	}
}

// AddPod adds a pod on a node, or a pending pod if node is "". Its age is in minutes.
func (c *Cluster) AddPod(namespace, name, node string, minutes int, limits map[string]int64, claims ...string) *corev1.Pod {
	since := metav1.NewTime(Now.Add(-time.Duration(minutes) * time.Minute))
	pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + "-" + name), CreationTimestamp: since}}
	container := corev1.Container{Name: "main", Image: "example.com/main", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{}, Requests: corev1.ResourceList{}}}
	for name, n := range limits {
		container.Resources.Limits[corev1.ResourceName(name)] = *resource.NewQuantity(n, resource.DecimalSI)
		container.Resources.Requests[corev1.ResourceName(name)] = *resource.NewQuantity(n, resource.DecimalSI)
	}
	for _, claim := range claims {
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: claim, ResourceClaimName: &claim})
		container.Resources.Claims = append(container.Resources.Claims, corev1.ResourceClaim{Name: claim})
	}
	pod.Spec.Containers = []corev1.Container{container}
	pod.Status.Phase = corev1.PodPending
	if node != "" {
		pod.Spec.NodeName, pod.Status.Phase, pod.Status.StartTime = node, corev1.PodRunning, &since
	}
	c.Pods = append(c.Pods, pod)
	return &c.Pods[len(c.Pods)-1]
}

// AddClaim adds a claim.
func (c *Cluster) AddClaim(namespace, name string, spec resourceapi.DeviceClaim) *resourceapi.ResourceClaim {
	claim := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("claim-" + namespace + "-" + name)}}
	claim.Spec.Devices = spec
	c.Claims = append(c.Claims, claim)
	return &c.Claims[len(c.Claims)-1]
}

// Request returns a request for devices of a class.
func Request(name, class string, count int64, selectors ...string) resourceapi.DeviceRequest {
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}
	for _, expression := range selectors {
		exactly.Selectors = append(exactly.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: expression}})
	}
	return resourceapi.DeviceRequest{Name: name, Exactly: exactly}
}

// poolOf returns the pool of a device, or the main pool of the node if no slice has the device.
func (c *Cluster) poolOf(node, device string) string {
	for i := range c.Slices {
		isNamed := func(d resourceapi.Device) bool { return d.Name == device }
		if spec := &c.Slices[i].Spec; *spec.NodeName == node && slices.ContainsFunc(spec.Devices, isNamed) {
			return spec.Pool.Name
		}
	}
	return node
}

// AllocateDevices allocates devices of a node to a new claim, which is reserved for a new pod on
// the node. The name of the claim is the pod's name followed by "-devices".
func (c *Cluster) AllocateDevices(namespace, pod, node string, minutes int, request string, devices ...string) {
	name := pod + "-devices"
	claim := c.AddClaim(namespace, name, resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{Request(request, "any", int64(len(devices)))}})
	since := metav1.NewTime(Now.Add(-time.Duration(minutes) * time.Minute))
	allocation := &resourceapi.AllocationResult{AllocationTimestamp: &since}
	for _, device := range devices {
		allocation.Devices.Results = append(allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{Request: request, Driver: discovery.Domain, Pool: c.poolOf(node, device), Device: device})
	}
	claim.Status.Allocation = allocation
	made := c.AddPod(namespace, pod, node, minutes, nil, name)
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: pod, UID: made.UID}}
}

// Objects returns all objects, for a fake client.
func (c *Cluster) Objects() (out []runtime.Object) {
	for i := range c.Slices {
		out = append(out, &c.Slices[i])
	}
	for i := range c.Claims {
		out = append(out, &c.Claims[i])
	}
	for i := range c.Templates {
		out = append(out, &c.Templates[i])
	}
	for i := range c.Classes {
		out = append(out, &c.Classes[i])
	}
	for i := range c.Nodes {
		out = append(out, &c.Nodes[i])
	}
	for i := range c.Pods {
		out = append(out, &c.Pods[i])
	}
	return out
}

// MakeUnhealthy returns a change for [Cluster.Node] that makes the named devices unhealthy.
func MakeUnhealthy(condition discovery.Condition, effect resourceapi.DeviceTaintEffect, minutes int, names ...string) func(*discovery.Device) {
	return func(d *discovery.Device) {
		for _, name := range names {
			if d.Name == name {
				d.Health = discovery.Health{Status: discovery.Unhealthy, Condition: condition, Effect: effect, Since: metav1.NewTime(Now.Add(-time.Duration(minutes) * time.Minute))}
			}
		}
	}
}
