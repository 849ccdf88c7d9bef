package inuse_test

import (
	"errors"
	"io/fs"
	"maps"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/inuse"
)

const (
	function  = "sys/devices/pci0000:00/0000:03:00.0"
	subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
)

// host returns a host with an unused function and further files. A text with the prefix "->"
// becomes a link, and a text with the prefix "b" or "c" a device node.
func host(files map[string]string) fstest.MapFS {
	all := fstest.MapFS{}
	for _, more := range []map[string]string{{
		function + "/class":     "0x088000",
		function + "/msi_bus":   "1",
		"proc/1/comm":           "init",
		"proc/1/fd/0":           "->/dev/null",
		"proc/1/mountinfo":      "22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/root rw",
		"proc/1/net/route":      "Iface\tDestination",
		"proc/1/ns/pid":         "->pid:[4026531836]",
		"proc/47/comm":          "qemu",
		"sys/class/block/x/dev": "8:200",
		"sys/class/net/x/flags": "0x1003",
	}, files} {
		for name, text := range more {
			file := &fstest.MapFile{Data: []byte(text + "\n")}
			if target, ok := strings.CutPrefix(text, "->"); ok {
				file = &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink | 0o777}
			}
			all[name] = file
		}
	}
	return all
}

func uses(host fs.FS, o inuse.Options) (texts []string) {
	for _, use := range inuse.UsesOf(&discovery.Host{FS: host}, sysfs.At(host, function), o) {
		texts = append(texts, use.String())
	}
	return texts
}

// Each case is a way to use the function, with all reported uses.
func TestUses(t *testing.T) {
	// A controller of a subsystem with a path to one of the two namespaces.
	multipath := map[string]string{
		function + "/nvme/nvme3/state":             "live",
		function + "/nvme/nvme3/nvme0c3n1/size":    "1",
		"sys/class/nvme-subsystem/nvme-subsys0":    "->../../../" + subsystem,
		subsystem + "/nvme3":                       "->../../../../../" + function + "/nvme/nvme3",
		subsystem + "/nvme0n1/dev":                 "259:1",
		subsystem + "/nvme0n1/nvme0n1p1/dev":       "259:2",
		subsystem + "/nvme0n1/subsystem":           "->../../../../../class/block",
		subsystem + "/nvme0n1/nvme0n1p1/subsystem": "->../../../../../../class/block",
		subsystem + "/ng0n1/dev":                   "242:1",
		subsystem + "/nvme0n2/dev":                 "259:3",
		"sys/class/block/nvme0n1":                  "->../../../" + subsystem + "/nvme0n1",
		"sys/class/block/nvme0n1p1":                "->../../../" + subsystem + "/nvme0n1/nvme0n1p1",
		"sys/class/block/nvme0n2":                  "->../../../" + subsystem + "/nvme0n2",
	}
	with := func(base map[string]string, more ...string) map[string]string {
		all := maps.Clone(base)
		for i := 0; i < len(more); i += 2 {
			all[more[i]] = more[i+1]
		}
		return all
	}
	disk := map[string]string{
		function + "/ata1/host0/block/sda/dev":       "8:0",
		function + "/ata1/host0/block/sda/subsystem": "->../../../../../../../../class/block",
		"sys/class/block/sda":                        "->../../../" + function + "/ata1/host0/block/sda",
	}
	vfio := map[string]string{
		function + "/iommu_group": "->../../../kernel/iommu_groups/42",
		"sys/class/vfio/42/dev":   "241:0",
	}
	for name, test := range map[string]struct {
		files map[string]string
		want  []string
	}{
		"no users":                     {nil, nil},
		"no users, several paths":      {multipath, nil},
		"a namespace":                  {with(multipath, "proc/1/mountinfo", "36 35 259:1 / /data rw - ext4 /dev/x rw"), []string{"in use: disk nvme0n1: it is mounted on /data"}},
		"its partition":                {with(multipath, "proc/1/mountinfo", "36 35 259:2 / /data rw - ext4 /dev/x rw"), []string{"in use: disk nvme0n1p1: it is mounted on /data"}},
		"another controller's":         {with(multipath, "proc/1/mountinfo", "36 35 259:3 / /data rw - ext4 /dev/x rw"), nil},
		"a namespace's node":           {with(multipath, "proc/47/fd/3", "->/dev/nvme0n1p1"), []string{"in use: /dev/nvme0n1p1: process 47 (qemu) has it open"}},
		"a namespace's character node": {with(multipath, "proc/47/fd/3", "->/dev/ng0n1"), []string{"in use: /dev/ng0n1: process 47 (qemu) has it open"}},
		"a SCSI target": {with(disk, "sys/kernel/config/target/core/iblock_0/disk/info", "Status: ACTIVATED\niBlock device: sda  UDEV PATH:   readonly: 0\n        Major: 8 Minor: 0  CLAIMED: IBLOCK"),
			[]string{"in use: disk sda: it is exported by the SCSI target"}},
		"an enabled namespace of the NVMe target": {with(disk, "sys/kernel/config/nvmet/subsystems/a/namespaces/1/device_path", "/dev/sda", "sys/kernel/config/nvmet/subsystems/a/namespaces/1/enable", "1"),
			[]string{"in use: disk sda: it is exported by the NVMe target"}},
		"a disabled namespace of the NVMe target":  {with(disk, "sys/kernel/config/nvmet/subsystems/a/namespaces/1/device_path", "/dev/sda", "sys/kernel/config/nvmet/subsystems/a/namespaces/1/enable", "0"), nil},
		"a disabled controller of the NVMe target": {with(multipath, "sys/kernel/config/nvmet/subsystems/a/passthru/device_path", "/dev/nvme3", "sys/kernel/config/nvmet/subsystems/a/passthru/enable", "0"), nil},
		"a file registered with an io_uring": {with(disk, "proc/47/fd/5", "->anon_inode:[io_uring]", "proc/47/fdinfo/5", "pos:\t0\nflags:\t02000002\nUserFiles:\t1\n    0: sda\nUserBufs:\t0"),
			[]string{"in use: /dev/sda: process 47 (qemu) has it open"}},
		"a group": {with(vfio, "proc/47/fd/5", "->/dev/vfio/42"), []string{"in use: /dev/vfio/42: process 47 (qemu) has it open"}},
		"a function of vfio": {with(vfio, "proc/47/fd/5", "->anon_inode:[vfio-device]", "proc/47/fdinfo/5", "pos:\t0\nvfio-device-syspath: /"+function),
			[]string{"in use: function 0000:03:00.0: process 47 (qemu) has it open as a whole"}},
		"another function of vfio": {with(vfio, "proc/47/fd/5", "->anon_inode:[vfio-device]", "proc/47/fdinfo/5", "vfio-device-syspath: /sys/devices/pci0000:00/0000:04:00.0"), nil},
		"some function of vfio": {with(vfio, "proc/47/fd/5", "->anon_inode:[vfio-device]"),
			[]string{"it is unknown whether /dev/vfio/42 is in use: process 47 (qemu) has a function open by vfio, and it is unknown which: open device dev/vfio/42: unsupported operation"}},
		"registers": {map[string]string{"proc/47/map_files/a-b": "->/host/sys/devices/pci0000:00/0000:03:00.0/resource2_wc", "host/sys/devices/pci0000:00/0000:03:00.0/resource2_wc": ""},
			[]string{"in use: function 0000:03:00.0: process 47 (qemu) has it open as a whole"}},
		"registers by proc": {map[string]string{"proc/47/fd/3": "->/proc/bus/pci/03/00.0", "proc/bus/pci/03/00.0": ""},
			[]string{"in use: function 0000:03:00.0: process 47 (qemu) has it open as a whole"}},
		"a mediated device": {map[string]string{function + "/a297db4a/mdev_type/name": "x", function + "/a297db4a/iommu_group": "->../../../../kernel/iommu_groups/7", "sys/class/vfio/7/dev": "241:7", "proc/47/fd/3": "->/dev/vfio/7"},
			[]string{"in use: mediated device a297db4a: it was created on this function; write 1 to its attribute remove first", "in use: /dev/vfio/7: process 47 (qemu) has it open"}},
		"virtual functions": {map[string]string{function + "/virtfn0": "->../0000:03:01.0"},
			[]string{"in use: function 0000:03:00.0: it has virtual functions; set sriov_numvfs to 0 first"}},
		"a sub-function": {map[string]string{function + "/mlx5_core.sf.4/sfnum": "1"}, []string{"in use: sub-function mlx5_core.sf.4: it was created on this function; remove it with devlink first"}},
		"a DMA channel":  {map[string]string{function + "/dma/dma0chan0/in_use": "2"}, []string{"in use: DMA channel dma0chan0: the kernel uses it"}},
		"a free channel": {map[string]string{function + "/dma/dma0chan0/in_use": "0"}, nil},
		"a console":      {map[string]string{function + "/tty/ttyS4/console": "Y"}, []string{"in use: terminal ttyS4: it is a console of the kernel"}},
		"a shared directory": {map[string]string{function + "/virtio0/mount_tag": "home", "proc/1/mountinfo": "36 35 0:50 / /home rw - 9p home rw,trans=virtio"},
			[]string{"in use: file system home: it is mounted on /home"}},
		"NVMe by RDMA": {map[string]string{function + "/infiniband/mlx5_0/node_type": "1: CA", "sys/class/nvme/nvme9/transport": "rdma"},
			[]string{"it is unknown whether its RDMA device is in use: NVMe controller nvme9 is reached by RDMA, and the kernel does not report the device; disconnect it first"}},
		"NVMe by RDMA without RDMA": {map[string]string{"sys/class/nvme/nvme9/transport": "rdma"}, nil},
		"a container's processes": {with(vfio, "proc/1/ns/pid", "->pid:[4026532000]"),
			[]string{"it is unknown whether /dev/vfio/42 is in use: the processes in /proc are those of a container, and not those of the host"}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, uses(host(test.files), inuse.Options{})); diff != "" {
				t.Errorf("uses (-want +got):\n%s", diff)
			}
		})
	}
	t.Run("exported as it is", func(t *testing.T) {
		h := host(with(multipath, "sys/kernel/config/nvmet/subsystems/a/passthru/device_path", "/dev/nvme3"))
		h["dev/nvme3"] = &fstest.MapFile{Mode: fs.ModeDevice | fs.ModeCharDevice}
		h[function+"/nvme/nvme3/dev"] = &fstest.MapFile{Data: []byte("243:3\n")}
		h["sys/kernel/config/nvmet/subsystems/a/passthru/device_path"] = &fstest.MapFile{Data: []byte("/dev/gone\n")}
		if got := uses(h, inuse.Options{}); len(got) == 0 || !strings.Contains(got[0], "the NVMe target passes it through, whose file cannot be read: /dev/gone") {
			t.Errorf("uses %q", got)
		}
	})
}

// A bound driver prevents unbinding, and nothing else.
func TestBound(t *testing.T) {
	h := host(map[string]string{
		function + "/net/eth0/flags": "0x1003", "sys/class/net/eth0": "->../../../" + function + "/net/eth0",
		function + "/virtfn0": "->../0000:03:01.0",
	})
	v := inuse.FindUsers(&discovery.Host{FS: h}, inuse.Options{})
	if all, bound := v.UsesOf(sysfs.At(h, function)), v.UsesOf(sysfs.At(h, function)).BoundUses(); len(all) != 2 || bound != nil || bound.Err() != nil {
		t.Errorf("uses %v, bound %v", all, bound)
	}
}

// UsesOf ignores the processes of the pods in Except.
func TestExcept(t *testing.T) {
	h := host(map[string]string{function + "/uio/uio0/dev": "240:0", "proc/47/fd/3": "->/dev/uio0", "proc/48/fd/3": "->/dev/uio0", "proc/47/cgroup": "0::/kubepods/podself/0\n"})
	want := []string{"in use: /dev/uio0: process 48 has it open"}
	if diff := cmp.Diff(want, uses(h, inuse.Options{Except: []types.UID{"self"}})); diff != "" {
		t.Errorf("uses (-want +got):\n%s", diff)
	}
}

// forbidden is a host whose reader has no permission to see the open files of process 47.
type forbidden struct{ fstest.MapFS }

func (f forbidden) ReadDir(name string) ([]fs.DirEntry, error) {
	if strings.HasPrefix(name, "proc/47/fd") {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	return f.MapFS.ReadDir(name)
}

// A reader without privilege reports the visible uses, and an error for the others.
func TestWithoutPrivilege(t *testing.T) {
	h := forbidden{host(map[string]string{function + "/uio/uio0/dev": "240:0", "proc/47/fd/3": "->/dev/uio0", "proc/48/fd/3": "->/dev/uio0", "proc/47/cgroup": "0::/kubepods/podself/0\n"})}
	found := inuse.UsesOf(&discovery.Host{FS: h}, sysfs.At(h, function), inuse.Options{})
	if len(found) != 2 || found[0].How != "process 48 has it open" || !errors.Is(found[1].ReadError, fs.ErrPermission) {
		t.Errorf("uses %v", found)
	}
	if errors.Is(found.Err(), fs.ErrPermission) {
		t.Error("a caller that ignores unreadable files would ignore process 48")
	}
	if unseen := found[1:]; !errors.Is(unseen.Err(), fs.ErrPermission) || len(unseen.KnownUses()) > 0 {
		t.Errorf("what cannot be seen: %v", unseen.Err())
	}
}

// DiskUses returns the uses of disks in the kernel's tables. It opens no disk and no process's list
// of open files.
func TestDisks(t *testing.T) {
	disk := map[string]string{
		function + "/ata1/host0/block/sda/dev":       "8:0",
		function + "/ata1/host0/block/sda/subsystem": "->../../../../../../../../class/block",
		"sys/class/block/sda":                        "->../../../" + function + "/ata1/host0/block/sda",
	}
	for name, test := range map[string]struct {
		files map[string]string
		want  string
	}{
		"unused":   {nil, ""},
		"mounted":  {map[string]string{"proc/1/mountinfo": "36 35 8:0 / /data rw - ext4 /dev/sda rw"}, "in use: disk sda: it is mounted on /data"},
		"an array": {map[string]string{function + "/ata1/host0/block/sda/holders/md0": ""}, "in use: disk sda: it is part of md0"},
		"swap":     {map[string]string{"proc/swaps": "Filename Type Size Used Priority\n/dev/sda partition 1 0 -2", "dev/sda": ""}, "in use: disk sda: swap"},
		"open":     {map[string]string{"proc/47/fd/3": "->/dev/sda", "dev/sda": ""}, ""},
		"unseen":   {map[string]string{"proc/spl/kstat/zfs/x": ""}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			files := maps.Clone(disk)
			maps.Copy(files, test.files)
			fsys := neverOpens{host(files), t}
			used := inuse.DiskUses(&discovery.Host{FS: fsys}, []sysfs.Device{sysfs.At(fsys, function)})
			got := ""
			if err := used[function]; err != nil {
				got = err.Error()
			}
			if got != test.want || len(used) > 1 {
				t.Errorf("%v, want %q", used, test.want)
			}
		})
	}
}

// neverOpens is a host that fails the test when a disk is opened, or when the open files of a
// process are listed.
type neverOpens struct {
	fstest.MapFS

	t *testing.T
}

func (f neverOpens) Open(name string) (fs.File, error) {
	if name == "dev/sda" || strings.Contains(name, "/fd") {
		f.t.Errorf("opens %s", name)
	}
	return f.MapFS.Open(name)
}
