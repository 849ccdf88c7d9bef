package driver

import (
	"context"
	"fmt"
	"path/filepath"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"chandler.dev/discovery"
	"chandler.dev/internal/kubeletapi"
)

// Probe connects to the driver like the kubelet: to the registration socket, and then with an empty
// call to the endpoint named there. It returns an error if one of them does not answer before the
// context ends. Probe succeeds if the driver waits to become the active instance, or is not
// serving. It contacts neither the API server nor the host.
func (d *Driver) Probe(ctx context.Context) error {
	if !d.serving.Load() {
		return nil
	}
	registrar := d.registrarSocket()
	info, err := getInfo(ctx, registrar)
	if err != nil {
		return fmt.Errorf("DRA registration at %s: %w", registrar, err)
	}
	if err := prepareNothing(ctx, info.Endpoint); err != nil {
		return fmt.Errorf("DRA calls at %s: %w", info.Endpoint, err)
	}
	return nil
}

// registrarSocket is the path of the helper's registration socket (kubeletplugin, Start). With a
// PodUID, it is specific to the pod.
func (d *Driver) registrarSocket() string {
	name := discovery.Domain + "-reg.sock"
	if uid := d.config.PodUID; uid != "" {
		name = kubeletplugin.RollingUpdateRegistrarSocketFile(d.registryDir(), discovery.Domain, uid)
	}
	return filepath.Join(d.registryDir(), name)
}

func getInfo(ctx context.Context, socket string) (*registerapi.PluginInfo, error) {
	conn, err := kubeletapi.Dial(socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{})
}

func prepareNothing(ctx context.Context, socket string) error {
	conn, err := kubeletapi.Dial(socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = drapb.NewDRAPluginClient(conn).NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{})
	return err
}
