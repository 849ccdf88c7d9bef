package legacy

import (
	"context"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list"
	"chandler.dev/legacy/sockets"
)

// holders is what the other API holds.
type holders struct {
	mu   sync.Mutex
	held map[string]string
}

func (h *holders) Holder(silicon string) (string, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	holder, held := h.held[silicon]
	return holder, held
}

func (h *holders) set(silicon, holder string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held == nil {
		h.held = make(map[string]string)
	}
	if h.held[silicon] = holder; holder == "" {
		delete(h.held, silicon)
	}
}

// grace is short: what must not happen within it is tested in list_test.go
// without a clock.
const grace = 150 * time.Millisecond

// configFor is for tests: it keeps to the kubelet's directories and is quick.
func configFor(k *kubelettest.Kubelet) Config {
	return Config{
		Kubelet:     sockets.New(k.Dir, nil),
		Pods:        podsOf(k, "chandler/agent"),
		StateDir:    filepath.Join(filepath.Dir(k.Dir), "state"),
		Grace:       grace,
		Poll:        20 * time.Millisecond,
		Unconfirmed: 200 * time.Millisecond,
	}
}

// podsOf asks a kubelet as the pod that we are.
func podsOf(k *kubelettest.Kubelet, own string) func(context.Context) (*kubeletapi.Listing, error) {
	return func(ctx context.Context) (*kubeletapi.Listing, error) { return kubeletapi.ListPods(ctx, k.Pods, own) }
}

// socketsOf returns the sockets at which a plugin is served.
func socketsOf(p *Plugin) *sockets.Directory { return p.config.Kubelet.(*sockets.Directory) }

// run runs a plugin and returns how to end it.
func run(t *testing.T, p *Plugin) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { p.Run(ctx); close(ended) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(kubelettest.Patience):
			t.Error("run does not end")
		}
	})
	t.Cleanup(stop)
	return stop
}

// gpus returns a snapshot of devices "gpu-<id>" with one ID of example.com/gpu
// each.
func gpus(ids ...string) *discovery.Snapshot {
	s := &discovery.Snapshot{}
	for _, id := range ids {
		s.Devices = append(s.Devices, gpu(id))
	}
	return s
}

// unitOf returns what the ID of a device stands for.
func unitOf(d discovery.Device) *list.Unit { return list.Of(snapshot(d)).Units[gpuResource][0] }

// listsOf returns the lists that follow from devices alone.
func listsOf(devices ...discovery.Device) map[string]*list.List {
	lists, _ := list.Lists{}.Next(list.Input{Snapshot: snapshot(devices...), View: list.NewView(nil, nil)})
	return lists.Resources()
}

// had is what a container has by the ID of a device.
func had(id string, d discovery.Device) *holding {
	h := newHolding(gpuResource, id, unitOf(d), testTime)
	h.Container = "default/train main"
	return h
}
