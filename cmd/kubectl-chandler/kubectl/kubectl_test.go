package kubectl

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/internal/apitest/older"
	"chandler.dev/internal/command"
	"chandler.dev/internal/fleet/fleettest"
	"chandler.dev/internal/terminal"
)

const hosts = "../../../discovery/families/"

// example returns a cluster with all kinds of devices and consumers.
func example(t *testing.T) *fleettest.Cluster {
	t.Helper()
	c := fleettest.New(t)
	c.Node("gpu-node-06", hosts+"nvidia/testdata/h100-mig.host", nil)
	c.Node("gpu-node-07", hosts+"amdgpu/testdata/mi210x8.host", func(d *discovery.Device) {
		fleettest.MakeUnhealthy(discovery.ConditionUnhealthy, resourceapi.DeviceTaintEffectNoSchedule, 37, "pci-0000-43-00-0")(d)
		fleettest.MakeUnhealthy(discovery.ConditionLinkDegraded, resourceapi.DeviceTaintEffectNone, 3*24*60, "pci-0000-a3-00-0")(d)
		fleettest.MakeUnhealthy(discovery.ConditionUnknown, resourceapi.DeviceTaintEffectNoSchedule, 2, "pci-0000-c3-00-0")(d)
	})
	c.Node("mi300x-vm-2", hosts+"amdgpu/testdata/mi300x-cpx.host", nil)
	c.Node("nic-3", hosts+"rdma/testdata/connectx7.host", nil)
	c.Node("vm-1", hosts+"hypervisor/testdata/kvm.host", nil)
	c.AddPlugin("vm-1", "example.com/npu", 4, 3)
	c.AddPlugin("vm-1", "hugepages-2Mi", 4, 3)
	c.AllocateDevices("ml", "llama-7b-worker-0", "gpu-node-07", 190, "gpus", "pci-0000-23-00-0", "pci-0000-24-00-0")
	c.AllocateDevices("ml", "llama-7b-worker-1", "gpu-node-07", 190, "gpus", "pci-0000-43-00-0")
	c.AllocateDevices("serve", "mixtral-router-6d9f8-4bq7x", "mi300x-vm-2", 7*60, "gpu", "pci-0000-05-00-0-xcp-0", "pci-0000-05-00-0-xcp-1", "pci-0000-05-00-0-xcp-2")
	c.AllocateDevices("storage", "nvmeof-gateway-4kq2z", "nic-3", 17*24*60, "nic", "pci-0000-18-00-0")
	c.AllocateDevices("vm", "virt-launcher-win11-b8f9z", "vm-1", 16*60, "kvm", "kvm")
	c.AddPod("lab", "nb-7", "vm-1", 90, map[string]int64{"example.com/npu": 2})
	c.AddClaim("ml", "train-42-gpus", resourceapi.DeviceClaim{
		Requests:    []resourceapi.DeviceRequest{fleettest.Request("gpus", "gpu", 4, "device.attributes['chandler.dev'].?family.orValue('') == 'amdgpu'")},
		Constraints: []resourceapi.DeviceConstraint{{MatchAttribute: new(resourceapi.FullyQualifiedName("resource.kubernetes.io/numaNode"))}},
	})
	c.AddPod("ml", "train-42", "", 6, nil, "train-42-gpus")
	c.AddClaim("ml", "wants-much-gpus", resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
		fleettest.Request("gpus", "gpu", 1, "device.capacity['chandler.dev'].?memory.orValue(quantity('0')).compareTo(quantity('100Gi')) >= 0"), fleettest.Request("nic", "nic", 1),
	}})
	c.AddPod("ml", "wants-much", "", 6, nil, "wants-much-gpus")
	c.AddPod("lab", "nb-8", "", 2, map[string]int64{"example.com/npu": 2})
	c.AddPod("lab", "nb-9", "", 2, map[string]int64{"nvidia.com/gpu": 1})
	c.AddClaim("ml", "fits-gpus", resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{fleettest.Request("gpus", "gpu", 1)}})
	fits := c.AddPod("ml", "fits", "", 1, nil, "fits-gpus")
	fits.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "0/5 nodes are available: 5 Insufficient cpu."}}
	return c
}

// run runs a command of the plugin on a cluster.
func run(t *testing.T, client *fake.Clientset, width int, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errOut bytes.Buffer
	cmd := &cobra.Command{Use: "kubectl-chandler", SilenceUsage: true, SilenceErrors: true}
	for _, made := range commands {
		o := newOptions("v1.2.3")
		o.Client, o.width, o.now = client, width, func() time.Time { return fleettest.Now }
		cmd.AddCommand(made(o))
	}
	cmd.SetOut(&out)
	cmd.SetErr(&errOut)
	cmd.SetArgs(args)
	err = cmd.ExecuteContext(t.Context())
	return out.String(), errOut.String(), err
}

func TestGoldens(t *testing.T) {
	c := example(t)
	c.AddClaim("lab", "asks-amiss-gpus", resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{fleettest.Request("gpus", "gpus.chandler.dev", 1)}})
	c.AddPod("lab", "asks-amiss", "", 2, nil, "asks-amiss-gpus")
	c.AddClass("firm", "", "device.driver == 'chandler.dev' && device.attributes['chandler.dev'].firmware == 'x'")
	c.AddClaim("lab", "asks-badly-gpus", resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{fleettest.Request("gpus", "firm", 1)}})
	c.AddPod("lab", "asks-badly", "", 2, nil, "asks-badly-gpus")
	client := fake.NewClientset(c.Objects()...)
	for name, args := range map[string][]string{
		"top":          {"top"},
		"top-nodes":    {"top", "nodes"},
		"top-ascii":    {"top", "--ascii"},
		"who-node":     {"who", "gpu-node-07"},
		"who-plugin":   {"who", "vm-1"},
		"who-pod":      {"who", "-n", "serve", "mixtral-router-6d9f8-4bq7x"},
		"who-device":   {"who", "23:00.0"},
		"who-resource": {"who", "example.com/npu"},
		"why-numa":     {"why", "-n", "ml", "train-42"},
		"why-selector": {"why", "ml/wants-much"},
		"why-limits":   {"why", "-n", "lab", "nb-8"},
		"why-noclass":  {"why", "-n", "lab", "nb-9"},
		"why-missing":  {"why", "lab/asks-amiss"},
		"why-fails":    {"why", "lab/asks-badly"},
		"why-fits":     {"why", "ml/fits"},
		"why-runs":     {"why", "ml/llama-7b-worker-0"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, width := range []int{80, 120} {
				stdout, stderr, err := run(t, client, width, args...)
				if err != nil && err.Error() != "" || stderr != "" {
					t.Fatalf("%q: %v, standard error %q", args, err, stderr)
				}
				for line := range strings.Lines(stdout) {
					if n := terminal.Columns(strings.TrimSuffix(line, "\n")); n > width {
						t.Errorf("a line of %d columns in %d: %s", n, width, line)
					}
				}
				discoverytest.CompareGolden(t, fmt.Sprintf("testdata/%s-%d.txt", name, width), []byte(stdout))
			}
		})
	}
}

// The output is the same with an API server that serves only an older version of resource.k8s.io.
func TestOlderVersions(t *testing.T) {
	objects := example(t).Objects()
	newest := fake.NewClientset(objects...)
	for _, version := range []string{"v1beta2", "v1beta1"} {
		client, err := older.Client(t.Context(), version, objects...)
		if err != nil {
			t.Fatal(err)
		}
		for _, args := range []string{"top", "who gpu-node-07", "who 23:00.0", "why ml/train-42", "why ml/wants-much", "why ml/llama-7b-worker-0"} {
			want, _, _ := run(t, newest, 120, strings.Fields(args)...)
			got, stderr, err := run(t, client, 120, strings.Fields(args)...)
			if err != nil && err.Error() != "" || stderr != "" || got != want {
				t.Errorf("%s, %s: %v, standard error %q: %s", version, args, err, stderr, cmp.Diff(want, got))
			}
		}
	}
}

// Devices with unlimited sharing are not counted as a thousand, nor added to other devices.
func TestOpenDevicesAreNotSummed(t *testing.T) {
	c := fleettest.New(t)
	c.Node("gpus", hosts+"amdgpu/testdata/mi210x8.host", nil)
	c.AddPlugin("gpus", "devices.kubevirt.io/kvm", 1000, 1000)
	c.AddPlugin("gpus", "devices.kubevirt.io/tun", 1000, 0)
	c.Node("vms", hosts+"hypervisor/testdata/kvm.host", nil)
	c.AddPlugin("vms", "devices.kubevirt.io/vhost-net", 1000, 1000)
	client := fake.NewClientset(c.Objects()...)
	for _, test := range []struct{ args, want string }{
		{"top nodes", "gpus     8          0            1"},
		{"top nodes", "vms    any          0            0"},
		{"top", "any          0            0      1  ○"},
		{"who gpus", "8 gpu are free. Any number of pods may have devices.kubevirt.io/kvm."},
		{"who vms", "Any number of pods may have kvm, tun and devices.kubevirt.io/vhost-net."},
		{"who tun", "tun on vms: not allocated; unlimited sharing."},
		{"who vhost-net", "devices.kubevirt.io/vhost-net on vms: unlimited sharing."},
		{"who kvm", "kvm on vms: not allocated; unlimited sharing. devices.kubevirt.io/kvm on gpus: unlimited sharing."},
		{"who devices.kubevirt.io/kvm", "devices.kubevirt.io/kvm on gpus: unlimited sharing."},
	} {
		stdout, _, err := run(t, client, 120, strings.Fields(test.args)...)
		if err != nil || !strings.Contains(stdout, test.want) || strings.Contains(stdout, "100") {
			t.Errorf("%s: %v, no %q in\n%s", test.args, err, test.want, stdout)
		}
	}
}

// Interchangeable devices, which are one device in the ResourceSlice, count each.
func TestInterchangeableDevicesCountEach(t *testing.T) {
	c := fleettest.New(t)
	c.Node("gb200", hosts+"nvidia/testdata/gb200.host", nil)
	c.AllocateDevices("ml", "imex", "gb200", 12, "channels", "nvidia-imex-channels")
	c.Claims[0].Status.Allocation.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{discovery.Shares: resource.MustParse("2")}
	client := fake.NewClientset(c.Objects()...)
	for _, test := range []struct{ args, want string }{
		{"top", "other  IMEX channel              1          2            0      3  ■■□"},
		{"top nodes", "gb200     5          2            0  gpu □□□□  other ■■□"},
		{"who gb200", "nvidia-imex-channels ×2  IMEX channel"},
		{"who gb200", "4 gpu and 1 other are free."},
		{"who gb200 --ascii", "nvidia-imex-channels x2  IMEX channel"},
	} {
		stdout, _, err := run(t, client, 120, strings.Fields(test.args)...)
		if err != nil || !strings.Contains(stdout, test.want) {
			t.Errorf("%s: %v, no %q in\n%s", test.args, err, test.want, stdout)
		}
	}
}

// The numbers of each row add up, and so do the glyphs if there is room for all.
func TestTopAddsUp(t *testing.T) {
	client := fake.NewClientset(example(t).Objects()...)
	stdout, _, err := run(t, client, 80, "top", "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	var top topView
	if err := json.Unmarshal([]byte(stdout), &top); err != nil {
		t.Fatal(err)
	}
	var models, nodes int64
	for _, m := range top.Models {
		models += m.All
		if m.Free+m.Held+m.Out != m.All {
			t.Errorf("%s %s: %d free, %d held and %d out are not %d", m.Kind, m.Model, m.Free, m.Held, m.Out, m.All)
		}
	}
	for _, n := range top.Nodes {
		nodes += n.All
	}
	if models != nodes || models == 0 {
		t.Errorf("%d devices by model, %d by node", models, nodes)
	}
}

// A user who may read one namespace only gets a note about the consequences. A user who may read
// nothing gets an error.
func TestForbidden(t *testing.T) {
	client := fake.NewClientset(example(t).Objects()...)
	forbid(client, func(resource, namespace string) bool {
		return resource == "nodes" || namespace == "" && (resource == "pods" || resource == "resourceclaims")
	})
	stdout, stderr, err := run(t, client, 80, "who", "gpu-node-07", "-n", "ml")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(stdout, "ml/llama-7b-worker-0") {
		t.Errorf("what the user's own namespace has is missing:\n%s", stdout)
	}
	for _, want := range []string{"nodes: forbidden", "ResourceClaims of other namespaces than ml: forbidden", "pods of other namespaces than ml: forbidden"} {
		if !strings.Contains(stderr, want) {
			t.Errorf("standard error does not say %q:\n%s", want, stderr)
		}
	}
	forbid(client, func(string, string) bool { return true })
	if _, _, err := run(t, client, 80, "top"); !apierrors.IsForbidden(errors.Unwrap(err)) {
		t.Errorf("top of a user who may read nothing: %v", err)
	}
}

func forbid(client *fake.Clientset, is func(resource, namespace string) bool) {
	client.PrependReactor("list", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		resource := action.GetResource().Resource
		if !is(resource, action.GetNamespace()) {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("no"))
	})
}

func TestUnknownWord(t *testing.T) {
	client := fake.NewClientset(example(t).Objects()...)
	for _, word := range []string{"no-such", "node/no-such", "pod/gpu-node-07", "device/gpu-node-07"} {
		if stdout, _, err := run(t, client, 80, "who", word); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("who %s: %v, %s", word, err, stdout)
		}
	}
}

// Each kind of glyph appears in a strip, even for a single device.
func TestScale(t *testing.T) {
	for _, counts := range []map[terminal.Glyph]int64{
		{terminal.Held: 1000, terminal.Unhealthy: 1, terminal.Free: 1, terminal.Moves: 1},
		{terminal.Held: 5, terminal.Free: 12},
		{terminal.Free: 64},
		{terminal.Held: 3, terminal.Partly: 3, terminal.Moves: 3, terminal.Unhealthy: 3, terminal.Unread: 3, terminal.Free: 3, terminal.Degraded: 3},
	} {
		total := int64(0)
		for _, n := range counts {
			total += n
		}
		sum := 0
		for g, n := range scaleCounts(counts, total, stripLength) {
			sum += n
			if n == 0 && counts[g] > 0 {
				t.Errorf("%v: %s is not seen", counts, terminal.Plain.BareGlyph(g))
			}
		}
		if sum != stripLength {
			t.Errorf("%v: %d glyphs, want %d", counts, sum, stripLength)
		}
	}
}

// Text from API objects cannot send control sequences to the terminal.
func TestSafe(t *testing.T) {
	c := fleettest.New(t)
	c.Node("node", hosts+"hypervisor/testdata/kvm.host", func(d *discovery.Device) {
		d.Attributes["model"] = discovery.Attribute{StringValue: new("evil\x1b[2J")}
	})
	c.AllocateDevices("default", "pod", "node", 1, "r", "kvm")
	client := fake.NewClientset(c.Objects()...)
	for _, args := range [][]string{{"top"}, {"who", "node"}, {"top", "nodes"}} {
		stdout, _, err := run(t, client, 120, args...)
		if err != nil {
			t.Fatal(err)
		}
		if strings.ContainsRune(stdout, '\x1b') {
			t.Errorf("%q prints an escape: %q", args, stdout)
		}
	}
}

// The exit code reports whether a pod waits, or that the check was impossible.
func TestWhyExitCode(t *testing.T) {
	client := fake.NewClientset(example(t).Objects()...)
	code := func(err error) int {
		var says interface{ ExitCode() int }
		if errors.As(err, &says) {
			return says.ExitCode()
		}
		return 0
	}
	for pod, want := range map[string]int{"ml/llama-7b-worker-0": 0, "ml/train-42": 1, "ml/fits": 1, "ml/no-such": 2} {
		if _, _, err := run(t, client, 80, "why", pod); code(err) != want {
			t.Errorf("why %s: exit code %d, want %d: %v", pod, code(err), want, err)
		}
	}
	for _, wrong := range [][]string{{"why"}, {"why", "a", "b"}, {"why", "--no-such", "ml/train-42"}, {"who"}, {"top", "-o", "xml"}, {"validate"}} {
		if _, err := plugin(wrong...); code(err) != 2 {
			t.Errorf("%q: exit code %d, want 2: %v", wrong, code(err), err)
		}
	}
	forbid(client, func(string, string) bool { return true })
	if _, _, err := run(t, client, 80, "why", "ml/train-42"); code(err) != 2 || err.Error() == "" {
		t.Errorf("of a user who may read nothing: %v", err)
	}
}

// For a pod whose containers do not start, the output has the last warning. For a pod that has
// ended, the output reports that its devices are free.
func TestWhyOfAPodThatDoesNotRun(t *testing.T) {
	for phase, want := range map[corev1.PodPhase][]string{
		corev1.PodPending:   {"and its containers do not start", "last warning: FailedPrepareDynamicResources: the newest", "/chandler doctor"},
		corev1.PodSucceeded: {"has ended on vm-1", "and has given its devices back"},
	} {
		c := example(t)
		pod := c.AddPod("lab", "odd", "vm-1", 5, nil, "fits-gpus")
		pod.Status.Phase, pod.UID = phase, "odd-uid"
		objects := c.Objects()
		for i, message := range []string{"an older one", "the newest", "of another pod", "all is well"} {
			e := &corev1.Event{
				ObjectMeta: metav1.ObjectMeta{Namespace: "lab", Name: fmt.Sprint("event-", i)}, Type: corev1.EventTypeWarning, Reason: "FailedPrepareDynamicResources", Message: message,
				InvolvedObject: corev1.ObjectReference{UID: "odd-uid"}, LastTimestamp: metav1.NewTime(fleettest.Now.Add(time.Duration(i) * time.Second)),
			}
			switch i {
			case 2:
				e.InvolvedObject.UID = "another"
			case 3:
				e.Type = corev1.EventTypeNormal
			}
			objects = append(objects, e)
		}
		stdout, _, err := run(t, fake.NewClientset(objects...), 120, "why", "lab/odd")
		for _, want := range want {
			if err != nil || !strings.Contains(stdout, want) {
				t.Errorf("%s: %q is missing in %v:\n%s", phase, want, err, stdout)
			}
		}
	}
}

// A DeviceTaintRule keeps pods away like a taint in a slice.
func TestDeviceTaintRules(t *testing.T) {
	c := example(t)
	objects := append(c.Objects(), &resourceapi.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{Name: "rule"},
		Spec: resourceapi.DeviceTaintRuleSpec{
			DeviceSelector: &resourceapi.DeviceTaintSelector{Pool: new("gpu-node-07")},
			Taint:          resourceapi.DeviceTaint{Key: "example.com/repair", Effect: resourceapi.DeviceTaintEffectNoSchedule},
		},
	})
	stdout, _, _ := run(t, fake.NewClientset(objects...), 120, "why", "ml/train-42")
	if !strings.Contains(stdout, "example.com/repair") {
		t.Errorf("the rule's taint is not told:\n%s", stdout)
	}
	stdout, _, _ = run(t, fake.NewClientset(objects...), 120, "who", "gpu-node-07")
	if !strings.Contains(stdout, "is example.com/repair") || strings.Contains(stdout, "gpu and") {
		t.Errorf("the node has free devices:\n%s", stdout)
	}
}

func TestCompletion(t *testing.T) {
	client := fake.NewClientset(example(t).Objects()...)
	stdout, _, err := run(t, client, 80, cobra.ShellCompRequestCmd, "who", "-n", "ml", "")
	if err != nil {
		t.Fatal(err)
	}
	words := strings.Fields(stdout)
	for _, want := range []string{"gpu-node-07", "llama-7b-worker-0", ":4"} {
		if !slices.Contains(words, want) {
			t.Errorf("completion lacks %s: %q", want, words)
		}
	}
}

// Wrong usage of any command has the exit code 2.
func TestUsageOfEachCommand(t *testing.T) {
	run := func(args ...string) error {
		cmd := PluginCommand("v1")
		cmd.SetArgs(args)
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		return cmd.Execute()
	}
	var check func(cmd *cobra.Command)
	check = func(cmd *cobra.Command) {
		for _, child := range cmd.Commands() {
			check(child)
		}
		path := strings.Fields(cmd.CommandPath())[2:] // after kubectl chandler
		if err := run(append(path, "--no-such-flag")...); command.ExitCode(err) != 2 {
			t.Errorf("%s with an unknown flag: exit code %d, %v", cmd.CommandPath(), command.ExitCode(err), err)
		}
	}
	check(PluginCommand("v1"))
	for _, args := range []string{"who", "why", "import", "validate", "top x y", "top -o xml", "migrate nope", "completion nope", "help nope"} {
		if err := run(strings.Fields(args)...); command.ExitCode(err) != 2 {
			t.Errorf("%s: exit code %d, %v", args, command.ExitCode(err), err)
		}
	}
}

func TestArguments(t *testing.T) {
	if got := PluginArguments([]string{"/bin/kubectl_complete-chandler", "who", ""}); !slices.Equal(got, []string{cobra.ShellCompRequestCmd, "who", ""}) {
		t.Errorf("arguments for completion: %q", got)
	}
	if got := PluginArguments([]string{"kubectl-chandler", "top"}); !slices.Equal(got, []string{"top"}) {
		t.Errorf("arguments: %q", got)
	}
	if _, _, err := PluginCommand("v1").Find([]string{"who", "x"}); err != nil {
		t.Error(err)
	}
}
