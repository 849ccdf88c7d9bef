package pooltest

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"

	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// Helper replaces the library's helper. It records the published pools of the node "node".
type Helper struct {
	mu        sync.Mutex
	published []resourceslice.DriverResources // since the last call of PublishedSketches
	last      resourceslice.DriverResources
	stopped   bool
}

// PublishResources records the pools.
func (h *Helper) PublishResources(_ context.Context, resources resourceslice.DriverResources) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last = *resources.DeepCopy()
	h.published = append(h.published, h.last)
	return nil
}

// LastPools returns the pools published last.
func (h *Helper) LastPools() resourceslice.DriverResources {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last
}

// Stop records that the helper was stopped.
func (h *Helper) Stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopped = true
}

// IsStopped reports whether the helper was stopped.
func (h *Helper) IsStopped() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.stopped
}

// PublishedSketches returns sketches of the pools published since the last call.
func (h *Helper) PublishedSketches() (out [][]string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, pools := range h.published {
		out = append(out, SketchPools(pools))
	}
	h.published = nil
	return out
}

// ExpectPublished checks the sketches published since the last call, each of one slice.
// It is for a synctest bubble.
func ExpectPublished(t testing.TB, helper *Helper, want ...string) {
	t.Helper()
	synctest.Wait()
	got := helper.PublishedSketches()
	if len(got) != len(want) {
		t.Fatalf("published %q, want %q", got, want)
	}
	for i := range want {
		if len(got[i]) != 1 || got[i][0] != want[i] {
			t.Errorf("published %q, want %q", got[i], want[i])
		}
	}
}
