// Package socket removes the Unix sockets left behind by killed processes. The package creates no
// sockets.
package socket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// RemoveStale removes the sockets without a listener that match a pattern of [filepath.Glob].
// Served sockets and files of other types are kept.
func RemoveStale(ctx context.Context, pattern string) error {
	left, err := filepath.Glob(pattern)
	errs := []error{err}
	for _, path := range left {
		info, err := os.Lstat(path)
		if err != nil || info.Mode().Type() != fs.ModeSocket {
			continue
		}
		conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", path)
		if err == nil {
			errs = append(errs, conn.Close())
			continue
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			errs = append(errs, os.Remove(path))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove left-over sockets: %w", err)
	}
	return nil
}
