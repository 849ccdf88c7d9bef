package sockets

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/internal/kubeletapi"
)

// register serves the plugin at a new socket and registers the plugin with the kubelet. Before, the
// kubelet must answer a probe, since a starting kubelet would remove the socket.
func (d *Directory) register(ctx context.Context, p *plugin) (registration, error) {
	if err := d.dir.probeKubelet(ctx); err != nil {
		return registration{}, unavailable{fmt.Errorf("register %s: %w", p.resource, err)}
	}
	// After the probe, this is the socket of a running kubelet. A killed kubelet leaves its socket
	// behind. Mistaking that socket for the next kubelet's would cause a second registration, which
	// ends the first stream. Kubelets up to 1.36 then lose both.
	kubelet := d.dir.kubeletInfo()
	e, err := d.dir.open(ctx, p)
	if err != nil {
		return registration{}, fmt.Errorf("serve %s: %w", p.resource, err)
	}
	if err := e.announceEndpoint(ctx); err != nil {
		e.close()
		return registration{}, fmt.Errorf("register %s with the kubelet at %s: %w", p.resource, d.dir.path(kubeletSocket), inWords(err))
	}
	d.mu.Lock()
	p.socket = e.path
	d.mu.Unlock()
	return registration{endpoint: e, kubelet: kubelet, registeredAt: time.Now()}, nil
}

// announceEndpoint registers the endpoint with the kubelet. The kubelet may use the endpoint before
// answering, and a closed endpoint would then reject pods. Therefore a running call gets some more
// time when the context ends.
func (e *endpoint) announceEndpoint(ctx context.Context) error {
	ended := ctx
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), registerTimeout)
	defer cancel()
	defer context.AfterFunc(ended, func() { time.AfterFunc(lastAnswer, cancel) })()
	options, err := e.plugin.server.GetDevicePluginOptions(ctx, &pluginapi.Empty{})
	if err != nil {
		return err
	}
	conn, err := kubeletapi.Dial(e.dir.path(kubeletSocket))
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = pluginapi.NewRegistrationClient(conn).Register(ctx, &pluginapi.RegisterRequest{
		Version:      pluginapi.Version,
		Endpoint:     filepath.Base(e.path),
		ResourceName: e.plugin.resource,
		Options:      options,
	})
	if status.Code(err) == codes.Unavailable {
		return unavailable{err}
	}
	return err
}

// inWords adds an explanation to errors of a registration from outside the kubelet's own code.
func inWords(err error) error {
	switch status.Code(err) {
	case codes.Unimplemented:
		return fmt.Errorf("the kubelet takes no device plugins of version %s: %w", pluginapi.Version, err)
	case codes.Canceled, codes.DeadlineExceeded:
		return fmt.Errorf("the kubelet does not answer: %w", err)
	}
	return err
}

// unavailable is an error due to a missing kubelet.
type unavailable struct{ error }

// Unwrap returns the wrapped error.
func (u unavailable) Unwrap() error { return u.error }

// retry computes the times of attempts. A new kubelet is tried at once.
type retry struct {
	delay       time.Duration
	next        time.Time
	kubelet     os.FileInfo // socket of the kubelet at the last attempt
	lastSuccess time.Time   // time of the last successful registration
}

// wait returns the time until the next attempt. A kubelet that ends a stream may be about to stop.
// Up to 1.36 it marks all devices of the resource unhealthy a moment later and stops its newest
// endpoint, which should not be the next one
// (pkg/kubelet/cm/devicemanager/plugin/v1beta1/client.go, Disconnect, in 1.25 to 1.36).
func (r *retry) wait(dir directory, lost *endpoint) time.Duration {
	if !sameSocket(r.kubelet, dir.kubeletInfo()) {
		return 0
	}
	next := r.next
	if lost != nil {
		if at := lost.lostAt.Load(); at != nil && at.Add(firstRetry).After(next) {
			next = at.Add(firstRetry)
		}
	}
	return time.Until(next)
}

// failed returns the time to wait after a failed attempt.
func (r *retry) failed(dir directory, err error) time.Duration {
	limit := maxRefused
	if errors.As(err, new(unavailable)) || errors.Is(err, errUnwritable) {
		limit = maxUnavailable
	}
	if kubelet := dir.kubeletInfo(); !sameSocket(r.kubelet, kubelet) {
		r.kubelet, r.delay = kubelet, firstRetry
	}
	wait := min(r.delay, limit)
	r.next = time.Now().Add(wait)
	r.delay = min(2*wait, limit)
	return wait
}

// recordSuccess slows down successful attempts in quick succession, since the kubelet drops these
// registrations again.
func (r *retry) recordSuccess(now registration) {
	if !sameSocket(r.kubelet, now.kubelet) || now.registeredAt.Sub(r.lastSuccess) > steadyAfter {
		r.delay = firstRetry
	}
	r.kubelet, r.lastSuccess = now.kubelet, now.registeredAt
	r.next = now.registeredAt.Add(r.delay)
	r.delay = min(2*r.delay, maxRefused)
}
