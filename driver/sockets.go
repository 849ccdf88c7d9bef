package driver

import (
	"context"
	"errors"
	"path/filepath"

	"chandler.dev/discovery"
	"chandler.dev/internal/socket"
)

// sweepSockets removes the sockets of agents that were killed and did not return. Socket names are
// specific to a pod, so later agents do not replace them, and the kubelet would try to register
// them at each start.
func (d *Driver) sweepSockets(ctx context.Context) error {
	return errors.Join(
		socket.RemoveStale(ctx, filepath.Join(d.registryDir(), discovery.Domain+"-*reg.sock")),
		socket.RemoveStale(ctx, filepath.Join(d.dataDir(), "dra*.sock")),
	)
}
