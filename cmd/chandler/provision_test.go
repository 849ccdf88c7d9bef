package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	qatHost          = "../../discovery/families/qat/testdata/4xxx.host"
	provisionHeader  = "apiVersion: chandler.dev/v1alpha1\nkind: ProvisionConfig\n"
	provisionExample = "../../deployments/examples/provision.yaml"
)

// provisionHost lays out a recorded server with QAT, and one process, without the recorded virtual
// functions.
func provisionHost(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "host")
	mustRun(t, "simulate", dir, qatHost)
	for _, address := range []string{"0000:6a:01.0/0000:6b:00", "0000:e7:01.0/0000:e8:00"} {
		physical := filepath.Join(dir, "sys/devices/pci"+address[:7], address+".0")
		write(t, filepath.Join(physical, "sriov_numvfs"), "0\n")
		links, err := filepath.Glob(physical + "/virtfn*")
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range links {
			if err := os.Remove(link); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "proc/1/fd"), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "proc/1/mountinfo"), "22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/root rw\n")
	return dir
}

// tree returns the content of every file and link below a directory.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := make(map[string]string)
	err := filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		if entry.Type()&fs.ModeSymlink != 0 {
			files[name], err = os.Readlink(name)
			return err
		}
		info, err := entry.Info()
		if err != nil || !info.Mode().IsRegular() {
			return err
		}
		data, err := os.ReadFile(name)
		files[name] = fmt.Sprint(info.ModTime(), string(data))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// A dry run of the example prints the plan and changes no file. A real run makes the same changes,
// as far as that is possible without a kernel.
func TestProvisionDryRun(t *testing.T) {
	dir := provisionHost(t)
	for _, driver := range []string{"vfio-pci"} {
		if err := os.MkdirAll(filepath.Join(dir, "sys/bus/pci/drivers", driver), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	before := tree(t, dir)
	out, _, err := chandler("provision", "--config", provisionExample, "--host-root", dir, "--dry-run")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, tree(t, dir)); diff != "" {
		t.Errorf("a dry run changed files:\n%s", diff)
	}
	for _, want := range []string{
		"functions[1] selects no PCI function\n",
		"/sys/devices/pci0000:6a/0000:6a:01.0/0000:6b:00.0/sriov_numvfs: 0 -> 16\n",
		"/sys/devices/pci0000:e7/0000:e7:01.0/0000:e8:00.0/qat/cfg_services: dc -> sym;asym\n",
		"/sys/devices/pci0000:e7/0000:e7:01.0/0000:e8:00.0/virtfn15/driver: none -> vfio-pci\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("the plan does not contain %q:\n%s", want, out)
		}
	}
	done, _, err := chandler("provision", "--config", provisionExample, "--host-root", dir)
	if err == nil || !strings.Contains(err.Error(), "virtfn0") { // no kernel creates virtual functions
		t.Errorf("error %v", err)
	}
	if first, _, _ := strings.Cut(done, "virtfn"); !strings.HasPrefix(out, first) {
		t.Errorf("done is not what was planned:\n%s", first)
	}
	services := filepath.Join(dir, "sys/devices/pci0000:e7/0000:e7:01.0/0000:e8:00.0/qat/cfg_services")
	if data, err := os.ReadFile(services); string(data) != "sym;asym\n" {
		t.Errorf("the services are %q, %v", data, err)
	}
}

// A device is not changed if a container has it according to the kubelet's directories. The
// device-plugins directory stays in its default place even with another kubelet root.
func TestProvisionAsksTheKubelet(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	write(t, config, provisionHeader+`
functions:
- cel: device.attributes["resource.kubernetes.io"].pciBusID == "0000:6b:00.0"
  services: [dc]
`)
	for name, files := range map[string]map[string]string{
		"claim": {"srv/kubelet/plugins/chandler.dev/claims/1.json": "sha256:1\n" +
			`{"version":1,"uid":"1","namespace":"a","name":"b","results":[{"device":"pci-0000-6b-00-0"}]}`},
		"grant":            {"srv/kubelet/plugins/chandler.dev/grants/grants.json": `[{"devices":["pci-0000-6b-00-0"],"container":"a/b"}]`},
		"another's plugin": {"var/lib/kubelet/device-plugins/kubelet_internal_checkpoint": `{"Data":{"PodDeviceEntries":[{"PodUID":"1","ContainerName":"a/b","DeviceIDs":{"0":["0000:6b:00.0"]}}]}}`, "srv/kubelet/pods/1/etc-hosts": ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := provisionHost(t)
			args := []string{"provision", "--config", config, "--host-root", dir, "--kubelet-root", "/srv/kubelet", "--dry-run"}
			if out := mustRun(t, args...); !strings.Contains(out, "sym;asym -> dc") {
				t.Errorf("printed %q", out)
			}
			for file, text := range files {
				file = filepath.Join(dir, file)
				if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
					t.Fatal(err)
				}
				write(t, file, text)
			}
			if _, _, err := chandler(args...); err == nil || !strings.Contains(err.Error(), "0000:6b:00.0: in use: ") || !strings.Contains(err.Error(), "a/b") {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestProvisionConfigRefused(t *testing.T) {
	dir := t.TempDir()
	unknown, cel := filepath.Join(dir, "unknown.yaml"), filepath.Join(dir, "cel.yaml")
	write(t, unknown, provisionHeader+"steps: []\n")
	write(t, cel, provisionHeader+"functions: [{cel: 'true', driver: a}, {cel: 'device.', driver: a}]\n")
	for name, test := range map[string]struct{ args, names []string }{
		"no config":     {nil, []string{"config"}},
		"missing":       {[]string{"--config", dir + "/missing"}, []string{dir + "/missing"}},
		"unknown field": {[]string{"--config", unknown}, []string{unknown, "steps"}},
		"CEL":           {[]string{"--config", cel}, []string{cel, "functions[1].cel"}},
		"host root":     {[]string{"--config", provisionExample, "--host-root", dir + "/missing"}, []string{"host root"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := chandler(append([]string{"provision", "--dry-run"}, test.args...)...)
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
