package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/telemetry"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver"
	"chandler.dev/internal/doctor"
)

// probeTimeout limits how long the agent waits for its own sockets. The kubelet's timeout for
// /healthz is longer.
const probeTimeout = 3 * time.Second

// handler serves /healthz, /readyz and /metrics.
func (a *agent) handler() http.Handler {
	mux := healthMux(a.Version, a.checkLive, a.checkReady)
	mux.Handle("GET /metrics", a.metrics.Handler(a.state(), a.ConfigError))
	return mux
}

// healthMux serves the result of live at /healthz and the result of ready at /readyz. Each response
// has the agent's version in its Server header. The response of an agent that is not ready has the
// reason in a header.
func healthMux(version string, live, ready func(context.Context) error) *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", serveCheck("alive", version, live))
	mux.HandleFunc("GET /readyz", serveCheck("ready", version, ready))
	return mux
}

// serveCheck serves the result of a check. It logs each result that differs from the last one,
// because the kubelet reports only the status code.
func serveCheck(what, version string, check func(context.Context) error) http.HandlerFunc {
	var mu sync.Mutex
	last := ""
	return func(w http.ResponseWriter, r *http.Request) {
		status, text := http.StatusOK, "ok"
		if err := check(r.Context()); err != nil {
			status, text = http.StatusServiceUnavailable, err.Error()
			if unready, is := errors.AsType[unreadyError](err); is {
				w.Header().Set(doctor.UnreadyHeader, string(unready.reason))
			}
		}
		mu.Lock()
		if text != last && r.Context().Err() == nil {
			last = text
			klog.FromContext(r.Context()).Info("Asked whether the agent is "+what, "answer", text)
		}
		mu.Unlock()
		w.Header().Set("Server", doctor.ServerName+version)
		w.WriteHeader(status)
		fmt.Fprintln(w, text)
	}
}

// checkLive returns nil while the agent's sockets respond to calls like the kubelet's. If they do
// not, a restart of the process helps. Faults outside the process do not fail the check.
func (a *agent) checkLive(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	return errors.Join(a.driver.Probe(ctx), a.Kubelet.DevicePlugins.Probe(ctx))
}

// checkReady returns nil once the kubelet has registered the driver or refused it, so that an agent
// which is being replaced may end. The new agent need not be active: it becomes active when the old
// agent has ended. An active agent must be able to read at least part of the host. An agent that
// started with an invalid configuration is not ready, so that a rolling upgrade stops there.
func (a *agent) checkReady(context.Context) error {
	if err := a.settings.stillWrong(); err != nil {
		return unreadyError{fmt.Errorf("the configuration is invalid: %w", err), doctor.UnreadyConfig}
	}
	if !a.withoutDRA.Load() && a.driver.Registration() == driver.Unanswered {
		return unreadyError{errors.New("the kubelet has not answered the registration of the DRA driver yet"), doctor.UnreadyRegistration}
	}
	return a.watch.checkRead(time.Now())
}

// unreadyError is the error of an agent that is not ready, with a reason that doctor recognizes.
type unreadyError struct {
	error
	reason doctor.UnreadyReason
}

// state returns the state of the agent for its metrics.
func (a *agent) state() telemetry.State {
	return telemetry.State{
		Node:      a.NodeName,
		Features:  a.driver.Publisher.Features,
		Prepared:  a.driver.PreparedClaims,
		Placed:    a.placedDevices.Load,
		View:      a.ledger.View,
		Listing:   a.cluster.LastListing,
		Published: a.driver.Publisher.CountPublished,
		Refusal:   a.driver.Publisher.Refusal,
		Registered: func() (is, known bool) {
			return a.driver.Registration() == driver.Accepted, !a.withoutDRA.Load()
		},
		Links: func(devices []rules.Offered) map[string]pci.Link { return a.links.Read(a.host, devices) },
	}
}
