package sharing

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"

	"chandler.dev/internal/hostservice"
	"chandler.dev/internal/hostservice/wire"
)

// Serve follows the agent's orders until the context ends, and then ends all daemons. It waits
// while another process serves the same directory.
func Serve(ctx context.Context, config Config) error {
	if err := os.MkdirAll(config.Dir, 0o711); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	listener, lock, err := hostservice.Listen(ctx, config.Dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	k, err := New(config)
	if err != nil {
		listener.Close()
		return err
	}
	stopped := make(chan struct{})
	context.AfterFunc(ctx, func() { k.Stop(context.WithoutCancel(ctx)); close(stopped) })
	if err := hostservice.Serve(ctx, listener, k.Handler(), k.config.Begin); err != nil {
		return err
	}
	<-stopped
	return nil
}

// Handler answers the requests of package wire.
func (k *Supervisor) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+wire.ClaimsPath, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(k.Claims()) // the client may be gone
	})
	mux.HandleFunc("PUT "+wire.ClaimsPath+"/{uid}", func(w http.ResponseWriter, r *http.Request) {
		var order wire.Order
		decoder := json.NewDecoder(io.LimitReader(r.Body, 64<<10))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&order); err != nil {
			http.Error(w, fmt.Sprintf("order: %v", err), http.StatusBadRequest)
			return
		}
		writeAnswer(w, k.Begin(r.Context(), r.PathValue("uid"), order))
	})
	mux.HandleFunc("DELETE "+wire.ClaimsPath+"/{uid}", func(w http.ResponseWriter, r *http.Request) {
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
