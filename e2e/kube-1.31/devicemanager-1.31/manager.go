//go:build !cgo

package main

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
)

func newManager(context.Context) (*devicemanager.ManagerImpl, error) {
	topology, err := topologymanager.NewManager(nil, topologymanager.PolicyNone, "", nil)
	if err != nil {
		return nil, err
	}
	return devicemanager.NewManagerImpl(nil, topology)
}

func start(_ context.Context, m *devicemanager.ManagerImpl, active func() []*corev1.Pod) error {
	return m.Start(active, ready(), containermap.NewContainerMap(), sets.New[string]())
}

// ready reports that the kubelet has received all pods from the API server.
func ready() config.SourcesReady {
	return config.NewSourcesReady(func(sets.Set[string]) bool { return true })
}

func allocate(_ context.Context, m *devicemanager.ManagerImpl, pod *corev1.Pod, c *corev1.Container) error {
	return m.Allocate(pod, c)
}

func options(_ context.Context, m *devicemanager.ManagerImpl, pod *corev1.Pod, c *corev1.Container) (*devicemanager.DeviceRunContainerOptions, error) {
	return m.GetDeviceRunContainerOptions(pod, c)
}

func allocatable(m *devicemanager.ManagerImpl) corev1.ResourceList {
	_, list, _ := m.GetCapacity()
	return list
}

func podResources(_ context.Context, k *kubelet) podresourcesapi.PodResourcesListerServer {
	return podresources.NewV1PodResourcesServer(podresources.PodResourcesProviders{
		Pods: k, Devices: provider{k}, Cpus: others{}, Memory: others{}, DynamicResources: others{},
	})
}

// A provider provides the devices of pods to the PodResources API.
type provider struct{ *kubelet }

func (p provider) UpdateAllocatedDevices() { p.devices.UpdateAllocatedDevices() }

func (p provider) GetDevices(uid, container string) []*podresourcesapi.ContainerDevices {
	return listed(p.devices.GetDevices(uid, container))
}

func (p provider) GetAllocatableDevices() []*podresourcesapi.ContainerDevices {
	return listed(p.devices.GetAllocatableDevices())
}

// others provides the other resources of pods to the PodResources API: none.
type others struct{}

func (others) GetCPUs(string, string) []int64                              { return nil }
func (others) GetAllocatableCPUs() []int64                                 { return nil }
func (others) GetMemory(string, string) []*podresourcesapi.ContainerMemory { return nil }
func (others) GetAllocatableMemory() []*podresourcesapi.ContainerMemory    { return nil }
func (others) GetDynamicResources(*corev1.Pod, *corev1.Container) []*podresourcesapi.DynamicResource {
	return nil
}
