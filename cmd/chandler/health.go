package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/driver"
)

// probeTimeout is how long the agent's own sockets have for an answer; the
// kubelet waits longer for that of /healthz.
const probeTimeout = 3 * time.Second

// serveHealth serves until the context ends.
func serveHealth(ctx context.Context, address string, handler http.Handler) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("serve health: %w", err)
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second}
	defer context.AfterFunc(ctx, func() { server.Close() })()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve health: %w", err)
	}
	return nil
}

// healthMux answers /healthz while live returns nil, and /readyz while ready
// does, else with what they return.
func healthMux(live, ready func(context.Context) error) *http.ServeMux {
	mux := http.NewServeMux()
	for pattern, check := range map[string]func(context.Context) error{"GET /healthz": live, "GET /readyz": ready} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := check(r.Context()); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			fmt.Fprintln(w, "ok")
		})
	}
	return mux
}

// checkLive returns nil while the kubelet's calls are answered, which a new
// process mends if they are not. What is wrong outside the process does not
// count. It is logged, since the kubelet only tells of the status.
func (p *parts) checkLive(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	err := errors.Join(p.driver.Probe(ctx), p.classic.Probe(ctx))
	if err != nil {
		klog.FromContext(ctx).Error(err, "The agent's own sockets do not answer")
	}
	return err
}

// checkReady returns nil once the kubelet knows where to call, so that an agent
// which this one replaces may end. That this one is active is not asked: it
// becomes so when the other has ended.
func (p *parts) checkReady(context.Context) error {
	if p.withoutDRA.Load() || p.driver.Registration() != driver.Unanswered {
		return nil
	}
	return errors.New("the kubelet has not answered the registration of the DRA driver yet")
}
