package hostservice

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"chandler.dev/internal/hostservice/wire"
)

// Listen returns a listener on the socket in a directory, which only root can open. It waits while
// another process serves the directory, until the last thread of that process has ended, and the
// programs that inherited its lock. The caller must close the lock after the listener.
func Listen(ctx context.Context, dir string) (listener net.Listener, lock *os.File, err error) {
	lock, err = awaitLock(ctx, filepath.Join(dir, "lock"))
	if err != nil {
		return nil, nil, fmt.Errorf("wait for another process that serves the directory: %w", err)
	}
	name := filepath.Join(dir, wire.Socket)
	if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
		lock.Close()
		return nil, nil, fmt.Errorf("remove the socket of an earlier process: %w", err)
	}
	listener, err = new(net.ListenConfig).Listen(ctx, "unix", name)
	if err == nil {
		err = os.Chmod(name, 0o600)
	}
	if err != nil {
		lock.Close()
		return nil, nil, fmt.Errorf("listen: %w", err)
	}
	return listener, lock, nil
}

// awaitLock waits for a file's lock, which ends when the file and its copies are closed. The kernel
// closes the files of a killed process.
func awaitLock(ctx context.Context, name string) (*os.File, error) {
	file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		select {
		case <-ctx.Done():
			file.Close()
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
	return file, nil
}

// Serve answers requests on a listener until the context ends. It then waits for the responses to
// requests in progress, up to a limit.
func Serve(ctx context.Context, listener net.Listener, handler http.Handler, limit time.Duration) error {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second, ConnContext: func(ctx context.Context, connection net.Conn) context.Context {
		return context.WithValue(ctx, connectionKey{}, connection)
	}}
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ended)
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
		defer cancel()
		_ = server.Shutdown(ending) // the agent repeats unanswered requests to the next process
	})
	err := server.Serve(listener)
	if stop() {
		return err
	}
	<-ended
	return nil
}

// drainLimit is how long a service that ends waits for its requests. A write that takes longer
// continues until the kernel has ended it.
const drainLimit = 20 * time.Second

// Run serves a directory until the context ends. It creates the directory, which only root can
// read.
func Run(ctx context.Context, dir string, s *Server) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	listener, lock, err := Listen(ctx, dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	s.lock = lock
	stop := context.AfterFunc(ctx, s.end) // so that the end does not wait for programs
	defer stop()
	return Serve(ctx, listener, s.Handler(), drainLimit)
}
