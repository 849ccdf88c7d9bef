package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"chandler.dev/discovery"
)

// sweepSockets removes the sockets of agents that were killed and never came
// back: each pod has names of its own, so no later one replaces them, and the
// kubelet would try to register them at each of its starts. What anybody still
// serves is left alone.
func (d *Driver) sweepSockets(ctx context.Context) error {
	var errs []error
	for _, pattern := range []string{
		filepath.Join(d.registryDir(), discovery.Domain+"-*reg.sock"),
		filepath.Join(d.dataDir(), "dra*.sock"),
	} {
		sockets, err := filepath.Glob(pattern)
		errs = append(errs, err)
		for _, socket := range sockets {
			errs = append(errs, removeUnserved(ctx, socket))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove left-over sockets: %w", err)
	}
	return nil
}

// removeUnserved removes a socket that nobody listens on.
func removeUnserved(ctx context.Context, socket string) error {
	connection, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", socket)
	if err == nil {
		return connection.Close()
	}
	if errors.Is(err, syscall.ECONNREFUSED) {
		return os.Remove(socket)
	}
	return nil
}
