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

// Probe goes the kubelet's way: to the socket where the driver registers, and
// with a call for no claims to the one that is named there. It returns which of
// them did not answer before the context ended. An instance that waits to
// become the active one passes, and so does a driver that does not serve yet or
// not any more. Neither the API server nor the host is asked.
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

// registrarSocket is where the helper registers the driver (kubeletplugin,
// Start): at a socket of this pod's own where there is one.
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
