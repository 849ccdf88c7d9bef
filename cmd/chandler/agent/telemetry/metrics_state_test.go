package telemetry

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/cdi"
	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families/amdgpu"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver"
	"chandler.dev/driver/features"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/legacy"
)

var update = flag.Bool("update", false, "write golden files")

// scraped is a node whose metrics are requested.
type scraped struct {
	t       *testing.T
	metrics *Metrics
	state   State
	placed  *placement.Placed
	entries []allocation.Entry
	said    kubeletapi.Listing
	handler http.Handler
}

// newScraped returns a node with the devices of a recorded host. DRA offers the devices unless the
// rules select the other API.
func newScraped(t *testing.T, node, host string, wanted *rules.Rules) *scraped {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("../../../../discovery/families", host))
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := recorded.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	recorded := &discovery.Host{FS: parsed.FS()}
	snapshot := wanted.ApplyTo(scan.ReadHost(recorded, []*discovery.Family{nvidia.Family, amdgpu.Family}))
	s := &scraped{t: t, metrics: NewMetrics("v1.0.0", true), state: emptyState()}
	s.placed = &placement.Placed{Snapshot: snapshot, Placement: placement.PlaceDevices(nil, snapshot.Devices, ledger.ViewOf(&exclusion.Present{Snapshot: snapshot}), placement.Facts{AutoMode: discovery.ModeDRA, Published: &placement.Published{}})}
	s.state.Node = node
	s.state.Links = func(devices []rules.Offered) map[string]pci.Link {
		return new(LinkReader).Read(recorded, devices)
	}
	s.state.Placed = func() *placement.Placed { return s.placed }
	s.state.View = func(stock exclusion.Stock) *ledger.View { return ledger.ViewOf(stock, s.entries...) }
	s.state.Listing = func() *kubeletapi.Listing { return &s.said }
	s.state.Features = features.All().WithoutFeatures("DRADeviceTaints").AllFeatures
	s.state.Published = func() (int, int, bool) { return 1, len(snapshot.Devices), true }
	s.state.Registered = func() (bool, bool) { return true, true }
	s.state.Prepared = func() int { return len(s.state.View(nil).Claims()) }
	s.handler = s.metrics.Handler(s.state, nil)
	s.metrics.ObserveScan(scan.Result{Took: 20 * time.Millisecond})
	return s
}

// claim allocates devices to a claim of a pod's containers.
func (s *scraped) claim(namespace, name, pod string, containers []string, devices ...string) {
	s.t.Helper()
	c := &allocation.Claim{UID: types.UID("uid-" + name), Namespace: namespace, Name: name}
	used := &podresourcesapi.ClaimResource{}
	for i, device := range devices {
		d, found := s.placed.Snapshot.Lookup(device)
		if !found {
			s.t.Fatalf("there is no device %s", device)
		}
		r := allocation.Result{Request: "gpu", Pool: s.state.Node, Device: device, Source: device, Silicon: d.Silicon(), Whole: true}
		r.CDI = cdi.Name(c.UID, i, device, "")
		c.Results = append(c.Results, r)
		used.CdiDevices = append(used.CdiDevices, &podresourcesapi.CDIDevice{Name: cdi.ID(r.CDI)})
	}
	s.entries = append(s.entries, c)
	listed := &podresourcesapi.PodResources{Namespace: namespace, Name: pod}
	for _, container := range containers {
		listed.Containers = append(listed.Containers, &podresourcesapi.ContainerResources{
			Name: container, DynamicResources: []*podresourcesapi.DynamicResource{{ClaimNamespace: namespace, ClaimName: name, ClaimResources: []*podresourcesapi.ClaimResource{used}}},
		})
	}
	s.said.Pods = append(s.said.Pods, listed)
}

// grant allocates devices to a container by IDs of the device plugin API.
func (s *scraped) grant(container, resource string, devices ...string) {
	for i, device := range devices {
		s.entries = append(s.entries, &allocation.Grant{Resource: resource, ID: fmt.Sprintf("%s-%d", device, i), Devices: []string{device}, Silicon: []string{device}, Exclusive: true, Container: container})
	}
}

// sick sets the health of a device.
func (s *scraped) sick(device string, health discovery.Health) {
	for i := range s.placed.Snapshot.Devices {
		if d := &s.placed.Snapshot.Devices[i]; d.Name == device {
			d.Health = health
		}
	}
}

var (
	ofProcess = regexp.MustCompile(`(?m)^(# (HELP|TYPE) )?(go|process)_.*\n`)
	changing  = regexp.MustCompile(`(?m)^(chandler_config_last_reload_success_timestamp_seconds) .*$`)
	builtWith = regexp.MustCompile(`go_version="[^"]*"`)
)

// scrape returns the response to Prometheus.
func (s *scraped) scrape() string {
	s.t.Helper()
	answer := httptest.NewRecorder()
	s.handler.ServeHTTP(answer, httptest.NewRequest("GET", "/metrics", nil))
	text, err := io.ReadAll(answer.Result().Body)
	if err != nil || answer.Code != 200 {
		s.t.Fatalf("%d, %v: %s", answer.Code, err, text)
	}
	return string(text)
}

// fixed removes or replaces the values that differ between scrapes or builds.
func fixed(text string) string {
	text = ofProcess.ReplaceAllString(text, "")
	text = changing.ReplaceAllString(text, "$1 1.7e+09")
	return builtWith.ReplaceAllString(text, `go_version="go1.26"`)
}

// scrapedNodes returns the nodes with golden files of metrics. Module e2e/prometheus evaluates the
// queries of the documentation, the dashboard and the alerts with these files.
func scrapedNodes(t *testing.T) map[string]*scraped {
	h100 := newScraped(t, "dgx-1", "nvidia/testdata/h100x8.host", &rules.Rules{})
	h100.claim("research", "train", "train-0", []string{"trainer"}, "pci-0000-1b-00-0", "pci-0000-43-00-0")
	h100.claim("serving", "llm", "llm-7d9f", []string{"server", "cache"}, "pci-0000-52-00-0")
	h100.claim("serving", "starting", "", nil, "pci-0000-61-00-0")
	h100.sick("pci-0000-9d-00-0", discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionOverTemperature, Effect: resourceapi.DeviceTaintEffectNoSchedule})
	h100.metrics.ObserveCall("prepare", "read", 4*time.Millisecond, nil)
	h100.metrics.ObserveCall("prepare", "claim", 2*time.Millisecond, nil)
	h100.metrics.ObserveCall("prepare", "call", 7*time.Millisecond, nil)
	h100.metrics.ObserveCall("unprepare", "claim", time.Millisecond, nil)
	h100.metrics.ObserveCall("prepare", "claim", time.Millisecond, fmt.Errorf("prepare: %w", &exclusion.Blocked{Device: "pci-0000-1b-00-0"}))

	mig := newScraped(t, "dgx-2", "nvidia/testdata/h100-mig.host", &rules.Rules{})
	mig.claim("research", "notebook", "notebook-0", []string{"jupyter"}, "pci-0000-1b-00-0-gi-2-ci-0")

	mi210 := newScraped(t, "mi-1", "amdgpu/testdata/mi210x8.host", &rules.Rules{Mode: discovery.ModeDevicePlugin})
	mi210.grant("physics/lattice-0 solver", "amd.com/gpu", "pci-0000-23-00-0", "pci-0000-24-00-0")
	mi210.grant("", "amd.com/gpu", "pci-0000-43-00-0")
	mi210.sick("pci-0000-44-00-0", discovery.Health{Status: discovery.Unknown, Effect: resourceapi.DeviceTaintEffectNoSchedule})
	mi210.metrics.ObserveDevicePlugin(legacy.OperationAllocate, 3*time.Millisecond, nil)
	mi210.metrics.ObserveDevicePlugin(legacy.OperationPrefer, time.Millisecond, nil)
	mi210.metrics.ObserveDevicePlugin(legacy.OperationList, time.Millisecond, nil)
	mi210.placed.Placement.Moving = map[string]string{"pci-0000-23-00-0": "physics/lattice-0 has it"}
	return map[string]*scraped{"h100": h100, "mig": mig, "mi210": mi210, "shared": sharedNode(t)}
}

// The metrics of nodes with allocations by both APIs match the golden files, and pass the checks of
// promtool check metrics.
func TestMetricsOfNodes(t *testing.T) {
	for name, node := range scrapedNodes(t) {
		t.Run(name, func(t *testing.T) {
			text := node.scrape()
			problems, err := promlint.New(strings.NewReader(text)).Lint()
			if err != nil || len(problems) > 0 {
				t.Errorf("promlint: %v, %v", problems, err)
			}
			golden := filepath.Join("testdata", "metrics", name+".prom")
			if *update {
				if err := os.MkdirAll(filepath.Dir(golden), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(golden, []byte(fixed(text)), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), fixed(text)); diff != "" {
				t.Errorf("-want +got, see -update:\n%s", diff)
			}
		})
	}
}

// docsRow matches a row of the table of metrics.
var docsRow = regexp.MustCompile("(?m)^\\| `(chandler_[a-z_]+)` \\| (\\w+) \\|")

// The table in the documentation lists exactly the existing metrics, each once and with its type.
func TestMetricsAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := make(map[string]string)
	for _, row := range docsRow.FindAllStringSubmatch(string(page), -1) {
		if documented[row[1]] != "" {
			t.Errorf("%s has two rows", row[1])
		}
		documented[row[1]] = row[2]
	}
	said := make(map[string]string)
	late := newScraped(t, "late", "nvidia/testdata/h100x8.host", &rules.Rules{})
	late.metrics.ObserveScan(scan.Result{Late: []string{"nvidia"}, Hanging: 1})
	late.sick("pci-0000-1b-00-0", discovery.Health{Status: discovery.Unknown})
	shared := newScraped(t, "shared", "nvidia/testdata/h100x8.host", &rules.Rules{Sharing: []rules.Share{{Selector: rulestest.CompileSelector(t, `true`), Replicas: 4}}})
	for _, text := range []string{late.scrape(), shared.scrape(), scrapeOf(scrapedNodes(t))} {
		for line := range strings.SplitSeq(text, "\n") {
			if words := strings.Fields(line); len(words) == 4 && words[1] == "TYPE" && strings.HasPrefix(words[2], "chandler_") {
				said[words[2]] = words[3]
			}
		}
	}
	if diff := cmp.Diff(said, documented); diff != "" {
		t.Errorf("-said +documented:\n%s", diff)
	}
	for _, d := range stateMetrics {
		name := regexp.MustCompile(`fqName: "([^"]+)"`).FindStringSubmatch(d.String())[1]
		if said[name] == "" {
			t.Errorf("no test has a value of %s", name)
		}
	}
}

func scrapeOf(nodes map[string]*scraped) string {
	var all bytes.Buffer
	for _, node := range nodes {
		all.WriteString(node.scrape())
	}
	return all.String()
}

// Refusals are counted by a fixed set of reasons, whatever the text of the error.
func TestMetricsOfRefusals(t *testing.T) {
	m := NewMetrics("v1", true)
	scrape := serveMetrics(t, m, emptyState())
	expectLines(t, scrape(), `chandler_refused_total{api="DRA",reason="allocated"} 0`)
	for _, err := range []error{
		fmt.Errorf("prepare: %w", &exclusion.Blocked{Device: "a"}),
		fmt.Errorf("prepare: %w", context.DeadlineExceeded),
		fmt.Errorf("write: %w", &fs.PathError{Op: "write", Path: "x", Err: fs.ErrPermission}),
		errors.New("device x-1 says y"),
		errors.New("device x-2 says z"),
	} {
		m.ObserveCall("prepare", "claim", time.Millisecond, err)
		m.ObserveCall("prepare", "call", time.Millisecond, err)
		m.ObserveCall("unprepare", "claim", time.Millisecond, err)
	}
	m.ObserveDevicePlugin(legacy.OperationAllocate, time.Millisecond, fmt.Errorf("allocate: %w", legacy.ErrUnavailable))
	m.ObserveDevicePlugin(legacy.OperationAllocate, time.Millisecond, &exclusion.Blocked{Device: "a"})
	m.ObserveDevicePlugin(legacy.OperationPrefer, time.Millisecond, errors.New("no such ID"))
	text := scrape()
	expectLines(t, text,
		`chandler_refused_total{api="DRA",reason="allocated"} 1`,
		`chandler_refused_total{api="DRA",reason="waiting"} 1`,
		`chandler_refused_total{api="DRA",reason="disk"} 1`,
		`chandler_refused_total{api="DRA",reason="other"} 2`,
		`chandler_refused_total{api="DevicePlugin",reason="gone"} 1`,
		`chandler_refused_total{api="DevicePlugin",reason="allocated"} 1`,
		`chandler_device_plugin_duration_seconds_count{operation="prefer",result="error"} 1`,
	)
	if n := strings.Count(text, "\nchandler_refused_total{"); n != 2*len(driver.Refusals()) {
		t.Errorf("%d series of refusals", n)
	}
}

// Each allocation is listed once, whatever the number of its shares, and with the pod once the
// kubelet has listed the pod.
func TestHolders(t *testing.T) {
	claim := &allocation.Claim{UID: "u", Namespace: "a", Name: "c", Results: []allocation.Result{
		{Request: "one", Device: "gpu-share-0", Source: "gpu", CDI: "u-0-gpu"},
		{Request: "one", Device: "gpu-share-1", Source: "gpu", CDI: "u-1-gpu"},
		{Request: "watch", Device: "other", Source: "other", CDI: "u-2-other", Admin: true},
	}}
	limits := &allocation.Claim{UID: "l", Namespace: "a", Name: "q-extended-resources-x7k2q", Pod: "q", Results: []allocation.Result{
		{Request: "container-0-request-0", Device: "npu", Source: "npu", Resource: "example.com/npu", CDI: "l-0-npu"},
	}}
	grants := []allocation.Entry{
		&allocation.Grant{Resource: "r", ID: "1", Devices: []string{"nic"}, Container: "b/p main"},
		&allocation.Grant{Resource: "r", ID: "2", Devices: []string{"nic"}, Container: "b/p main"},
		&allocation.Grant{Resource: "r", ID: "3", Devices: []string{"nic"}},
	}
	sealed := &allocation.Sealed{UID: "lost", Devices: []allocation.SealedDevice{{Name: "old"}}}
	view := ledger.ViewOf(nil, slices.Concat([]allocation.Entry{claim, limits, sealed}, grants)...)
	dra, classic := discovery.ModeDRA, discovery.ModeDevicePlugin
	want := []inventory.Holder{
		{Device: "gpu", API: dra, Namespace: "a", Claim: "c", Request: "one"},
		{Device: "nic", API: classic, Resource: "r"},
		{Device: "nic", API: classic, Namespace: "b", Pod: "p", Container: "main", Resource: "r"},
		{Device: "npu", API: dra, Namespace: "a", Pod: "q", Claim: "q-extended-resources-x7k2q", Request: "container-0-request-0", Resource: "example.com/npu"},
		{Device: "old", API: dra, Claim: "lost"},
	}
	if diff := cmp.Diff(want, holdersOf(view, nil)); diff != "" {
		t.Errorf("before the kubelet has answered: %s", diff)
	}
	said := &kubeletapi.Listing{Pods: []*podresourcesapi.PodResources{{Namespace: "a", Name: "pod", Containers: []*podresourcesapi.ContainerResources{{
		Name: "main", DynamicResources: []*podresourcesapi.DynamicResource{{ClaimResources: []*podresourcesapi.ClaimResource{{
			CdiDevices: []*podresourcesapi.CDIDevice{{Name: cdi.ID("u-0-gpu")}, {Name: cdi.ID("u-1-gpu")}},
		}}}},
	}}}}}
	want[0].Pod, want[0].Container = "pod", "main"
	if diff := cmp.Diff(want, holdersOf(view, said)); diff != "" {
		t.Errorf("after: %s", diff)
	}
}

func TestNVIDIABusID(t *testing.T) {
	for address, want := range map[string]string{"0000:3b:00.0": "00000000:3B:00.0", "10000:01:00.1": "00010000:01:00.1", "": "", "usb-1": ""} {
		if got := nvidiaBusID(address); got != want {
			t.Errorf("%q: %q, want %q", address, got, want)
		}
	}
}

// BenchmarkScrape requests the metrics of a node with 512 devices, half of them allocated.
func BenchmarkScrape(b *testing.B) {
	snapshot := &rules.Snapshot{}
	var entries []allocation.Entry
	for i := range 512 {
		d := discovery.Device{Name: fmt.Sprintf("pci-%04x-00-00-0", i), Family: "nvidia", Attributes: discovery.Attributes{}}
		d.Attributes.SetString("resource.kubernetes.io/pciBusID", fmt.Sprintf("%04x:00:00.0", i))
		d.Attributes.SetString("uuid", fmt.Sprintf("GPU-%d", i))
		d.Attributes.SetString("model", "NVIDIA H100 80GB HBM3")
		snapshot.Devices = append(snapshot.Devices, rules.Offered{Device: d})
		if i%2 == 0 {
			entries = append(entries, &allocation.Grant{Resource: "nvidia.com/gpu", ID: d.Name, Devices: []string{d.Name}, Container: fmt.Sprintf("team/pod-%d main", i)})
		}
	}
	state := emptyState()
	now := &placement.Placed{Snapshot: snapshot}
	view := ledger.ViewOf(nil, entries...)
	state.Placed = func() *placement.Placed { return now }
	state.View = func(exclusion.Stock) *ledger.View { return view }
	handler := NewMetrics("v1", true).Handler(state, nil)
	b.ReportAllocs()
	for b.Loop() {
		handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/metrics", nil))
	}
}
