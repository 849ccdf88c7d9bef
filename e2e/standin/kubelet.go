package standin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// PodUID is the UID of the agent's pod, default/agent.
const PodUID = "uid"

// patience is the time limit of each call of the agent. It is long because the machine is emulated.
const patience = time.Minute

// A Kubelet accepts the registrations of device plugins, calls the registered plugins and drivers,
// and lists pods with their devices.
type Kubelet struct {
	// Listed is called with each list of devices. Optional.
	Listed func(resource string, devices []*pluginapi.Device)

	root string

	mu      sync.Mutex
	pods    []*podresourcesapi.PodResources
	plugins map[string]plugin // by resource
}

type plugin struct {
	pluginapi.DevicePluginClient

	offered int
}

// Serve serves in the kubelet's directory. It first removes the sockets of earlier boots, as a
// starting kubelet does (Start in pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go, in 1.31 to
// 1.37).
func (k *Kubelet) Serve(root string) error {
	k.root, k.plugins = root, make(map[string]plugin)
	k.pods = append(k.pods, &podresourcesapi.PodResources{Namespace: "default", Name: "agent"})
	server := grpc.NewServer()
	pluginapi.RegisterRegistrationServer(server, registrar{kubelet: k})
	podresourcesapi.RegisterPodResourcesListerServer(server, lister{kubelet: k})
	for _, socket := range []string{"device-plugins/kubelet.sock", "pod-resources/kubelet.sock"} {
		socket = filepath.Join(root, socket)
		if err := errors.Join(os.RemoveAll(filepath.Dir(socket)), os.MkdirAll(filepath.Dir(socket), 0o755)); err != nil {
			return err
		}
		listener, err := net.Listen("unix", socket)
		if err != nil {
			return err
		}
		go func() { _ = server.Serve(listener) }() // until the machine ends
	}
	return nil
}

// RunPod adds a pod with one container and devices of a resource to the list of pods.
func (k *Kubelet) RunPod(name, resource string, ids ...string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods = append(k.pods, &podresourcesapi.PodResources{
		Namespace: "default", Name: name,
		Containers: []*podresourcesapi.ContainerResources{{
			Name: "main", Devices: []*podresourcesapi.ContainerDevices{{ResourceName: resource, DeviceIds: ids}},
		}},
	})
}

// EndPod removes a pod from the list of pods.
func (k *Kubelet) EndPod(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods = slices.DeleteFunc(k.pods, func(pod *podresourcesapi.PodResources) bool { return pod.GetName() == name })
}

// Plugin returns the plugin of a resource, or an error while the plugin lists no devices.
func (k *Kubelet) Plugin(resource string) (pluginapi.DevicePluginClient, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.plugins[resource].offered == 0 {
		return nil, errors.New("none are offered")
	}
	return k.plugins[resource], nil
}

// Allocate allocates devices of a resource to a container.
func (k *Kubelet) Allocate(ctx context.Context, resource string, ids ...string) error {
	plugin, err := k.Plugin(resource)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_, err = plugin.Allocate(ctx, &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}})
	return err
}

// Register registers the agent's driver by its registration socket, as the kubelet does, and
// returns a client of the driver.
func (k *Kubelet) Register(ctx context.Context) (drapb.DRAPluginClient, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := dial(filepath.Join(k.root, "plugins_registry/chandler.dev-"+PodUID+"-reg.sock"))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	client := registerapi.NewRegistrationClient(conn)
	info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return nil, err
	}
	if _, err := client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		return nil, err
	}
	endpoint, err := dial(info.GetEndpoint())
	return drapb.NewDRAPluginClient(endpoint), err
}

// A Refusal is the agent's error for a claim that the agent does not prepare.
type Refusal struct{ text string }

// Error implements error.
func (r *Refusal) Error() string { return r.text }

// Prepare prepares a claim of the API.
func Prepare(ctx context.Context, driver drapb.DRAPluginClient, claim string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	answer, err := driver.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{{Namespace: "n", Name: claim, Uid: claim}}})
	if err != nil {
		return fmt.Errorf("prepare %s: %w", claim, err)
	}
	if text := answer.GetClaims()[claim].GetError(); text != "" {
		return fmt.Errorf("prepare %s: %w", claim, &Refusal{text})
	}
	return nil
}

// Unprepare unprepares a claim of the API.
func Unprepare(ctx context.Context, driver drapb.DRAPluginClient, claim string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	answer, err := driver.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{{Namespace: "n", Name: claim, Uid: claim}}})
	if err != nil {
		return fmt.Errorf("unprepare %s: %w", claim, err)
	}
	if text := answer.GetClaims()[claim].GetError(); text != "" {
		return fmt.Errorf("unprepare %s: %s", claim, text)
	}
	return nil
}

func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// registrar implements the kubelet's side of the device plugin API.
type registrar struct {
	pluginapi.UnimplementedRegistrationServer

	kubelet *Kubelet
}

// Register implements the API.
func (r registrar) Register(_ context.Context, request *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	go r.kubelet.follow(request.GetResourceName(), filepath.Join(r.kubelet.root, "device-plugins", request.GetEndpoint()))
	return &pluginapi.Empty{}, nil
}

// follow receives the lists of a plugin until the plugin ends.
func (k *Kubelet) follow(resource, endpoint string) {
	conn, err := dial(endpoint)
	if err != nil {
		return
	}
	defer conn.Close()
	client := pluginapi.NewDevicePluginClient(conn)
	stream, err := client.ListAndWatch(context.Background(), &pluginapi.Empty{})
	for err == nil {
		var list *pluginapi.ListAndWatchResponse
		if list, err = stream.Recv(); err == nil {
			if k.Listed != nil {
				k.Listed(resource, list.GetDevices())
			}
			k.mu.Lock()
			k.plugins[resource] = plugin{client, len(list.GetDevices())}
			k.mu.Unlock()
		}
	}
}

// lister implements the PodResources API with the agent's own pod and the running pods.
type lister struct {
	podresourcesapi.UnimplementedPodResourcesListerServer

	kubelet *Kubelet
}

// List implements the API.
func (l lister) List(context.Context, *podresourcesapi.ListPodResourcesRequest) (*podresourcesapi.ListPodResourcesResponse, error) {
	l.kubelet.mu.Lock()
	defer l.kubelet.mu.Unlock()
	return &podresourcesapi.ListPodResourcesResponse{PodResources: slices.Clone(l.kubelet.pods)}, nil
}
