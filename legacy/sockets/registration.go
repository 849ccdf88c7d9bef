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

// register serves the plugin at a new socket and tells the kubelet of it.
// Nothing is made before the kubelet answers: one that starts would remove the
// socket again.
func (d *Directory) register(ctx context.Context, p *plugin) (registration, error) {
	if err := d.dir.probe(ctx); err != nil {
		return registration{}, unavailable{fmt.Errorf("register %s: %w", p.resource, err)}
	}
	// Only now is it the socket of a kubelet that lives. One that was killed leaves its
	// own, and who takes that for its follower's would register there once more and end
	// the first stream, by which kubelets to 1.36 lose both.
	kubelet := d.dir.kubelet()
	e, err := d.dir.open(ctx, p)
	if err != nil {
		return registration{}, fmt.Errorf("serve %s: %w", p.resource, err)
	}
	if err := e.announce(ctx); err != nil {
		e.close()
		return registration{}, fmt.Errorf("register %s with the kubelet at %s: %w", p.resource, d.dir.path(kubeletSocket), inWords(err))
	}
	d.mu.Lock()
	p.socket = e.path
	d.mu.Unlock()
	return registration{endpoint: e, kubelet: kubelet, at: time.Now()}, nil
}

// announce tells the kubelet of the endpoint. The kubelet may have taken it before
// it answers, and pods would be rejected if it were closed then. So a call that has
// begun gets a moment more when the context ends.
func (e *endpoint) announce(ctx context.Context) error {
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

// inWords says what an answer to a registration means that is none of a kubelet's
// own words.
func inWords(err error) error {
	switch status.Code(err) {
	case codes.Unimplemented:
		return fmt.Errorf("the kubelet takes no device plugins of version %s: %w", pluginapi.Version, err)
	case codes.Canceled, codes.DeadlineExceeded:
		return fmt.Errorf("the kubelet does not answer: %w", err)
	}
	return err
}

// unavailable is that there is no kubelet to refuse anything.
type unavailable struct{ error }

// Unwrap returns what went wrong.
func (u unavailable) Unwrap() error { return u.error }

// retry says when to try again. A kubelet that is new is tried at once.
type retry struct {
	delay   time.Duration
	next    time.Time
	kubelet os.FileInfo // that of the last attempt
	taken   time.Time   // when a registration was last taken
}

// wait returns how long to wait before the next attempt. A kubelet that ends a
// stream may be about to end itself. To 1.36 it marks all devices of the resource
// unhealthy a moment later, and its newest endpoint stopped, which should not be
// the next one (pkg/kubelet/cm/devicemanager/plugin/v1beta1/client.go, Disconnect,
// in 1.25 to 1.36).
func (r *retry) wait(dir directory, lost *endpoint) time.Duration {
	if !sameSocket(r.kubelet, dir.kubelet()) {
		return 0
	}
	next := r.next
	if lost != nil {
		if at := lost.lost.Load(); at != nil && at.Add(firstRetry).After(next) {
			next = at.Add(firstRetry)
		}
	}
	return time.Until(next)
}

// failed returns how long to wait after an attempt that was not taken.
func (r *retry) failed(dir directory, err error) time.Duration {
	limit := maxRefused
	if errors.As(err, new(unavailable)) || errors.Is(err, errUnwritable) {
		limit = maxUnavailable
	}
	if kubelet := dir.kubelet(); !sameSocket(r.kubelet, kubelet) {
		r.kubelet, r.delay = kubelet, firstRetry
	}
	wait := min(r.delay, limit)
	r.next = time.Now().Add(wait)
	r.delay = min(2*wait, limit)
	return wait
}

// succeeded makes the attempts rarer that follow each other closely all the
// same, since the kubelet drops what it takes.
func (r *retry) succeeded(now registration) {
	if !sameSocket(r.kubelet, now.kubelet) || now.at.Sub(r.taken) > steady {
		r.delay = firstRetry
	}
	r.kubelet, r.taken = now.kubelet, now.at
	r.next = now.at.Add(r.delay)
	r.delay = min(2*r.delay, maxRefused)
}
