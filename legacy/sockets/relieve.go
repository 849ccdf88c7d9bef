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
	// maxRelief limits how long earlier endpoints of other instances may continue.
	maxRelief = 30 * time.Second

	othersInterval = 100 * time.Millisecond

	// settleTime is how long the kubelet may take to notice the end of a stream.
	settleTime = time.Second
)

// errRefused is the answer that makes a registration fail on purpose.
var errRefused = status.Error(codes.Unavailable, "this registration is meant to fail: it has the kubelet forget the one before")

// registerNext registers the plugin. The new registration replaces earlier ones, both of this and
// of earlier instances.
func (d *Directory) registerNext(ctx context.Context, p *plugin, before registration, gone <-chan struct{}) (registration, error) {
	now, err := d.register(ctx, p)
	if err != nil {
		return now, err
	}
	var own []*endpoint // endpoints with a stream to the present kubelet
	for _, e := range before.endpoints() {
		if e.hasStream() && sameSocket(before.kubelet, now.kubelet) {
			own = append(own, e)
		} else {
			e.close()
		}
	}
	// A lost endpoint has no stream. The other endpoint, which is already silent, is kept.
	if len(own) == 1 && own[0] == before.earlierEndpoint && len(d.dir.otherSockets(ctx, now.endpoint, own)) == 0 {
		now.earlierEndpoint = before.earlierEndpoint
		now.earlierEndpoint.silenceEndpoint(now.endpoint)
		return now, nil
	}
	return d.replaceEarlier(ctx, p, now, own, gone), nil
}

// replaceEarlier ends earlier endpoints of the resource without leaving the kubelet without
// devices.
//
// Up to 1.36 the kubelet identifies plugins only by the resource's name. When any stream of the
// resource ends, the kubelet disconnects the plugin with the name at that time, and considers all
// devices unhealthy (pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go, runClient, in 1.25 to
// 1.36). A failed registration takes the name away from its plugin and does nothing else
// (connectClient, there). After that, the end of a stream has no effect. The plugin must get the
// name again, since otherwise its own end would have no effect either. So replaceEarlier registers
// the plugin twice, and the first stream must last as long as the second.
//
// From 1.37 on the kubelet identifies plugins by name and socket, and calls any of them. These
// steps then have no effect.
func (d *Directory) replaceEarlier(ctx context.Context, p *plugin, now registration, own []*endpoint, gone <-chan struct{}) registration {
	if len(own) == 0 && len(d.dir.otherSockets(ctx, now.endpoint, nil)) == 0 {
		return now
	}
	logger := klog.FromContext(ctx)
	if err := d.disownPlugin(ctx, p); err != nil {
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
			return now.endpoint.lostAt.Load() == nil && sameSocket(now.kubelet, d.dir.kubeletInfo())
		}
		return false
	}
	for end := time.Now().Add(maxRelief); time.Now().Before(end) && len(d.dir.otherSockets(ctx, now.endpoint, nil)) > 0; {
		if !wait(othersInterval) {
			return now
		}
	}
	if !wait(settleTime) {
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
	last.earlierEndpoint = now.endpoint
	last.earlierEndpoint.silenceEndpoint(last.endpoint)
	return last
}

// disownPlugin makes the kubelet forget the plugin of a resource, by a registration that fails.
// Other instances ignore its socket.
func (d *Directory) disownPlugin(ctx context.Context, p *plugin) error {
	e, err := d.dir.serve(ctx, p, &endpoint{refuses: true}, placeholder)
	if err != nil {
		return err
	}
	defer e.close()
	err = e.announceEndpoint(ctx)
	if err == nil {
		return errors.New("the kubelet takes a registration that should fail")
	}
	if status.Code(err) == codes.Unknown { // the kubelet's refusal, which contains the endpoint's answer
		return nil
	}
	return err
}

// nobody stands in for the resource in the name of a socket. It is not a valid resource name.
const placeholder = "_"

// otherSockets returns the sockets of other endpoints of the resource with a listening process,
// except those in but.
func (dir directory) otherSockets(ctx context.Context, e *endpoint, but []*endpoint) []string {
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

// silenceEndpoint makes an endpoint send nothing more, because another endpoint of this instance
// has replaced it. The endpoint keeps its streams and still answers calls.
func (e *endpoint) silenceEndpoint(by *endpoint) {
	e.mu.Lock()
	e.laterSocket = by.path
	e.mu.Unlock()
	e.mute()
	_ = os.Remove(e.path) // like a listener when it is closed
}
