package sockets

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// endpoint is a plugin at one socket, as the kubelet is told of it in one
// registration.
type endpoint struct {
	pluginapi.DevicePluginServer // answers what the endpoint does not

	plugin  *plugin
	dir     directory
	path    string
	grpc    *grpc.Server
	served  chan struct{}             // closed when serving has ended
	closing context.Context           // ended when this end wants the streams to end
	end     context.CancelFunc        // ends closing
	lost    atomic.Pointer[time.Time] // when the other end has ended a stream

	mu       sync.Mutex
	inFlight int           // calls of Allocate
	idle     chan struct{} // closed when an endpoint that leaves has none in flight; nil until it leaves
}

// open serves a plugin at a new socket. The socket accepts connections when open
// returns.
func (dir directory) open(ctx context.Context, p *plugin) (*endpoint, error) {
	listener, err := dir.listen(p.resource)
	if err != nil {
		return nil, err
	}
	e := &endpoint{
		DevicePluginServer: p.server,
		plugin:             p,
		dir:                dir,
		path:               listener.Addr().String(),
		grpc:               grpc.NewServer(grpc.UnaryInterceptor(answer(klog.FromContext(ctx)))),
		served:             make(chan struct{}),
	}
	e.closing, e.end = context.WithCancel(context.WithoutCancel(ctx))
	pluginapi.RegisterDevicePluginServer(e.grpc, e)
	go func() {
		defer close(e.served)
		if err := e.grpc.Serve(listener); err != nil {
			klog.FromContext(ctx).Error(err, "Device plugin stopped serving", "resource", p.resource, "socket", e.path)
			e.lose()
		}
	}()
	return e, nil
}

// answer puts the logger into the context of a call, and logs its error.
func answer(logger klog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		response, err := handler(klog.NewContext(ctx, logger), request)
		if err != nil {
			logger.Error(err, "Device-plugin call refused", "method", info.FullMethod)
		}
		return response, err
	}
}

// close ends the streams, waits for the other calls and removes the socket. It
// does nothing on nil.
func (e *endpoint) close() {
	if e == nil {
		return
	}
	e.end()
	timer := time.AfterFunc(5*time.Second, e.grpc.Stop)
	defer timer.Stop()
	e.grpc.GracefulStop()
	<-e.served
}

// lose says that the kubelet does not have the endpoint any more.
func (e *endpoint) lose() {
	now := time.Now()
	e.lost.CompareAndSwap(nil, &now)
	e.plugin.poke()
}

// stream is a call of ListAndWatch that either end can end.
type stream struct {
	grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s stream) Context() context.Context { return s.ctx }

// ListAndWatch passes the plugin's lists on. If the kubelet ends the stream, the
// plugin must be registered anew.
func (e *endpoint) ListAndWatch(r *pluginapi.Empty, to grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	ctx, cancel := context.WithCancel(to.Context())
	defer cancel()
	defer context.AfterFunc(e.closing, cancel)()
	err := e.plugin.server.ListAndWatch(r, stream{to, ctx})
	if e.closing.Err() == nil {
		e.lose()
	}
	return err
}

// Allocate has the plugin answer, or the next instance once this one leaves.
func (e *endpoint) Allocate(ctx context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	if !e.begin() {
		return e.forward(ctx, r)
	}
	defer e.ended()
	return e.plugin.server.Allocate(ctx, r)
}

// begin counts a call of Allocate. An endpoint that leaves takes none.
func (e *endpoint) begin() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.idle != nil {
		return false
	}
	e.inFlight++
	return true
}

// ended says that a call of Allocate has.
func (e *endpoint) ended() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.inFlight--
	if e.idle != nil && e.inFlight == 0 {
		close(e.idle)
	}
}
