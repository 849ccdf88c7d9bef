package kubelet

import (
	"context"
	"slices"
	"sync"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// retryPause is the time until a failed registration is tried again.
const retryPause = 500 * time.Millisecond

// newEndpoint returns an unregistered endpoint.
func (p *Process) newEndpoint(ctx context.Context, resource string, server pluginapi.DevicePluginServer) *endpoint {
	e := &endpoint{process: p, resource: resource, server: server, lost: make(chan struct{})}
	e.stream, e.drop = context.WithCancel(context.WithoutCancel(ctx))
	e.speaks, e.mute = context.WithCancel(e.stream)
	return e
}

// Serve implements legacy.Kubelet.
func (p *Process) Serve(ctx context.Context, resource string, server pluginapi.DevicePluginServer, gone <-chan struct{}) {
	for {
		var all []*endpoint // latest last
		e := p.newEndpoint(ctx, resource, server)
		if err := p.kubelet.devices.register(e); err == nil {
			all = p.replaceEndpoints(ctx, e, gone)
			select {
			case <-all[len(all)-1].lost:
			case <-gone:
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil && len(all) > 0 && all[len(all)-1].stream.Err() == nil && p.Succeeded != nil && p.Succeeded() {
			for _, e := range all {
				p.keepLeaving(e)
			}
			return
		}
		e.endStream()
		for _, e := range all {
			e.endStream()
		}
		timer := time.NewTimer(retryPause)
		select {
		case <-ctx.Done():
		case <-gone:
		case <-timer.C:
			timer.Stop()
			continue
		}
		timer.Stop()
		for _, e := range all {
			e.calls.Wait()
		}
		return
	}
}

// replaceEndpoints behaves as legacy/sockets if endpoints of other instances exist: it makes the
// kubelet forget the endpoint's name while the others end, and registers another endpoint
// afterwards. It returns the endpoints with a stream to the kubelet.
func (p *Process) replaceEndpoints(ctx context.Context, e *endpoint, gone <-chan struct{}) []*endpoint {
	if !p.kubelet.devices.hasOtherStreams(e) {
		return []*endpoint{e}
	}
	forgotten := p.newEndpoint(ctx, e.resource, e.server)
	forgotten.fails = true
	defer forgotten.drop()
	_ = p.kubelet.devices.register(forgotten) // intended to fail
	wait := func(how time.Duration) bool {
		timer := time.NewTimer(how)
		defer timer.Stop()
		select {
		case <-ctx.Done():
		case <-gone:
		case <-e.lost:
		case <-timer.C:
			return true
		}
		return false
	}
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end) && p.kubelet.devices.hasOtherStreams(e); {
		if !wait(100 * time.Millisecond) {
			return []*endpoint{e}
		}
	}
	last := p.newEndpoint(ctx, e.resource, e.server)
	if !wait(time.Second) || p.kubelet.devices.register(last) != nil {
		last.drop()
		return []*endpoint{e}
	}
	e.mute()
	return []*endpoint{e, last}
}

// hasOtherStreams reports whether the kubelet has streams from other processes.
func (m *deviceManager) hasOtherStreams(e *endpoint) bool {
	m.kubelet.mu.Lock()
	defer m.kubelet.mu.Unlock()
	for _, other := range m.endpoints[e.resource] {
		if other.process != e.process && !other.process.isDead() && other.stream.Err() == nil {
			return true
		}
	}
	return false
}

// keepLeaving keeps an endpoint for Linger.
func (p *Process) keepLeaving(e *endpoint) {
	e.leaves.Store(true)
	e.calls.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left = append(p.left, e)
}

// awaitSuccessor waits for another agent's endpoint of the resource, and returns nil if none
// appears in time.
func (e *endpoint) awaitSuccessor(ctx context.Context) *endpoint {
	k := e.process.kubelet
	for ctx.Err() == nil && e.stream.Err() == nil {
		k.mu.Lock()
		for _, other := range slices.Backward(k.devices.endpoints[e.resource]) {
			if other.process != e.process && !other.leaves.Load() && other.stream.Err() == nil {
				k.mu.Unlock()
				return other
			}
		}
		k.mu.Unlock()
		sleep(ctx, 20*time.Millisecond)
	}
	return nil
}

// Linger implements legacy.Kubelet.
func (p *Process) Linger(ctx context.Context) {
	p.mu.Lock()
	left := p.left
	p.left = nil
	p.mu.Unlock()
	var all sync.WaitGroup
	for _, e := range left {
		all.Go(func() {
			defer e.endStream()
			if e.awaitSuccessor(ctx) != nil {
				sleep(ctx, time.Second)
			}
		})
	}
	all.Wait()
}
