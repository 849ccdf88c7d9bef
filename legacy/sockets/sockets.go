package sockets

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	firstRetry     = 100 * time.Millisecond
	maxUnavailable = 800 * time.Millisecond // between attempts while there is no kubelet, or no socket can be created
	maxRefused     = 30 * time.Second       // between attempts while the kubelet refuses or drops registrations
	lookInterval   = time.Second            // between checks for changes that inotify may have missed

	// registerTimeout is longer than the kubelet's timeout for connecting to a registering plugin:
	// 10 s (plugin/v1beta1/client.go, dial, in 1.31 to 1.37).
	registerTimeout = 15 * time.Second

	// lastAnswer is how long the kubelet has to answer a registration when the agent ends in the
	// meantime.
	lastAnswer = time.Second

	// watchTimeout is how long the kubelet may take to request the list after a registration.
	watchTimeout = 15 * time.Second

	// steadyAfter is the minimum age of a registration that the kubelet has not dropped.
	steadyAfter = 10 * time.Second
)

// Directory is the kubelet's device-plugins directory.
type Directory struct {
	dir          directory
	hasSuccessor func() bool
	patience     time.Duration // how long the kubelet may take to request a list
	clearOnce    sync.Once

	mu        sync.Mutex
	plugins   map[string]*plugin // served plugins, by resource
	lingering []*endpoint        // endpoints for Linger
}

// New returns the device-plugins directory at a path. Succeeded reports whether another instance of
// the agent waits to take over. Nil means that none does.
func New(path string, succeeded func() bool) *Directory {
	if succeeded == nil {
		succeeded = func() bool { return false }
	}
	return &Directory{
		dir:          directory(filepath.Clean(path)),
		hasSuccessor: succeeded,
		patience:     watchTimeout,
		plugins:      make(map[string]*plugin),
	}
}

// plugin is the server of a resource, at any number of sockets.
type plugin struct {
	resource string
	server   pluginapi.DevicePluginServer
	wake     chan struct{} // receives a value when another registration may be needed
	socket   string        // the registered socket, or ""; guarded by Directory.mu
}

// wakeServe wakes Serve, because another registration may be needed.
func (p *plugin) wakeServe() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// registration is an endpoint that the kubelet has accepted.
type registration struct {
	endpoint        *endpoint
	earlierEndpoint *endpoint   // an earlier endpoint, whose stream must last as long; see relieve
	kubelet         os.FileInfo // socket of the kubelet that accepted it
	registeredAt    time.Time
}

// endpoints returns the endpoints of a registration, the latest first.
func (r registration) endpoints() []*endpoint {
	return slices.DeleteFunc([]*endpoint{r.endpoint, r.earlierEndpoint}, func(e *endpoint) bool { return e == nil })
}

// close closes the endpoints of a registration.
func (r registration) close() {
	for _, e := range r.endpoints() {
		e.close()
	}
}

// Serve serves a resource and keeps it registered with the kubelet, until the context ends or gone
// is closed. While there is no kubelet, or the directory is not writable, Serve waits. When Serve
// returns, no call is running. If the context ended and another instance waits to take over, the
// socket remains for Linger. The kubelet does not notice the end of the plugin: the next instance
// continues with the allocations of pods.
func (d *Directory) Serve(ctx context.Context, resource string, server pluginapi.DevicePluginServer, gone <-chan struct{}) {
	d.clear(ctx)
	p := &plugin{resource: resource, server: server, wake: make(chan struct{}, 1)}
	d.mu.Lock()
	d.plugins[resource] = p
	d.mu.Unlock()
	last := d.keepRegistered(ctx, p, gone)
	d.mu.Lock()
	delete(d.plugins, resource)
	d.mu.Unlock()
	if ctx.Err() != nil && d.hasSuccessor() {
		d.leaveEndpoints(last)
		return
	}
	last.close()
}

// keepRegistered returns the last registration of the plugin, which may be empty. The caller must
// close it.
func (d *Directory) keepRegistered(ctx context.Context, p *plugin, gone <-chan struct{}) registration {
	logger := klog.FromContext(ctx)
	var current registration
	again := retry{delay: firstRetry}
	lastError := ""
	for {
		wait := lookInterval
		if reason := d.staleReason(current); reason != "" {
			if wait = again.wait(d.dir, current.endpoint); wait <= 0 {
				following, err := d.registerNext(ctx, p, current, gone)
				if err != nil {
					if ctx.Err() == nil && err.Error() != lastError {
						lastError = err.Error()
						logger.Info("Device plugin waits for the kubelet", "resource", p.resource, "reason", lastError)
					}
					wait = again.failed(d.dir, err)
				} else {
					current, lastError, wait = following, "", lookInterval
					again.recordSuccess(current)
					logger.Info("Device plugin registered", "resource", p.resource, "socket", current.endpoint.path, "reason", reason)
				}
			}
		}
		select {
		case <-ctx.Done():
			return current
		case <-gone:
			return current
		case <-p.wake:
		case <-time.After(wait):
		}
	}
}

// staleReason returns why another registration is needed, or "".
func (d *Directory) staleReason(r registration) string {
	if r.endpoint == nil {
		return "new"
	}
	if !sameSocket(r.kubelet, d.dir.kubeletInfo()) {
		return "the kubelet has restarted"
	}
	if r.endpoint.lostAt.Load() != nil {
		return "the kubelet has ended the stream"
	}
	if _, err := os.Lstat(r.endpoint.path); errors.Is(err, fs.ErrNotExist) {
		return "the socket has vanished"
	}
	if !r.endpoint.hasStream() && time.Since(r.registeredAt) >= d.patience {
		return "the kubelet has not requested the list"
	}
	return ""
}

// RegisteredSockets returns the sockets registered with the kubelet, by resource.
func (d *Directory) RegisteredSockets() map[string]string {
	d.mu.Lock()
	defer d.mu.Unlock()
	sockets := make(map[string]string)
	for resource, p := range d.plugins {
		if p.socket != "" {
			sockets[resource] = p.socket
		}
	}
	return sockets
}

// Run removes the leftovers of killed instances, and watches the directory until the context ends,
// so that Serve reacts at once when the kubelet creates its socket or removes another. Serve also
// checks for such changes at intervals, so Run does not fail on a host without free inotify
// instances.
func (d *Directory) Run(ctx context.Context) {
	d.clear(ctx)
	d.dir.watchSockets(ctx, func() {
		d.mu.Lock()
		plugins := slices.Collect(maps.Values(d.plugins))
		d.mu.Unlock()
		for _, p := range plugins {
			p.wakeServe()
		}
	})
}

// clear removes the leftovers of killed instances, once.
func (d *Directory) clear(ctx context.Context) {
	d.clearOnce.Do(func() {
		if err := d.dir.removeStale(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Files are left over in the device-plugins directory")
		}
	})
}
