package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/internal/command"
	"chandler.dev/internal/doctor"
	"chandler.dev/internal/doctor/codes"
)

// hostPrograms lists the programs in the documentation of doctor's codes that examine or change a
// host.
var hostPrograms = []string{
	"ausearch", "cat", "crictl", "df", "dmesg", "du", "findmnt", "journalctl", "mkdir", "mv", "nvidia-modprobe",
	"ps", "reboot", "rm", "sed", "sh", "sort", "sudoedit", "tail", "tee", "timedatectl", "tr", "udevadm",
}

// doctored runs doctor, and returns its output and its exit code.
func doctored(t *testing.T, args ...string) (out string, code int) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := newCommand()
	cmd.SetArgs(append([]string{"doctor"}, args...))
	cmd.SetOut(&stdout)
	cmd.SetErr(&stderr)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := cmd.ExecuteContext(ctx)
	if err != nil {
		code = command.ExitCode(err)
	}
	if code == 2 {
		return err.Error(), code
	}
	if stderr.Len() > 0 {
		t.Errorf("chandler doctor %q: %s", args, &stderr)
	}
	return stdout.String(), code
}

// On recorded hosts, doctor reports the faults of the devices and nothing else.
func TestDoctorOfRecordedHosts(t *testing.T) {
	for host, want := range map[string][]string{
		"amdgpu/mi210x8":     nil,
		"nvidia/h100x8":      nil,
		"npu/laptop":         nil,
		"amdgpu/es1000":      {"CH0304"},
		"nvidia/a100-single": {"CH0301"},
		"neuron/inf1":        {"CH0302"},
		"rdma/mixed":         {"CH0305"},
		"tenstorrent/broken": {"CH0302", "CH0304", "CH0305", "CH0306"},
		"solarflare/gone":    {"CH0309"},
		"dlb/vfs":            {"CH0305"},
		"solarflare/images":  {"CH0305", "CH0401"},
		"generic/board":      {"CH0302", "CH0401"},
		"gaudi/slots":        {"CH0304"},
	} {
		t.Run(host, func(t *testing.T) {
			t.Parallel()
			family, name := filepath.Split(host)
			file := filepath.Join("../../discovery/families", family, "testdata", name+".host")
			out, code := doctored(t, file, "-o", "json")
			var report struct {
				Success    bool
				Categories []struct {
					CategoryName string
					Checks       []struct{ Code, Result string }
				}
			}
			if err := json.Unmarshal([]byte(out), &report); err != nil {
				t.Fatal(err)
			}
			var found []string
			for _, category := range report.Categories {
				for _, check := range category.Checks {
					if check.Code != "" && !slices.Contains(found, check.Code) {
						found = append(found, check.Code)
					}
					if category.CategoryName != "devices" && category.CategoryName != "host" && check.Result != "skipped" {
						t.Errorf("%s was asked of a recorded host: %+v", category.CategoryName, check)
					}
				}
			}
			slices.Sort(found)
			if !slices.Equal(found, want) {
				t.Errorf("found %v, want %v", found, want)
			}
			if failed := report.Success == (code == 1); failed {
				t.Errorf("exit code %d, success %t", code, report.Success)
			}
		})
	}
}

// The fix of a fault repairs its cause. A reset repairs neither a setting nor a cable.
func TestDoctorFixes(t *testing.T) {
	for _, test := range []struct{ host, text, fix string }{
		{"qat/broken", "crypto 30:00.1 8086:4941 is unhealthy", "echo up > /sys/bus/pci/devices/0000:30:00.0/qat/state"},
		{"solarflare/broken", "nic onload is unhealthy", "sudo modprobe sfc_char"},
		{"slingshot/broken", "nic 06:00.0 Brazos is unhealthy", "ip link show dev hsn2 "},
		{"tpu/tpu7x", "npu 80:05.0 1ae0:0076 is unhealthy", "/sys/bus/pci/devices/0000:80:05.1/driver_override"},
		{"vfio/broken", "vfio 03:00.0 10de:1eb8 is unhealthy", "ls /sys/kernel/iommu_groups/3/devices"},
		{"vpu/unasked", "npu vpu-kmb Keem Bay is unhealthy", "set driverRoots.vpu to /var/tmp"},
		{"intelgpu/broken", "gpu 03:00.0 Arc Pro B60 is unhealthy", "sudo cat /sys/bus/pci/devices/0000:03:00.0/survivability_mode"},
		{"gaudi/broken", "npu 11:00.0 GAUDI2 is unhealthy", "sudo hl-smi -r -i 0000:11:00.0 "},
		{"gaudi/broken", "npu 21:00.0 GAUDI2 is being reset", "doctor --only devices --wait"},
		{"neuron/inf1", "npu neuron2 Inferentia is being reset", "doctor --only devices --wait"},
		{"fpgaxilinx/broken", "fpga 86:00.1 ALVEO U200 is unhealthy", "\nxbutil examine -d 0000:86:00.1"},
		{"generic/board", "vfio 00:02.0 1bcf:001c cannot be read", "modprobe -a vfio iommufd"},
		{"fpgaintel/broken", "dfl-port-3 cannot be described", "no command is known to repair this"},
		{"amdgpu/broken", "2 devices of amdgpu lack a device node", "0000:06:00.0/driver/unbind"},
	} {
		file := filepath.Join("../../discovery/families", strings.Replace(test.host, "/", "/testdata/", 1)+".host")
		out, _ := doctored(t, file, "-o", "json")
		var report struct {
			Categories []struct {
				Checks []struct {
					Description string
					Fix         []string
				}
			}
		}
		if err := json.Unmarshal([]byte(out), &report); err != nil {
			t.Fatal(err)
		}
		found := false
		for _, category := range report.Categories {
			for _, check := range category.Checks {
				fix := strings.Join(check.Fix, "\n")
				if check.Description != test.text {
					continue
				}
				if found = true; !strings.Contains("\n"+fix, test.fix) || strings.Contains(fix, "/reset") {
					t.Errorf("%s: %s: fix %s", test.host, test.text, fix)
				}
			}
		}
		if !found {
			t.Errorf("%s: no finding %q:\n%s", test.host, test.text, out)
		}
	}
}

// A reset repairs the function that fails: the physical function of a virtual function, or the
// device's own function if a file of another device fails.
func TestDoctorResetsTheFailedFunction(t *testing.T) {
	for host, resets := range map[string][]string{
		"qat/broken":        {"0000:10:00.0/reset", "echo on > /sys/bus/pci/devices/0000:40:00.0/qat/auto_reset"},
		"fpgaxilinx/broken": {"0000:e5:00.0/reset"},
	} {
		out, _ := doctored(t, filepath.Join("../../discovery/families", strings.Replace(host, "/", "/testdata/", 1)+".host"))
		for _, reset := range resets {
			if !strings.Contains(out, reset) {
				t.Errorf("%s: no %s in:\n%s", host, reset, out)
			}
		}
		for _, not := range []string{"0000:10:00.1/reset", "0000:40:00.1/reset", "devices/./", "grep .  "} {
			if strings.Contains(out, not) {
				t.Errorf("%s: %s in:\n%s", host, not, out)
			}
		}
	}
}

// The other function of a TPU has one fix.
func TestDoctorOfAnotherFunction(t *testing.T) {
	out, _ := doctored(t, "../../discovery/families/tpu/testdata/tpu7x.host")
	if strings.Contains(out, "modalias") || strings.Contains(out, "every accelerator has a kernel driver") {
		t.Errorf("printed\n%s", out)
	}
}

// A cause has one finding, or one finding has the commands.
func TestDoctorReportsACauseOnce(t *testing.T) {
	for host, once := range map[string]string{
		"fpgaaws/f2":        "sudo reboot",
		"fpgaxilinx/broken": "sudo reboot",
		"solarflare/images": "sudo reboot",
		"tpu/broken":        "CONFIG_VFIO_GROUP",
		"vfio/broken":       "IOMMU group 3 ",
		"sriovnet/cdevs":    "IOMMU group",
		"ascend/broken":     "driver/unbind",
		"sriovnet/broken":   "driver/unbind",
	} {
		out, _ := doctored(t, filepath.Join("../../discovery/families", strings.Replace(host, "/", "/testdata/", 1)+".host"))
		if n := strings.Count(out, once); n > 1 {
			t.Errorf("%s: %d times %q in:\n%s", host, n, once, out)
		}
	}
}

// No finding repeats a name or a cause.
func TestDoctorRepeatsNothing(t *testing.T) {
	out, _ := doctored(t, "../../discovery/families/hypervisor/testdata/broken.host")
	if !strings.Contains(out, "virtualization kvm lacks a device node") {
		t.Errorf("printed\n%s", out)
	}
	out, _ = doctored(t, "../../discovery/families/nvidia/testdata/a100-single.host")
	if !strings.Contains(out, "gpu 07:00.0 gi-4-ci-0 NVIDIA A100-SXM4-40GB is unhealthy") {
		t.Errorf("a partition is not named:\n%s", out)
	}
	out, _ = doctored(t, "../../discovery/families/fpgaaws/testdata/f2.host")
	if strings.Count(out, "No shell") != 1 || !strings.Contains(out, "he kernel has no render node for it.") {
		t.Errorf("printed\n%s", out)
	}
}

// No command unbinds a function that the host uses, and a command that only shows the cause is marked.
func TestDoctorMarksAdvice(t *testing.T) {
	for host, remark := range map[string]string{
		"sriovnet/cdevs":     "# if the host uses 0000:03:01.0, do not unbind it",
		"nvidia/a100-single": "# shows the kernel's messages; no command is known to repair this",
	} {
		out, _ := doctored(t, filepath.Join("../../discovery/families", strings.Replace(host, "/", "/testdata/", 1)+".host"))
		if !strings.Contains(out, remark) {
			t.Errorf("%s: no %q in:\n%s", host, remark, out)
		}
	}
}

// No finding contradicts another finding.
func TestDoctorContradictsNothing(t *testing.T) {
	for host, not := range map[string][]string{
		"solarflare/broken": {"modules are loaded", "It is offered"},
		"ascend/broken":     {"It is offered"},
		"fpgaaws/f2":        {"It is offered"},
		"fpgaxilinx/broken": {"It is offered"},
		"qat/broken":        {"intel_iommu=on", "sudo reboot"},
		"idxd/broken":       {"intel_iommu=on", "sudo reboot"},
		"tpu/broken":        {"intel_iommu=on", "sudo reboot"},
		"sriovnet/broken":   {"intel_iommu=on", "sudo reboot", "It is offered"},
	} {
		out, _ := doctored(t, filepath.Join("../../discovery/families", strings.Replace(host, "/", "/testdata/", 1)+".host"))
		out = strings.Join(strings.Fields(out), " ")
		for _, text := range not {
			if strings.Contains(out, text) {
				t.Errorf("%s: %q in:\n%s", host, text, out)
			}
		}
	}
	out, _ := doctored(t, "../../discovery/families/vfio/testdata/broken.host")
	if strings.Contains(out, "the IOMMU is on") == strings.Contains(out, "intel_iommu=on") {
		t.Errorf("vfio/broken:\n%s", out)
	}
}

func TestDoctorExitCodes(t *testing.T) {
	const sick = "../../discovery/families/nvidia/testdata/a100-single.host"
	const warned = "../../discovery/families/solarflare/testdata/gone.host"
	for name, test := range map[string]struct {
		args []string
		code int
	}{
		"well":             {[]string{"../../discovery/families/npu/testdata/laptop.host"}, 0},
		"sick":             {[]string{sick}, 1},
		"not looked there": {[]string{sick, "--only", "host"}, 0},
		"a warning":        {[]string{warned}, 0},
		"strict":           {[]string{warned, "--strict"}, 1},
		"no such file":     {[]string{"no.host"}, 2},
		"no such category": {[]string{sick, "--only", "gpu"}, 2},
		"no such format":   {[]string{sick, "-o", "xml"}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			if out, code := doctored(t, test.args...); code != test.code {
				t.Errorf("exit code %d, want %d:\n%s", code, test.code, out)
			}
		})
	}
}

// A directory with the files of another host shows no fact of this machine.
func TestDoctorOfACopy(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "host")
	mustRun(t, "simulate", dir, "../../discovery/families/npu/testdata/laptop.host")
	out, code := doctored(t, "--host-root", dir)
	if head, _, _ := strings.Cut(out, "\n"); code != 0 || !strings.Contains(head, "   copy of a host   ") {
		t.Errorf("exit code %d:\n%s", code, out)
	}
	for _, not := range []string{"this machine", "SELinux", "the kernel's numbers", "no Kubernetes"} {
		if strings.Contains(out, not) {
			t.Errorf("%q in:\n%s", not, out)
		}
	}
}

// If the kernel does not know the model of a device, findings have the name from the host's pci.ids.
func TestDoctorNamesProducts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "host")
	mustRun(t, "simulate", dir, "../../discovery/families/amdgpu/testdata/broken.host")
	ids := filepath.Join(dir, "usr/share/hwdata/pci.ids")
	if err := os.MkdirAll(filepath.Dir(ids), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, ids, "1002  Advanced Micro Devices, Inc. [AMD/ATI]\n\t74a1  Aqua Vanjaram [Instinct MI300X]\n")
	if out, _ := doctored(t, "--host-root", dir); !strings.Contains(out, "gpu f2:00.0 Instinct MI300X has no kernel driver") {
		t.Errorf("no name of a product in:\n%s", out)
	}
}

// A directory without the /sys of a host is a fault, and errors have the absolute paths of the host.
func TestDoctorOfADirectoryWithoutDevices(t *testing.T) {
	for name, make := range map[string]func(dir string) error{
		"/sys/bus: no such file or directory": func(dir string) error { return os.MkdirAll(filepath.Join(dir, "sys/class"), 0o755) },
		"/sys/bus/pci/devices: not a directory": func(dir string) error {
			bus := filepath.Join(dir, "sys/bus/pci")
			return errors.Join(os.MkdirAll(bus, 0o755), os.WriteFile(filepath.Join(bus, "devices"), nil, 0o600))
		},
	} {
		dir := t.TempDir()
		if err := make(dir); err != nil {
			t.Fatal(err)
		}
		out, code := doctored(t, "--host-root", dir)
		text := strings.Join(strings.Fields(out), " ")
		if code != 1 || !strings.Contains(text, name) || strings.Contains(text, " sys/") || strings.Contains(text, "no accelerators") || !strings.Contains(text, dir+"/sys/bus/pci") {
			t.Errorf("%s: exit code %d:\n%s", name, code, out)
		}
	}
}

// An expression that fails is one finding for all devices, with the entry in the file, and not a fault
// of the devices. Other nodes' entries count for the index.
func TestFailingExpression(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	write(t, config, header()+`exclude:
- {cel: 'true', nodes: {names: [other]}}
- cel: device.attributes["chandler.dev"].vendr == "amd"
passthrough:
- cel: device.attributes["chandler.dev"].speed > 3
- cel: device.attributes["chandler.dev"].nope
`)
	out, code := doctored(t, "--config", config, "--node-name=one", migHost)
	text := strings.Join(strings.Fields(out), " ")
	for want, times := range map[string]int{
		"! exclude[1].cel fails for 7 devices CH0315":                                                        1,
		`The expression device.attributes["chandler.dev"].vendr == "amd" has the error: no such key: vendr.`: 1,
		"! passthrough[0].cel fails for 3 devices CH0315":                                                    1,
		"! passthrough[1].cel fails for 3 devices CH0315":                                                    1,
		"does not apply to pci-0000-43-00-0, pci-0000-52-00-0 and pci-0000-61-00-0.":                         2,
		"correct exclude[1].cel": 1,
		"CH0309":                 0,
		"dmesg":                  0,
	} {
		if got := strings.Count(text, want); got != times {
			t.Errorf("%q is there %d times, want %d:\n%s", want, got, times, out)
		}
	}
	if code != 1 { // two GPUs of the recording are unhealthy
		t.Errorf("exit code %d", code)
	}
	_, errOut, err := chandler("discover", "--config", config, "--node-name=one", migHost)
	if n := strings.Count(errOut, "exclude[1].cel"); err != nil || n != 1 || !strings.Contains(errOut, "pci-0000-52-00-0, pci-0000-61-00-0: config: exclude[1].cel: evaluate ") {
		t.Errorf("discover: %d lines, %v:\n%s", n, err, errOut)
	}
	if want := "problem: pci-0000-43-00-0, pci-0000-52-00-0, pci-0000-61-00-0: passthrough[0].cel: evaluate "; strings.Count(errOut, "passthrough[0].cel") != 1 || !strings.Contains(errOut, want) {
		t.Errorf("discover prints no line %q:\n%s", want, errOut)
	}
}

// With --quiet, a healthy recording has no list of skipped checks.
func TestDoctorQuietOfARecording(t *testing.T) {
	out, code := doctored(t, "../../discovery/families/tpu/testdata/v6e.host", "--quiet")
	if code != 0 || strings.Contains(out, "not checked:") || strings.Contains(out, "information") {
		t.Errorf("exit code %d:\n%s", code, out)
	}
}

// The /sys and /proc of this machine are those of its kernel.
func TestDoctorOfThisMachine(t *testing.T) {
	out, _ := doctored(t, "--only", "host")
	if strings.Contains(out, "copy of a host") || strings.Contains(out, "CH0409") {
		t.Errorf("printed\n%s", out)
	}
}

func TestDoctorRefusesToWaitANegativeTime(t *testing.T) {
	if _, _, err := chandler("doctor", "--wait", "-5s", "no.host"); command.ExitCode(err) != 2 || !strings.Contains(err.Error(), "--wait -5s") {
		t.Errorf("got %v", err)
	}
}

func TestExplain(t *testing.T) {
	run := func(args ...string) (string, error) {
		var out bytes.Buffer
		cmd := newCommand()
		cmd.SetArgs(append([]string{"explain"}, args...))
		cmd.SetOut(&out)
		err := cmd.Execute()
		return out.String(), err
	}
	out, err := run("ch0104")
	if err != nil || !strings.HasPrefix(out, "CH0104 another device plugin serves the same extended resource") {
		t.Errorf("%s, %v", out, err)
	}
	out, err = run()
	for _, c := range codes.Codes() {
		if err != nil || !strings.Contains(out, c.ID) {
			t.Errorf("the list lacks %s: %v", c.ID, err)
		}
	}
	if out, err := run("0104"); err != nil || !strings.HasPrefix(out, "CH0104") {
		t.Errorf("by its number: %s, %v", out, err)
	}
	if _, err := run("a", "CH0104", "b"); err == nil || !strings.Contains(err.Error(), `"a" and no "b"`) {
		t.Errorf("of two that are unknown: %v", err)
	}
	_, err = run("CH9999")
	var says interface{ ExitCode() int }
	if !errors.As(err, &says) || says.ExitCode() != 2 {
		t.Errorf("a code that there is not: %v", err)
	}
}

// For node-problem-detector, doctor prints one line and uses the matching exit codes.
func TestDoctorForNodeProblemDetector(t *testing.T) {
	const hosts = "../../discovery/families/nvidia/testdata/"
	for _, test := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--only", "devices", hosts + "h100x8.host"}, 0, "no faults found"},
		{[]string{"--only", "devices", hosts + "broken.host"}, 1, "CH"},
		{[]string{"--only", "nonsense"}, 2, "category"},
		{[]string{"none.host"}, 2, "read host recording"},
	} {
		out, _, err := chandler(append([]string{"doctor", "-o", "npd"}, test.args...)...)
		code := 0
		if err != nil {
			code = command.ExitCode(err)
		}
		if code != test.code || !strings.HasPrefix(out, test.want) || strings.Count(out, "\n") != 1 || len(out) > 81 {
			t.Errorf("%v: exit code %d, %q", test.args, code, out)
		}
	}
}

// An invalid mode label does not stop doctor: the label has its own code.
func TestDoctorOfAnInvalidLabel(t *testing.T) {
	var f doctor.Facts
	f.Cluster.Node = doctor.KnownAnswer(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{v1alpha1.LabelMode: "dra"}}})
	o := doctorOptions{node: v1alpha1.Node{Name: "n"}}
	state := fstest.MapFS{agent.KeptConfig: {Data: []byte("apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\nmode: DevicePlugin\n")}}
	config, n, err := o.configInForce(state, &f)
	if err != nil || config.Mode != v1alpha1.ModeDevicePlugin || n.Rules == nil {
		t.Errorf("config %+v, error %v", config, err)
	}
	if got := f.Cluster.Node.Value.Labels[v1alpha1.LabelMode]; got != "dra" {
		t.Errorf("the node that is judged has the label %q", got)
	}
}

// Doctor lists the parts of the configuration that require the agent to see which processes have
// devices open.
func TestWhatNeedsVisibility(t *testing.T) {
	for text, want := range map[string]string{
		"":                                "",
		"reclaim:\n- cel: \"true\"\n":     "reclaim",
		"passthrough:\n- cel: \"true\"\n": "passthrough",
		"onDemand: {keepSeconds: 5}\n":    "",
		"onDemand: {partitions: [{cel: \"true\"}]}\n":                                   "",
		"onDemand: {virtualFunctions: [{cel: \"true\"}]}\nreclaim: [{cel: \"true\"}]\n": "onDemand.virtualFunctions reclaim",
	} {
		var f doctor.Facts
		o := doctorOptions{node: v1alpha1.Node{Name: "n"}}
		state := fstest.MapFS{agent.KeptConfig: {Data: []byte("apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\n" + text)}}
		if _, _, err := o.configInForce(state, &f); err != nil || strings.Join(f.Agent.NeedsVisibility, " ") != want {
			t.Errorf("%q: %v, error %v", text, f.Agent.NeedsVisibility, err)
		}
	}
}

// In the agent's pod, commands that examine the node use the agent's directories and node name
// unless flags are set, and no other options of the agent.
func TestOptionsOfTheAgent(t *testing.T) {
	own := map[string]string{"host-root": "/host", "kubelet-root": "/k", "node-name": "n", "config": "/etc/c.yaml", "v": "4"}
	cmd := newInventoryCommand()
	if err := cmd.ParseFlags([]string{"--kubelet-root=/mine"}); err != nil {
		t.Fatal(err)
	}
	inheritFlags(cmd.Flags(), own, places...)
	for name, want := range map[string]string{"host-root": "/host", "kubelet-root": "/mine", "node-name": "n", "config": ""} {
		if got := cmd.Flags().Lookup(name).Value.String(); got != want {
			t.Errorf("--%s is %q, want %q", name, got, want)
		}
	}
}

// If NVIDIA's device nodes are missing, doctor also reports the nodes that all GPUs share.
func TestDoctorOfNodesThatWereNotMade(t *testing.T) {
	data, err := os.ReadFile("../../discovery/families/nvidia/testdata/h100x8.host")
	if err != nil {
		t.Fatal(err)
	}
	text := regexp.MustCompile(`(?m)^-- dev/nvidia(ctl|[0-9]+|-uvm\S*|-modeset) .*--\n`).ReplaceAllString(string(data), "")
	file := filepath.Join(t.TempDir(), "fresh.host")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	out, code := doctored(t, file)
	if said := strings.Join(strings.Fields(out), " "); code != 1 || !strings.Contains(said, "/dev/nvidiactl, /dev/nvidia-uvm") || !strings.Contains(said, "are missing too") || !strings.Contains(said, "sudo nvidia-modprobe") {
		t.Errorf("exit code %d:\n%s", code, out)
	}
}
