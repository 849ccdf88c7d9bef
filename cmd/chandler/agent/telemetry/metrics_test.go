package telemetry

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/exclusion"
)

// serveMetrics serves metrics until the test ends, and returns a function that requests the
// metrics.
func serveMetrics(t *testing.T, m *Metrics, state State) (scrape func() string) {
	t.Helper()
	server := httptest.NewServer(m.Handler(state, nil))
	t.Cleanup(server.Close)
	return func() string {
		response, err := http.Get(server.URL)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s, %v", response.Status, text, err)
		}
		return string(text)
	}
}

// emptyState returns the state of an agent before its first scan.
func emptyState() State {
	return State{
		Node:       "worker",
		Features:   func() []features.Feature { return nil },
		Prepared:   func() int { return 0 },
		Placed:     func() *placement.Placed { return nil },
		View:       func(s exclusion.Stock) *ledger.View { return ledger.ViewOf(s) },
		Listing:    func() *kubeletapi.Listing { return nil },
		Published:  func() (int, int, bool) { return 0, 0, false },
		Refusal:    func() string { return "" },
		Registered: func() (bool, bool) { return false, true },
		Links:      func([]rules.Offered) map[string]pci.Link { return nil },
	}
}

func expectLines(t *testing.T, text string, lines ...string) {
	t.Helper()
	for _, line := range lines {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("%q is not said:\n%s", line, text)
		}
	}
}

// The kubelet's calls are counted by duration. The numbers of devices and claims are those at the
// time of the request.
func TestMetricsOfCallsAndDevices(t *testing.T) {
	m := NewMetrics("v1", true)
	var now *placement.Placed
	prepared := 0
	state := emptyState()
	state.Prepared = func() int { return prepared }
	state.Placed = func() *placement.Placed { return now }
	scrape := serveMetrics(t, m, state)
	text := scrape()
	expectLines(t, text, "chandler_dra_prepared_claims 0")
	if strings.Contains(text, "chandler_devices{") {
		t.Errorf("devices are counted before they are known:\n%s", text)
	}
	m.ObserveCall("prepare", "claim", 700*time.Microsecond, nil)
	m.ObserveCall("prepare", "claim", 3*time.Second, errors.New("held"))
	prepared = 3
	now = &placement.Placed{
		Snapshot: &rules.Snapshot{Devices: []rules.Offered{
			{Device: discovery.Device{Name: "a", Family: "amdgpu"}}, {Device: discovery.Device{Name: "b", Family: "amdgpu"}}, {Device: discovery.Device{Name: "c", Family: "amdgpu", Health: discovery.Health{Status: discovery.Unknown}}},
			{Device: discovery.Device{Name: "kvm", Family: "hypervisor"}}, {Device: discovery.Device{Name: "nobody-knows", Family: "qat"}},
		}},
		Placement: placement.Placement{API: map[string]discovery.Mode{"a": discovery.ModeDRA, "b": discovery.ModeDRA, "c": discovery.ModeDRA, "kvm": discovery.ModeDevicePlugin}},
	}
	expectLines(t, scrape(),
		"# TYPE chandler_dra_duration_seconds histogram",
		`chandler_dra_duration_seconds_bucket{operation="prepare",result="success",stage="claim",le="0.0005"} 0`,
		`chandler_dra_duration_seconds_bucket{operation="prepare",result="success",stage="claim",le="0.001"} 1`,
		`chandler_dra_duration_seconds_count{operation="prepare",result="error",stage="claim"} 1`,
		"chandler_dra_prepared_claims 3",
		`chandler_devices{api="DRA",family="amdgpu",health="healthy"} 2`,
		`chandler_devices{api="DRA",family="amdgpu",health="unknown"} 1`,
		`chandler_devices{api="DevicePlugin",family="hypervisor",health="healthy"} 1`,
	)
	if text := scrape(); strings.Contains(text, `chandler_devices{api="",`) || strings.Contains(text, `family="qat",health`) {
		t.Errorf("a device is counted that no API has:\n%s", text)
	}
}

func TestMetricsSayWhatTheServerKeeps(t *testing.T) {
	var kept []features.Feature
	state := emptyState()
	state.Features = func() []features.Feature { return kept }
	scrape := serveMetrics(t, NewMetrics("v1", true), state)
	if text := scrape(); strings.Contains(text, "chandler_dra_server_feature_enabled{") {
		t.Errorf("said before it is known:\n%s", text)
	}
	kept = features.All().WithoutFeatures("DRANodeAllocatableResources").AllFeatures()
	text := scrape()
	expectLines(t, text,
		"# TYPE chandler_dra_server_feature_enabled gauge",
		`chandler_dra_server_feature_enabled{feature="DRANodeAllocatableResources"} 0`,
		`chandler_dra_server_feature_enabled{feature="DRAPartitionableDevices"} 1`,
		`chandler_dra_server_feature_enabled{feature="SeparateCounters"} 1`,
	)
	if lines := strings.Count(text, "\nchandler_dra_server_feature_enabled{"); lines != len(kept) {
		t.Errorf("%d features, want %d:\n%s", lines, len(kept), text)
	}
	// The next scrape reflects the change.
	kept = features.All().AllFeatures()
	if text := scrape(); regexp.MustCompile(`feature_enabled\{.*\} 0\n`).MatchString(text) {
		t.Errorf("still without:\n%s", text)
	}
}
