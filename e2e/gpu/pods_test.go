package gpu

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/chandler"
)

// sum is the sum that vectoradd prints.
const sum = "sum 4198379136"

// podOf returns a pod with one container, which runs a shell script. Without the capability MKNOD,
// the driver's libraries cannot create device nodes in the container.
func podOf(name, resources, script string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  containers:
  - name: user
    image: %s
    imagePullPolicy: Never
    args: [%q]
    securityContext: {capabilities: {drop: [MKNOD]}}
    resources: {%s}
`, name, userImage, script, resources)
}

// claimPod returns a pod and its ResourceClaimTemplate for a device of a class, with optional
// further fields of the request.
func claimPod(name, class, fields, script string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: %[1]s}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly:
          deviceClassName: %[2]s
%[3]s
---
%[4]s  resourceClaims: [{name: gpu, resourceClaimTemplateName: %[1]s}]
`, name, class, fields, podOf(name, "claims: [{name: gpu}]", script))
}

// gpuPod returns a claimPod with the first GPU of the machine.
func (in *installed) gpuPod(name, script string) string {
	return claimPod(name, "nvidia.chandler.dev", in.selector(""), script)
}

// selector selects the first GPU of the machine. fields are further fields of the request.
func (in *installed) selector(fields string) string {
	return fields + `
          selectors:
          - cel: {expression: 'device.attributes["resource.kubernetes.io"].?pciBusID.orValue("") == "` + in.host.gpus[0].address + `"'}`
}

// script lists the GPUs and the files of the container, and computes. If wait is set, the script
// then goes on until the pod ends.
func (in *installed) script(wait bool) string {
	script := "nvidia-smi -L; /probe env devices mounts"
	switch {
	case in.cuda != "" && wait:
		script += "; exec /vectoradd wait"
	case in.cuda != "":
		script += "; exec /vectoradd"
	case wait:
		script += "; exec /probe wait"
	}
	return script
}

// listed matches a GPU in the output of nvidia-smi -L, and computed the GPU that vectoradd prints.
var (
	listed   = regexp.MustCompile(`(?m)^GPU \d+: .* \(UUID: (GPU-[0-9a-f-]+)\)$`)
	computed = regexp.MustCompile(`(?m)^devices 1\nuuid (GPU-[0-9a-f-]+)$`)
)

// uses checks that a pod has computed on exactly one GPU of the machine, and that its container has
// the nodes of that GPU only. It returns the log and the GPU.
func (in *installed) uses(t *testing.T, pod string) (log string, used gpu) {
	t.Helper()
	words, programs := []string{"device "}, map[string]*regexp.Regexp{"nvidia-smi -L": listed}
	if in.cuda != "" {
		words, programs["the CUDA program"] = append(words, sum), computed
	}
	log = in.prints(t, pod, words...)
	for program, pattern := range programs {
		gpus := pattern.FindAllStringSubmatch(log, -1)
		if len(gpus) != 1 {
			t.Errorf("%s in the container does not print one GPU:\n%s", program, log)
			continue
		}
		i := slices.IndexFunc(in.host.gpus, func(g gpu) bool { return g.uuid == gpus[0][1] })
		if i < 0 || used.uuid != "" && used != in.host.gpus[i] {
			t.Errorf("%s in the container prints the GPU %s; the GPUs of the machine are %v\n%s", program, gpus[0][1], in.host.gpus, log)
			continue
		}
		used = in.host.gpus[i]
	}
	if used.uuid == "" {
		t.FailNow()
	}
	var nodes []string
	for line := range strings.Lines(log) {
		if fields := strings.Fields(line); len(fields) == 5 && fields[0] == "device" {
			nodes = append(nodes, fields[4])
		}
	}
	if want := slices.Sorted(slices.Values(used.nodes())); !slices.Equal(slices.Sorted(slices.Values(nodes)), want) {
		t.Errorf("the container has the device nodes %q, want %q", nodes, want)
	}
	return log, used
}

// driverConfig is the configuration that a user needs for the driver of this machine, with further
// fields.
func (in *installed) driverConfig(fields string) string {
	return "driverRoots: {nvidia: " + in.host.root + "}\n" + fields
}

// driverPatch mounts the driver's directory into the agent's container, and uses the image with
// chandler-host. The agent remains unprivileged.
func (in *installed) driverPatch() string {
	patch := `
spec:
  template:
    spec:
      containers:
      - name: chandler
        image: ` + chandler.AgentImage + `-host
        volumeMounts:
`
	volumes := "      volumes:\n"
	dirs := []string{in.host.root}
	if in.host.root == "/" {
		dirs = slices.DeleteFunc([]string{"/usr", "/lib/firmware", "/etc/alternatives", "/etc/OpenCL", "/etc/vulkan"}, func(dir string) bool { return !exists(dir) })
	}
	for i, dir := range dirs {
		patch += fmt.Sprintf("        - {name: driver-%d, mountPath: /host%s, readOnly: true, mountPropagation: HostToContainer}\n", i, dir)
		volumes += fmt.Sprintf("      - {name: driver-%d, hostPath: {path: %s, type: Directory}}\n", i, dir)
	}
	return patch + volumes
}

// servicePatch makes the agent use the host service.
const servicePatch = `
spec:
  template:
    spec:
      containers:
      - name: chandler
        args: [` + agentArgs + `, --host-service-dir=/run/chandler/host]
`

// installNVML installs the agent and the host service, which reads NVML, with further fields of the
// configuration.
func (in *installed) installNVML(t *testing.T, fields string) {
	t.Helper()
	in.install(t, in.driverConfig(fields), in.driverPatch(), servicePatch)
	in.installHostService(t)
}

// installHostService applies the host service of the examples, with the driver root of this machine.
func (in *installed) installHostService(t *testing.T) {
	t.Helper()
	manifest, err := os.ReadFile(in.project.Manifest("examples/host-service.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	service := strings.Replace(string(manifest), "- --serve-nvml\n", "- --serve-nvml\n        - --serve-files\n", 1)
	if root := in.host.root; root != "" && root != "/" {
		service = strings.NewReplacer("--driver-root=/", "--driver-root="+root, "/host/usr", "/host"+root, "path: /usr", "path: "+root).Replace(service)
	}
	if err := in.kube.Apply(within(t), service); err != nil {
		t.Fatal(err)
	}
}

// offersGPUs waits until the slices contain the first GPU with the given attributes and capacities,
// and without those that begin with !. It returns all of them.
func (in *installed) offersGPUs(t *testing.T, with ...string) map[string]string {
	t.Helper()
	want := in.host.gpus[0]
	return in.deviceIs(t, fmt.Sprintf("GPU %s to be offered with %q", want.address, with), func(_ string, attributes map[string]string) bool {
		for _, name := range with {
			without, absent := strings.CutPrefix(name, "!")
			if (attributes[without] == "") != absent {
				return false
			}
		}
		return attributes["resource.kubernetes.io/pciBusID"] == want.address
	})
}

// testUnprivileged installs an unprivileged agent, which mounts the driver's files into containers
// without the NVIDIA container runtime.
func (in *installed) testUnprivileged(t *testing.T) {
	in.install(t, in.driverConfig("mode: Auto\n"), in.driverPatch())
	in.offersGPUs(t)
	in.run(t, in.gpuPod("unprivileged", in.script(false)), "unprivileged", corev1.PodSucceeded)
	log, _ := in.uses(t, "unprivileged")
	t.Logf("in the container:\n%s", log)
	in.measure(t)
}

// testNVML installs the agent with NVML and tries the commands for operators while a pod has the GPU.
func (in *installed) testNVML(t *testing.T) {
	in.installNVML(t, "mode: Auto\n")
	in.offersGPUs(t, "capacity:memory")
	in.run(t, in.gpuPod("with-nvml", in.script(true)), "with-nvml", corev1.PodRunning)
	in.uses(t, "with-nvml")
	in.saveSpec(t)
	model := in.host.gpus[0].name
	in.asks(t, []string{"top"}, strings.TrimPrefix(model, "NVIDIA "))
	in.asks(t, []string{"who", "with-nvml"}, "with-nvml", "DRA")
	in.asks(t, []string{"who", in.host.gpus[0].uuid}, "with-nvml")
	in.asks(t, []string{"why", "with-nvml"}, "with-nvml")
	in.doctorIsContent(t)
	in.measure(t)
}

// saveSpec copies the CDI specs of the node to the directory of logs.
func (in *installed) saveSpec(t *testing.T) {
	t.Helper()
	specs, err := filepath.Glob(filepath.Join(in.node.NodePath(chandler.CDIDir), "*"))
	if err != nil || len(specs) == 0 {
		t.Errorf("there is no CDI spec: %v", err)
	}
	for _, spec := range specs {
		text, err := os.ReadFile(spec)
		if err == nil && *logs != "" {
			err = os.WriteFile(filepath.Join(in.node.LogDir(), "cdi-"+filepath.Base(spec)), text, 0o644)
		}
		if err != nil {
			t.Error(err)
		}
		t.Logf("%s: %d bytes, %d mounts, %d hooks", spec, len(text), strings.Count(string(text), "hostPath"), strings.Count(string(text), "hookName"))
	}
}

// testAttributes compares the slices with nvidia-smi.
func (in *installed) testAttributes(t *testing.T) {
	for _, g := range in.host.gpus {
		got := in.deviceIs(t, "GPU "+g.address, func(_ string, attributes map[string]string) bool {
			return attributes["resource.kubernetes.io/pciBusID"] == g.address
		})
		t.Logf("in the slice: %v", got)
		t.Logf("from nvidia-smi: %+v", g)
		mebibytes, err := strconv.ParseInt(g.memoryMiB, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		// NVML reports bytes, and nvidia-smi whole MiB.
		if memory, err := strconv.ParseInt(got["capacity:memory"], 10, 64); err != nil || memory>>20 != mebibytes {
			t.Errorf("GPU %s: the memory is %q bytes, and nvidia-smi prints %s MiB", g.address, got["capacity:memory"], g.memoryMiB)
		}
		for name, want := range map[string]string{
			"uuid":                  g.uuid,
			"model":                 g.name,
			"driverVersion":         g.driver,
			"cudaComputeCapability": g.capability,
		} {
			if value := got[name]; value != want && !sameVersion(value, want) {
				t.Errorf("GPU %s: %s is %q, and nvidia-smi prints %q", g.address, name, value, want)
			}
		}
	}
}

// sameVersion reports whether two versions are equal apart from leading and trailing zeros: an
// attribute is a semantic version.
func sameVersion(a, b string) bool { return plainVersion(a) == plainVersion(b) }

// plainVersion returns a version without leading zeros of its parts, and without parts that are
// zero at its end.
func plainVersion(v string) string {
	parts := strings.Split(v, ".")
	for i, part := range parts {
		parts[i] = strings.TrimLeft(part, "0")
	}
	return strings.TrimRight(strings.Join(parts, "."), ".")
}

// testLabels reads the labels that the agent writes for Node Feature Discovery.
func (in *installed) testLabels(t *testing.T) {
	g := in.host.gpus[0]
	if len(in.host.gpus) > 1 {
		t.Skip("the labels describe the most frequent model")
	}
	major, minor, _ := strings.Cut(g.capability, ".")
	in.hasLabels(t,
		"nvidia.com/gpu.product="+strings.ReplaceAll(g.name, " ", "-"), "nvidia.com/gpu.count=1", "nvidia.com/gpu.memory="+g.memoryMiB,
		"nvidia.com/gpu.compute.major="+major, "nvidia.com/gpu.compute.minor="+minor, "nvidia.com/cuda.driver-version.full="+g.driver)
}

// hasLabels waits until the agent has written labels for Node Feature Discovery, which it does
// every few seconds.
func (in *installed) hasLabels(t *testing.T, want ...string) {
	t.Helper()
	err := in.kube.Until(within(t), "the labels of the GPU", func(context.Context) error {
		text, err := os.ReadFile(in.node.NodePath("/etc/kubernetes/node-feature-discovery/features.d/chandler"))
		if err != nil {
			return err
		}
		lines := strings.Split(string(text), "\n")
		for _, label := range want {
			if !slices.Contains(lines, label) {
				return fmt.Errorf("there is no label %s in\n%s", label, text)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// testClaim runs pods with a claim, and logs how long each takes.
func (in *installed) testClaim(t *testing.T) {
	for i := range 3 {
		manifest := in.gpuPod(fmt.Sprintf("claim-%d", i), in.script(true))
		in.run(t, manifest, fmt.Sprintf("claim-%d", i), corev1.PodRunning)
		if _, used := in.uses(t, fmt.Sprintf("claim-%d", i)); used != in.host.gpus[0] {
			t.Errorf("the pod has the GPU %s, want %s", used.uuid, in.host.gpus[0].uuid)
		}
		in.remove(t, manifest)
	}
	in.measure(t)
	in.nothingHeld(t)
}

// testLimits runs a pod with limits, which the scheduler serves by DRA.
func (in *installed) testLimits(t *testing.T) {
	in.run(t, podOf("limits", "limits: {nvidia.com/gpu: 1}", in.script(true)), "limits", corev1.PodRunning)
	in.uses(t, "limits")
	pod, err := in.kube.CoreV1().Pods(metav1.NamespaceDefault).Get(within(t), "limits", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if pod.Status.ExtendedResourceClaimStatus == nil {
		t.Error("the pod has its GPU without a claim of the scheduler")
	}
	in.asks(t, []string{"who", "limits"}, "limits", "DRA")
}

// testTurns runs two pods for one GPU. The second must wait until the first has ended.
func (in *installed) testTurns(t *testing.T) {
	first, second := in.gpuPod("first", in.script(true)), in.gpuPod("second", in.script(false))
	in.run(t, first, "first", corev1.PodRunning)
	in.apply(t, second)
	in.waits(t, "second")
	in.uses(t, "first")
	in.waits(t, "second")
	begin := time.Now()
	in.remove(t, first)
	in.waitFor(t, "second", corev1.PodSucceeded)
	t.Logf("the second pod had succeeded %s after the deletion of the first", time.Since(begin).Round(time.Millisecond))
	in.uses(t, "second")
}

// testNoGPU expects that a container without a GPU can neither see nor open one.
func (in *installed) testNoGPU(t *testing.T) {
	const script = "/probe devices; mknod /tmp/gpu c 195 255 && (: </tmp/gpu) && echo opened; echo end"
	in.run(t, strings.Replace(podOf("no-gpu", "", script), "drop: [MKNOD]", "add: [MKNOD]", 1), "no-gpu", corev1.PodSucceeded)
	if log := in.prints(t, "no-gpu", "end"); strings.Contains(log, "device ") || strings.Contains(log, "opened") {
		t.Errorf("the container prints:\n%s", log)
	} else {
		t.Log(log)
	}
}

// testShares shares each GPU by number. Two pods must compute on one GPU at the same time, and a
// third pod must wait.
func (in *installed) testShares(t *testing.T) {
	in.installNVML(t, "sharing:\n- {cel: 'device.attributes[\"chandler.dev\"].kind == \"gpu\"', replicas: 2}\n")
	in.offersGPUs(t, "shared", "capacity:shares")
	in.together(t, "share", in.selector(""), "CHANDLER_SHARES=1")
	manifest := in.gpuPod("share-third", in.script(false))
	in.apply(t, manifest)
	in.waits(t, "share-third")
	in.asks(t, []string{"who", in.node.NodeName()}, "share-first", "share-second")
	in.hasLabels(t, "nvidia.com/gpu.sharing-strategy=time-slicing")
}

// testMemory shares the memory of each GPU. Two pods with 8 GiB each must compute at the same time.
func (in *installed) testMemory(t *testing.T) {
	in.installNVML(t, "sharing:\n- {cel: 'device.attributes[\"chandler.dev\"].kind == \"gpu\"', unit: 1Gi, resource: example.com/gpu-mem}\n")
	in.offersGPUs(t, "shared", "capacity:memory", "!capacity:shares")
	in.together(t, "memory", in.selector("          capacity: {requests: {memory: 8Gi}}"), "CHANDLER_MEMORY=8589934592")
}

// together runs two pods on the first GPU. Both must go on to compute while the other one runs.
func (in *installed) together(t *testing.T, name, fields, variable string) {
	t.Helper()
	pods := []string{name + "-first", name + "-second"}
	for _, pod := range pods {
		in.run(t, claimPod(pod, "nvidia.chandler.dev", fields, in.script(true)), pod, corev1.PodRunning)
	}
	for _, pod := range pods {
		log, used := in.uses(t, pod)
		if used != in.host.gpus[0] || !strings.Contains(log, "env "+variable+"\n") {
			t.Errorf("the pod uses %s, and has no variable %s:\n%s", used.uuid, variable, log)
		}
	}
	if in.cuda == "" {
		return
	}
	for _, pod := range pods {
		steps := strings.Count(in.prints(t, pod), "\nstep ")
		in.prints(t, pod, fmt.Sprintf("\nstep %d\n", steps+3))
	}
	out, err := exec.CommandContext(within(t), in.host.smi, "--query-compute-apps=pid,name,used_memory", "--format=csv").CombinedOutput()
	t.Logf("on the GPU: %v\n%s", err, out)
}

// testDevicePlugin offers the GPUs by the device plugin API.
func (in *installed) testDevicePlugin(t *testing.T) {
	in.installNVML(t, `mode: DevicePlugin
allocation:
- resource: nvidia.com/gpu
  deviceListStrategy: [CDIDevices]
`)
	err := in.kube.Until(within(t), "nvidia.com/gpu to be allocatable", func(ctx context.Context) error {
		node, err := in.kube.CoreV1().Nodes().Get(ctx, in.node.NodeName(), metav1.GetOptions{})
		if err != nil {
			return err
		}
		if n := node.Status.Allocatable["nvidia.com/gpu"]; int(n.Value()) != len(in.host.gpus) {
			return fmt.Errorf("the node has %s", n.String())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	manifest := podOf("allocate", "limits: {nvidia.com/gpu: 1}", in.script(true))
	in.run(t, manifest, "allocate", corev1.PodRunning)
	in.uses(t, "allocate")
	pod, err := in.kube.CoreV1().Pods(metav1.NamespaceDefault).Get(within(t), "allocate", metav1.GetOptions{})
	if err != nil || pod.Status.ExtendedResourceClaimStatus != nil {
		t.Errorf("the pod has its GPU by DRA: %v", err)
	}
	in.asks(t, []string{"who", "allocate"}, "allocate", "nvidia.com/gpu")
	in.doctorIsContent(t)
	in.measure(t)
}
