package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"chandler.dev/internal/command"
)

const migHost = "../../discovery/families/nvidia/testdata/h100-mig.host"

// The table has the reasons of unhealthy devices, the profiles of partitions and the names of
// interfaces, and the number of physical devices.
func TestDiscoverTable(t *testing.T) {
	for host, want := range map[string][]string{
		migHost: {
			"1g.10gb ", "1c.3g.40gb ",
			"Unhealthy: MIG mode is on and no MIG instance exists\n",
			"\n4 gpu (7 devices)\n",
		},
		"../../discovery/families/rdma/testdata/mixed.host": {"ens8f1s88 ", "mlx5_3 ", "1 npu, 5 nic (6 devices)\n"},
		eightGPUs: {"\n8 gpu\n"},
		kvmHost:   {"\nkvm, tun:\nnot published by DRA, because the mode is Auto and the host has no accelerators\n"},
	} {
		out := mustRun(t, "discover", host)
		for _, want := range want {
			if !strings.Contains(out, want) {
				t.Errorf("%s: no %q in:\n%s", host, want, out)
			}
		}
	}
	out := mustRun(t, "discover", kvmHost)
	header, _, _ := strings.Cut(out, "\n")
	if got, want := strings.Join(strings.Fields(header), " "), "NAME KIND MODEL HEALTH"; got != want {
		t.Errorf("columns %q, want %q without those that have no value", got, want)
	}
	for _, format := range []string{"tree", "wide"} {
		if out := mustRun(t, "discover", "-o", format, "../../discovery/families/rdma/testdata/mixed.host"); !strings.Contains(out, "rdmap81s0") {
			t.Errorf("-o %s cuts the name of an interface:\n%s", format, out)
		}
	}
}

// Each row of the table is one line, whatever the driver reports.
func TestDiscoverTableRows(t *testing.T) {
	out := mustRun(t, "discover", "../../discovery/families/tenstorrent/testdata/broken.host")
	if strings.ContainsRune(out, '\x1b') {
		t.Errorf("control characters of a driver in:\n%q", out)
	}
	table, _, _ := strings.Cut(out, "\n\n")
	for line := range strings.SplitSeq(table, "\n") {
		if !strings.HasPrefix(line, "NAME") && !strings.HasPrefix(line, "pci-") {
			t.Errorf("a row has the line %q", line)
		}
	}
}

// Each cause of a problem is printed once, in a line of its own, with absolute paths.
func TestDiscoverProblems(t *testing.T) {
	for _, format := range []string{"table", "wide", "tree", "json"} {
		out, errOut, err := chandler("discover", "-o", format, "../../discovery/families/rdma/testdata/broken.host")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(errOut) {
			if !strings.HasPrefix(line, "problem: ") || strings.Contains(line, " sys/") {
				t.Errorf("-o %s: line %q", format, line)
			}
		}
		if !strings.Contains(errOut, "pci-0000-06-00-0: attribute class: read /sys/devices/") {
			t.Errorf("-o %s: no problem of a function that is no device:\n%s", format, errOut)
		}
		if repeated := strings.Contains(errOut, "pci-0000-07-00-0"); repeated != (format == "json") {
			t.Errorf("-o %s: problems of pci-0000-07-00-0 repeated: %t:\n%s\n%s", format, repeated, out, errOut)
		}
	}
}

// A cause that two families have found is printed once, with its context. Without any device, a problem
// is the reason why none is listed.
func TestDiscoverProblemsOnce(t *testing.T) {
	_, errOut, err := chandler("discover", "../../discovery/families/qat/testdata/broken.host")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(errOut, "0000:60:00.2/device: input/output error"); n != 1 || !strings.Contains(errOut, "describe PCI function 0000:60:00.2: ") {
		t.Errorf("%d lines of one cause:\n%s", n, errOut)
	}
	for _, format := range []string{"table", "wide", "tree"} {
		if out := mustRun(t, "discover", "-o", format, "../../discovery/families/solarflare/testdata/gone.host"); out != "No accelerators found. Some data of the host could not be read.\n" {
			t.Errorf("-o %s: %q", format, out)
		}
	}
}

// Names of products come from the host, in a recording too. The name of this machine and its
// products are never shown for another host.
func TestNamesOfAnotherHost(t *testing.T) {
	own, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(t.TempDir(), "other-machine")
	mustRun(t, "simulate", root, "../../discovery/families/intelgpu/testdata/desktop.host")
	unnamed := mustRun(t, "discover", "--host-root", root)
	if !strings.Contains(unnamed, "intel 8086:7d67") {
		t.Errorf("a host without names of products:\n%s", unnamed)
	}
	for _, args := range [][]string{{"discover", "-o", "tree"}, {"inventory"}} {
		if tree := mustRun(t, append(args, "--host-root", root)...); !strings.HasPrefix(tree, "other-machine ") {
			t.Errorf("%q of another host does not begin with its directory:\n%s", args, tree)
		}
	}
	if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(root, "etc/hostname")
	if err := os.Symlink("/proc/sys/kernel/hostname", link); err != nil {
		t.Fatal(err)
	}
	if tree := mustRun(t, "discover", "-o", "tree", "--host-root", root); !strings.HasPrefix(tree, "other-machine ") {
		t.Errorf("a link leads to the name of this machine:\n%s", tree)
	}
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	ids := filepath.Join(root, "usr/share/hwdata/pci.ids")
	for _, file := range []string{ids, filepath.Join(root, "etc/hostname")} {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, ids, "8086  Intel Corporation\n\t7d67  Arrow Lake-S [Intel Graphics]\n\t7d68  another\n")
	write(t, filepath.Join(root, "etc/hostname"), "rack7-3\n")
	recording := filepath.Join(t.TempDir(), "rack7.host")
	write(t, recording, mustRun(t, "record", "--host-root", root))
	for _, host := range [][]string{{"--host-root", root}, {recording}} {
		if table := mustRun(t, append([]string{"discover"}, host...)...); !strings.Contains(table, "Intel Graphics ") {
			t.Errorf("%q has no name of a product:\n%s", host, table)
		}
	}
	if data, err := os.ReadFile(recording); err != nil || strings.Contains(string(data), "7d68") {
		t.Errorf("%v, or the recording has names of devices that the host does not have", err)
	}
	for _, args := range [][]string{{"discover", "-o", "tree"}, {"inventory"}, {"slices"}} {
		for host, name := range map[string]string{"--host-root=" + root: "rack7-3", recording: "rack7"} {
			out := mustRun(t, append(args, host)...)
			if !strings.Contains(out, name) || strings.Contains(out, own) && !strings.Contains(name, own) {
				t.Errorf("%q of %s: want the name %s, and not %s:\n%s", args, host, name, own, out)
			}
		}
	}
}

// A directory without the files of a host, two hosts, and for doctor an invalid configuration, are errors.
func TestWrongHost(t *testing.T) {
	file, config := t.TempDir(), filepath.Join(t.TempDir(), "config.yaml")
	write(t, filepath.Join(file, "sys"), "")
	empty, none := filepath.Join(t.TempDir(), "empty.host"), filepath.Join(t.TempDir(), "none.host")
	write(t, empty, "An empty directory.\n\n-- sys/ --\n-- end --\n")
	write(t, none, "No directory.\n\n-- dev/kvm c 10:232 --\n-- end --\n")
	unmounted := t.TempDir()
	if err := os.Mkdir(filepath.Join(unmounted, "sys"), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, config, "apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\nshard: []\n")
	for _, test := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"discover", "--host-root", file}, 1, "has no directory sys"},
		{[]string{"discover", "--host-root", ""}, 2, "--host-root is empty"},
		{[]string{"discover", "--host-root", file, migHost}, 2, "cannot be combined"},
		{[]string{"doctor", "--host-root", file, migHost}, 2, "cannot be combined"},
		{[]string{"inventory", "--host-root", file, migHost}, 2, "cannot be combined"},
		{[]string{"slices", "--host-root", file, migHost}, 2, "cannot be combined"},
		{[]string{"migrate", "plan", "--host-root", file, migHost}, 2, "cannot be combined"},
		{[]string{"discover", migHost, migHost}, 2, "2 arguments given"},
		{[]string{"discover", "--host-root", unmounted}, 1, "host root " + unmounted + " has an empty directory sys"},
		{[]string{"doctor", "--host-root", unmounted}, 2, "host root " + unmounted + " has an empty directory sys"},
		{[]string{"discover", empty}, 1, "host recording " + empty + " has an empty directory sys"},
		{[]string{"doctor", empty}, 2, "host recording " + empty + " has an empty directory sys"},
		{[]string{"inventory", none}, 1, "host recording " + none + " has no directory sys"},
		{[]string{"doctor", "--config", config, migHost}, 2, "shard"},
		{[]string{"doctor", "--config", config, "--host-root", file}, 2, "has no directory sys"},
	} {
		if _, _, err := chandler(test.args...); command.ExitCode(err) != test.code || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%q: exit code %d, %v; want %d, %q", test.args, command.ExitCode(err), err, test.code, test.want)
		}
	}
}

// Commands without a cluster read a configuration for a given node.
func TestDiscoverOnANode(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	write(t, config, header()+"exclude: [{cel: 'true', nodes: {names: [worker-1]}}, {cel: 'true', nodes: {matchLabels: {pool: idle}}}]\n")
	discover := func(args ...string) (string, error) {
		out, _, err := chandler(append([]string{"discover", "--config", config, kvmHost}, args...)...)
		return out, err
	}
	for _, args := range [][]string{{"--node-name=worker-1", "--node-labels=a=b"}, {"--node-name=worker-2", "--node-labels=pool=idle"}} {
		if out, err := discover(args...); err != nil || !strings.Contains(out, "No accelerators") {
			t.Errorf("%v: %v\n%s", args, err, out)
		}
	}
	if out, err := discover("--node-name=worker-2", "--node-labels=a=b"); err != nil || !strings.Contains(out, "kvm") {
		t.Errorf("another node: %v\n%s", err, out)
	}
	if _, err := discover("--node-name=worker-2"); err == nil || !strings.Contains(err.Error(), "--node-labels") {
		t.Errorf("without labels: %v", err)
	}
}
