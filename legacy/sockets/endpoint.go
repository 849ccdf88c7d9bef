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

// closeTimeout is how long calls may take that are in flight at the end.
const closeTimeout = 5 * time.Second

// sendTime is how long the answer to a call may take to the kubelet once it is made.
const sendTime = 50 * time.Millisecond

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
	muted   context.Context           // ended when the streams are to stay, and say no more
	mute    context.CancelFunc        // ends muted
	watched chan struct{}             // closed when the kubelet has asked for the list
	asked   sync.Once                 // closes watched
	lost    atomic.Pointer[time.Time] // when the other end has ended a stream
	refuses bool                      // it fails the registration
	calls   callers

	mu       sync.Mutex
	after    string        // a later socket of this instance, "" if there is none
	inFlight int           // calls of Allocate
	idle     chan struct{} // closed when an endpoint that leaves has none in flight; nil until it leaves
}

// open serves a plugin at a new socket. The socket accepts connections when open
// returns.
func (dir directory) open(ctx context.Context, p *plugin) (*endpoint, error) {
	return dir.serve(ctx, p, &endpoint{}, p.resource)
}

// serve has an endpoint serve a plugin at a new socket that is named for a resource.
func (dir directory) serve(ctx context.Context, p *plugin, e *endpoint, resource string) (*endpoint, error) {
	listener, err := dir.listen(resource)
	if err != nil {
		return nil, err
	}
	e.DevicePluginServer, e.plugin, e.dir = p.server, p, dir
	e.path = listener.Addr().String()
	options := []grpc.ServerOption{grpc.StatsHandler(&e.calls)}
	if !e.refuses {
		options = append(options, grpc.UnaryInterceptor(answer(klog.FromContext(ctx))))
	}
	e.grpc = grpc.NewServer(options...)
	e.served, e.watched = make(chan struct{}), make(chan struct{})
	e.closing, e.end = context.WithCancel(context.WithoutCancel(ctx))
	e.muted, e.mute = context.WithCancel(context.WithoutCancel(ctx))
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

// close waits for calls, ends the streams and removes the socket. The kubelet gives
// a call up when a stream ends before it. Until it has noticed the end, it may call
// here, and a call that is not answered is a pod that is rejected. It hangs up when
// it has (pkg/kubelet/cm/devicemanager/plugin/v1beta1/client.go, Disconnect, in 1.25
// to 1.37), but for an endpoint whose name another one has, to 1.36. It does nothing
// on nil.
func (e *endpoint) close() {
	if e == nil {
		return
	}
	select {
	case <-e.retire():
	case <-time.After(closeTimeout):
	}
	if e.streams() {
		time.Sleep(sendTime)
	}
	e.end()
	select {
	case <-e.calls.gone():
	case <-time.After(settled):
	}
	timer := time.AfterFunc(closeTimeout, e.grpc.Stop)
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

// streams reports whether the kubelet has asked for the list and has not ended the
// stream. It does not for nil.
func (e *endpoint) streams() bool {
	if e == nil || e.lost.Load() != nil {
		return false
	}
	select {
	case <-e.watched:
		return true
	default:
		return false
	}
}

// GetDevicePluginOptions has the plugin answer, unless the registration is to fail.
func (e *endpoint) GetDevicePluginOptions(ctx context.Context, r *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	if e.refuses {
		return nil, errRefused
	}
	return e.plugin.server.GetDevicePluginOptions(ctx, r)
}

// ListAndWatch passes the plugin's lists on. If the kubelet ends the stream, the
// plugin must be registered anew.
func (e *endpoint) ListAndWatch(r *pluginapi.Empty, to grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	e.asked.Do(func() { close(e.watched) })
	ctx, cancel := context.WithCancel(to.Context())
	defer cancel()
	defer context.AfterFunc(e.closing, cancel)()
	defer context.AfterFunc(e.muted, cancel)()
	err := e.plugin.server.ListAndWatch(r, stream{to, ctx})
	if e.muted.Err() != nil {
		select {
		case <-e.closing.Done():
		case <-to.Context().Done():
		}
	}
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
