package takeover

import (
	"context"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// vendor is a fake of the replaced plugin. It lists the plugin's IDs, prefers the IDs of the row's
// pod, and returns the same edits as the plugin.
type vendor struct {
	pluginapi.UnimplementedDevicePluginServer
	row  row
	ends chan struct{}
}

// startVendor starts the plugin and registers it with the kubelet. The function end stops the
// plugin.
func startVendor(t *testing.T, r row, dir string) (end func()) {
	t.Helper()
	v := &vendor{row: r, ends: make(chan struct{})}
	listener, err := net.Listen("unix", filepath.Join(dir, "vendor.sock"))
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, v)
	go func() { _ = server.Serve(listener) }()
	conn, err := grpc.NewClient("unix://"+filepath.Join(dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = pluginapi.NewRegistrationClient(conn).Register(t.Context(), &pluginapi.RegisterRequest{
		Version: pluginapi.Version, Endpoint: "vendor.sock", ResourceName: r.resource,
		Options: &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		close(v.ends)
		server.Stop()
	}
}

func (v *vendor) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

func (v *vendor) ListAndWatch(_ *pluginapi.Empty, to grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	list := &pluginapi.ListAndWatchResponse{}
	for _, id := range v.row.ids {
		list.Devices = append(list.Devices, &pluginapi.Device{ID: id, Health: pluginapi.Healthy})
	}
	if err := to.Send(list); err != nil {
		return err
	}
	<-v.ends
	return nil
}

func (v *vendor) GetPreferredAllocation(context.Context, *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	return &pluginapi.PreferredAllocationResponse{ContainerResponses: []*pluginapi.ContainerPreferredAllocationResponse{{DeviceIDs: v.row.held}}}, nil
}

func (v *vendor) Allocate(context.Context, *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	r := &pluginapi.ContainerAllocateResponse{Envs: v.row.env, Annotations: v.row.annotations}
	for _, node := range slices.Concat(v.row.own, v.row.common) {
		r.Devices = append(r.Devices, &pluginapi.DeviceSpec{ContainerPath: node, HostPath: node, Permissions: "rw"})
	}
	for _, mount := range v.row.mounts {
		host, container, _ := strings.Cut(mount, " at ")
		r.Mounts = append(r.Mounts, &pluginapi.Mount{HostPath: host, ContainerPath: container, ReadOnly: true})
	}
	return &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{r}}, nil
}
