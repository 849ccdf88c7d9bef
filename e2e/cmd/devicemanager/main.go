//go:build !cgo

// Command devicemanager runs the part of a kubelet that serves device plugins: the kubelet's own
// device manager with its checkpoint, and the kubelet's own PodResources API. The command runs no
// containers. It reads requests from standard input, one line of JSON each, and answers each
// request with one line on standard output. Requests admit, inspect and end pods. The first request
// lists the pods that already run.
//
// The kubelet's directory of device plugins is a constant, so this program needs a mount namespace
// of its own. There, it mounts the directory of its first argument as the kubelet's directory.
//
// The module kube-1.31 has this file as a link and builds it with another version of Kubernetes.
// The file must therefore import nothing of this module.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
)

// A request has exactly one of these fields.
type request struct {
	Running []*corev1.Pod `json:"running,omitempty"` // pods that already run
	Admit   *corev1.Pod   `json:"admit,omitempty"`   // the pod to start
	Look    types.UID     `json:"look,omitempty"`    // the pod whose containers are returned
	End     types.UID     `json:"end,omitempty"`     // the pod that ends
	Ask     bool          `json:"ask,omitempty"`     // Return the allocatable amounts.
}

type answer struct {
	Error       string               `json:"error,omitempty"`
	Allocatable map[string]int64     `json:"allocatable,omitempty"`
	Containers  map[string]container `json:"containers,omitempty"`
}

// A container lists the devices of a container, and the options that the runtime gets for each
// start of it.
type container struct {
	IDs     map[string][]string                      `json:"ids"` // by resource
	Options *devicemanager.DeviceRunContainerOptions `json:"options"`
}

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "devicemanager:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	if len(os.Args) != 2 {
		return errors.New("usage: devicemanager DIRECTORY")
	}
	if err := mountRoot(os.Args[1]); err != nil {
		return fmt.Errorf("mount %s: %w", os.Args[1], err)
	}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	var first request
	if err := in.Decode(&first); err != nil {
		return fmt.Errorf("read request: %w", err)
	}
	k := &kubelet{running: first.Running}
	var err error
	if k.devices, err = newManager(ctx); err != nil {
		return fmt.Errorf("device manager: %w", err)
	}
	if err := start(ctx, k.devices, k.active); err != nil {
		return fmt.Errorf("start device manager: %w", err)
	}
	if err := k.serve(ctx); err != nil {
		return fmt.Errorf("serve PodResources: %w", err)
	}
	if err := out.Encode(answer{}); err != nil { // the answer to the first request
		return err
	}
	for {
		var r request
		if err := in.Decode(&r); err != nil {
			return nil // Standard input is closed.
		}
		if err := out.Encode(k.do(ctx, r)); err != nil {
			return err
		}
	}
}

// root is the kubelet's directory.
const root = "/var/lib/kubelet"

// mountRoot mounts a directory as the kubelet's directory, for this process only. The directory may
// lie below /var/lib, which the mounts hide.
func mountRoot(dir string) error {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", filepath.Dir(root), "tmpfs", 0, ""); err != nil {
		return err
	}
	if err := os.Mkdir(root, 0o755); err != nil {
		return err
	}
	return unix.Mount(fmt.Sprintf("/proc/self/fd/%d", fd), root, "", unix.MS_BIND, "")
}

// A kubelet holds the pods of the node.
type kubelet struct {
	devices *devicemanager.ManagerImpl

	mu      sync.Mutex
	running []*corev1.Pod
}

// active returns the pods that have not ended.
func (k *kubelet) active() []*corev1.Pod {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.running)
}

func (k *kubelet) end(uid types.UID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.running = slices.DeleteFunc(slices.Clone(k.running), func(p *corev1.Pod) bool { return p.UID == uid })
}

func (k *kubelet) do(ctx context.Context, r request) (a answer) {
	var err error
	switch {
	case r.Admit != nil:
		err = k.admit(ctx, r.Admit)
	case r.Look != "":
		a.Containers, err = k.look(ctx, r.Look)
	case r.End != "":
		k.end(r.End)
	case r.Ask:
		a.Allocatable = make(map[string]int64)
		for resource, amount := range allocatable(k.devices) {
			a.Allocatable[string(resource)] = amount.Value()
		}
	}
	if err != nil {
		a.Error = err.Error()
	}
	return a
}

// admit admits a pod as the kubelet does: the pod is active before devices are allocated to it, and
// is removed again if an allocation fails.
func (k *kubelet) admit(ctx context.Context, pod *corev1.Pod) error {
	k.mu.Lock()
	k.running = append(slices.Clone(k.running), pod)
	k.mu.Unlock()
	for i := range pod.Spec.Containers {
		if err := allocate(ctx, k.devices, pod, &pod.Spec.Containers[i]); err != nil {
			k.end(pod.UID)
			return err
		}
	}
	return nil
}

// look returns the devices of a pod's containers, and the options that the runtime would get for a
// start now.
func (k *kubelet) look(ctx context.Context, uid types.UID) (map[string]container, error) {
	containers := make(map[string]container)
	for _, pod := range k.active() {
		if pod.UID != uid {
			continue
		}
		for i := range pod.Spec.Containers {
			c := &pod.Spec.Containers[i]
			o, err := options(ctx, k.devices, pod, c)
			if err != nil {
				return nil, fmt.Errorf("container %s: %w", c.Name, err)
			}
			has := container{IDs: make(map[string][]string), Options: o}
			for resource, devices := range k.devices.GetDevices(string(uid), c.Name) {
				for id := range devices {
					has.IDs[resource] = append(has.IDs[resource], id)
				}
				slices.Sort(has.IDs[resource])
			}
			containers[c.Name] = has
		}
	}
	return containers, nil
}

// serve serves the PodResources API.
func (k *kubelet) serve(ctx context.Context) error {
	socket := filepath.Join(root, "pod-resources/kubelet.sock")
	if err := os.MkdirAll(filepath.Dir(socket), 0o750); err != nil {
		return err
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) { // left by an earlier kubelet
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(server, podResources(ctx, k))
	go func() { _ = server.Serve(listener) }()
	return nil
}

// GetPods returns the pods of the node.
func (k *kubelet) GetPods() []*corev1.Pod { return k.active() }

// GetActivePods returns the pods that have not ended.
func (k *kubelet) GetActivePods() []*corev1.Pod { return k.active() }

// GetPodByName returns a pod of the node.
func (k *kubelet) GetPodByName(namespace, name string) (*corev1.Pod, bool) {
	for _, pod := range k.active() {
		if pod.Namespace == namespace && pod.Name == name {
			return pod, true
		}
	}
	return nil, false
}

// listed converts devices to the form of the PodResources API, like
// containerDevicesFromResourceDeviceInstances in pkg/kubelet/cm/container_manager.go of Kubernetes
// 1.31 to 1.37, which is not exported.
func listed(all devicemanager.ResourceDeviceInstances) (devices []*podresourcesapi.ContainerDevices) {
	for resource, instances := range all {
		for id, device := range instances {
			one := func(t *podresourcesapi.TopologyInfo) {
				devices = append(devices, &podresourcesapi.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}, Topology: t})
			}
			if device.GetTopology() == nil {
				one(nil)
			}
			for _, node := range device.GetTopology().GetNodes() {
				one(&podresourcesapi.TopologyInfo{Nodes: []*podresourcesapi.NUMANode{{ID: node.GetID()}}})
			}
		}
	}
	return devices
}
