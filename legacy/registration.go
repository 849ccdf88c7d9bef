package legacy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/internal/kubeletapi"
)

const (
	firstRetry     = 100 * time.Millisecond
	maxUnavailable = 800 * time.Millisecond // between attempts while the kubelet is not there
	maxRefused     = 30 * time.Second       // between attempts while it refuses, or drops what it took
	lookInterval   = time.Second            // between looks at what inotify may not have told

	// registerTimeout is longer than the kubelet takes to give up on reaching
	// the plugin while it registers it (plugin/v1beta1/client.go, dial).
	registerTimeout = 15 * time.Second

	// steady is how long a registration lasts that the kubelet did not drop.
	steady = 10 * time.Second
)

// registration is an endpoint that the kubelet has taken.
type registration struct {
	endpoint *endpoint
	kubelet  os.FileInfo // the socket of the kubelet that has
	at       time.Time
}

// run keeps the server registered with whatever kubelet there is until the
// context ends, and returns the endpoint that it has then, which the caller must
// close. It says nothing to the kubelet at the end: the next instance takes over
// what pods hold.
func (s *server) run(ctx context.Context, dir directory) (*endpoint, error) {
	logger := klog.FromContext(ctx)
	if err := dir.check(); errors.Is(err, errUnwritable) {
		return nil, err
	}
	var current registration
	defer s.socket.Store(nil)
	again := retry{delay: firstRetry}
	lastError := ""
	for {
		wait := lookInterval
		if reason := current.stale(dir); reason != "" {
			if wait = again.wait(dir, current.endpoint); wait <= 0 {
				following, err := s.register(ctx, dir)
				switch {
				case errors.Is(err, errUnwritable):
					return current.endpoint, err
				case err != nil:
					if ctx.Err() == nil && err.Error() != lastError {
						lastError = err.Error()
						logger.Info("Device plugin waits for the kubelet", "resource", s.resource, "reason", lastError)
					}
					wait = again.failed(dir, err)
				default:
					current.endpoint.close()
					current, lastError, wait = following, "", lookInterval
					again.succeeded(current)
					logger.Info("Device plugin registered", "resource", s.resource, "socket", current.endpoint.path, "reason", reason)
				}
			}
		}
		select {
		case <-ctx.Done():
			return current.endpoint, nil
		case <-s.wake:
		case <-time.After(wait):
		}
	}
}

// stale says why the registration is no longer one, "" if it is.
func (r registration) stale(dir directory) string {
	if r.endpoint == nil {
		return "new"
	}
	if !sameSocket(r.kubelet, dir.kubelet()) {
		return "the kubelet has restarted"
	}
	if r.endpoint.lost.Load() != nil {
		return "the kubelet has ended the stream"
	}
	if _, err := os.Lstat(r.endpoint.path); errors.Is(err, os.ErrNotExist) {
		return "the socket has vanished"
	}
	return ""
}

// register serves at a new socket and tells the kubelet of it. Nothing is made
// before the kubelet answers: one that starts would remove it again.
func (s *server) register(ctx context.Context, dir directory) (registration, error) {
	kubelet := dir.kubelet()
	if err := dir.probe(ctx); err != nil {
		return registration{}, unavailable{err}
	}
	e, err := s.open(ctx, dir)
	if err != nil {
		return registration{}, fmt.Errorf("serve %s: %w", s.resource, err)
	}
	if err := e.announce(ctx, dir.path(kubeletSocket)); err != nil {
		e.close()
		return registration{}, fmt.Errorf("register %s: %w", s.resource, err)
	}
	s.socket.Store(&e.path)
	return registration{e, kubelet, time.Now()}, nil
}

// announce tells the kubelet of the endpoint.
func (e *endpoint) announce(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	conn, err := kubeletapi.Dial(socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = pluginapi.NewRegistrationClient(conn).Register(ctx, &pluginapi.RegisterRequest{
		Version:      pluginapi.Version,
		Endpoint:     filepath.Base(e.path),
		ResourceName: e.resource,
		Options:      pluginOptions(),
	})
	if status.Code(err) == codes.Unavailable {
		return unavailable{err}
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
// stream may be about to end itself.
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
	if errors.As(err, new(unavailable)) {
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
