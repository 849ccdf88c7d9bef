package legacy

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
	// successorInterval is the time between looks for the next instance's socket.
	successorInterval = 20 * time.Millisecond

	// lingerGrace is how long the kubelet has to call at a socket that is there.
	lingerGrace = time.Second
)

// leaving are the endpoints that outlive Run. When the last endpoint of a
// resource ends, the kubelet takes all its devices for unhealthy, and rejects
// pods that have just been scheduled to them. It may have several and calls the
// newest (pkg/kubelet/cm/devicemanager/manager.go, PluginConnected and
// PluginDisconnected; older ones drop theirs for a new one).
type leaving struct {
	mu        sync.Mutex
	endpoints []*endpoint
}

// leave makes an endpoint write nothing any more, and keeps it.
func (p *Plugin) leave(e *endpoint) {
	<-e.retire()
	p.leaving.mu.Lock()
	defer p.leaving.mu.Unlock()
	p.leaving.endpoints = append(p.leaving.endpoints, e)
}

// retire lets no more calls of Allocate in. What it returns is closed when those
// that were have ended.
func (s *server) retire() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.idle == nil {
		s.idle = make(chan struct{})
		if s.inFlight == 0 {
			close(s.idle)
		}
	}
	return s.idle
}

// Linger keeps the sockets that Run has left, until the kubelet has those of the
// next instance, or the context ends. That instance may be the active one by
// then: it is asked what the kubelet still asks of this one.
func (p *Plugin) Linger(ctx context.Context) {
	p.leaving.mu.Lock()
	defer p.leaving.mu.Unlock()
	var all sync.WaitGroup
	for _, e := range p.leaving.endpoints {
		all.Go(func() {
			defer e.close()
			if e.successor(ctx) == "" {
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(lingerGrace):
			}
		})
	}
	all.Wait()
	p.leaving.endpoints = nil
}

// successor waits for the next instance's socket, and returns "" if the context
// or the endpoint ends before there is one.
func (e *endpoint) successor(ctx context.Context) string {
	for {
		if socket := e.dir.newest(e.resource); socket > e.path {
			return socket
		}
		select {
		case <-ctx.Done():
			return ""
		case <-e.closing:
			return ""
		case <-time.After(successorInterval):
		}
	}
}

// forward has the next instance answer.
func (e *endpoint) forward(ctx context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	socket := e.successor(ctx)
	if socket == "" {
		return nil, status.Error(codes.Unavailable, e.resource+": this instance has ended, and no other has begun")
	}
	conn, err := kubeletapi.Dial(socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return pluginapi.NewDevicePluginClient(conn).Allocate(ctx, r)
}
