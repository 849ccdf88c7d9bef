package gather

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"k8s.io/client-go/rest"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/discovery/hostfs"
	"chandler.dev/internal/doctor"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
)

// madeUp is a node made of files, with a kubelet that answers.
type madeUp struct {
	t       *testing.T
	root    string
	options Options
	kubelet *grpc.Server
	listed  []*podresourcesapi.ContainerDevices
}

// The process IDs of the made-up node.
const (
	kubeletPID = "100"
	runtimePID = "200"
	agentPID   = "300"
)

const uid = "5d0cd0c4-1111-2222-3333-444455556666"

// newMadeUp creates a healthy node: containerd 2 with CDI, one prepared claim, and an agent.
func newMadeUp(t *testing.T) *madeUp {
	t.Helper()
	root, err := os.MkdirTemp("", "n") // the path of t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	n := &madeUp{t: t, root: root}
	kubelet := filepath.Join(root, "k")
	n.options = Options{
		Node: "n", Version: "v1", Root: root, Proc: filepath.Join(root, "proc"), Self: filepath.Join(root, "self"), Simulated: true,
		KubeletRoot: kubelet, PluginDir: filepath.Join(kubelet, "device-plugins"), StateDir: filepath.Join(kubelet, "plugins/chandler.dev"), CDIDir: filepath.Join(root, "var/run/cdi"),
		Connect: func() (*rest.Config, error) { return nil, errors.New("no kubeconfig") },
	}
	for _, dir := range []string{"sys/bus/pci/devices", "sys/module/kvm", "dev", "k/device-plugins", "k/pod-resources", "k/plugins_registry", "k/plugins/chandler.dev/claims", "etc/cdi", "var/run/cdi"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.write("etc/containerd/config.toml", "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true\n")
	n.write("k/config.yaml", "kind: KubeletConfiguration\ntopologyManagerPolicy: none\nfeatureGates: {Other: true}\n")
	n.write("proc/stat", "cpu 1 2 3\nbtime 1000000000\n")
	n.write("proc/sys/kernel/random/boot_id", "boot\n")
	n.process(kubeletPID, "/usr/bin/kubelet", "--root-dir="+kubelet, "--config=/k/config.yaml")
	n.process(runtimePID, "/usr/bin/containerd", "--config", "/etc/containerd/config.toml")
	n.process(agentPID, "/chandler", "run", "--kubelet-root="+kubelet)
	n.write("proc/"+agentPID+"/attr/current", "system_u:system_r:container_device_plugin_t:s0\x00")
	n.write("k/plugins/chandler.dev/claims/"+uid+".record", "sum\n"+`{"version":2,"readableBy":1,"uid":"`+uid+`","namespace":"ml","name":"llama","boot":"boot"}`)
	n.write("var/run/cdi/chandler.dev-claim_"+uid+".json", `{"cdiVersion":"0.6.0","kind":"chandler.dev/claim","devices":[{"name":"`+uid+`-0-gpu","containerEdits":{"env":["A=B"]}}]}`)
	n.listen("k/device-plugins/kubelet.sock", nil)
	n.listen("k/plugins_registry/chandler.dev-reg.sock", nil)
	n.kubelet = grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(n.kubelet, answers{madeUp: n})
	n.listen("k/pod-resources/kubelet.sock", n.kubelet)
	return n
}

// write writes a file of the node with a modification time three days ago.
func (n *madeUp) write(name, text string) {
	n.t.Helper()
	file := filepath.Join(n.root, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
		n.t.Fatal(err)
	}
	if err := os.Chtimes(file, time.Time{}, time.Now().Add(-72*time.Hour)); err != nil {
		n.t.Fatal(err)
	}
}

func (n *madeUp) remove(name string) {
	n.t.Helper()
	if err := os.RemoveAll(filepath.Join(n.root, name)); err != nil {
		n.t.Fatal(err)
	}
}

// process creates a process that started a day ago.
func (n *madeUp) process(pid string, args ...string) {
	n.t.Helper()
	n.write("proc/"+pid+"/cmdline", strings.Join(args, "\x00")+"\x00")
	ticks := (time.Now().Unix() - 24*3600 - 1000000000) * 100
	n.write("proc/"+pid+"/stat", pid+" (a b) S 1"+strings.Repeat(" 0", 17)+" "+itoa(ticks)+" 0 0\n")
}

func itoa(n int64) string {
	var digits []byte
	for ; n > 0; n /= 10 {
		digits = append(digits, byte('0'+n%10))
	}
	slices.Reverse(digits)
	return string(digits)
}

// listen serves a gRPC server at a socket of the node. Without a server, listen only accepts
// connections.
func (n *madeUp) listen(name string, server *grpc.Server) {
	n.t.Helper()
	listener, err := net.Listen("unix", filepath.Join(n.root, name))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { listener.Close() })
	if server != nil {
		n.t.Cleanup(server.Stop)
		go func() { _ = server.Serve(listener) }()
	}
}

// answers implements the kubelet's PodResources API.
type answers struct {
	podresourcesapi.UnimplementedPodResourcesListerServer
	*madeUp
}

// List implements podresourcesapi.PodResourcesListerServer.
func (answers) List(context.Context, *podresourcesapi.ListPodResourcesRequest) (*podresourcesapi.ListPodResourcesResponse, error) {
	return &podresourcesapi.ListPodResourcesResponse{}, nil
}

// GetAllocatableResources implements podresourcesapi.PodResourcesListerServer.
func (a answers) GetAllocatableResources(context.Context, *podresourcesapi.AllocatableResourcesRequest) (*podresourcesapi.AllocatableResourcesResponse, error) {
	return &podresourcesapi.AllocatableResourcesResponse{Devices: a.listed}, nil
}

// facts gathers the facts of the node.
func (n *madeUp) facts() *doctor.Facts {
	n.t.Helper()
	var err error
	if n.options.HostFS, err = hostfs.Open(n.root); err != nil {
		n.t.Fatal(err)
	}
	f := All(n.t.Context(), n.options)
	f.Kubelet.Ours = map[string][]string{"nvidia.com/gpu": {}}
	f.Kubernetes = "v1.37.0"
	return f
}

// asked are the categories that need no API server.
var asked = []codes.Category{codes.Kubelet, codes.Runtime, codes.Host, codes.Agent}

// Each fault in the files, processes or sockets of a node is reported with its code. A healthy
// node has no findings.
func TestBrokenNodes(t *testing.T) {
	const state = "k/plugins/chandler.dev/"
	for code, break_ := range map[string]func(n *madeUp){
		"": func(*madeUp) {},
		"CH0101": func(n *madeUp) {
			n.options.PluginDir = filepath.Join(n.root, "k/elsewhere")
			if err := os.WriteFile(n.options.PluginDir, nil, 0o644); err != nil {
				n.t.Fatal(err)
			}
		},
		"CH0102": func(n *madeUp) { n.remove("k/device-plugins/kubelet.sock") },
		"CH0103": func(n *madeUp) { n.remove("k/plugins_registry/chandler.dev-reg.sock") },
		"CH0104": func(n *madeUp) {
			n.listed = []*podresourcesapi.ContainerDevices{{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-1"}}}
		},
		"CH0105": func(n *madeUp) {
			n.write("k/config.yaml", "featureGates: {KubeletPodResourcesDynamicResources: false}\n")
		},
		"CH0108": func(n *madeUp) { n.process(kubeletPID, "/usr/bin/kubelet", "--root-dir", "/var/lib/k0s/kubelet") },
		"CH0109": func(n *madeUp) {
			n.process(kubeletPID, "/usr/bin/kubelet", "--root-dir="+n.options.KubeletRoot, "--feature-gates=A=true,DynamicResourceAllocation=false")
		},
		"CH0202": func(n *madeUp) {
			n.write("etc/containerd/config.toml", "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = false\n")
		},
		"CH0203": func(n *madeUp) {
			n.write("etc/containerd/config.toml", "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\ncdi_spec_dirs = ['/etc/cdi']\n")
		},
		"CH0204": func(n *madeUp) {
			n.write("var/run/cdi/chandler.dev-claim_u2.json", `{"cdiVersion":"0.6.0","kind":"chandler.dev/claim","devices":[{"name":"u2-0-gpu","containerEdits":{"env":["A=B"]}}]}`)
		},
		"CH0206": func(n *madeUp) { n.remove("var/run/cdi/chandler.dev-claim_" + uid + ".json") },
		"CH0207": func(n *madeUp) { n.write("etc/cdi/vendor.json", `{"cdiVersion":`) },
		"CH0208": func(n *madeUp) {
			if err := os.Chtimes(filepath.Join(n.root, "etc/containerd/config.toml"), time.Time{}, time.Now()); err != nil {
				n.t.Fatal(err)
			}
		},
		"CH0304": func(n *madeUp) { n.function("0000:41:00.0", "0x030200", "", "") },
		"CH0401": func(n *madeUp) { n.function("0000:41:00.0", "0x020000", "vfio-pci", "") },
		"CH0403": func(n *madeUp) { n.function("0000:41:00.0", "0x020000", "", "vfio-pci") },
		"CH0404": func(n *madeUp) {
			n.write("sys/fs/selinux/enforce", "1")
			n.write("proc/"+agentPID+"/attr/current", "system_u:system_r:container_t:s0:c1,c2\n")
		},
		"CH0701": func(n *madeUp) { n.remove("proc/" + agentPID) },
		"CH0702": func(n *madeUp) {
			n.write(state+"sides.json.unreadable", "")
			n.write(state+"claims/u9.bad0", "") // not reported again as unreadable
		},
		"CH0704": func(n *madeUp) {
			n.write(state+"claims/u9.bad0", "sum\n"+`{"version":99,"readableBy":99,"uid":"","boot":"boot"}`)
		},
		"CH0707": func(n *madeUp) { n.write(state+"claims/u8.record", "") },
		"CH0708": func(n *madeUp) { n.second("gpu", "chandler-x8k2v") },
	} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			n := newMadeUp(t)
			break_(n)
			var want []string
			if code != "" {
				want = []string{code}
			}
			report := doctor.JudgeFacts(n.facts(), asked...)
			if found := report.Codes(); !slices.Equal(found, want) {
				t.Errorf("found %v, want %v: %+v", found, want, report.Sections)
			}
		})
	}
}

// second creates a second agent process beside the first, which is chandler-7fz2k in namespace
// chandler.
func (n *madeUp) second(namespace, pod string) {
	n.t.Helper()
	n.process("301", "/chandler", "run", "--kubelet-root="+n.options.KubeletRoot)
	n.write("proc/"+agentPID+"/environ", "POD_NAMESPACE=chandler\x00POD_NAME=chandler-7fz2k\x00")
	n.write("proc/301/environ", "PATH=/\x00POD_NAMESPACE="+namespace+"\x00POD_NAME="+pod+"\x00")
}

// Two agents of one DaemonSet are part of an update. Agents of two DaemonSets are reported, even
// in one namespace.
func TestInstallationsOfProcesses(t *testing.T) {
	for pod, want := range map[string][]string{
		"chandler-x8k2v":     {"chandler/chandler"},
		"chandler-gpu-x8k2v": {"chandler/chandler", "chandler/chandler-gpu"},
		"":                   {"chandler/chandler"},
	} {
		n := newMadeUp(t)
		n.second("chandler", pod)
		f := n.facts()
		if found := f.Agent.Installations; !slices.Equal(found, want) {
			t.Errorf("with %q: %q, want %q", pod, found, want)
		}
		if said := slices.Contains(doctor.JudgeFacts(f, codes.Agent).Codes(), "CH0708"); said != (len(want) > 1) {
			t.Errorf("with %q: CH0708 is said: %v", pod, said)
		}
	}
}

// If a directory that the agent has mounted was removed and created again, the agent is
// unhealthy, although the kubelet listens in the new directory. If doctor itself sees only the
// old directory, it does not report the kubelet as unreachable.
func TestDirectoryMadeAgain(t *testing.T) {
	for name, socket := range map[string]bool{"on the node": true, "in the pod": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newMadeUp(t)
			old := filepath.Join(n.root, "old")
			if err := os.Mkdir(old, 0o755); err != nil {
				t.Fatal(err)
			}
			dir, err := os.Open(old)
			if err != nil {
				t.Fatal(err)
			}
			defer dir.Close()
			seen := filepath.Join(n.root, "proc", agentPID, "root", n.options.PluginDir)
			if err := errors.Join(os.Remove(old), os.MkdirAll(filepath.Dir(seen), 0o755), os.Symlink(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), seen)); err != nil {
				t.Fatal(err)
			}
			if !socket {
				n.remove("k/device-plugins/kubelet.sock")
			}
			report := doctor.JudgeFacts(n.facts(), asked...)
			if found := report.Codes(); !slices.Equal(found, []string{"CH0108"}) {
				t.Errorf("found %v: %+v", found, report.Sections)
			}
		})
	}
}

// function creates a PCI function.
func (n *madeUp) function(at, class, driver, override string) {
	dir := "sys/devices/pci0000:00/" + at
	n.write(dir+"/class", class+"00"[:8-len(class)])
	n.write(dir+"/vendor", "0x10de")
	n.write(dir+"/device", "0x2330")
	n.write(dir+"/driver_override", cmpOr(override, "(null)"))
	if err := os.Symlink("../../../devices/pci0000:00/"+at, filepath.Join(n.root, "sys/bus/pci/devices", at)); err != nil {
		n.t.Fatal(err)
	}
	if driver == "" {
		return
	}
	n.write("sys/bus/pci/drivers/"+driver+"/bind", "")
	if err := os.Symlink("../../../bus/pci/drivers/"+driver, filepath.Join(n.root, dir, "driver")); err != nil {
		n.t.Fatal(err)
	}
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// A kubelet that never answers or has stopped does not block the other checks.
func TestSilentKubelet(t *testing.T) {
	n := newMadeUp(t)
	n.kubelet.Stop()
	begun := time.Now()
	f := n.facts()
	if found := doctor.JudgeFacts(f, codes.Kubelet).Codes(); !slices.Equal(found, []string{"CH0102"}) {
		t.Errorf("found %v", found)
	}
	if f.Agent.Records.Unknown != "" || f.Runtime.Config.Unknown != "" {
		t.Errorf("not asked: %s %s", f.Agent.Records.Unknown, f.Runtime.Config.Unknown)
	}
	if took := time.Since(begun); took > 3*Patience {
		t.Errorf("it took %s", took)
	}
}

// within returns although its step hangs.
func TestWithin(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	hangs := make(chan struct{})
	defer close(hangs)
	got := withPatience(ctx, "it", func() (int, error) { <-hangs; return 1, nil })
	if got.Unknown == "" {
		t.Error("it answered")
	}
	if got := withPatience(t.Context(), "it", func() (int, error) { return 1, nil }); got.Value != 1 || got.Unknown != "" {
		t.Errorf("%+v", got)
	}
}

// Gathering facts changes nothing on the node.
func TestNothingIsWritten(t *testing.T) {
	n := newMadeUp(t)
	before := listing(t, n.root)
	n.facts()
	if after := listing(t, n.root); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

func listing(t *testing.T, root string) string {
	t.Helper()
	var all strings.Builder
	err := filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err == nil {
			all.WriteString(path + " " + info.ModTime().String() + "\n")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}

// An agent sends its version with each health check, even if its metrics are protected. An
// agent of a different version may write records that this program misreads.
func TestAgentSaysItsVersion(t *testing.T) {
	for name, test := range map[string]struct {
		server, protected string
		version           string
		codes             []string
	}{
		"this version":            {server: "chandler/v1", version: "v1"},
		"another":                 {server: "chandler/v0.9.0", version: "v0.9.0", codes: []string{"CH0705"}},
		"protected metrics":       {server: "chandler/v1", protected: "the agent's metrics are protected", version: "v1"},
		"one that does not say":   {},
		"something else is asked": {server: "nginx/1.29"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newMadeUp(t)
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if test.server != "" {
					w.Header().Set("Server", test.server)
				}
				if test.protected != "" && r.URL.Path == "/metrics" {
					http.NotFound(w, r)
				}
			}))
			defer server.Close()
			n.options.Agent = strings.TrimPrefix(server.URL, "http://")
			f := n.facts()
			if f.Agent.Version != test.version || f.Agent.Live.Value != "" || f.Agent.Live.Unknown != "" {
				t.Errorf("version %q, live %+v", f.Agent.Version, f.Agent.Live)
			}
			if f.Agent.Features.Unknown != test.protected {
				t.Errorf("features: %q", f.Agent.Features.Unknown)
			}
			if found := doctor.JudgeFacts(f, codes.Agent).Codes(); !slices.Equal(found, test.codes) {
				t.Errorf("found %v", found)
			}
		})
	}
}

// If permissions prevent a look at the kubelet, doctor does not report that there is no
// kubelet.
func TestKubeletOfOthers(t *testing.T) {
	n := newMadeUp(t)
	n.options.KubeletRoot, n.options.PluginDir, n.options.StateDir = n.root+"/none", n.root+"/none", n.root+"/none"
	var err error
	if n.options.HostFS, err = hostfs.Open(n.root); err != nil {
		t.Fatal(err)
	}
	f := All(t.Context(), n.options)
	if f.Kubernetes != doctor.UnknownVersion || !strings.Contains(f.NoKubelet, "run doctor as root") {
		t.Errorf("Kubernetes %s; %s", f.Kubernetes, f.NoKubelet)
	}
}

// A configuration change that the agent rejected is reported, although the configuration in
// effect, which is all that the files show, is valid.
func TestConfigurationThatWasRefused(t *testing.T) {
	for said, want := range map[string][]string{
		"chandler_config_last_reload_successful 0": {"CH0703"}, "chandler_config_last_reload_successful 1": nil,
		"chandler_config_restart_needed 1": {"CH0710"}, "chandler_config_restart_needed 0": nil,
		"chandler_dra_slices_refused 1": nil, "chandler_dra_slices_refused 0": nil, // a check of the cluster, which does not exist here
	} {
		n := newMadeUp(t)
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/metrics" {
				fmt.Fprintln(w, said)
			}
		}))
		defer server.Close()
		n.options.Agent = strings.TrimPrefix(server.URL, "http://")
		f := n.facts()
		if f.Agent.ModeUnwanted != (said == "chandler_dra_slices_refused 1") {
			t.Errorf("%s: unwanted %t", said, f.Agent.ModeUnwanted)
		}
		f.Agent.Config = doctor.KnownAnswer("")
		if found := doctor.JudgeFacts(f, asked...).Codes(); !slices.Equal(found, want) {
			t.Errorf("%s: found %v, want %v", said, found, want)
		}
	}
}

// A host root with the kernel's /sys but another /proc is a fault of the node. A copy of a host has
// neither, and shows no fact of this machine, even if a kubelet runs here.
func TestHostRootOfAnotherHost(t *testing.T) {
	n := newMadeUp(t)
	n.options.Simulated, n.options.HasProc = false, true
	if f := n.facts(); slices.Contains(doctor.JudgeFacts(f).Codes(), "CH0409") {
		t.Error("the node's own /proc is reported")
	}
	n.options.HasProc = false
	f := n.facts()
	if !slices.Contains(doctor.JudgeFacts(f).Codes(), "CH0409") || f.NoKubelet != "" {
		t.Errorf("another /proc is not reported: %v", doctor.JudgeFacts(f).Codes())
	}
	n.options.Source = report.Copy
	var others []string // findings of the categories other than the devices and the host
	for _, section := range doctor.JudgeFacts(n.facts()).Sections {
		for _, finding := range section.Findings {
			switch {
			case section.Category == codes.Devices:
			case section.Category != codes.Host:
				others = append(others, finding.Text)
			case finding.Code != "" || strings.Contains(finding.Text, "SELinux"):
				t.Errorf("%s: %+v", section.Category, finding)
			}
		}
	}
	if want := "the copy of a host has no information about the kubelet, the container runtime, the cluster and the agent"; len(others) != 1 || others[0] != want {
		t.Errorf("%q, want %q once", others, want)
	}
}

// A machine without Kubernetes has no faults.
func TestNoKubelet(t *testing.T) {
	n := newMadeUp(t)
	n.remove("k")
	n.remove("proc")
	report := doctor.JudgeFacts(n.facts(), codes.Kubelet, codes.Runtime, codes.APIs, codes.Cluster, codes.Agent)
	if len(report.Sections) != 1 || len(report.Sections[0].Findings) != 1 || report.Sections[0].Findings[0].Text != "no kubelet runs on this machine: kubelet, container runtime, cluster and agent are not checked" {
		t.Errorf("got %+v", report.Sections)
	}
}
