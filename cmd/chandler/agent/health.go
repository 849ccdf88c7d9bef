package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/driver"
	"chandler.dev/internal/doctor"
)

// probeTimeout is how long the agent's own sockets have for an answer. The kubelet
// waits longer for the answer of /healthz.
const probeTimeout = 3 * time.Second

// handler answers /healthz, /readyz and /metrics.
func (a *agent) handler() http.Handler {
	mux := healthMux(a.Version, a.checkLive, a.checkReady)
	mux.Handle("GET /metrics", a.metrics.handler(a.state(), a.Wrong))
	return mux
}

// healthMux answers /healthz with the result of live, and /readyz with that of ready. Each answer
// says the version.
func healthMux(version string, live, ready func(context.Context) error) *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", answer("alive", version, live))
	mux.HandleFunc("GET /readyz", answer("ready", version, ready))
	return mux
}

// answer answers with the result of a check. It logs each answer that differs from the
// one before, since the kubelet only tells of the status.
func answer(what, version string, check func(context.Context) error) http.HandlerFunc {
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
		w.Header().Set("Server", doctor.ServerName+version)
		w.WriteHeader(status)
		fmt.Fprintln(w, text)
	}
}

// checkLive returns nil while the kubelet's calls are answered. If they are not, a new
// process mends that. Faults outside the process do not count.
func (a *agent) checkLive(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	return errors.Join(a.driver.Probe(ctx), a.Kubelet.DevicePlugins.Probe(ctx))
}

// checkReady returns nil once the kubelet knows where to call, so that an agent
// which this one replaces may end. That this one is active is not asked: it
// becomes so when the other has ended. The active one must be able to read
// something of the host. An agent that starts with a wrong configuration is not ready,
// so that an upgrade stops there.
func (a *agent) checkReady(context.Context) error {
	if err := a.stillWrong(); err != nil {
		return fmt.Errorf("the configuration is wrong: %w", err)
	}
	if !a.withoutDRA.Load() && a.driver.Registration() == driver.Unanswered {
		return errors.New("the kubelet has not answered the registration of the DRA driver yet")
	}
	return a.checkRead(time.Now())
}

// readPatience is how long it may take until something of the host was read.
const readPatience = time.Minute

// checkRead returns nil unless nothing of the host could be read for long.
func (a *agent) checkRead(now time.Time) error {
	begun := a.watching.Load()
	if begun == nil || a.settled.Load() != nil || now.Sub(*begun) <= readPatience {
		return nil
	}
	return fmt.Errorf("nothing of the host could be read since %s", begun.Format(time.RFC3339))
}
