package e2e

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"chandler.dev/discovery"
	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
)

// The devices of a node are in two complete pools: GPUs and NPUs in the pool of its name.
func TestPoolsOfNode(t *testing.T) {
	offers(t)
	found, err := kube.ResourceV1().ResourceSlices().List(within(t), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + chandler.Driver})
	if err != nil {
		t.Fatal(err)
	}
	missing := make(map[string]int64) // slices
	for _, slice := range found.Items {
		pool := slice.Spec.Pool
		if missing[pool.Name]--; missing[pool.Name] == -1 {
			missing[pool.Name] += pool.ResourceSliceCount
		}
		for _, device := range slice.Spec.Devices {
			if kind := ptr.Deref(device.Attributes["kind"].StringValue, ""); discovery.PoolName(node.NodeName(), kind == "gpu" || kind == "npu") != pool.Name {
				t.Errorf("device %s of kind %q is in pool %s", device.Name, kind, pool.Name)
			}
		}
	}
	if want := map[string]int64{node.NodeName(): 0, node.NodeName() + "/other": 0}; !maps.Equal(missing, want) {
		t.Errorf("pools and the numbers of their missing slices: %v, want %v", missing, want)
	}
}

// TestAgentIsKeptToItsNode creates and deletes ResourceSlices with an agent's identity, as an
// attacker with the agent's token could. Only slices of the agent's own node, pool and driver are
// allowed.
func TestAgentIsKeptToItsNode(t *testing.T) {
	offers(t)
	own := node.NodeName()
	slice := func(node, pool, driver string) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "kept-"},
			Spec: resourceapi.ResourceSliceSpec{
				NodeName: &node, Driver: driver, Pool: resourceapi.ResourcePool{Name: pool, Generation: 1, ResourceSliceCount: 1},
			},
		}
	}
	tests := map[string]struct {
		token string // the node that the token names
		slice *resourceapi.ResourceSlice
		want  string
	}{
		"its own":          {own, slice(own, own, chandler.Driver), ""},
		"another node's":   {own, slice("other", "other", chandler.Driver), "of that node"},
		"its other pool":   {own, slice(own, own+"/other", chandler.Driver), ""},
		"another pool":     {own, slice(own, "other", chandler.Driver), "of that node"},
		"a third pool":     {own, slice(own, own+"/third", chandler.Driver), "of that node"},
		"another driver's": {own, slice(own, own, "gpu.nvidia.com"), "driver chandler.dev"},
		"by another agent": {"other", slice(own, own, chandler.Driver), "of that node"},
		"by no node's":     {"", slice(own, own, chandler.Driver), "names no node"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := agentOf(t, test.token).ResourceV1().ResourceSlices().Create(within(t), test.slice, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if test.want == "" && err != nil {
				t.Error(err)
			}
			if test.want != "" && (!apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("the answer is %v; want one that says %q", err, test.want)
			}
		})
	}
	all, err := kube.ResourceV1().ResourceSlices().List(within(t), metav1.ListOptions{})
	if err != nil || len(all.Items) == 0 {
		t.Fatalf("no slice to delete: %v", err)
	}
	err = agentOf(t, "other").ResourceV1().ResourceSlices().Delete(within(t), all.Items[0].Name, metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
	if err == nil || !strings.Contains(err.Error(), "of that node") {
		t.Errorf("another node's agent deletes a slice: %v", err)
	}
}

// agentUser is the user of all agents.
const agentUser = "system:serviceaccount:" + chandler.Namespace + ":chandler"

// agentOf returns a client that impersonates the agent of a node.
func agentOf(t *testing.T, nodeName string) kubernetes.Interface {
	t.Helper()
	config := rest.CopyConfig(node.RESTConfig())
	config.Impersonate = rest.ImpersonationConfig{UserName: agentUser}
	if nodeName != "" {
		config.Impersonate.Extra = map[string][]string{"authentication.kubernetes.io/node-name": {nodeName}}
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

var keptFeature = regexp.MustCompile(`chandler_dra_server_feature_enabled\{feature="([^"]+)"\} ([01])`)

// TestSlicesOfARecordedHost records the node's host. Given the features of the API server,
// "chandler slices" must print the slices that the agent publishes.
func TestSlicesOfARecordedHost(t *testing.T) {
	if *version == build.Classic {
		t.Skip("no resource.k8s.io")
	}
	offers(t)
	file := filepath.Join(t.TempDir(), "node.host")
	chandlerSays := func(args ...string) []byte {
		t.Helper()
		var stderr bytes.Buffer
		cmd := exec.CommandContext(within(t), project.Agent, args...)
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("chandler %s: %v\n%s", strings.Join(args, " "), err, stderr.String())
		}
		return out
	}
	chandlerSays("record", "--host-root", node.NodePath(chandler.HostDir), "-o", file)
	agent, err := chandler.AgentPod(within(t), kube)
	if err != nil {
		t.Fatal(err)
	}
	metrics, err := kube.CoreV1().Pods(agent.Namespace).ProxyGet("http", agent.Name, "8080", "metrics", nil).DoRaw(within(t))
	if err != nil {
		t.Fatal(err)
	}
	var gates []string
	for _, feature := range keptFeature.FindAllStringSubmatch(string(metrics), -1) {
		gates = append(gates, feature[1]+"="+map[string]string{"1": "true", "0": "false"}[feature[2]])
	}
	if len(gates) == 0 {
		t.Fatal("the agent does not say what the API server keeps")
	}
	config, err := kube.CoreV1().ConfigMaps(chandler.Namespace).Get(within(t), "chandler", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	configFile := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(configFile, []byte(config.Data["config.yaml"]), 0o600); err != nil {
		t.Fatal(err)
	}
	server, err := kube.Discovery().ServerVersion()
	if err != nil {
		t.Fatal(err)
	}
	var printed, live resourceapi.ResourceSliceList
	out := chandlerSays("slices", file, "--node-name", node.NodeName(), "--config", configFile,
		"--kubernetes-version", server.Major+"."+server.Minor, "--feature-gates", strings.Join(gates, ","), "-o", "json")
	if err := json.Unmarshal(out, &printed); err != nil {
		t.Fatal(err)
	}
	found, err := kube.ResourceV1().ResourceSlices().List(within(t), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + discovery.Domain})
	if err != nil {
		t.Fatal(err)
	}
	for _, slice := range found.Items {
		if discovery.IsPoolOf(node.NodeName(), slice.Spec.Pool.Name) {
			live.Items = append(live.Items, slice)
		}
	}
	if diff := gocmp.Diff(poolText(t, &live), poolText(t, &printed)); diff != "" {
		t.Errorf("-agent +chandler slices:\n%s", diff)
	}
}

// poolText returns the specs of the pools' slices as text, as if one slice had all devices and counters. The
// division into slices is left out: it depends on the devices that came and went before (divideDevices in
// driver/pool). The pools' generation and the time of taints are left out, because the agent and the
// command scan at different times.
func poolText(t *testing.T, list *resourceapi.ResourceSliceList) string {
	t.Helper()
	var devices []resourceapi.Device
	var counters []resourceapi.CounterSet
	specs := make(map[string]bool)
	for i := range list.Items {
		spec := list.Items[i].Spec.DeepCopy()
		devices, counters = append(devices, spec.Devices...), append(counters, spec.SharedCounters...)
		spec.Devices, spec.SharedCounters = nil, nil
		spec.Pool.Generation, spec.Pool.ResourceSliceCount = 0, 0
		specs[indent(t, spec)] = true
	}
	for i := range devices {
		for j := range devices[i].Taints {
			devices[i].Taints[j].TimeAdded = nil
		}
	}
	slices.SortFunc(devices, func(a, b resourceapi.Device) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(counters, func(a, b resourceapi.CounterSet) int { return cmp.Compare(a.Name, b.Name) })
	return strings.Join(append(slices.Sorted(maps.Keys(specs)), indent(t, counters), indent(t, devices)), "\n")
}

func indent(t *testing.T, value any) string {
	t.Helper()
	data, err := json.MarshalIndent(value, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
