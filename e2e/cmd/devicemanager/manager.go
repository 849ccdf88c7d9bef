//go:build !cgo

package main

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

func newManager(ctx context.Context) (*devicemanager.ManagerImpl, error) {
	logger := klog.FromContext(ctx)
	topology, err := topologymanager.NewManager(logger, nil, topologymanager.PolicyNone, "", nil)
	if err != nil {
		return nil, err
	}
	return devicemanager.NewManagerImpl(logger, nil, topology)
}

func start(ctx context.Context, m *devicemanager.ManagerImpl, active func() []*corev1.Pod) error {
	return m.Start(klog.FromContext(ctx), active, ready(), containermap.NewContainerMap(), sets.New[string]())
}

// ready reports that the kubelet has received all pods from the API server.
func ready() config.SourcesReady {
	return config.NewSourcesReady(func(sets.Set[string]) bool { return true })
}

func allocate(ctx context.Context, m *devicemanager.ManagerImpl, pod *corev1.Pod, c *corev1.Container) error {
	return m.Allocate(ctx, pod, c, lifecycle.AddOperation)
}

func options(ctx context.Context, m *devicemanager.ManagerImpl, pod *corev1.Pod, c *corev1.Container) (*devicemanager.DeviceRunContainerOptions, error) {
	return m.GetDeviceRunContainerOptions(ctx, pod, c)
}

func allocatable(m *devicemanager.ManagerImpl) corev1.ResourceList {
	_, list, _ := m.GetCapacity(klog.Background())
	return list
}

func podResources(ctx context.Context, k *kubelet) podresourcesapi.PodResourcesListerServer {
	return podresources.NewV1PodResourcesServer(ctx, podresources.PodResourcesProviders{
		Pods: k, Devices: provider{k}, Cpus: others{}, Memory: others{}, DynamicResources: others{},
	})
}

// A provider provides the devices of pods to the PodResources API.
type provider struct{ *kubelet }

func (p provider) UpdateAllocatedDevices(logger klog.Logger) {
	p.devices.UpdateAllocatedDevices(logger)
}

func (p provider) GetDevices(uid, container string) []*podresourcesapi.ContainerDevices {
	return listed(p.devices.GetDevices(uid, container))
}

func (p provider) GetAllocatableDevices(logger klog.Logger) []*podresourcesapi.ContainerDevices {
	return listed(p.devices.GetAllocatableDevices(logger))
}

// others provides the other resources of pods to the PodResources API: none.
type others struct{}

func (others) GetCPUs(*corev1.Pod, *corev1.Container) []int64 { return nil }
func (others) GetPodCPUs(string) []int64                      { return nil }
func (others) GetAllocatableCPUs() []int64                    { return nil }
func (others) GetMemory(klog.Logger, *corev1.Pod, *corev1.Container) []*podresourcesapi.ContainerMemory {
	return nil
}
func (others) GetPodMemory(klog.Logger, string) []*podresourcesapi.ContainerMemory { return nil }
func (others) GetAllocatableMemory(klog.Logger) []*podresourcesapi.ContainerMemory { return nil }
func (others) GetDynamicResources(klog.Logger, *corev1.Pod, *corev1.Container) []*podresourcesapi.DynamicResource {
	return nil
}
