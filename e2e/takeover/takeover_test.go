// Package takeover tests the replacement of other device plugins by the agent while pods run. It
// uses the real device manager of a kubelet, whose checkpoint contains the plugin's IDs, and the
// real agent on a recorded host. It needs no cluster, but root for mount namespaces.
package takeover

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"chandler.dev/e2e/build"
)

// patience is the time limit of each single step.
const patience = 30 * time.Second

// node is the name of the node.
const node = "node"

var version = flag.String("kubernetes", build.Version, "use the device manager of this version, "+build.Version+" or "+build.Classic)

func quantity(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.DecimalSI) }

// TestMain runs more nodes in parallel than there are processors, because most of them wait most of
// the time.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	m.Run()
}

// shortRows are the plugins of the short selection, in which devices have one ID each, several IDs,
// and an IOMMU group. The other plugins are variations.
var shortRows = []string{"NVIDIA", "NVIDIA, time-slicing", "sriovdp, virtual functions under vfio"}

// TestTakeover replaces each plugin, once with and for some plugins once without the kubelet's
// PodResources API.
func TestTakeover(t *testing.T) {
	builder := build.Builder{Kubernetes: *version, Progress: os.Stderr}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute) // A first build takes long.
	defer cancel()
	manager, err := builder.DeviceManager(ctx)
	if err != nil {
		t.Fatal(err)
	}
	project, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	agent, err := builder.Agent(ctx, project)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("plugins", func(t *testing.T) {
		all := slices.Clone(rows)
		if testing.Short() {
			all = slices.DeleteFunc(all, func(r row) bool { return !slices.Contains(shortRows, r.plugin) })
		}
		for _, r := range all {
			if slices.Contains([]string{"NVIDIA", "AMD", "Habana"}, r.plugin) {
				r.plugin, r.mute = r.plugin+", no PodResources API", true
				all = append(all, r)
			}
		}
		for _, r := range all {
			t.Run(r.plugin, func(t *testing.T) {
				t.Parallel()
				s := newStation(t, r, manager, agent, filepath.Join(project, "discovery/families"))
				s.takeOver()
			})
		}
	})
}

// station is a node with a kubelet, and first with a plugin, then with an agent.
type station struct {
	t       *testing.T
	row     row
	dir     string
	kubelet *kubelet
	agent   string // the program
	log     log    // the agent's output
}

func newStation(t *testing.T, r row, manager, agent, families string) *station {
	t.Helper()
	dir, err := os.MkdirTemp("", "takeover-") // A path below t.TempDir may be too long for a socket.
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &station{t: t, row: r, dir: dir, agent: agent}
	for _, name := range []string{"kubelet", "host", "cdi"} {
		if err := os.Mkdir(s.path(name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	args := []string{"simulate", "--device-nodes", s.path("host")}
	for _, host := range r.hosts {
		args = append(args, filepath.Join(families, host+".host"))
	}
	if err := run(t.Context(), agent, args...); err != nil {
		t.Fatal(err)
	}
	s.kubelet = &kubelet{t: t, program: manager, mute: r.mute, dir: s.path("kubelet"), pods: []*corev1.Pod{newPod("agent", "", 0)}}
	s.write("config.yaml", "apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\nmode: DevicePlugin\n"+r.config)
	s.write("kubeconfig", fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c,
		clusters: [{name: c, cluster: {server: %q}}], contexts: [{name: c, context: {cluster: c}}]}`, s.apiServer()))
	return s
}

func (s *station) path(name string) string { return filepath.Join(s.dir, name) }

func (s *station) write(name, text string) {
	s.t.Helper()
	if err := os.WriteFile(s.path(name), []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// apiServer starts an API server without DRA that serves the node and its pods, and returns the
// server's address.
func (s *station) apiServer() string {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/nodes/"+node, func(w http.ResponseWriter, _ *http.Request) {
		n := &corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}}
		n.Name, n.Status.NodeInfo.KubeletVersion = node, *version
		respond(w, http.StatusOK, n)
	})
	mux.HandleFunc("GET /api/v1/pods", func(w http.ResponseWriter, _ *http.Request) {
		list := &corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}}
		for _, pod := range s.kubelet.running() {
			list.Items = append(list.Items, *pod)
		}
		respond(w, http.StatusOK, list)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		respond(w, http.StatusNotFound, &metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound,
		})
	})
	server := httptest.NewServer(mux)
	s.t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server.URL
}

func respond(w http.ResponseWriter, status int, object runtime.Object) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(object) // The client may have disconnected.
}

// startAgent starts the agent.
func (s *station) startAgent() {
	s.t.Helper()
	cmd := exec.Command(s.agent, "run", "--kubeconfig", s.path("kubeconfig"), "--config", s.path("config.yaml"), "--node-name", node, "--pod-uid=uid-of-agent", "--pod=default/agent",
		"--kubelet-root", s.path("kubelet"), "--device-plugin-dir", s.path("kubelet/device-plugins"), "--host-root", s.path("host"),
		"--cdi-root", s.path("cdi"), "--run-dir", s.path("run"), "--host-files-root", s.path("files"), "--feature-dir=", "--rescan-interval=1s", "-v=2")
	cmd.Stdout, cmd.Stderr = &s.log, &s.log
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			s.t.Errorf("the agent ended with %v", err)
		}
		if s.t.Failed() {
			s.t.Logf("the agent said:\n%s", s.log.String())
		}
	})
}

// takeOver replaces the plugin by the agent.
func (s *station) takeOver() {
	t, k, r := s.t, s.kubelet, s.row
	k.start()
	endVendor := startVendor(t, r, s.path("kubelet/device-plugins"))
	k.offers(r.resource, int64(len(r.ids)))
	before := newPod("before", r.resource, int64(len(r.held)))
	if err := k.admit(before); err != nil {
		t.Fatalf("the plugin itself cannot be used: %v", err)
	}
	had := k.look(before)
	if ids := had.IDs[r.resource]; !slices.Equal(ids, slices.Sorted(slices.Values(r.held))) {
		t.Fatalf("of the plugin itself the pod has %q; want %q", ids, r.held)
	}
	endVendor()
	k.offers(r.resource, 0)
	s.written()

	// The kubelet must keep the pod and its devices, also after a restart. The container must see
	// the same devices.
	s.startAgent()
	total := max(int64(r.offered), 0)
	if r.offered == 0 {
		total = int64(len(r.ids))
	}
	left := total - int64(len(r.held))
	if r.renamed != nil {
		left = total // The agent does not list the pod's devices.
	}
	k.offers(r.resource, total)
	s.keeps(before, had)
	k.kill()
	k.start()
	k.offers(r.resource, total)
	s.keeps(before, had)

	// A new pod gets one of the remaining devices, and further pods get all others. None may get a
	// device of the first pod.
	var others []*corev1.Pod
	for i := 0; left > 0; i++ {
		n := int64(1)
		if i > 0 {
			if n = left; r.most > 0 {
				n = min(n, int64(r.most))
			}
		}
		pod := newPod(fmt.Sprintf("other-%d", i), r.resource, n)
		if err := k.admit(pod); err != nil {
			t.Fatalf("a pod that asks for %d of the %d that are left: %v", n, left, err)
		}
		s.apart(pod, had)
		others = append(others, pod)
		left -= n
	}
	if err := k.admit(newPod("one-too-many", r.resource, 1)); err == nil {
		t.Error("more can be had than there is")
	}
	s.keeps(before, had)

	// Once the first pod has ended, the next pod must get its devices with the same edits.
	k.end(before)
	if r.renamed != nil {
		k.offers(r.resource, total+int64(len(r.renamed)))
	}
	after := newPod("after", r.resource, int64(len(r.held)))
	if err := k.admit(after); err != nil {
		t.Fatalf("what the pod had is not allocated again: %v", err)
	}
	s.same(k.look(after), had)
	for _, pod := range others {
		s.apart(pod, k.look(after))
	}
}

// written checks that the kubelet's checkpoint contains the IDs of the pod.
func (s *station) written() {
	s.t.Helper()
	data, err := os.ReadFile(s.path("kubelet/device-plugins/kubelet_internal_checkpoint"))
	if err != nil {
		s.t.Fatal(err)
	}
	for _, id := range s.row.held {
		if !strings.Contains(string(data), string(mustMarshal(s.t, id))) {
			s.t.Fatalf("the kubelet's checkpoint does not have %s: %s", id, data)
		}
	}
}

func mustMarshal(t *testing.T, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// keeps checks that a pod has the same devices as before, and that its container would start with
// the same options.
func (s *station) keeps(pod *corev1.Pod, had container) {
	s.t.Helper()
	if now := s.kubelet.look(pod); string(mustMarshal(s.t, now)) != string(mustMarshal(s.t, had)) {
		s.t.Errorf("pod %s has %s; it had %s", pod.Name, mustMarshal(s.t, now), mustMarshal(s.t, had))
	}
}

// apart checks that a pod has no ID of another container, and no device node that belongs to the
// first pod only.
func (s *station) apart(pod *corev1.Pod, from container) {
	s.t.Helper()
	now := s.kubelet.look(pod)
	if len(now.IDs[s.row.resource]) == 0 {
		s.t.Errorf("pod %s has nothing", pod.Name)
	}
	for _, id := range now.IDs[s.row.resource] {
		if slices.Contains(from.IDs[s.row.resource], id) {
			s.t.Errorf("pod %s has %s, which another has", pod.Name, id)
		}
	}
	for _, path := range now.Options.nodes() {
		if slices.Contains(s.row.own, path) {
			s.t.Errorf("pod %s has the node %s, which another has", pod.Name, path)
		}
	}
}

// same checks that a container has at least the edits that the plugin gave to another container.
func (s *station) same(now, had container) {
	s.t.Helper()
	ids := had.IDs[s.row.resource]
	if s.row.renamed != nil {
		ids = s.row.renamed
	}
	if !slices.Equal(now.IDs[s.row.resource], ids) {
		s.t.Errorf("the next pod has %q; want %q", now.IDs[s.row.resource], ids)
	}
	for _, path := range had.Options.nodes() {
		if !slices.Contains(now.Options.nodes(), path) {
			s.t.Errorf("the next pod has the nodes %q; want %s too", now.Options.nodes(), path)
		}
	}
	for _, mount := range had.Options.Mounts {
		if !slices.Contains(now.Options.Mounts, mount) {
			s.t.Errorf("the next pod has the mounts %v; want %v too", now.Options.Mounts, mount)
		}
	}
	env := now.Options.env()
	for name, value := range had.Options.env() {
		if env[name] != value {
			s.t.Errorf("the next pod has %s=%q; want %q", name, env[name], value)
		}
	}
}
