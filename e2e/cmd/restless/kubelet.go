package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
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

// resource is that of the GPUs.
const resource = "amd.com/gpu"

func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// register registers the agent's driver, as the kubelet does when it finds its socket, and returns how it is called.
func (n *node) register(ctx context.Context) (calls drapb.DRAPluginClient, err error) {
	err = n.until(ctx, "the driver is registered", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		conn, err := dial(filepath.Join(n.disk, "plugins_registry/chandler.dev-uid-reg.sock"))
		if err != nil {
			return err
		}
		defer conn.Close()
		client := registerapi.NewRegistrationClient(conn)
		info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
		if err != nil {
			return err
		}
		if _, err := client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
			return err
		}
		endpoint, err := dial(info.GetEndpoint())
		calls = drapb.NewDRAPluginClient(endpoint)
		return err
	})
	return calls, err
}

// A kubelet takes the registrations of device plugins, and says what pods have.
type kubelet struct {
	pluginapi.UnimplementedRegistrationServer
	podresourcesapi.UnimplementedPodResourcesListerServer

	dir     string
	had     []string // IDs that were allocated in earlier boots
	mu      sync.Mutex
	client  pluginapi.DevicePluginClient // of the plugin of the GPUs
	offered int
}

// newKubelet serves in the kubelet's directory. Sockets that are there are of an earlier boot; a kubelet that starts
// removes them (Start in pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go, in 1.31 to 1.37).
func newKubelet(root string, j *journal) (*kubelet, error) {
	k := &kubelet{dir: filepath.Join(root, "device-plugins"), had: slices.Sorted(maps.Keys(j.allocated))}
	server := grpc.NewServer()
	pluginapi.RegisterRegistrationServer(server, k)
	podresourcesapi.RegisterPodResourcesListerServer(server, k)
	for _, socket := range []string{"device-plugins/kubelet.sock", "pod-resources/kubelet.sock"} {
		socket = filepath.Join(root, socket)
		if err := errors.Join(os.RemoveAll(filepath.Dir(socket)), os.MkdirAll(filepath.Dir(socket), 0o755)); err != nil {
			return nil, err
		}
		listener, err := net.Listen("unix", socket)
		if err != nil {
			return nil, err
		}
		go func() { _ = server.Serve(listener) }() // until the machine ends
	}
	return k, nil
}

// List implements the PodResources API: the agent's own pod, and one for each device that was allocated. It says nothing
// of devices that were allocated since it started, as a kubelet that has not yet started their pod.
func (k *kubelet) List(context.Context, *podresourcesapi.ListPodResourcesRequest) (*podresourcesapi.ListPodResourcesResponse, error) {
	list := &podresourcesapi.ListPodResourcesResponse{PodResources: []*podresourcesapi.PodResources{{Namespace: "default", Name: "agent"}}}
	for i, id := range k.had {
		list.PodResources = append(list.PodResources, &podresourcesapi.PodResources{
			Namespace: "default", Name: fmt.Sprint("pod-", i),
			Containers: []*podresourcesapi.ContainerResources{{
				Name: "main", Devices: []*podresourcesapi.ContainerDevices{{ResourceName: resource, DeviceIds: []string{id}}},
			}},
		})
	}
	return list, nil
}

// Register implements the kubelet's part of the device-plugin API.
func (k *kubelet) Register(_ context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	if r.GetResourceName() == resource {
		go k.follow(filepath.Join(k.dir, r.GetEndpoint()))
	}
	return &pluginapi.Empty{}, nil
}

// follow follows the list of a plugin until the plugin ends.
func (k *kubelet) follow(endpoint string) {
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
			k.mu.Lock()
			k.client, k.offered = client, len(list.GetDevices())
			k.mu.Unlock()
		}
	}
}

// plugin returns the plugin of the GPUs once it offers some.
func (k *kubelet) plugin() (pluginapi.DevicePluginClient, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.offered == 0 {
		return nil, errors.New("none are offered")
	}
	return k.client, nil
}

// allocate asks for one device for a container.
func allocate(ctx context.Context, plugin pluginapi.DevicePluginClient, id string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		_, err := plugin.Allocate(ctx, &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{id}}}})
		if err == nil || ctx.Err() != nil {
			return err
		}
		fmt.Println("not yet:", err)
		time.Sleep(100 * time.Millisecond)
	}
}
