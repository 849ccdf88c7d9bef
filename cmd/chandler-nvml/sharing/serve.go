package sharing

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"chandler.dev/internal/sharing/wire"
)

// Serve follows the agent's orders until the context ends, and then ends all daemons. It waits
// while another process serves the same directory.
func Serve(ctx context.Context, config Config) error {
	if err := os.MkdirAll(config.Dir, 0o711); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	unlock, err := lock(ctx, filepath.Join(config.Dir, "lock"))
	if err != nil {
		return err
	}
	defer unlock()
	k, err := New(config)
	if err != nil {
		return err
	}
	name := filepath.Join(config.Dir, wire.Socket)
	if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the socket of an earlier process: %w", err)
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "unix", name)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	if err := os.Chmod(name, 0o600); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	server := &http.Server{Handler: k.Handler(), ReadHeaderTimeout: 5 * time.Second}
	context.AfterFunc(ctx, func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), k.config.Begin)
		defer cancel()
		_ = server.Shutdown(ending) // the agent repeats unanswered orders to the next process
	})
	err = server.Serve(listener)
	if ctx.Err() == nil {
		return err
	}
	k.Stop(context.WithoutCancel(ctx))
	return nil
}

// lock waits for a file's lock. The kernel releases the lock of a killed process.
func lock(ctx context.Context, name string) (unlock func(), err error) {
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
	return func() { file.Close() }, nil
}

// Handler answers the requests of package wire.
func (k *Supervisor) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+wire.Path, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(k.Claims()) // the client may be gone
	})
	mux.HandleFunc("PUT "+wire.Path+"/{uid}", func(w http.ResponseWriter, r *http.Request) {
		var order wire.Order
		decoder := json.NewDecoder(io.LimitReader(r.Body, 64<<10))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&order); err != nil {
			http.Error(w, fmt.Sprintf("order: %v", err), http.StatusBadRequest)
			return
		}
		writeAnswer(w, k.Begin(r.Context(), r.PathValue("uid"), order))
	})
	mux.HandleFunc("DELETE "+wire.Path+"/{uid}", func(w http.ResponseWriter, r *http.Request) {
		writeAnswer(w, k.End(context.WithoutCancel(r.Context()), r.PathValue("uid")))
	})
	return mux
}

func writeAnswer(w http.ResponseWriter, err error) {
	switch {
	case err == nil:
		w.WriteHeader(http.StatusNoContent)
	case errors.Is(err, errOrder):
		http.Error(w, err.Error(), http.StatusBadRequest)
	case errors.Is(err, errStopping):
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
	default:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}
