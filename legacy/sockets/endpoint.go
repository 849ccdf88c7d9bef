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

// closeTimeout limits the wait for calls in flight when an endpoint closes.
const closeTimeout = 5 * time.Second

// sendTime is the time for sending the answer of a call to the kubelet.
const sendTime = 50 * time.Millisecond

// endpoint is a plugin at one socket, registered once with the kubelet.
type endpoint struct {
	pluginapi.DevicePluginServer // answers other calls

	plugin       *plugin
	dir          directory
	path         string
	grpc         *grpc.Server
	servingEnded chan struct{}             // closed when serving has ended
	closing      context.Context           // ended when the agent ends the streams
	end          context.CancelFunc        // ends closing
	muted        context.Context           // ended when the streams must stay open but send nothing more
	mute         context.CancelFunc        // ends muted
	watched      chan struct{}             // closed when the kubelet has requested the list
	closeWatched sync.Once                 // closes watched
	lostAt       atomic.Pointer[time.Time] // when the kubelet has ended a stream
	refuses      bool                      // makes the registration fail
	calls        callers

	mu          sync.Mutex
	laterSocket string        // a later socket of this instance, or ""
	inFlight    int           // running calls of Allocate
	callsEnded  chan struct{} // closed when a retired endpoint has no running Allocate; nil until it is retired
}

// open serves a plugin at a new socket, which accepts connections when open returns.
func (dir directory) open(ctx context.Context, p *plugin) (*endpoint, error) {
	return dir.serve(ctx, p, &endpoint{}, p.resource)
}

// serve lets an endpoint serve a plugin at a new socket, whose name contains the resource.
func (dir directory) serve(ctx context.Context, p *plugin, e *endpoint, resource string) (*endpoint, error) {
	listener, err := dir.listen(resource)
	if err != nil {
		return nil, err
	}
	e.DevicePluginServer, e.plugin, e.dir = p.server, p, dir
	e.path = listener.Addr().String()
	options := []grpc.ServerOption{grpc.StatsHandler(&e.calls)}
	if !e.refuses {
		options = append(options, grpc.UnaryInterceptor(answerInterceptor(klog.FromContext(ctx))))
	}
	e.grpc = grpc.NewServer(options...)
	e.servingEnded, e.watched = make(chan struct{}), make(chan struct{})
	e.closing, e.end = context.WithCancel(context.WithoutCancel(ctx))
	e.muted, e.mute = context.WithCancel(context.WithoutCancel(ctx))
	pluginapi.RegisterDevicePluginServer(e.grpc, e)
	go func() {
		defer close(e.servingEnded)
		if err := e.grpc.Serve(listener); err != nil {
			klog.FromContext(ctx).Error(err, "Device plugin stopped serving", "resource", p.resource, "socket", e.path)
			e.markLost()
		}
	}()
	return e, nil
}

// answerInterceptor returns an interceptor with a logger for the context of a call and for the
// call's error.
func answerInterceptor(logger klog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		response, err := handler(klog.NewContext(ctx, logger), request)
		if err != nil {
			logger.Error(err, "Device-plugin call refused", "method", info.FullMethod)
		}
		return response, err
	}
}

// close waits for running calls, ends the streams and removes the socket. The kubelet abandons a
// call when a stream ends before the call. Until the kubelet has noticed the end, it may call this
// endpoint, and rejects a pod whose call is not answered. Afterwards the kubelet closes the
// connection (pkg/kubelet/cm/devicemanager/plugin/v1beta1/client.go, Disconnect, in 1.25 to 1.37).
// Kubelets up to 1.36 keep the connection if another endpoint has replaced this one under the same
// name. close does nothing for nil.
func (e *endpoint) close() {
	if e == nil {
		return
	}
	select {
	case <-e.retireEndpoint():
	case <-time.After(closeTimeout):
	}
	if e.hasStream() {
		time.Sleep(sendTime)
	}
	e.end()
	select {
	case <-e.calls.goneChannel():
	case <-time.After(settleTime):
	}
	timer := time.AfterFunc(closeTimeout, e.grpc.Stop)
	defer timer.Stop()
	e.grpc.GracefulStop()
	<-e.servingEnded
}

// markLost marks the endpoint as no longer in use by the kubelet.
func (e *endpoint) markLost() {
	now := time.Now()
	e.lostAt.CompareAndSwap(nil, &now)
	e.plugin.wakeServe()
}

// stream is a call of ListAndWatch that both sides can end.
type stream struct {
	grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s stream) Context() context.Context { return s.ctx }

// hasStream reports whether the kubelet has requested the list and has not ended the stream. It
// returns false for nil.
func (e *endpoint) hasStream() bool {
	if e == nil || e.lostAt.Load() != nil {
		return false
	}
	select {
	case <-e.watched:
		return true
	default:
		return false
	}
}

// GetDevicePluginOptions returns the plugin's answer, or an error if the registration must fail.
func (e *endpoint) GetDevicePluginOptions(ctx context.Context, r *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	if e.refuses {
		return nil, errRefused
	}
	return e.plugin.server.GetDevicePluginOptions(ctx, r)
}

// ListAndWatch forwards the plugin's lists. If the kubelet ends the stream, the plugin must be
// registered again.
func (e *endpoint) ListAndWatch(r *pluginapi.Empty, to grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	e.closeWatched.Do(func() { close(e.watched) })
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
		e.markLost()
	}
	return err
}

// Allocate returns the plugin's answer, or the answer of the next instance if this endpoint is
// retired.
func (e *endpoint) Allocate(ctx context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	if !e.begin() {
		return e.forwardCall(ctx, r)
	}
	defer e.endCall()
	return e.plugin.server.Allocate(ctx, r)
}

// begin counts a call of Allocate. It reports false if the endpoint is retired.
func (e *endpoint) begin() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.callsEnded != nil {
		return false
	}
	e.inFlight++
	return true
}

// endCall marks the end of a call of Allocate.
func (e *endpoint) endCall() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.inFlight--
	if e.callsEnded != nil && e.inFlight == 0 {
		close(e.callsEnded)
	}
}
