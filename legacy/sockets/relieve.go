package sockets

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
)

const (
	// maxRelief is how long earlier endpoints of other instances may go on.
	maxRelief = 30 * time.Second

	othersInterval = 100 * time.Millisecond

	// settled is how long the kubelet may take to notice the end of a stream.
	settled = time.Second
)

// errRefused fails a registration that is meant to.
var errRefused = status.Error(codes.Unavailable, "this registration is meant to fail: it has the kubelet forget the one before")

// succeed registers the plugin in place of an earlier registration of this
// instance, if there is one, and of those of instances before.
func (d *Directory) succeed(ctx context.Context, p *plugin, before registration, gone <-chan struct{}) (registration, error) {
	now, err := d.register(ctx, p)
	if err != nil {
		return now, err
	}
	var own []*endpoint // that the kubelet still streams from
	for _, e := range before.endpoints() {
		if e.streams() && sameSocket(before.kubelet, now.kubelet) {
			own = append(own, e)
		} else {
			e.close()
		}
	}
	// A lost endpoint does not stream. The one that was kept beside it is kept on.
	if len(own) == 1 && own[0] == before.kept && len(d.dir.others(ctx, now.endpoint, own)) == 0 {
		now.kept = before.kept
		now.kept.silence(now.endpoint)
		return now, nil
	}
	return d.relieve(ctx, p, now, own, gone), nil
}

// relieve lets earlier endpoints of the resource end without a moment in which the
// kubelet has no device of it.
//
// To 1.36 the kubelet knows the plugin of a resource by the resource's name alone.
// When any stream of it ends, it disconnects whichever plugin has the name by
// then, and takes all devices for unhealthy (pkg/kubelet/cm/devicemanager/plugin/
// v1beta1/handler.go, runClient, in 1.25 to 1.36). A registration that fails takes
// the name away from the plugin that has it, and nothing else (connectClient,
// there). The end of a stream has no effect then. The plugin must have the name
// again afterwards, or its own end would have none either. So it is registered
// twice, and the first stream has to last as long as the second.
//
// From 1.37 on the kubelet knows plugins by name and socket, and calls any of those
// it has: all this changes nothing there.
func (d *Directory) relieve(ctx context.Context, p *plugin, now registration, own []*endpoint, gone <-chan struct{}) registration {
	if len(own) == 0 && len(d.dir.others(ctx, now.endpoint, nil)) == 0 {
		return now
	}
	logger := klog.FromContext(ctx)
	if err := d.disown(ctx, p); err != nil {
		logger.Info("The kubelet may have no devices for a moment", "resource", p.resource, "reason", err.Error())
	}
	for _, e := range own {
		e.close()
	}
	wait := func(how time.Duration) bool {
		select {
		case <-ctx.Done():
		case <-gone:
		case <-now.endpoint.closing.Done():
		case <-time.After(how):
			return now.endpoint.lost.Load() == nil && sameSocket(now.kubelet, d.dir.kubelet())
		}
		return false
	}
	for end := time.Now().Add(maxRelief); time.Now().Before(end) && len(d.dir.others(ctx, now.endpoint, nil)) > 0; {
		if !wait(othersInterval) {
			return now
		}
	}
	if !wait(settled) {
		return now
	}
	last, err := d.register(ctx, p)
	if err != nil {
		logger.Info("The kubelet would not notice if this instance ended", "resource", p.resource, "reason", err.Error())
		return now
	}
	select {
	case <-last.endpoint.watched:
	case <-ctx.Done():
	case <-time.After(d.patience):
	}
	last.kept = now.endpoint
	last.kept.silence(last.endpoint)
	return last
}

// disown has the kubelet forget which plugin has the name of a resource, by a
// registration that fails. Its socket is none that other instances look for.
func (d *Directory) disown(ctx context.Context, p *plugin) error {
	e, err := d.dir.serve(ctx, p, &endpoint{refuses: true}, nobody)
	if err != nil {
		return err
	}
	defer e.close()
	err = e.announce(ctx)
	if err == nil {
		return errors.New("the kubelet takes a registration that should fail")
	}
	if status.Code(err) == codes.Unknown { // its own refusal, with what it was answered
		return nil
	}
	return err
}

// nobody is in place of a resource, and cannot be one.
const nobody = "_"

// others returns the sockets of other endpoints of the resource that are listened
// at, but for some.
func (dir directory) others(ctx context.Context, e *endpoint, but []*endpoint) []string {
	return slices.DeleteFunc(dir.sockets(e.plugin.resource), func(path string) bool {
		if path == e.path || slices.ContainsFunc(but, func(b *endpoint) bool { return b.path == path }) {
			return true
		}
		conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", path)
		if err != nil {
			return true
		}
		_ = conn.Close()
		return false
	})
}

// silence has an endpoint keep its streams and its calls, and nothing else, since
// another of this instance has taken its place.
func (e *endpoint) silence(by *endpoint) {
	e.mu.Lock()
	e.after = by.path
	e.mu.Unlock()
	e.mute()
	_ = os.Remove(e.path) // as the listener does when it is closed
}
