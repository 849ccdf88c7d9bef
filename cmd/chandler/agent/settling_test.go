package agent

import (
	"encoding/json"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

func healthSnapshot(status discovery.HealthStatus) *discovery.Snapshot {
	return &discovery.Snapshot{Devices: []discovery.Device{{Name: "a", Health: discovery.Health{Status: status}}}}
}

// A state that changes after a delay triggers a scan when the delay ends, and a restarted agent
// reports the same state as before.
func TestSettling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		var scans atomic.Int32
		severity := discovery.Severity{discovery.ConditionUnhealthy: resourceapi.DeviceTaintEffectNoExecute}
		s := newSettling(t.Context(), severity, disk.Files{}, dir, func() { scans.Add(1) })
		first := s.settleStates(t.Context(), healthSnapshot(discovery.Unhealthy))
		if effect := first.Devices[0].Health.Effect; effect != resourceapi.DeviceTaintEffectNoExecute {
			t.Errorf("effect %q", effect)
		}
		written, err := os.Stat(filepath.Join(dir, "health.json"))
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if again := s.settleStates(t.Context(), healthSnapshot(discovery.Unhealthy)); !discovery.SameSnapshots(first, again) {
			t.Errorf("nothing has changed, and it is %+v", again.Devices[0].Health)
		}
		if now, err := os.Stat(filepath.Join(dir, "health.json")); err != nil || !os.SameFile(written, now) {
			t.Errorf("written though nothing has changed: %v", err)
		}
		s.stop()

		s = newSettling(t.Context(), severity, disk.Files{}, dir, func() { scans.Add(1) })
		if again := s.settleStates(t.Context(), healthSnapshot(discovery.Unhealthy)); !discovery.SameSnapshots(first, again) {
			t.Errorf("after a restart it is %+v, it was %+v", again.Devices[0].Health, first.Devices[0].Health)
		}
		s.settleStates(t.Context(), healthSnapshot(discovery.Healthy))
		time.Sleep(9 * time.Second)
		if scans.Load() > 0 {
			t.Error("scans before it can have recovered")
		}
		time.Sleep(2 * time.Second)
		if synctest.Wait(); scans.Load() != 1 {
			t.Errorf("%d scans, want one when it has recovered", scans.Load())
		}
		if now := s.settleStates(t.Context(), healthSnapshot(discovery.Healthy)); now.Devices[0].Health.Key() != "" {
			t.Errorf("then %+v", now.Devices[0].Health)
		}
		s.stop()
	})
}

func TestSettlingFromDamagedFile(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "health.json"), []byte(`{"a":{"status":"Unhe`), 0o600); err != nil {
		t.Fatal(err)
	}
	s := newSettling(t.Context(), nil, disk.Files{}, dir, func() {})
	defer s.stop()
	if now := s.settleStates(t.Context(), healthSnapshot(discovery.Healthy)); now.Devices[0].Health.Key() != "" {
		t.Errorf("settled as %+v", now.Devices[0].Health)
	}
	written, err := os.ReadFile(filepath.Join(dir, "health.json"))
	if err != nil || !json.Valid(written) {
		t.Errorf("the file is %q, %v", written, err)
	}
	again := newSettling(t.Context(), nil, disk.Files{}, dir, func() {})
	defer again.stop()
	if read, err := json.Marshal(&again.settler); err != nil || string(read) != string(written) {
		t.Errorf("read %q, %v, want %q", read, err, written)
	}
}
