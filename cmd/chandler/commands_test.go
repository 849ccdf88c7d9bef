package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/yaml"

	"chandler.dev/internal/command"
)

const (
	eightGPUs = "../../discovery/families/amdgpu/testdata/mi210x8.host"
	kvmHost   = "../../discovery/families/hypervisor/testdata/kvm.host"
)

// chandler runs a command and returns its output.
func chandler(args ...string) (out, errOut string, err error) {
	var o, e bytes.Buffer
	cmd := newCommand()
	cmd.SetArgs(args)
	cmd.SetOut(&o)
	cmd.SetErr(&e)
	err = cmd.Execute()
	return o.String(), e.String(), err
}

func mustRun(t *testing.T, args ...string) string {
	t.Helper()
	out, _, err := chandler(args...)
	if err != nil {
		t.Fatalf("chandler %s: %v", strings.Join(args, " "), err)
	}
	return out
}

// names returns the names of the devices that discover finds.
func names(t *testing.T, args ...string) (names []string) {
	t.Helper()
	var snapshot struct {
		Devices  []struct{ Name string }
		Problems []struct{ Device, Error string }
	}
	out := mustRun(t, append([]string{"discover", "-o", "json"}, args...)...)
	if err := json.Unmarshal([]byte(out), &snapshot); err != nil {
		t.Fatalf("%v in:\n%s", err, out)
	}
	for _, d := range snapshot.Devices {
		names = append(names, d.Name)
	}
	return names
}

func TestDiscoverTableFitsTerminal(t *testing.T) {
	for _, host := range []string{eightGPUs, kvmHost, "../../discovery/families/amdgpu/testdata/mi300x-cpx.host"} {
		for line := range strings.Lines(mustRun(t, "discover", host)) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
				t.Errorf("%s: a line of %d characters: %s", host, n, line)
			}
		}
	}
}

func TestDiscoverFormats(t *testing.T) {
	for format, want := range map[string]string{
		"table": "pci-0000-23-00-0  gpu",
		"wide":  "pci0000:20",
		"yaml":  "name: pci-0000-23-00-0",
		"json":  `"name": "pci-0000-23-00-0"`,
	} {
		if out := mustRun(t, "discover", "-o", format, eightGPUs); !strings.Contains(out, want) {
			t.Errorf("-o %s does not contain %q:\n%s", format, want, out)
		}
	}
}

// Devices of the configuration's paths are printed, and recorded only with --config.
func TestPathsOfTheConfiguration(t *testing.T) {
	dir := t.TempDir()
	config, host := filepath.Join(dir, "config.yaml"), filepath.Join(dir, "own.host")
	write(t, config, `{apiVersion: chandler.dev/v1alpha1, kind: DriverConfig, paths: [
		{name: example.com/serial, env: {BAUD: "9600"}, groups: [{paths: [{path: /dev/ttyUSB*, permissions: rw, mountPath: /dev/modem/}, {path: /dev/fuse, limit: 2}, {path: /run/none, type: Mount, readOnly: true, optional: true}]}]},
		{name: example.com/stick, kind: npu, groups: [{each: true, count: 2, usb: [{vendor: "18D1", product: "9302"}, {vendor: "403", product: "6001", serial: A50285BI}]}]},
		{name: b-com.com/accelerator, kind: fpga, groups: [{units: 3, unitEnv: ACCELERATOR_UNITS}]}]}`)
	gateway := "../../discovery/families/paths/testdata/gateway.host"
	out := mustRun(t, "discover", "--config", config, "-o", "json", gateway)
	for _, want := range []string{`"example.com/serial"`, `"/dev/modem/ttyUSB1"`, `"BAUD=9600"`, `"/dev/bus/usb/001/012"`, `"/dev/bus/usb/001/005"`, `"npu"`, `"ACCELERATOR_UNITS=2"`} {
		if !strings.Contains(out, want) {
			t.Errorf("no %s in:\n%s", want, out)
		}
	}
	root := filepath.Join(dir, "root")
	mustRun(t, "simulate", root, gateway)
	mustRun(t, "record", "--host-root", root, "--config", config, "-o", host)
	if again := mustRun(t, "discover", "--config", config, "-o", "json", host); again != out {
		t.Errorf("of the record:\n%s\nwant:\n%s", again, out)
	}
	wrong := filepath.Join(dir, "wrong.yaml")
	if err := os.WriteFile(wrong, []byte("kind: DriverConfig\nnoSuch: field\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if host := mustRun(t, "record", "--host-root", root, "--config", wrong); !strings.Contains(host, "-- ") {
		t.Errorf("with a wrong configuration it recorded %q", host)
	}
	if without := mustRun(t, "record", "--host-root", root); strings.Contains(without, "ttyUSB") {
		t.Error("recorded a path that was not named")
	}
}

// stranger returns a malicious recorded host: it claims to be this machine and has the driver whose
// vendor library the agent queries.
func stranger(t *testing.T, more string) string {
	t.Helper()
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "stranger.host")
	write(t, file, "-- proc/sys/kernel/random/boot_id --\n"+string(bootID)+"-- proc/driver/nvidia/ --\n-- sys/class/ --\n-- dev/watchdog c 10:130 --\n"+more+"-- end --\n")
	return file
}

// A recorded host does not affect this machine: discover creates no file, opens no device and runs
// no program for it.
func TestDiscoverOfAStranger(t *testing.T) {
	bin, tmp := t.TempDir(), t.TempDir()
	ran := filepath.Join(t.TempDir(), "ran")
	program := filepath.Join(bin, "chandler-host")
	write(t, program, "#!/bin/sh\n: > "+ran+"\n")
	if err := os.Chmod(program, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	t.Setenv("TMPDIR", tmp)
	if err := os.Chmod(tmp, 0o555); err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(tmp)
	if err != nil {
		t.Fatal(err)
	}
	file := stranger(t, "")
	mustRun(t, "discover", file)
	if after, err := os.Stat(tmp); err != nil || !after.ModTime().Equal(before.ModTime()) {
		t.Errorf("something was made in the directory for temporary files: %v", err)
	}
	mustRun(t, "simulate", filepath.Join(bin, "host"), file)
	mustRun(t, "discover", "--host-root", filepath.Join(bin, "host"))
	mustRun(t, "record", "--host-root", filepath.Join(bin, "host"))
	if _, err := os.Stat(ran); err == nil {
		t.Error("a program was run on the files of a recorded host")
	}
	for _, node := range []string{"-- dev -> sys --\n", "-- sys/a c 10:130 --\n", "-- proc/a b 8:0 --\n"} {
		if _, _, err := chandler("discover", stranger(t, node)); err == nil {
			t.Errorf("accepted: %s", node)
		}
	}
}

// Real device nodes are created only on request.
func TestSimulateDeviceNodes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "host")
	mustRun(t, "simulate", dir, stranger(t, ""))
	node := filepath.Join(dir, "dev/watchdog")
	if info, err := os.Lstat(node); err != nil || !info.Mode().IsRegular() {
		t.Errorf("%v, %v; want an empty file", info, err)
	}
	_, errOut, err := chandler("simulate", "--device-nodes", dir, stranger(t, ""))
	info, statErr := os.Lstat(node)
	if err != nil || statErr != nil || info.Mode().IsRegular() != strings.Contains(errOut, "1 device nodes are empty files") {
		t.Errorf("%v, %v, %v: %s", info, statErr, err, errOut)
	}
}

// The command discover reports what was unreadable, and prints the rest.
func TestDiscoverSaysWhatItCouldNotRead(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "sys/class"), 0o755); err != nil {
		t.Fatal(err)
	}
	out, errOut, err := chandler("discover", "--host-root", root)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out, "No accelerators found") || !strings.Contains(errOut, "/sys/bus/pci") {
		t.Errorf("a host without /sys/bus/pci: printed %q and %q", out, errOut)
	}
}

func TestDiscoverRefuses(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	write(t, file, "")
	whole, err := os.ReadFile(kvmHost)
	if err != nil {
		t.Fatal(err)
	}
	short := filepath.Join(dir, "short.host")
	write(t, short, string(whole[:len(whole)*2/3]))
	header := "apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\n"
	unknown, cel := filepath.Join(dir, "unknown.yaml"), filepath.Join(dir, "cel.yaml")
	write(t, unknown, header+"modes: DRA\n")
	write(t, cel, header+"exclude: [{cel: 'true'}, {cel: 'device.'}]\nresources: [{name: a.b/c, cel: '1'}]\n")
	condition, effect := filepath.Join(dir, "condition.yaml"), filepath.Join(dir, "effect.yaml")
	write(t, condition, header+"health: {severity: {too-hot: NoSchedule}}\n")
	write(t, effect, header+"health: {severity: {over-temperature: Evict}}\n")
	tests := map[string]struct{ args, names []string }{
		"config condition":     {[]string{"--config", condition}, []string{condition, "health.severity[too-hot]", "over-temperature"}},
		"config effect":        {[]string{"--config", effect}, []string{effect, "health.severity[over-temperature]", "Evict", "NoExecute"}},
		"format":               {[]string{"-o", "xml"}, []string{"xml", "json"}},
		"missing root":         {[]string{"--host-root", dir + "/missing"}, []string{"host root", dir + "/missing"}},
		"root is a file":       {[]string{"--host-root", file}, []string{file, "not a directory"}},
		"root without sys":     {[]string{"--host-root", dir}, []string{dir, "no directory sys"}},
		"directory":            {[]string{dir}, []string{dir, "--host-root=" + dir}},
		"no recording":         {[]string{unknown}, []string{unknown, "not a valid host recording"}},
		"missing host":         {[]string{dir + "/missing.host"}, []string{dir + "/missing.host"}},
		"host cut short":       {[]string{short}, []string{short, "cut short"}},
		"config unknown field": {[]string{"--config", unknown}, []string{unknown, "modes"}},
		"config CEL":           {[]string{"--config", cel}, []string{cel, "exclude[1].cel", "resources[0].cel"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, _, err := chandler(append([]string{"discover"}, test.args...)...)
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range test.names {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error does not name %q: %v", want, err)
				}
			}
		})
	}
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// The recording of a simulated host equals the original, and two hosts can be laid out over each
// other.
func TestSimulateAndRecord(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "host")
	mustRun(t, "simulate", dir, eightGPUs, kvmHost)
	want := append(names(t, kvmHost), names(t, eightGPUs)...)
	got := names(t, "--host-root", dir)
	if diff := cmp.Diff(want, got, cmp.Transformer("sorted", sorted)); diff != "" {
		t.Errorf("simulated (-want +got):\n%s", diff)
	}
	file := filepath.Join(t.TempDir(), "again.host")
	mustRun(t, "record", "--host-root", dir, "-o", file, "--comment", "Both.")
	before := mustRun(t, "discover", "--host-root", dir, "-o", "json")
	if diff := cmp.Diff(before, mustRun(t, "discover", file, "-o", "json")); diff != "" {
		t.Errorf("recorded (-want +got):\n%s", diff)
	}
}

func sorted(names []string) map[string]bool {
	set := make(map[string]bool)
	for _, name := range names {
		set[name] = true
	}
	return set
}

// An unreadable host is detected before another is laid out.
func TestSimulateDoesNothingByHalves(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "host")
	if _, _, err := chandler("simulate", dir, kvmHost, filepath.Join(t.TempDir(), "missing.host")); err == nil {
		t.Fatal("no error")
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("the first host was laid out")
	}
}

func TestRunRefuses(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	write(t, file, "")
	kubeconfig := filepath.Join(dir, "kubeconfig")
	write(t, kubeconfig, `{apiVersion: v1, kind: Config, clusters: [{name: a, cluster: {server: "https://127.0.0.1:1"}}], contexts: [{name: a, context: {cluster: a}}], current-context: a}`)
	tests := map[string]struct{ args, names []string }{
		"kubeconfig missing":      {[]string{"--kubeconfig", dir + "/missing"}, []string{"API server", dir + "/missing"}},
		"no kubeconfig":           {nil, []string{"API server", "--kubeconfig"}},
		"kubelet root not usable": {[]string{"--kubeconfig", kubeconfig, "--kubelet-root", file}, []string{"kubelet root", file}},
		"unknown flag":            {[]string{"--kubelet-rot", dir}, []string{"--kubelet-rot"}},
		"renamed flag":            {[]string{"--page-bind-address", ":1"}, []string{"renamed to --web-ui-bind-address"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			klog.StopFlushDaemon() // an earlier run started the daemon, which reads the settings that are reset here
			if err := logsapi.ResetForTest(nil); err != nil {
				t.Fatal(err)
			}
			_, _, err := chandler(append([]string{"run", "--cdi-root", dir, "--run-dir", dir}, test.args...)...)
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range test.names {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error does not name %q: %v", want, err)
				}
			}
		})
	}
}

// Wrong usage of any command has the exit code 2.
func TestUsageOfEachCommand(t *testing.T) {
	var check func(cmd *cobra.Command)
	check = func(cmd *cobra.Command) {
		for _, child := range cmd.Commands() {
			check(child)
		}
		path := strings.Fields(cmd.CommandPath())[1:]
		if _, _, err := chandler(append(path, "--no-such-flag")...); command.ExitCode(err) != 2 {
			t.Errorf("%s with an unknown flag: exit code %d, %v", cmd.CommandPath(), command.ExitCode(err), err)
		}
	}
	check(newCommand())
	for _, args := range []string{"provision", "simulate", "run x", "discover x y", "migrate nope", "completion nope", "help nope", "explain CH9999", "inventory -o xml"} {
		if _, _, err := chandler(strings.Fields(args)...); command.ExitCode(err) != 2 {
			t.Errorf("%s: exit code %d, %v", args, command.ExitCode(err), err)
		}
	}
}

func TestHelp(t *testing.T) {
	for _, command := range []string{"", "run", "discover", "record", "simulate", "provision", "version"} {
		out := mustRun(t, append(strings.Fields(command), "--help")...)
		if !strings.Contains(out, "Usage:") || len(out) < 200 && command != "version" {
			t.Errorf("%s --help does not help:\n%s", command, out)
		}
	}
	if out := mustRun(t, "version"); !strings.HasPrefix(out, "chandler ") {
		t.Errorf("version prints %q", out)
	}
}

// The labels of a host are printed in the form of its feature file, and follow the configuration.
func TestDiscoverLabels(t *testing.T) {
	out := mustRun(t, "discover", "-o", "labels", eightGPUs)
	if want := "amd.com/gpu.vram=64G\n"; !strings.Contains(out, want) || strings.Contains(out, "#") {
		t.Errorf("no %q, or a comment, in:\n%s", want, out)
	}
	config := filepath.Join(t.TempDir(), "config.yaml")
	write(t, config, `{apiVersion: chandler.dev/v1alpha1, kind: DriverConfig, sharing: [{cel: 'device.attributes["chandler.dev"].kind == "gpu"', replicas: 4}]}`)
	shared := mustRun(t, "discover", "-o", "labels", "--config", config, "../../discovery/families/nvidia/testdata/h100x8.host")
	for _, want := range []string{"nvidia.com/gpu.replicas=4\n", "nvidia.com/gpu.sharing-strategy=time-slicing\n"} {
		if !strings.Contains(shared, want) {
			t.Errorf("no %q in:\n%s", want, shared)
		}
	}
	_, _, err := chandler("discover", "-o", "lables", eightGPUs)
	if err == nil || !strings.Contains(err.Error(), "yaml or labels") {
		t.Errorf("another format: %v", err)
	}
}

// The output of discover -o json has the sysfs path of each device.
func TestDiscoverSaysPaths(t *testing.T) {
	for _, format := range []string{"json", "yaml"} {
		out := mustRun(t, "discover", "-o", format, "../../discovery/families/amdgpu/testdata/mi210x8.host")
		var found struct {
			Devices []struct{ Name, Path string }
		}
		if err := yaml.Unmarshal([]byte(out), &found); err != nil {
			t.Fatal(err)
		}
		for _, d := range found.Devices {
			if !strings.HasPrefix(d.Path, "/sys/devices/") {
				t.Errorf("%s: %s is at %q", format, d.Name, d.Path)
			}
		}
		if len(found.Devices) == 0 {
			t.Error("no devices")
		}
	}
}

// header returns the beginning of a configuration.
func header() string { return "apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\n" }
