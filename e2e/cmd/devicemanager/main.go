//go:build !cgo

// Command devicemanager is the part of a kubelet that device plugins meet: its own device manager, with its checkpoint,
// and its own PodResources API. It runs no containers. Pods are admitted, looked at and ended by lines of JSON on
// standard input, each of which is answered by one on standard output; the first one names pods that run already.
//
// The kubelet's directory of device plugins is a constant, so this program must have a mount namespace of its own. It
// has the directory that its first argument names as the kubelet's there.
//
// This file is built of other versions of Kubernetes too, by the module kube-1.31, which has it as a link. So it imports
// nothing of this module.
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

// A request has one of these.
type request struct {
	Running []*corev1.Pod `json:"running,omitempty"` // which run already
	Admit   *corev1.Pod   `json:"admit,omitempty"`   // which is to start
	Look    types.UID     `json:"look,omitempty"`    // the pod whose containers are to be told of
	End     types.UID     `json:"end,omitempty"`     // the pod that ends
	Ask     bool          `json:"ask,omitempty"`     // what can be given out
}

type answer struct {
	Error       string               `json:"error,omitempty"`
	Allocatable map[string]int64     `json:"allocatable,omitempty"`
	Containers  map[string]container `json:"containers,omitempty"`
}

// container is what a container has, and what the runtime is told whenever it starts it.
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
	if err := out.Encode(answer{}); err != nil { // to the first request
		return err
	}
	for {
		var r request
		if err := in.Decode(&r); err != nil {
			return nil // nobody asks any more
		}
		if err := out.Encode(k.do(ctx, r)); err != nil {
			return err
		}
	}
}

// root is the kubelet's directory.
const root = "/var/lib/kubelet"

// mountRoot has this process see a directory as the kubelet's. It may be anywhere, in what is hidden by that too.
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

// kubelet has the pods of the node.
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

// admit does with a pod what the kubelet does: the pod counts among the active ones before it is given devices, and no
// more if it cannot have them.
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

// look says what the containers of a pod have, and what they would be started with now.
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
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) { // of a kubelet before
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

// listed says devices as PodResources lists them (containerDevicesFromResourceDeviceInstances in
// pkg/kubelet/cm/container_manager.go of Kubernetes 1.31 to 1.37, which other packages cannot call).
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
