package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
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
	mux.HandleFunc("GET /healthz", answer("alive", live))
	mux.HandleFunc("GET /readyz", answer("ready", ready))
	return mux
}

// answer answers with what a check returns. It logs answers that differ from the
// one before, since the kubelet only tells of their status.
func answer(what string, check func(context.Context) error) http.HandlerFunc {
	var mu sync.Mutex
	last := ""
	return func(w http.ResponseWriter, r *http.Request) {
		status, text := http.StatusOK, "ok"
		if err := check(r.Context()); err != nil {
			status, text = http.StatusServiceUnavailable, err.Error()
		}
		mu.Lock()
		if text != last && r.Context().Err() == nil {
			last = text
			klog.FromContext(r.Context()).Info("Asked whether the agent is "+what, "answer", text)
		}
		mu.Unlock()
		w.WriteHeader(status)
		fmt.Fprintln(w, text)
	}
}

// checkLive returns nil while the kubelet's calls are answered, which a new
// process mends if they are not. What is wrong outside the process does not
// count.
func (p *parts) checkLive(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	return errors.Join(p.driver.Probe(ctx), p.classic.Probe(ctx))
}

// checkReady returns nil once the kubelet knows where to call, so that an agent
// which this one replaces may end. That this one is active is not asked: it
// becomes so when the other has ended. The active one must be able to look at
// the host: if it is not, a new process would not be either.
func (p *parts) checkReady(context.Context) error {
	if !p.withoutDRA.Load() && p.driver.Registration() == driver.Unanswered {
		return errors.New("the kubelet has not answered the registration of the DRA driver yet")
	}
	return p.checkScan(time.Now())
}

// scanPatience is how much longer than the interval between scans it may take
// until one has ended.
const scanPatience = time.Minute

// checkScan returns nil unless the scan that is due has long not ended.
func (p *parts) checkScan(now time.Time) error {
	last, what := p.lastScan(), "no scan of the host has ended since"
	if begun := p.watching.Load(); last.IsZero() && begun != nil {
		last, what = *begun, "the first scan of the host has not ended since"
	}
	if last.IsZero() || now.Sub(last) <= p.options.rescanInterval+scanPatience {
		return nil
	}
	return fmt.Errorf("%s %s", what, last.Format(time.RFC3339))
}
