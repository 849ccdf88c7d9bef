package inuse_test

import (
	"io/fs"
	"maps"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/internal/inuse"
)

const pod types.UID = "5f1c9a52-7d0e-4c8e-9a57-0d2f6d0e1b11"

// serial is a device without a PCI function.
var serial = discovery.Device{Name: "serial", Source: "sys/devices/virtual/tty/ttyS9", Edits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{
	{Path: "/dev/serial", HostPath: "/dev/ttyS9", Type: "c", Major: 4, Minor: 73}, {Path: "/dev/control", Type: "c", Major: 10, Minor: 1},
}}, CommonNodes: []string{"/dev/control"}}

func byPods(host fs.FS, d discovery.Device) string {
	var texts []string
	for _, use := range inuse.ByPods(&discovery.Host{FS: host}, d, []types.UID{pod, ""}) {
		texts = append(texts, use.String())
	}
	return strings.Join(texts, "; ")
}

// ByPods finds a process in the pod's control group, with any form of the group's name, if the
// process has one of the device's own nodes open.
func TestByPods(t *testing.T) {
	const open = "in use: /dev/ttyS9: process 47 (qemu) has it open"
	for name, test := range map[string]struct {
		group, file, want string
	}{
		"version 2":           {"0::/kubepods/besteffort/pod5f1c9a52-7d0e-4c8e-9a57-0d2f6d0e1b11/0123", "/dev/ttyS9", open},
		"systemd":             {"0::/kubepods.slice/kubepods-pod5f1c9a52_7d0e_4c8e_9a57_0d2f6d0e1b11.slice/cri-containerd-0123.scope", "/dev/ttyS9", open},
		"systemd, burstable":  {"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod5f1c9a52_7d0e_4c8e_9a57_0d2f6d0e1b11.slice/crio-0123.scope", "/dev/ttyS9", open},
		"version 1":           {"12:pids:/kubepods/pod5f1c9a52-7d0e-4c8e-9a57-0d2f6d0e1b11/0123\n1:name=systemd:/", "/dev/ttyS9", open},
		"seen from a pod":     {"0::/../../pod5f1c9a52-7d0e-4c8e-9a57-0d2f6d0e1b11/0123", "/dev/ttyS9", open},
		"a monitor":           {"0::/kubepods/besteffort/pod00000000-7d0e-4c8e-9a57-0d2f6d0e1b11/0123", "/dev/ttyS9", ""},
		"a longer name":       {"0::/kubepods/xpod5f1c9a52-7d0e-4c8e-9a57-0d2f6d0e1b11/0123", "/dev/ttyS9", ""},
		"a daemon":            {"0::/system.slice/qemu.service", "/dev/ttyS9", ""},
		"something else":      {"0::/kubepods/besteffort/pod5f1c9a52-7d0e-4c8e-9a57-0d2f6d0e1b11/0123", "/dev/ttyS8", ""},
		"a node that all use": {"0::/kubepods/besteffort/pod5f1c9a52-7d0e-4c8e-9a57-0d2f6d0e1b11/0123", "/dev/control", ""},
	} {
		t.Run(name, func(t *testing.T) {
			fsys := host(map[string]string{"proc/1/cgroup": "0::/init.scope", "proc/47/cgroup": test.group, "proc/47/fd/3": "->" + test.file})
			if got := byPods(fsys, serial); got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}

// ByUnlistedPods finds a process of each pod that is not listed, and no other process.
func TestByUnlistedPods(t *testing.T) {
	const open = "in use: /dev/ttyS9: process 47 (qemu) has it open"
	for name, test := range map[string]struct{ group, want string }{
		"version 2":     {"0::/kubepods/besteffort/pod00000000-7d0e-4c8e-9a57-0d2f6d0e1b11/0123", open},
		"systemd":       {"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod00000000_7d0e_4c8e_9a57_0d2f6d0e1b11.slice/crio-0123.scope", open},
		"version 1":     {"1:name=systemd:/\n12:pids:/kubepods/pod00000000-7d0e-4c8e-9a57-0d2f6d0e1b11/0123", open},
		"a listed pod":  {"0::/kubepods.slice/kubepods-pod5f1c9a52_7d0e_4c8e_9a57_0d2f6d0e1b11.slice/crio-0123.scope", ""},
		"a static pod":  {"0::/kubepods/burstable/pod0123456789abcdef0123456789abcdef/0123", ""},
		"a daemon":      {"0::/system.slice/qemu.service", ""},
		"another group": {"0::/machine.slice/libpod-0123.scope", ""},
	} {
		t.Run(name, func(t *testing.T) {
			fsys := host(map[string]string{"proc/1/cgroup": "0::/init.scope", "proc/47/cgroup": test.group, "proc/47/fd/3": "->/dev/ttyS9"})
			var texts []string
			for _, use := range inuse.ByUnlistedPods(&discovery.Host{FS: fsys}, serial, []types.UID{pod}) {
				texts = append(texts, use.String())
			}
			if got := strings.Join(texts, "; "); got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}

// ByPods checks all files that can drive a function, not only its nodes.
func TestByPodsOfAFunction(t *testing.T) {
	d := discovery.Device{Name: "f", Source: function}
	for file, want := range map[string]string{
		"->/sys/devices/pci0000:00/0000:03:00.0/resource0": "in use: function 0000:03:00.0: process 47 (qemu) has it open as a whole",
		"->/dev/fpga0":     "in use: /dev/fpga0: process 47 (qemu) has it open",
		"->/dev/vfio/7":    "in use: /dev/vfio/7: process 47 (qemu) has it open",
		"->socket:[4711]":  "",
		"->/dev/vfio/vfio": "",
		"->/dev/vfio/8":    "",
	} {
		fsys := host(map[string]string{
			"proc/1/cgroup": "0::/", "proc/47/cgroup": "0::/kubepods/pod" + string(pod) + "/0", "proc/47/fd/3": file,
			function + "/fpga/fpga0/dev": "240:0", function + "/fpga/fpga0/uevent": "DEVNAME=fpga0",
			function + "/iommu_group": "->../../../kernel/iommu_groups/7", "sys/class/vfio/7/dev": "511:7", "sys/class/vfio/7/uevent": "DEVNAME=vfio/7",
		})
		if got := byPods(fsys, d); got != want {
			t.Errorf("%s: %q, want %q", file, got, want)
		}
	}
}

// harsh is a host that changes while it is read, or cannot be read.
type harsh struct {
	fs.FS

	open func(name string) error // called before a file is opened, or a directory read
}

func (h harsh) Open(name string) (fs.File, error) {
	if err := h.open(name); err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return h.FS.Open(name)
}

func (h harsh) ReadDir(name string) ([]fs.DirEntry, error) {
	if err := h.open(name); err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return fs.ReadDir(h.FS, name)
}
func (h harsh) ReadLink(name string) (string, error)   { return fs.ReadLink(h.FS, name) }
func (h harsh) Lstat(name string) (fs.FileInfo, error) { return fs.Lstat(h.FS, name) }
func (h harsh) Stat(name string) (fs.FileInfo, error)  { return fs.Stat(h.FS, name) }
func (h harsh) fails(at string, err error) harsh       { h.open = failAt(at, err); return h }
func failAt(at string, err error) func(name string) error {
	return func(name string) error { return map[bool]error{true: err}[name == at] }
}

// Invisible processes are reported as such. Processes that end meanwhile are ignored.
func TestByPodsThatCannotBeSeen(t *testing.T) {
	files := map[string]string{"proc/1/cgroup": "0::/", "proc/47/cgroup": "0::/kubepods/pod" + string(pod) + "/0", "proc/47/fd/3": "->/dev/ttyS9"}
	with := func(name, text string) fs.FS {
		all := maps.Clone(files)
		all[name] = text
		return host(all)
	}
	hidden := host(files)
	maps.DeleteFunc(hidden, func(name string, _ *fstest.MapFile) bool { return strings.HasPrefix(name, "proc/1/") })
	container := func(own string) fs.FS {
		all := maps.Clone(files)
		all["proc/1/ns/pid"], all["proc/self/ns/pid"] = "->pid:[4026532000]", "->pid:["+own+"]"
		return host(all)
	}
	inNetworks := func(first, own string) fs.FS {
		all := maps.Clone(files)
		all["proc/1/ns/pid"], all["proc/self/ns/pid"] = "->pid:[4026532000]", "->pid:[4026532000]"
		all["proc/1/ns/net"], all["proc/self/ns/net"] = "->net:["+first+"]", "->net:["+own+"]"
		return host(all)
	}
	if got := byPods(inNetworks("4026532001", "4026532002"), serial); got != "in use: /dev/ttyS9: process 47 (qemu) has it open" {
		t.Errorf("with hostPID on a node that is a container: %q", got)
	}
	if got := byPods(container("4026532111"), serial); got != "in use: /dev/ttyS9: process 47 (qemu) has it open" {
		t.Errorf("on a node that is a container: %q", got)
	}
	for name, test := range map[string]struct {
		host fs.FS
		want string
	}{
		"it ends before its group is read": {harsh{FS: host(files)}.fails("proc/47/cgroup", fs.ErrNotExist), ""},
		"it ends while its group is read":  {harsh{FS: host(files)}.fails("proc/47/cgroup", syscall.ESRCH), ""},
		"it ends before its files are":     {harsh{FS: host(files)}.fails("proc/47/fd", fs.ErrNotExist), ""},
		"its group may not be read":        {harsh{FS: host(files)}.fails("proc/47/cgroup", fs.ErrPermission), "read the control group of process 47"},
		"its files may not be read":        {harsh{FS: host(files)}.fails("proc/47/fd", fs.ErrPermission), "list open files of process 47"},
		"no process may be seen":           {harsh{FS: host(files)}.fails("proc", fs.ErrPermission), "list processes"},
		"hidepid":                          {hidden, "not all processes are visible"},
		"a container's own processes":      {with("proc/1/ns/pid", "->pid:[4026532000]"), "those of a container"},
		"its own container's processes":    {container("4026532000"), "those of a container"},
		"its own pod's processes":          {inNetworks("4026532001", "4026532001"), "those of a container"},
	} {
		t.Run(name, func(t *testing.T) {
			got := byPods(test.host, serial)
			if test.want == "" && got != "" || !strings.Contains(got, test.want) || test.want != "" && !strings.Contains(got, "it is unknown whether") {
				t.Errorf("%q, want %q", got, test.want)
			}
			for _, use := range inuse.ByPods(&discovery.Host{FS: test.host}, serial, []types.UID{pod}) {
				if use.ReadError == nil || use.How != "" {
					t.Errorf("%+v", use)
				}
			}
		})
	}
}

// A reader without access to the first process does not see the open files of others.
func TestVisibility(t *testing.T) {
	files := map[string]string{"proc/1/cgroup": "0::/", "proc/1/fd/3": "->/dev/null"}
	container := maps.Clone(files)
	container["proc/1/ns/pid"] = "->pid:[4026532000]"
	hidden := host(files)
	maps.DeleteFunc(hidden, func(name string, _ *fstest.MapFile) bool { return strings.HasPrefix(name, "proc/1/") })
	for want, fsys := range map[string]fs.FS{
		"":                              host(files),
		"not all processes are visible": hidden,
		"those of a container":          host(container),
		"may not be seen":               harsh{FS: host(files)}.fails("proc/1/fd", fs.ErrPermission),
	} {
		err := inuse.CheckVisibility(fsys)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// A process that starts another process and ends during the pass does not hide the new process.
func TestByPodsThatStartProcesses(t *testing.T) {
	files := map[string]string{"proc/1/cgroup": "0::/", "proc/47/cgroup": "0::/kubepods/pod" + string(pod) + "/0", "proc/47/fd/3": "->/dev/ttyS9"}
	processes := host(files)
	changing := harsh{FS: processes}
	at, forks := 47, 1
	changing.open = func(name string) error {
		if name != "proc/"+strconv.Itoa(at)+"/fd" || forks == 0 {
			return nil
		}
		forks--
		was := "proc/" + strconv.Itoa(at)
		at++
		now := "proc/" + strconv.Itoa(at)
		for name, file := range maps.Clone(processes) {
			if rest, ok := strings.CutPrefix(name, was+"/"); ok {
				delete(processes, name)
				processes[now+"/"+rest] = file
			}
		}
		return fs.ErrNotExist
	}
	if got := byPods(changing, serial); !strings.Contains(got, "process 48 (qemu) has it open") {
		t.Errorf("%q", got)
	}
	forks = 1000
	if got := byPods(changing, serial); !strings.Contains(got, "in use: the device: the pod starts processes") {
		t.Errorf("%q", got)
	}
	forks = 0
	if got := byPods(changing, serial); !strings.Contains(got, "has it open") {
		t.Errorf("%q", got)
	}
}
