package sockets

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/internal/kubeletapi"
)

const (
	// successorInterval is the interval of checks for the next instance's socket.
	successorInterval = 20 * time.Millisecond

	// lingerGrace is how long the kubelet has to call the next instance's socket.
	lingerGrace = time.Second
)

// leaveEndpoints retires the endpoints of a registration and stores them for Linger. When the last
// endpoint of a resource ends, the kubelet considers all of its devices unhealthy and rejects pods
// that have just been scheduled.
func (d *Directory) leaveEndpoints(r registration) {
	for _, e := range r.endpoints() {
		<-e.retireEndpoint()
		d.mu.Lock()
		d.lingering = append(d.lingering, e)
		d.mu.Unlock()
	}
}

// retireEndpoint makes the endpoint forward new calls of Allocate. The returned channel is closed
// when the running calls have ended.
func (e *endpoint) retireEndpoint() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.callsEnded == nil {
		e.callsEnded = make(chan struct{})
		if e.inFlight == 0 {
			close(e.callsEnded)
		}
	}
	return e.callsEnded
}

// Linger keeps the sockets left by Serve until the kubelet has the sockets of the next instance, or
// the context ends. The next instance may already be active, and therefore answers calls of
// Allocate on the old sockets.
func (d *Directory) Linger(ctx context.Context) {
	d.mu.Lock()
	left := d.lingering
	d.lingering = nil
	d.mu.Unlock()
	var all sync.WaitGroup
	for _, e := range left {
		all.Go(func() {
			defer e.close()
			if e.awaitSuccessor(ctx) == "" {
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(lingerGrace):
			}
		})
	}
	all.Wait()
}

// awaitSuccessor waits until the next instance listens on its socket, and returns the socket. It
// returns "" if the context or the streams end before.
func (e *endpoint) awaitSuccessor(ctx context.Context) string {
	e.mu.Lock()
	last := max(e.path, e.laterSocket)
	e.mu.Unlock()
	for {
		if socket := e.dir.newestSocket(e.plugin.resource); socket > last && checkListening(ctx, socket) == nil {
			return socket
		}
		select {
		case <-ctx.Done():
			return ""
		case <-e.closing.Done():
			return ""
		case <-time.After(successorInterval):
		}
	}
}

// forwardCall returns the answer of the next instance.
func (e *endpoint) forwardCall(ctx context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	socket := e.awaitSuccessor(ctx)
	if socket == "" {
		return nil, status.Error(codes.Unavailable, e.plugin.resource+": this instance has ended, and no other has begun")
	}
	conn, err := kubeletapi.Dial(socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return pluginapi.NewDevicePluginClient(conn).Allocate(ctx, r)
}
