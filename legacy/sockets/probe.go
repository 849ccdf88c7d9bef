package sockets

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/internal/kubeletapi"
)

// Probe calls each registered plugin at its socket, and returns an error for each plugin without an
// answer before the context ended. A missing socket is not an error: a starting kubelet removes all
// sockets, and Serve soon creates a new one.
func (d *Directory) Probe(ctx context.Context) error {
	var errs []error
	for resource, socket := range d.RegisteredSockets() {
		if _, err := os.Lstat(socket); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := askOptions(ctx, socket); err != nil {
			errs = append(errs, fmt.Errorf("device plugin of %s at %s: %w", resource, socket, err))
		}
	}
	return errors.Join(errs...)
}

func askOptions(ctx context.Context, socket string) error {
	conn, err := kubeletapi.Dial(socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = pluginapi.NewDevicePluginClient(conn).GetDevicePluginOptions(ctx, &pluginapi.Empty{})
	return err
}
