package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"chandler.dev/driver"
)

// serveHealth answers /healthz while the process works, and /readyz once ready
// returns nil, else with what it returns.
func serveHealth(ctx context.Context, address string, ready func() error) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("serve health: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	defer context.AfterFunc(ctx, func() { server.Close() })()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve health: %w", err)
	}
	return nil
}

// checkReady returns nil once the kubelet knows where to call, so that an agent
// which this one replaces may end. That this one is active is not asked: it
// becomes so when the other has ended.
func (p *parts) checkReady() error {
	if p.withoutDRA.Load() || p.driver.Registration() != driver.Unanswered {
		return nil
	}
	return errors.New("the kubelet has not answered the registration of the DRA driver yet")
}
