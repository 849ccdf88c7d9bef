package doctor

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
	"chandler.dev/internal/terminal"
)

var update = flag.Bool("update", false, "rewrite the pages and the golden files")

// Each code is reported for its fault, and no code is reported for a healthy node.
func TestCodes(t *testing.T) {
	if found := JudgeFacts(healthy()).Codes(); len(found) > 0 {
		t.Fatalf("a healthy node has %v:\n%s", found, printed(t, healthy(), terminal.Plain, true))
	}
	for _, c := range codes.Codes() {
		t.Run(c.ID, func(t *testing.T) {
			break_, known := breaks[c.ID]
			if !known {
				t.Fatal("no test shows it")
			}
			f := healthy()
			break_(f)
			judged := JudgeFacts(f)
			if found := judged.Codes(); !slices.Equal(found, []string{c.ID}) {
				t.Fatalf("found %v:\n%s", found, printed(t, f, terminal.Plain, true))
			}
			for _, s := range judged.Sections {
				for _, finding := range s.Findings {
					checkFinding(t, c, s.Category, finding)
				}
			}
		})
	}
	for id := range breaks {
		if _, known := codes.Lookup(id); !known {
			t.Errorf("a test shows %s, which is no code", id)
		}
	}
}

// placeholder matches the words in capitals that stand for names in the documentation.
var placeholder = regexp.MustCompile(`\b(NAMESPACE|POD|NODE|ADDRESS|MODULE|UID|FILE|DRIVER)\b`)

func checkFinding(t *testing.T, c codes.Code, category codes.Category, f report.Finding) {
	t.Helper()
	if f.Code == "" {
		return
	}
	switch {
	case f.Result != c.Result || category != c.Category() && f.Code != "CH0304":
		t.Errorf("%s: result %d in %s", f.Code, f.Result, category)
	case f.Text == "" || strings.HasSuffix(f.Text, "."):
		t.Errorf("text %q", f.Text)
	case !strings.HasSuffix(f.Cause, "."):
		t.Errorf("the cause is no sentence: %q", f.Cause)
	case len(f.Fix) == 0:
		t.Error("there is no fix")
	}
	for _, command := range f.Fix {
		if name := placeholder.FindString(command); name != "" {
			t.Errorf("a fix has %s in place of a name: %s", name, command)
		}
		if strings.Contains(command, "  #") && !strings.Contains(command, "   # ") {
			t.Errorf("a remark does not stand off: %q", command)
		}
	}
	checkHelm(t, f.Fix)
}

// byHand matches commands for objects of the chart that Helm does not see.
var byHand = regexp.MustCompile(`kubectl.* (edit|patch|set) .*(configmap|daemonset)`)

// checkHelm checks that commands for objects of the chart are for the plain manifests, after the
// ones for Helm.
func checkHelm(t *testing.T, commands []string) {
	t.Helper()
	helm := false
	for _, command := range commands {
		helm = helm || strings.HasPrefix(command, "helm upgrade ")
		if byHand.MatchString(command) && (!helm || !strings.Contains(command, "with the plain manifests")) {
			t.Errorf("a change of an object that Helm manages: %s", command)
		}
	}
}

// Accelerators without a driver that no family describes are one finding.
func TestUnboundAccelerators(t *testing.T) {
	f := healthy()
	functions, _ := f.Host.Functions.get()
	f.Host.Functions = KnownAnswer(append(slices.Clone(functions),
		Function{Address: "0000:03:00.0", Class: "120000", Vendor: "8086", Device: "6240"},
		Function{Address: "0000:05:00.1", Class: "120000", Vendor: "8086", Device: "4fc1"},
		Function{Address: "0000:06:00.0", Class: "120000", Vendor: "1e3b", Device: "0002", Override: "vfio-pci"}))
	f.Host.Modules["vfio_pci"] = true
	var findings []report.Finding
	for _, s := range JudgeFacts(f).Sections {
		for _, finding := range s.Findings {
			if finding.Code != "" {
				findings = append(findings, finding)
			}
		}
	}
	want := []report.Finding{{
		Text:  "2 accelerators have no kernel driver",
		Cause: "No module with a driver for the device is loaded. The devices 03:00.0 8086:6240 and 05:00.1 8086:4fc1 cannot be allocated.",
		Fix:   []string{"for a in 0000:03:00.0 0000:05:00.1; do", `  sudo modprobe "$(cat /sys/bus/pci/devices/$a/modalias)"`, "done"},
	}, {
		Text:  "06:00.0 1e3b:0002 has no kernel driver",
		Cause: "The driver_override is vfio-pci, but this driver is not bound. The device cannot be allocated.",
		Fix:   []string{"sudo modprobe vfio-pci", `sudo sh -c "echo 0000:06:00.0 > /sys/bus/pci/drivers_probe"`},
	}}
	if len(findings) != len(want) {
		t.Fatalf("%+v", findings)
	}
	for i, got := range findings {
		if got.Code != "CH0304" || got.Text != want[i].Text || got.Cause != want[i].Cause || !slices.Equal(got.Fix, want[i].Fix) {
			t.Errorf("%+v, want %+v", got, want[i])
		}
	}
}

// A setting of the host is changed by its own command: a reset would not help.
func TestFixOfASetting(t *testing.T) {
	f := healthy()
	snapshot, _ := f.Devices.Snapshot.get()
	snapshot.Devices[0].Health = discovery.Health{Status: discovery.Unhealthy, Reason: "MIG mode is on and no MIG instance exists", Fix: "sudo nvidia-smi -i 0000:1a:00.0 -mig 0"}
	text := printed(t, f, terminal.Plain, true)
	if !strings.Contains(text, "fix    sudo nvidia-smi -i 0000:1a:00.0 -mig 0") || strings.Contains(text, "/reset") {
		t.Errorf("printed\n%s", text)
	}
}

// Each code has all parts of its page, and a unique number.
func TestCodesAreComplete(t *testing.T) {
	seen := make(map[string]bool)
	last := ""
	checked := make(map[string]bool)
	for _, c := range allChecks() {
		for _, id := range c.codes {
			checked[id] = true
		}
	}
	for _, c := range codes.Codes() {
		if seen[c.ID] || c.ID <= last || !regexp.MustCompile(`^CH0[1-7]\d\d$`).MatchString(c.ID) {
			t.Errorf("%s: twice, not in order, or no code", c.ID)
		}
		seen[c.ID], last = true, c.ID
		if c.Says == "" || c.Looks == "" || c.Comes == "" || c.Why == "" || len(c.Fixes) == 0 || len(c.Symptoms) == 0 {
			t.Errorf("%s: something of its page is missing", c.ID)
		}
		for _, text := range []string{c.Looks, c.Comes, c.Why} {
			if !strings.HasSuffix(text, ".") || strings.HasPrefix(text, "What ") {
				t.Errorf("%s: no sentence: %q", c.ID, text)
			}
		}
		if !checked[c.ID] {
			t.Errorf("%s: no check says that it may find it", c.ID)
		}
	}
	for id := range checked {
		if !seen[id] {
			t.Errorf("a check finds %s, which is no code", id)
		}
	}
	if len(seen) < 40 {
		t.Errorf("%d codes", len(seen))
	}
}

// docs is the directory of the documentation.
const docs = "../../docs"

// The pages match the codes. The flag -update writes the pages.
func TestPages(t *testing.T) {
	want := map[string]string{
		"codes/README.md":    codes.Index(),
		"troubleshooting.md": codes.TroubleshootingPage(),
	}
	for _, c := range codes.Codes() {
		want["codes/"+c.ID+".md"] = c.Page()
	}
	files, err := filepath.Glob(filepath.Join(docs, "codes", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if _, known := want["codes/"+filepath.Base(file)]; !known {
			t.Errorf("%s is the page of no code", file)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		golden(t, filepath.Join(docs, name), want[name])
	}
}

func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s is not up to date (-update writes it):\n%s", file, diff)
	}
}

func printed(t *testing.T, f *Facts, style terminal.Style, quiet bool) string {
	t.Helper()
	var out bytes.Buffer
	if err := JudgeFacts(f).Print(&out, style, quiet); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// sick returns the facts of a node with several faults.
func sick() *Facts {
	f := healthy()
	for _, id := range []string{"CH0104", "CH0202", "CH0301", "CH0307", "CH0502", "CH0604"} {
		breaks[id](f)
	}
	return f
}

func TestPrint(t *testing.T) {
	for name, test := range map[string]struct {
		facts *Facts
		style terminal.Style
		quiet bool
	}{
		"healthy":  {healthy(), terminal.Plain, false},
		"sick-80":  {sick(), terminal.Plain, false},
		"sick-120": {sick(), terminal.Style{Width: 120}, true},
		"ascii":    {sick(), terminal.Style{Width: 80, ASCII: true}, true},
		"laptop":   {laptop(), terminal.Plain, false},
	} {
		t.Run(name, func(t *testing.T) {
			got := printed(t, test.facts, test.style, test.quiet)
			for line := range strings.Lines(got) {
				if n := terminal.Columns(strings.TrimRight(line, "\n")); n > test.style.Width && !strings.Contains(line, "'") && !strings.Contains(line, `"`) {
					t.Errorf("a line of %d columns: %s", n, line)
				}
			}
			golden(t, filepath.Join("testdata", name+".txt"), got)
		})
	}
}

func TestPrintIsHarmless(t *testing.T) {
	f := healthy()
	f.Node = "n\x1b[2J"
	breaks["CH0301"](f)
	for i := range f.Devices.Snapshot.Value.Devices {
		f.Devices.Snapshot.Value.Devices[i].Health.Reason = "\x1b]0;x\a"
	}
	if got := printed(t, f, terminal.Plain, false); strings.ContainsAny(got, "\x1b\a") {
		t.Errorf("control characters: %q", got)
	}
}

// The JSON output has the format of "linkerd check -o json", and contains everything that
// Print prints.
func TestJSON(t *testing.T) {
	data, err := json.MarshalIndent(JudgeFacts(sick()), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/sick.json", string(data)+"\n")
	var linkerd struct {
		Success    bool
		Categories []struct {
			CategoryName string
			Checks       []struct{ Description, Result string }
		}
	}
	if err := json.Unmarshal(data, &linkerd); err != nil || linkerd.Success || len(linkerd.Categories) != 7 || linkerd.Categories[0].Checks[0].Result == "" {
		t.Errorf("as linkerd's: %+v, %v", linkerd, err)
	}
}

func TestOnly(t *testing.T) {
	for list, want := range map[string]int{"": 7, "devices": 1, "kubelet, apis": 2, "two APIs,runtime": 2} {
		only, err := codes.ParseCategories(list)
		if err != nil {
			t.Fatal(err)
		}
		if got := len(JudgeFacts(healthy(), only...).Sections); got != want {
			t.Errorf("--only %q: %d sections, want %d", list, got, want)
		}
	}
	if _, err := codes.ParseCategories("device"); err == nil {
		t.Error("a category that there is not is taken")
	}
}

func TestHealthy(t *testing.T) {
	f := healthy()
	if !JudgeFacts(f).IsHealthy(true) {
		t.Error("a healthy node is not")
	}
	breaks["CH0307"](f)
	if r := JudgeFacts(f); !r.IsHealthy(false) || r.IsHealthy(true) {
		t.Error("a warning counts, or does not count when it is to")
	}
	breaks["CH0301"](f)
	if JudgeFacts(f).IsHealthy(false) {
		t.Error("a failure does not count")
	}
}

// An agent that only reports devices is not registered, publishes nothing, and may run beside
// another plugin for the same devices.
func TestReportOnly(t *testing.T) {
	for _, code := range []string{"CH0104", "CH0502", "CH0503", "CH0603", "CH0608"} {
		f := healthy()
		breaks[code](f)
		if found := JudgeFacts(f).Codes(); !slices.Contains(found, code) {
			t.Fatalf("%s: found %v", code, found)
		}
		f.Agent.ReportOnly = true
		if found := JudgeFacts(f).Codes(); slices.Contains(found, code) {
			t.Errorf("in mode ReportOnly: found %v", found)
		}
	}
	f := healthy()
	f.Agent.ReportOnly = true
	if got := printed(t, f, terminal.Plain, false); !strings.Contains(got, "the mode is ReportOnly, so the agent offers no device") {
		t.Errorf("the mode is missing:\n%s", got)
	}
}

// Doctor reports why nodes for virtual machines are not in ResourceSlices.
func TestNoAccelerators(t *testing.T) {
	f := healthy()
	snapshot, _ := f.Devices.Snapshot.get()
	snapshot.Devices[0].ModeReason = rules.NoAccelerators
	if got := printed(t, f, terminal.Plain, false); !strings.Contains(strings.Join(strings.Fields(got), " "), snapshot.Devices[0].Name+": "+rules.NoAccelerators) {
		t.Errorf("the reason is missing:\n%s", got)
	}
}

// A node of Kubernetes 1.33 can use DRA if DRA is enabled there. Otherwise doctor reports the
// kubelet's feature gate.
func TestOldDRA(t *testing.T) {
	f := healthy()
	f.Kubernetes, f.Cluster.Server, f.Cluster.DRA = "v1.33.9", KnownAnswer("v1.33.9"), KnownAnswer("v1beta2")
	f.Cluster.Node.Value.Status.NodeInfo.KubeletVersion = "v1.33.9"
	gates := map[string]bool{"DynamicResourceAllocation": true, "KubeletPodResourcesDynamicResources": true}
	f.Kubelet.Config.Value.FeatureGates = gates
	if found := JudgeFacts(f).Codes(); len(found) > 0 {
		t.Errorf("found %v", found)
	}
	if got := printed(t, f, terminal.Plain, false); !strings.Contains(got, "resource.k8s.io/v1beta2 is served, but not v1") {
		t.Errorf("it does not say which version:\n%s", got)
	}
	delete(gates, "DynamicResourceAllocation")
	if found := JudgeFacts(f).Codes(); !slices.Equal(found, []string{"CH0109"}) {
		t.Errorf("with the gate as it is by default: found %v", found)
	}
}

// Partitions of one physical device with the same fault are reported once, with all consumers.
func TestParts(t *testing.T) {
	f := healthy()
	s := f.Devices.Snapshot.Value
	for i := range 2 {
		s.Devices[i].PartOf = &discovery.Silicon{Name: "gpu"}
		condition(i, discovery.ConditionUnknown, noSchedule, "it is being reset", time.Minute)(f)
	}
	judged := JudgeFacts(f, codes.Devices)
	var found []report.Finding
	for _, finding := range judged.Sections[0].Findings {
		if finding.Code != "" {
			found = append(found, finding)
		}
	}
	if len(found) != 1 || !strings.Contains(found[0].Cause, "pci-0000-9e-00-0") || !strings.Contains(found[0].Cause, "llama-7b-worker-1") {
		t.Errorf("found %+v", found)
	}
}

// A device with unlimited sharing is published as numbered devices to an API server without
// sharing.
func TestNumberedShares(t *testing.T) {
	f := healthy()
	d := &f.Devices.Snapshot.Value.Devices[2]
	d.Shareable = true
	published := &f.Cluster.Slices.Value[0].Spec.Devices[2]
	if published.Name != d.Name {
		t.Fatalf("%s is published as %s", d.Name, published.Name)
	}
	published.Name = rules.ShareName(d.Name, 0, 64)
	if found := JudgeFacts(f).Codes(); len(found) > 0 {
		t.Errorf("found %v", found)
	}
}

// Doctor reports no success for anything that could not be checked.
func TestNoAnswer(t *testing.T) {
	f := &Facts{Head: report.Head{Node: "n", Version: "v", Time: time.Unix(0, 0)}}
	for _, s := range JudgeFacts(f).Sections {
		for _, finding := range s.Findings {
			if finding.Result == codes.OK {
				t.Errorf("%s: %q without having looked", s.Category, finding.Text)
			}
		}
	}
}

// The reason of an agent that is not ready selects the finding. Without a reason, the agent's text is
// reported, whatever the text is.
func TestUnreadyReasons(t *testing.T) {
	for reason, want := range map[UnreadyReason][]string{
		UnreadyConfig:       {"CH0703"},
		UnreadyRegistration: {"CH0103", "CH0701"},
		"":                  {"CH0701"},
	} {
		f := healthy()
		f.Agent.Pod, f.Agent.Ready, f.Agent.Unready = KnownAnswer[*corev1.Pod](nil), KnownAnswer("it cannot be ready"), reason
		if found := JudgeFacts(f).Codes(); !slices.Equal(found, want) {
			t.Errorf("%q: found %v, want %v", reason, found, want)
		}
		if got := printed(t, f, terminal.Plain, true); strings.Count(got, "It cannot be ready.") != len(want) {
			t.Errorf("%q: printed\n%s", reason, got)
		}
	}
}

// An invalid configuration is one finding, also where the agent's pod is not ready, and where the agent
// that should take over has it.
func TestOneFindingForTheConfiguration(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "chandler", Name: "chandler-new", CreationTimestamp: ago(3 * time.Minute)}}
	const why = "the configuration is invalid: exclude[0].cel: no such field"
	const waits = "The agent chandler-new does not become ready, and the update waits."
	for name, test := range map[string]struct {
		set   func(*AgentFacts)
		waits bool
	}{
		"the agent":      {func(a *AgentFacts) { a.Pod, a.Ready, a.Unready = KnownAnswer(pod), KnownAnswer(why), UnreadyConfig }, false},
		"the next agent": {func(a *AgentFacts) { a.OtherAgents = []OtherAgent{{Pod: pod, Why: why, Unready: UnreadyConfig}} }, true},
		"the next agent and ConfigMap": {func(a *AgentFacts) {
			a.OtherAgents, a.Config = []OtherAgent{{Pod: pod, Why: why, Unready: UnreadyConfig}}, KnownAnswer(why)
		}, true},
	} {
		f := healthy()
		test.set(&f.Agent)
		if found := JudgeFacts(f).Codes(); !slices.Equal(found, []string{"CH0703"}) {
			t.Errorf("%s: found %v", name, found)
		}
		got := strings.Join(strings.Fields(printed(t, f, terminal.Plain, true)), " ")
		if strings.Count(got, "exclude[0].cel: no such field") != 1 || strings.Contains(got, waits) != test.waits {
			t.Errorf("%s: printed\n%s", name, got)
		}
	}
}

// An agent that cannot take over is reported after a while, although another agent is ready.
func TestAgentBeside(t *testing.T) {
	f := healthy()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "chandler", Name: "chandler-new", CreationTimestamp: ago(30 * time.Second)}}
	f.Agent.OtherAgents = []OtherAgent{{Pod: pod, Why: "the kubelet has not answered the registration of the DRA driver yet", Unready: UnreadyRegistration}}
	if found := JudgeFacts(f).Codes(); len(found) > 0 {
		t.Errorf("found %v of an agent that has just started", found)
	}
	pod.CreationTimestamp = ago(3 * time.Minute)
	if found := JudgeFacts(f).Codes(); !slices.Equal(found, []string{"CH0701"}) {
		t.Errorf("found %v", found)
	}
	got := printed(t, f, terminal.Plain, true)
	for _, want := range []string{"two agents are on this node, and chandler-new is not ready, for 3 min", "the DRA driver", "kubectl -n chandler logs chandler-new"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing:\n%s", want, got)
		}
	}
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	if found := JudgeFacts(f).Codes(); len(found) > 0 {
		t.Errorf("found %v of an agent that is ready", found)
	}
}

// Quiet output lists the skipped checks.
func TestQuietNamesWhatWasNotAsked(t *testing.T) {
	f := healthy()
	f.Runtime.Config = UnknownAnswer[RuntimeConfig]("it is not in the agent's pod")
	if got := printed(t, f, terminal.Plain, true); !strings.Contains(got, "not checked: whether CDI is on") {
		t.Errorf("it is not named:\n%s", got)
	}
	if got := printed(t, healthy(), terminal.Plain, true); strings.Contains(got, "not checked:") {
		t.Errorf("all was asked:\n%s", got)
	}
}

// If a disk is full, the findings for the missing specs refer to the full disk, which is the
// code to read first.
func TestCauseBeforeConsequence(t *testing.T) {
	for _, code := range []string{"CH0406", "CH0407"} {
		f := healthy()
		breaks["CH0206"](f)
		breaks[code](f)
		if found := JudgeFacts(f).Codes(); !slices.Equal(found, []string{"CH0206", code}) {
			t.Errorf("found %v", found)
		}
		got := words(printed(t, f, terminal.Plain, true))
		for _, want := range []string{"plugins/chandler.dev is full: free space first (" + code + ").", "chandler explain " + code} {
			if !strings.Contains(got, want) {
				t.Errorf("no %q in %s", want, got)
			}
		}
		if !strings.HasSuffix(got, "chandler explain "+code) {
			t.Errorf("the foot names another code: %s", got)
		}
		if line := JudgeFacts(f).Line(false); !strings.HasPrefix(line, code) {
			t.Errorf("the line begins with another code: %s", line)
		}
		if line := JudgeFacts(f, codes.Runtime).Line(false); !strings.HasPrefix(line, "CH0206") {
			t.Errorf("of the runtime alone: %s", line)
		}
	}
}

// If the version of containerd is unknown, doctor mentions that CDI may be on nevertheless.
func TestCDIOfAnUnknownVersion(t *testing.T) {
	f := healthy()
	f.Runtime.Version, f.Runtime.Config.Value.CDI = "", false
	if got := printed(t, f, terminal.Plain, true); !strings.Contains(got, "CH0202") || !strings.Contains(got, "From containerd 2.4 on CDI") {
		t.Errorf("the doubt is not told:\n%s", got)
	}
}

// Several devices with the same cause are reported once, with the command of their family.
func TestDevicesOfOneCause(t *testing.T) {
	f := healthy()
	f.Devices.MakeNodes = map[string]string{"nvidia": "sudo make-nodes"}
	devices := f.Devices.Snapshot.Value.Devices
	var ill []string
	for i := range devices {
		if devices[i].Family == "nvidia" {
			ill = append(ill, devices[i].Name)
			devices[i].Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionNodeMissing, Reason: "device node /dev/nvidia" + string(rune('0'+i)) + " is missing", Since: ago(time.Minute)}
		}
	}
	got := printed(t, f, terminal.Plain, true)
	if strings.Count(got, "CH0305") != 2 || !strings.Contains(got, "2 devices of nvidia lack a device node") || strings.Count(got, "sudo make-nodes") != 1 {
		t.Errorf("%v are not told of together:\n%s", ill, got)
	}
	f.Devices.MissingNodes = map[string][]string{"nvidia": {"/dev/nvidiactl", "/dev/nvidia-uvm"}}
	if got := words(printed(t, f, terminal.Plain, true)); !strings.Contains(got, "Of the nodes that these devices share, /dev/nvidiactl and /dev/nvidia-uvm are missing too.") {
		t.Errorf("what they share is not told of:\n%s", got)
	}
	for i := range devices {
		if devices[i].Family == "nvidia" {
			devices[i].Health = discovery.MissingNodeHealth("/dev/nvidiactl")
		}
	}
	if got := words(printed(t, f, terminal.Plain, true)); !strings.Contains(got, "Of the nodes that these devices share, /dev/nvidia-uvm is missing too.") {
		t.Errorf("the missing node of the devices themselves is repeated:\n%s", got)
	}
	for _, name := range ill {
		if !strings.Contains(got, name) {
			t.Errorf("%s is missing:\n%s", name, got)
		}
	}
}

// Equal faults of several devices are one finding, with commands for all of them that can be pasted.
func TestEqualFaults(t *testing.T) {
	for _, test := range []struct {
		condition discovery.Condition
		reasons   [2]string
		text      string
		fix       []string
	}{
		{discovery.ConditionDriverUnbound, [2]string{"no driver is bound to it", "no driver is bound to it"}, "2 devices of nvidia have no kernel driver", []string{
			"for a in 0000:1a:00.0 0000:9e:00.0; do",
			`  sudo modprobe "$(cat /sys/bus/pci/devices/$a/modalias)"`,
			`  sudo sh -c "echo $a > /sys/bus/pci/drivers_probe"`,
			"done",
		}},
		{discovery.ConditionNotResponding, [2]string{"its configuration space reads as ones", "its configuration space reads as ones"}, "2 devices of nvidia do not respond on the bus", nil},
		{discovery.ConditionUnhealthy, [2]string{"XID 79", "XID 48"}, "gpu 1a:00.0 H100 80GB HBM3 is unhealthy", nil},
	} {
		f := healthy()
		snapshot, _ := f.Devices.Snapshot.get()
		for i, reason := range test.reasons {
			snapshot.Devices[i].Health = discovery.Health{Status: discovery.Unhealthy, Condition: test.condition, Reason: reason}
		}
		judged := JudgeFacts(f)
		var findings []report.Finding
		for _, s := range judged.Sections {
			for _, finding := range s.Findings {
				if finding.Code != "" {
					findings = append(findings, finding)
				}
				if test.condition == discovery.ConditionDriverUnbound && strings.Contains(finding.Text, "every accelerator has a kernel driver") {
					t.Errorf("two devices without a driver, and: %s", finding.Text)
				}
			}
		}
		want := 1
		if test.reasons[0] != test.reasons[1] {
			want = 2
		}
		if len(findings) != want || !strings.HasPrefix(findings[0].Text, test.text) {
			t.Fatalf("%s: findings %+v", test.condition, findings)
		}
		fix := slices.DeleteFunc(slices.Clone(findings[0].Fix), func(line string) bool { return strings.HasPrefix(line, "kubectl ") })
		if test.fix != nil && !slices.Equal(fix, test.fix) {
			t.Errorf("%s: fix\n%s", test.condition, strings.Join(fix, "\n"))
		}
	}
}

// A device under vfio that cannot be opened is reported once, with the fix for vfio.
func TestVFIOIsReportedOnce(t *testing.T) {
	cause := fmt.Errorf("%w: it has no node", pci.ErrVFIO)
	f := healthy()
	snapshot, _ := f.Devices.Snapshot.get()
	snapshot.Devices[2].Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionNodeMissing, Reason: cause.Error()}
	problem(snapshot.Devices[2].Name, cause)(f)
	if text := printed(t, f, terminal.Plain, true); strings.Count(text, "CH03") != 2 || !strings.Contains(text, "sudo modprobe vfio-pci") { // the finding and the last line
		t.Errorf("printed\n%s", text)
	}
	function(Function{Address: pciAddress(&snapshot.Devices[2].Device), Driver: "vfio-pci", Group: "7"})(f) // the module is loaded
	if text := printed(t, f, terminal.Plain, true); strings.Contains(text, "modprobe") || !strings.Contains(text, "CONFIG_VFIO_DEVICE_CDEV") {
		t.Errorf("bound to vfio-pci: printed\n%s", text)
	}
	snapshot.Problems[0].Err, snapshot.Devices[2].Health.Reason = pci.ErrNoIOMMUGroup, pci.ErrNoIOMMUGroup.Error()
	if text := words(printed(t, f, terminal.Plain, true)); !strings.Contains(text, "the IOMMU is on, but not for this device") {
		t.Errorf("without a group: printed\n%s", text)
	}
}

// A problem with a setting is not reported as a fault of the device.
func TestSettingWithoutEffect(t *testing.T) {
	f := healthy()
	snapshot, _ := f.Devices.Snapshot.get()
	snapshot.Problems = append(snapshot.Problems, discovery.Problem{Device: snapshot.Devices[0].Name, Setting: discovery.SettingPartitions, Err: errors.New("no placements")})
	got := words(printed(t, f, terminal.Plain, true))
	if !strings.Contains(got, "onDemand.partitions has no effect on gpu 1a:00.0") || strings.Contains(got, "cannot be read") {
		t.Errorf("printed\n%s", got)
	}
}

// A recorded host has no answer for most categories. The reason is printed once, and not with --quiet.
func TestReasonOfARecording(t *testing.T) {
	f := &Facts{Head: report.Head{Node: "n", Source: report.Recording, Time: now}}
	for quiet, want := range map[bool]int{false: 1, true: 0} {
		if text := words(printed(t, f, terminal.Plain, quiet)); strings.Count(text, "has no information about") != want {
			t.Errorf("quiet %t: printed\n%s", quiet, text)
		}
	}
}

// With --quiet, the skipped checks of a node are separate from each other.
func TestQuietSeparatesSkippedChecks(t *testing.T) {
	f := &Facts{Head: report.Head{Node: "n", Time: now}, NoKubelet: "no kubelet, and no containers", NoCluster: "no cluster"}
	f.Host.Functions = KnownAnswer([]Function{})
	if text := words(printed(t, f, terminal.Plain, true)); !strings.Contains(text, "not checked: no kubelet, and no containers; the kernel modules") {
		t.Errorf("printed\n%s", text)
	}
}

func TestDeviceThatRecovers(t *testing.T) {
	f := healthy()
	d := &f.Devices.Snapshot.Value.Devices[0]
	f.Devices.Recovered = map[string]bool{d.Name: true}
	d.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionDriverUnbound, Reason: "no driver is bound to it", Since: ago(11 * time.Second)}
	got := printed(t, f, terminal.Plain, true)
	if !strings.Contains(got, "has recovered") || strings.Contains(got, "modprobe") {
		t.Errorf("got:\n%s", got)
	}
	f.Devices.Recovered = nil
	if got := printed(t, f, terminal.Plain, true); strings.Contains(got, "has recovered") {
		t.Errorf("got:\n%s", got)
	}
}

// If an expression of a class or claim reads a missing attribute, doctor names the attribute
// and a syntax that reads it safely, and that syntax works.
func TestExpressionThatFails(t *testing.T) {
	for name, test := range map[string]struct {
		class, selector, want string
	}{
		"string":   {`device.attributes["chandler.dev"].nothing == "x"`, "", `in place of .nothing write .?nothing.orValue("")`},
		"index":    {`device.attributes["chandler.dev"]["nothing"] == "x"`, "", `in place of ["nothing"] write [?"nothing"].orValue("")`},
		"capacity": {`device.capacity["chandler.dev"].nothing.compareTo(quantity("1")) >= 0`, "", `in place of .nothing write .?nothing.orValue(quantity("0"))`},
		"boolean":  {`device.attributes["chandler.dev"].only == true`, "", `in place of .only write .?only.orValue(false)`},
		"claim":    {`true`, `device.attributes["chandler.dev"].nothing == "x"`, `in place of .nothing write .?nothing.orValue("")`},
	} {
		t.Run(name, func(t *testing.T) {
			broken := func(rewrite func(string) string) string {
				f := healthy()
				f.Cluster.Slices.Value[0].Spec.Devices[0].Attributes["only"] = resourceapi.DeviceAttribute{BoolValue: new(bool)}
				f.Cluster.Classes.Value = append(f.Cluster.Classes.Value, deviceClass("bad.chandler.dev", "", `device.driver == "chandler.dev" && `+rewrite(test.class), ago(time.Hour)))
				f.Cluster.Claims.Value = append(f.Cluster.Claims.Value, claim("c", "bad.chandler.dev", rewrite(test.selector), 1))
				return printed(t, f, terminal.Plain, true)
			}
			if got := broken(func(s string) string { return s }); !strings.Contains(words(got), test.want) || !strings.Contains(words(got), "no such key") {
				t.Errorf("no %q in\n%s", test.want, got)
			}
			from, to, _ := strings.Cut(strings.TrimPrefix(test.want, "in place of "), " write ")
			if got := broken(func(s string) string { return strings.ReplaceAll(s, from, to) }); strings.Contains(got, "fails") {
				t.Errorf("with %s it still fails:\n%s", to, got)
			}
		})
	}
}

// words returns a text without line breaks and without the marks at the beginning of remarks.
func words(text string) string {
	return strings.Join(slices.DeleteFunc(strings.Fields(text), func(word string) bool { return word == "#" }), " ")
}

// On a node that is a container, the agent supports reclaim, but cannot change devices. More
// permissions would not help.
func TestVisibilityOnANodeThatIsAContainer(t *testing.T) {
	const changes = "onDemand.virtualFunctions and passthrough cause"
	f := healthy()
	f.Agent.NeedsVisibility, f.Agent.Visibility, f.Agent.VisibilityAll = []string{"reclaim", "onDemand.virtualFunctions", "passthrough"}, KnownAnswer(""), KnownAnswer("the processes in /proc are those of a container")
	got := words(printed(t, f, terminal.Plain, true))
	if !strings.Contains(got, changes) || strings.Contains(got, "reclaim and") || strings.Contains(got, "enabled=true") || !strings.Contains(got, "for this node, which is a container") {
		t.Errorf("got:\n%s", got)
	}
	f.Agent.NeedsVisibility = []string{"reclaim"}
	if got := printed(t, f, terminal.Plain, true); strings.Contains(got, "CH0709") {
		t.Errorf("got:\n%s", got)
	}
	f.Agent.NeedsVisibility, f.Agent.Visibility = []string{"reclaim", "passthrough"}, KnownAnswer("not all processes are visible")
	f.Agent.VisibilityAll = f.Agent.Visibility
	if got := words(printed(t, f, terminal.Plain, true)); strings.Count(got, "cannot determine") != 1 || !strings.Contains(got, `--set reclaim.enabled=true \ --set passthrough.enabled=true`) {
		t.Errorf("got:\n%s", got)
	}
}
