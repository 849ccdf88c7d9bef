package provision_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/families/idxd"
	"chandler.dev/discovery/families/qat"
	"chandler.dev/internal/provision"
)

// id returns a selector for functions with a vendor and device ID.
func id(id string) func(discovery.Device) (bool, error) {
	return func(d discovery.Device) (bool, error) {
		return d.Attributes.String("pciVendor")+":"+d.Attributes.String("pciDevice") == id, nil
	}
}

// run provisions the host and returns the output.
func (k *kernel) run(rules ...provision.Rule) (string, error) { return k.runHeld(nil, nil, rules...) }

func (k *kernel) runHeld(held map[string]string, heldErr error, rules ...provision.Rule) (string, error) {
	var out bytes.Buffer
	p := &provision.Provisioner{
		Host: &discovery.Host{FS: host{k.MapFS, k.broken}}, Families: families.All, Rules: rules, Write: k.write, Keep: k.keep, Out: &out,
		Held: func([]discovery.Device) (map[string]string, error) { return held, heldErr },
	}
	err := p.Run(context.Background())
	return out.String(), err
}

// dryRun returns the output of a dry run.
func (k *kernel) dryRun(rules ...provision.Rule) (string, error) {
	var out bytes.Buffer
	p := &provision.Provisioner{
		Host: &discovery.Host{FS: k.MapFS}, Families: families.All, Rules: rules, Out: &out,
		Held: func([]discovery.Device) (map[string]string, error) { return nil, nil },
	}
	err := p.Run(context.Background())
	return out.String(), err
}

const qatID, nicID, dsaID = "8086:4940", "8086:1572", "8086:0b25"

func qatRule(count int) provision.Rule {
	return provision.Rule{
		Selects:  id(qatID),
		Settings: qat.Services{"dc", "sym"},
		VFs:      &provision.VFs{Count: count, Driver: "vfio-pci"},
	}
}

// qatHost returns a host with a QAT device in its state after boot.
func qatHost() (*kernel, string) {
	k := newKernel("4xxx", "vfdriver", "vfio-pci")
	attributes := sriov(16)
	attributes["qat/state"], attributes["qat/cfg_services"] = "up", "sym;asym"
	return k, k.function("0000:6b:00.0", qatID, "0b4000", "4xxx", attributes)
}

var queues = provision.Rule{Selects: id(dsaID), Settings: idxd.Groups{
	{Engines: 1, Queues: []idxd.Queue{{Name: "one", Size: 16, Priority: 10}}},
	{Engines: 2, Queues: []idxd.Queue{{Name: "all", Shared: true, Size: 112, Priority: 5, Threshold: 100}}},
}}

// Each case is a host with rules, and the expected output. A dry run prints the same and
// writes nothing, and a second run finds nothing to do.
func TestProvision(t *testing.T) {
	nic := provision.Rule{Selects: id(nicID), VFs: &provision.VFs{Count: 2}}
	bound := provision.Rule{Selects: id(nicID), Driver: "vfio-pci"}
	for name, test := range map[string]struct {
		host  func() *kernel
		rules []provision.Rule
		want  string
	}{
		"services and virtual functions": {
			func() *kernel { k, _ := qatHost(); return k },
			[]provision.Rule{qatRule(2)}, `
/sys/devices/pci0000:00/0000:6b:00.0/qat/state: up -> down
/sys/devices/pci0000:00/0000:6b:00.0/qat/cfg_services: sym;asym -> sym;dc
/sys/devices/pci0000:00/0000:6b:00.0/qat/state: down -> up
/sys/devices/pci0000:00/0000:6b:00.0/sriov_drivers_autoprobe: 1 -> 0
/sys/devices/pci0000:00/0000:6b:00.0/sriov_numvfs: 0 -> 2
/sys/devices/pci0000:00/0000:6b:00.0/sriov_drivers_autoprobe: 0 -> 1
/sys/devices/pci0000:00/0000:6b:00.0/virtfn0/driver_override: none -> vfio-pci
/sys/devices/pci0000:00/0000:6b:00.0/virtfn0/driver: none -> vfio-pci
/sys/devices/pci0000:00/0000:6b:00.0/virtfn1/driver_override: none -> vfio-pci
/sys/devices/pci0000:00/0000:6b:00.0/virtfn1/driver: none -> vfio-pci
`},
		"a function that gets its group with a driver, as under virtio-iommu": {
			func() *kernel {
				k := newKernel("i40e", "vfio-pci")
				dir := k.function("0000:03:00.0", nicID, "020000", "", nil)
				delete(k.MapFS, dir+"/iommu_group")
				k.file("sys/class/iommu/virtio0/devices/0000:04:00.0", "")
				return k
			},
			[]provision.Rule{bound}, `
/sys/devices/pci0000:00/0000:03:00.0/driver_override: none -> vfio-pci
/sys/devices/pci0000:00/0000:03:00.0/driver: none -> vfio-pci
`},
		"a function without an IOMMU, in vfio's mode without one": {
			func() *kernel {
				k := newKernel("i40e", "vfio-pci")
				delete(k.MapFS, k.function("0000:03:00.0", nicID, "020000", "", nil)+"/iommu_group")
				k.file("sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "Y")
				return k
			},
			[]provision.Rule{bound}, `
/sys/devices/pci0000:00/0000:03:00.0/driver_override: none -> vfio-pci
/sys/devices/pci0000:00/0000:03:00.0/driver: none -> vfio-pci
`},
		"unused virtual functions, in another number": {
			func() *kernel {
				k, dir := qatHost()
				k.file(dir+"/qat/cfg_services", "dc;sym") // in a different order
				k.file(dir+"/sriov_drivers_autoprobe", "0")
				k.setVFs(dir, "3")
				return k
			},
			[]provision.Rule{qatRule(1)}, `
/sys/devices/pci0000:00/0000:6b:00.0/sriov_numvfs: 3 -> 0
/sys/devices/pci0000:00/0000:6b:00.0/sriov_numvfs: 0 -> 1
/sys/devices/pci0000:00/0000:6b:00.0/virtfn0/driver_override: none -> vfio-pci
/sys/devices/pci0000:00/0000:6b:00.0/virtfn0/driver: none -> vfio-pci
`},
		"virtual functions that the kernel bound": {
			func() *kernel {
				k, dir := qatHost()
				k.file(dir+"/qat/cfg_services", "sym;dc")
				k.setVFs(dir, "1")
				return k
			},
			[]provision.Rule{qatRule(1)}, `
/sys/devices/pci0000:00/0000:6b:00.0/virtfn0/driver_override: none -> vfio-pci
/sys/devices/pci0000:00/0000:6b:00.0/virtfn0/driver: vfdriver -> none
/sys/devices/pci0000:00/0000:6b:00.0/virtfn0/driver: none -> vfio-pci
`},
		"a device that was left down": {
			func() *kernel {
				k, dir := qatHost()
				k.file(dir+"/qat/state", "down")
				return k
			},
			[]provision.Rule{{Selects: id(qatID), Settings: qat.Services{"asym", "sym"}}}, `
/sys/devices/pci0000:00/0000:6b:00.0/qat/state: down -> up
`},
		"virtual functions with the kernel's drivers": {
			func() *kernel {
				k := newKernel("i40e", "vfdriver")
				k.netdev(k.function("0000:03:00.0", nicID, "020000", "i40e", sriov(64)), "eth0", "0x1003")
				return k
			},
			[]provision.Rule{nic}, `
/sys/devices/pci0000:00/0000:03:00.0/sriov_numvfs: 0 -> 2
`},
		"the first rule that selects counts, and none is as good": {
			func() *kernel {
				k := newKernel("i40e", "vfio-pci")
				k.netdev(k.function("0000:03:00.0", nicID, "020000", "i40e", nil), "eth0", "0x1002")
				k.function("0000:04:00.0", "10de:2330", "030200", "", nil)
				return k
			},
			[]provision.Rule{bound, nic, {Selects: id("ffff:ffff"), Driver: "vfio-pci"}}, `
functions[1] selects no PCI function
functions[2] selects no PCI function
/sys/devices/pci0000:00/0000:03:00.0/driver_override: none -> vfio-pci
/sys/devices/pci0000:00/0000:03:00.0/driver: i40e -> none
/sys/devices/pci0000:00/0000:03:00.0/driver: none -> vfio-pci
`},
		"work queues of a fresh device": {
			func() *kernel {
				k := newKernel("idxd")
				k.dsa("0000:6a:01.0")
				return k
			},
			[]provision.Rule{queues}, prefixed("/sys/devices/pci0000:00/0000:6a:01.0/dsa0/", `
engine0.0/group_id: -1 -> 0
engine0.1/group_id: -1 -> 1
engine0.2/group_id: -1 -> 1
wq0.0/size: 0 -> 16
wq0.1/size: 0 -> 112
wq0.0/group_id: -1 -> 0
wq0.0/mode: shared -> dedicated
wq0.0/priority: 0 -> 10
wq0.0/type: none -> user
wq0.0/name: none -> one
wq0.0/driver_name: none -> user
wq0.1/group_id: -1 -> 1
wq0.1/priority: 0 -> 5
wq0.1/type: none -> user
wq0.1/name: none -> all
wq0.1/driver_name: none -> user
wq0.1/threshold: 0 -> 100
state: disabled -> enabled
wq0.0/state: disabled -> enabled
wq0.1/state: disabled -> enabled
`)},
		"work queues that are otherwise": {
			func() *kernel {
				k := newKernel("idxd")
				dir := k.dsa("0000:6a:01.0")
				for _, write := range []string{
					"engine0.0/group_id=0", "wq0.0/size=128", "wq0.0/group_id=0", "wq0.0/type=user", "wq0.0/name=one",
					"wq0.0/driver_name=user", "wq0.0/mode=dedicated",
				} {
					name, value, _ := strings.Cut(write, "=")
					k.file(dir+"/"+name, value)
				}
				k.file(dir+"/state", "enabled")
				k.file(dir+"/wq0.0/state", "enabled")
				return k
			},
			[]provision.Rule{queues}, prefixed("/sys/devices/pci0000:00/0000:6a:01.0/dsa0/", `
wq0.0/state: enabled -> disabled
state: enabled -> disabled
engine0.0/group_id: none -> 0
engine0.1/group_id: none -> 1
engine0.2/group_id: none -> 1
wq0.0/size: none -> 16
wq0.1/size: none -> 112
wq0.0/group_id: none -> 0
wq0.0/mode: none -> dedicated
wq0.0/priority: none -> 10
wq0.0/type: none -> user
wq0.0/name: none -> one
wq0.0/driver_name: none -> user
wq0.1/group_id: none -> 1
wq0.1/mode: none -> shared
wq0.1/priority: none -> 5
wq0.1/type: none -> user
wq0.1/name: none -> all
wq0.1/driver_name: none -> user
wq0.1/threshold: none -> 100
state: disabled -> enabled
wq0.0/state: disabled -> enabled
wq0.1/state: disabled -> enabled
`)},
	} {
		t.Run(name, func(t *testing.T) {
			k := test.host()
			before := k.state()
			planned, err := k.dryRun(test.rules...)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.TrimPrefix(test.want, "\n"), planned); diff != "" {
				t.Errorf("dry run (-want +got):\n%s", diff)
			}
			if k.state() != before || len(k.writes) > 0 {
				t.Errorf("a dry run wrote %q", k.writes)
			}
			done, err := k.run(test.rules...)
			if diff := cmp.Diff(planned, done); diff != "" || err != nil {
				t.Errorf("run: %v (-planned +done):\n%s", err, diff)
			}
			after := k.state()
			again, err := k.run(test.rules...)
			if !strings.HasSuffix(again, "nothing to do\n") || strings.Contains(again, "->") || err != nil || k.state() != after {
				t.Errorf("a second run: %v\n%s", err, again)
			}
			for n := range len(k.writes) {
				killed := test.host()
				killed.runKilled(n, test.rules...)
				planned, dryErr := killed.dryRun(test.rules...)
				done, err := killed.run(test.rules...)
				if diff := cmp.Diff(planned, done); diff != "" || err != nil || dryErr != nil {
					t.Errorf("killed after %d writes, and run again: %v, %v (-planned +done):\n%s", n, dryErr, err, diff)
				}
				if diff := cmp.Diff(after, killed.state()); diff != "" {
					t.Errorf("killed after %d writes, and run again (-want +got):\n%s", n, diff)
				}
			}
		})
	}
}

func prefixed(prefix, lines string) string {
	return "\n" + prefix + strings.ReplaceAll(strings.TrimSpace(lines), "\n", "\n"+prefix) + "\n"
}

// Each case is a host that must remain unchanged, and the expected error.
func TestProvisionRefuses(t *testing.T) {
	nic := func() (*kernel, string) {
		k := newKernel("i40e", "vfio-pci", "vfdriver")
		dir := k.function("0000:03:00.0", nicID, "020000", "i40e", sriov(64))
		k.netdev(dir, "eth0", "0x1002")
		return k, dir
	}
	nvme := func() (*kernel, string) {
		k := newKernel("nvme", "vfio-pci")
		dir := k.function("0000:03:00.0", nicID, "010802", "nvme", sriov(4))
		k.disk(dir+"/nvme/nvme0", "nvme0n1", "259:1")
		return k, dir
	}
	// multipath gives the disk several paths, as the kernel does if an NVMe subsystem may have
	// several controllers (nvme_mpath_alloc_disk and nvme_mpath_set_live in
	// drivers/nvme/host/multipath.c): the function has only a path to the namespace, without a
	// node.
	multipath := func(k *kernel, dir string) {
		subsystem := "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
		delete(k.MapFS, "sys/class/block/nvme0n11")
		k.link("sys/class/nvme-subsystem/nvme-subsys0", "../../../"+subsystem)
		k.file(dir+"/nvme/nvme0/state", "live")
		k.link(subsystem+"/nvme0", "../../../../../"+dir+"/nvme/nvme0")
		k.file(dir+"/nvme/nvme0/nvme1c0n1/hidden", "1")
		k.file(subsystem+"/nvme1n1/dev", "259:7")
		k.file(subsystem+"/ng1n1/dev", "242:3")
		k.link("sys/class/block/nvme1n1", "../../../"+subsystem+"/nvme1n1")
	}
	bind := provision.Rule{Selects: id(nicID), Driver: "vfio-pci"}
	create := provision.Rule{Selects: id(nicID), VFs: &provision.VFs{Count: 2}}
	const line = "\neth0\t%D\t0101A8C0\t0003\t0\t0\t100\t%M\t0\t0\t0"
	route := func(k *kernel, name, destination, mask string) {
		text := strings.NewReplacer("%D", destination, "%M", mask, "eth0", name).Replace(line)
		k.file("proc/1/net/route", k.text("proc/1/net/route")+text)
	}
	for name, test := range map[string]struct {
		host  func() (*kernel, string)
		spoil func(k *kernel, dir string)
		rule  provision.Rule
		want  []string
	}{
		"default route": {nic, func(k *kernel, _ string) { route(k, "eth0", "00000000", "00000000") }, create, []string{"eth0", "default route"}},
		"default route through a bond": {nic, func(k *kernel, dir string) {
			k.link(dir+"/net/eth0/upper_bond0", "../../../../../virtual/net/bond0")
			k.file("sys/devices/virtual/net/bond0/flags", "0x1003")
			k.link("sys/class/net/bond0", "../../devices/virtual/net/bond0")
			route(k, "bond0", "00000000", "00000000")
		}, create, []string{"eth0", "bond0", "default route"}},
		"route": {nic, func(k *kernel, _ string) { route(k, "eth0", "0001A8C0", "00FFFFFF") }, create, []string{"eth0", "a route"}},
		"default route of IPv6": {nic, func(k *kernel, _ string) {
			zeros := strings.Repeat("0", 32)
			k.file("proc/1/net/ipv6_route", zeros+" 00 "+zeros+" 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth0")
		}, bind, []string{"eth0", "default route"}},
		"interface is up":           {nic, func(k *kernel, dir string) { k.netdev(dir, "eth0", "0x1003") }, bind, []string{"eth0", "is up"}},
		"routes not told":           {nic, func(k *kernel, _ string) { delete(k.MapFS, "proc/1/net/route") }, create, []string{"eth0", "unknown", "route"}},
		"interface in a pod":        {nic, func(k *kernel, _ string) { delete(k.MapFS, "sys/class/net/eth0") }, bind, []string{"namespace"}},
		"second interface in a pod": {nic, func(k *kernel, dir string) { k.links(dir+"/net", 2) }, bind, []string{"namespace"}},
		"sub-function in a pod":     {nic, func(k *kernel, dir string) { k.links(dir+"/mlx5_core.sf.2/net", 1) }, bind, []string{"namespace"}},
		"mounted": {nvme, func(k *kernel, _ string) {
			k.file("proc/1/mountinfo", "36 35 259:1 / /var/data rw,noatime shared:1 - ext4 /dev/nvme0n1p1 rw")
		}, bind, []string{"nvme0n11", "/var/data"}},
		"mounted by name": {nvme, func(k *kernel, _ string) {
			k.file("proc/1/mountinfo", "36 35 0:98 / /data rw - btrfs /dev/disk/by-uuid/1 rw")
			k.link("dev/disk/by-uuid/1", "../../nvme0n11")
		}, create, []string{"nvme0n11", "/data"}},
		"swap": {nvme, func(k *kernel, _ string) {
			k.file("proc/swaps", "Filename Type Size Used Priority\n/dev/nvme0n11 partition 1 0 -2")
		}, bind, []string{"nvme0n11", "swap"}},
		"part of LVM": {nvme, func(k *kernel, dir string) {
			k.link(dir+"/nvme/nvme0/block/nvme0n1/holders/dm-0", "../../../../../../../virtual/block/dm-0")
		}, bind, []string{"nvme0n1", "dm-0"}},
		"btrfs": {nvme, func(k *kernel, _ string) { k.link("sys/fs/btrfs/1/devices/nvme0n1", "../../../../devices/x") }, bind, []string{"nvme0n1", "btrfs"}},
		"ZFS":   {nvme, func(k *kernel, _ string) { k.file("proc/spl/kstat/zfs/dbgmsg", "") }, bind, []string{"nvme0n1", "ZFS"}},
		"disk with several paths, open": {nvme, func(k *kernel, dir string) {
			multipath(k, dir)
			k.file("proc/47/comm", "dd")
			k.link("proc/47/fd/3", "/dev/nvme1n1")
		}, bind, []string{"process 47 (dd)", "nvme1n1"}},
		"its character device, open": {nvme, func(k *kernel, dir string) {
			multipath(k, dir)
			k.file("proc/47/comm", "nvme")
			k.link("proc/47/fd/3", "/dev/ng1n1")
		}, bind, []string{"process 47 (nvme)", "ng1n1"}},
		"disk with several paths, exported": {nvme, func(k *kernel, dir string) {
			multipath(k, dir)
			k.link("dev/nvme1n1", "elsewhere")
			k.file("sys/kernel/config/nvmet/subsystems/a/namespaces/1/device_path", "/dev/nvme1n1")
		}, create, []string{"nvme1n1", "NVMe target"}},
		"disk with several paths, mounted": {nvme, func(k *kernel, dir string) {
			multipath(k, dir)
			k.file("proc/1/mountinfo", "36 35 259:7 / /shared rw,noatime shared:1 - ext4 /dev/nvme1n1 rw")
		}, bind, []string{"nvme1n1", "/shared"}},
		"mounted by a container": {nvme, func(k *kernel, _ string) {
			k.link("proc/1/ns/mnt", "mnt:[4026531841]")
			k.link("proc/47/ns/mnt", "mnt:[4026532000]")
			k.file("proc/47/mountinfo", "36 35 259:1 / /inside rw,noatime shared:1 - xfs /dev/nvme0n1p1 rw")
		}, bind, []string{"nvme0n11", "/inside"}},
		"mounted where no process is": {nvme, func(k *kernel, _ string) { k.file("sys/fs/xfs/nvme0n11/log/log_tail_lsn", "1") }, bind, []string{"nvme0n11", "XFS", "mounted"}},
		"one of several disks": {nvme, func(k *kernel, _ string) {
			k.file("proc/1/mountinfo", "36 35 0:98 / /many rw - bcachefs /dev/sda:/dev/nvme0n11 rw")
		}, bind, []string{"nvme0n11", "/many"}},
		"a log": {nvme, func(k *kernel, _ string) {
			k.file("proc/1/mountinfo", "36 35 8:1 / /x rw - xfs /dev/sda1 rw,logdev=/dev/nvme0n11,noquota")
		}, bind, []string{"nvme0n11", "/x"}},
		"a journal": {nvme, func(k *kernel, _ string) { k.file("proc/fs/jbd2/nvme0n11-8/info", "") }, bind, []string{"nvme0n11", "journal"}},
		"a volume in block mode": {nvme, func(k *kernel, _ string) {
			k.file("proc/1/mountinfo", "36 35 0:5 /nvme0n11 /var/lib/kubelet/x rw - devtmpfs udev rw,size=1k")
		}, bind, []string{"nvme0n11", "/var/lib/kubelet/x"}},
		"zram that writes to it": {nvme, func(k *kernel, _ string) {
			k.file("sys/devices/virtual/block/zram0/dev", "252:0")
			k.file("sys/devices/virtual/block/zram0/backing_dev", "/dev/nvme0n11")
			k.link("sys/class/block/zram0", "../../devices/virtual/block/zram0")
		}, bind, []string{"nvme0n11", "zram0 writes to it"}},
		"a USB gadget": {nvme, func(k *kernel, _ string) {
			k.file("sys/kernel/config/usb_gadget/g1/functions/mass_storage.0/lun.0/file", "/dev/nvme0n11")
		}, bind, []string{"nvme0n11", "exported as a USB disk"}},
		"a process has mapped it": {nvme, func(k *kernel, _ string) {
			k.link("proc/47/fd/0", "/dev/null")
			k.link("proc/47/map_files/7f0000000000-7f0000001000", "/dev/nvme0n11")
		}, bind, []string{"process 47", "nvme0n11"}},
		"a thread has it open": {nvme, func(k *kernel, _ string) {
			k.link("proc/47/fd/0", "/dev/null")
			k.link("proc/47/task/48/fd/3", "/dev/nvme0n11")
		}, bind, []string{"process 47", "nvme0n11"}},
		"a loop device": {nvme, func(k *kernel, _ string) { k.loop("loop3", "/dev/disk/by-uuid/1") }, bind, []string{"nvme0n11", "loop3"}},
		"a loop device of a volume": {nvme, func(k *kernel, _ string) {
			k.loop("loop3", "/var/lib/kubelet/volumeDevices/1")
			k.MapFS["var/lib/kubelet/volumeDevices/1"] = &fstest.MapFile{Mode: fs.ModeDevice, Sys: &syscall.Stat_t{Rdev: 259<<8 | 1}}
		}, bind, []string{"nvme0n11", "loop3"}},
		"a loop device of something": {nvme, func(k *kernel, _ string) { k.loop("loop3", "/gone (deleted)") }, bind, []string{"nvme0n1", "unknown", "loop3"}},
		"exported by NVMe": {nvme, func(k *kernel, _ string) {
			k.file("sys/kernel/config/nvmet/subsystems/a/namespaces/1/device_path", "/dev/nvme0n11")
		}, bind, []string{"nvme0n11", "NVMe target"}},
		"exported by SCSI": {nvme, func(k *kernel, _ string) {
			k.file("sys/kernel/config/target/core/iblock_0/a/udev_path", "/dev/nvme0n1")
		}, bind, []string{"nvme0n1", "SCSI target"}},
		"exports not told": {nvme, func(k *kernel, _ string) { k.file("sys/module/nvmet/refcnt", "1") }, bind, []string{"nvme0n1", "unknown", "nvmet"}},
		"exported by RNBD": {nvme, func(k *kernel, dir string) {
			k.link("sys/class/rnbd-server/ctl/devices/a/block_dev", "../../../../../../../../"+dir+"/nvme/nvme0/block/nvme0n1")
		}, bind, []string{"nvme0n1", "RNBD"}},
		"bcache":                 {nvme, func(k *kernel, dir string) { k.link(dir+"/nvme/nvme0/block/nvme0n1/bcache", "x") }, bind, []string{"nvme0n1", "bcache"}},
		"bcachefs":               {nvme, func(k *kernel, _ string) { k.link("sys/fs/bcachefs/1/dev-0/block", "../../../../block/nvme0n11") }, bind, []string{"nvme0n11", "bcachefs"}},
		"mounts not told":        {nvme, func(k *kernel, _ string) { delete(k.MapFS, "proc/1/mountinfo") }, bind, []string{"unknown", "mountinfo"}},
		"swap on a deleted node": {nvme, func(k *kernel, _ string) { k.file("proc/swaps", "/dev/nvme0n11\\040(deleted) partition 1 0 -2") }, bind, []string{"nvme0n11", "swap"}},
		"swap on a node that is gone": {nvme, func(k *kernel, _ string) { k.file("proc/swaps", "/dev/other\\040(deleted) partition 1 0 -2") }, bind,
			[]string{"nvme0n1", "unknown", "swap", "/dev/other"}},
		"swap by two links": {nvme, func(k *kernel, _ string) {
			k.alias()
			k.file("proc/swaps", "/dev/alias partition 1 0 -2")
		}, bind, []string{"nvme0n11", "swap"}},
		"loop device by two links": {nvme, func(k *kernel, _ string) {
			k.alias()
			k.loop("loop3", "/dev/alias")
		}, bind, []string{"nvme0n11", "loop3"}},
		"exported by two links": {nvme, func(k *kernel, _ string) {
			k.alias()
			k.file("sys/kernel/config/nvmet/subsystems/a/namespaces/1/device_path", "/dev/alias")
		}, bind, []string{"nvme0n11", "NVMe target"}},
		"RDMA interface in a pod": {nic, func(k *kernel, dir string) {
			delete(k.MapFS, "sys/class/net/eth0")
			k.file(dir+"/infiniband/mlx5_0/ports/1/link_layer", "Ethernet")
		}, bind, []string{"namespace"}},
		"IPoIB interface in a pod": {nic, func(k *kernel, dir string) {
			delete(k.MapFS, "sys/class/net/eth0")
			k.file(dir+"/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand")
			k.file("sys/module/ib_ipoib/refcnt", "0")
		}, bind, []string{"namespace"}},
		"RDMA of an unknown kind": {nic, func(k *kernel, dir string) {
			delete(k.MapFS, "sys/class/net/eth0")
			k.file(dir+"/infiniband/mlx5_0/node_type", "1: CA")
		}, bind, []string{"namespace"}},
		"node is open": {nvme, func(k *kernel, dir string) {
			k.file(dir+"/nvme/nvme0/dev", "242:0")
			k.file(dir+"/nvme/nvme0/uevent", "DEVNAME=nvme0")
			k.file("proc/47/comm", "smartd")
			k.link("proc/47/fd/3", "/dev/nvme0")
		}, bind, []string{"process 47 (smartd)", "/dev/nvme0"}},
		"processes not told": {nvme, func(k *kernel, _ string) { delete(k.MapFS, "proc/1/fd/0") }, bind, []string{"unknown", "processes"}},
		"VFIO group is open": {nic, func(k *kernel, dir string) {
			delete(k.MapFS, "sys/class/net/eth0")
			k.link(dir+"/driver", "../../../bus/pci/drivers/other-vfio-pci")
			k.link(dir+"/iommu_group", "../../../kernel/iommu_groups/42")
			k.file("sys/devices/virtual/vfio/42/dev", "243:0")
			k.file("sys/devices/virtual/vfio/42/uevent", "DEVNAME=vfio/42")
			k.link("sys/class/vfio/42", "../../devices/virtual/vfio/42")
			k.file("proc/47/comm", "qemu")
			k.link("proc/47/fd/3", "/dev/vfio/42")
		}, bind, []string{"process 47 (qemu)", "/dev/vfio/42"}},
		"something behind it": {nvme, func(k *kernel, dir string) { k.file(dir+"/0000:04:00.0/vendor", "0x10de") }, bind, []string{"0000:04:00.0", "behind"}},
		"driver not loaded":   {nvme, func(k *kernel, _ string) { delete(k.MapFS, "sys/bus/pci/drivers/vfio-pci/unbind") }, bind, []string{"vfio-pci", "not loaded"}},
		"no IOMMU":            {nvme, func(k *kernel, dir string) { delete(k.MapFS, dir+"/iommu_group") }, bind, []string{"IOMMU"}},
		"no group of the IOMMU": {nvme, func(k *kernel, dir string) {
			delete(k.MapFS, dir+"/iommu_group")
			k.file("sys/class/iommu/dmar0/name", "")
		}, bind, []string{"IOMMU", "enable_unsafe_noiommu_mode"}},
		"no group of the IOMMU, no driver": {nvme, func(k *kernel, dir string) {
			delete(k.MapFS, dir+"/iommu_group")
			delete(k.MapFS, dir+"/driver")
			k.file("sys/class/iommu/dmar0/name", "")
		}, bind, []string{"0000:03:00.0", "no IOMMU of the host serves it", "enable_unsafe_noiommu_mode"}},
		"no IOMMU, no driver": {nvme, func(k *kernel, dir string) {
			delete(k.MapFS, dir+"/iommu_group")
			delete(k.MapFS, dir+"/driver")
		}, bind, []string{"0000:03:00.0", "IOMMU is off", "switch the IOMMU on", "enable_unsafe_noiommu_mode"}},
		"physical function":      {nvme, func(k *kernel, dir string) { k.setVFs(dir, "1") }, bind, []string{"has virtual functions"}},
		"bound virtual function": {nic, func(k *kernel, dir string) { k.setVFs(dir, "1") }, create, []string{"0000:03:01.0", "bound to vfdriver"}},
		"too many":               {nic, func(k *kernel, dir string) { k.file(dir+"/sriov_totalvfs", "1") }, create, []string{"2 virtual functions are wanted", "it can have 1"}},
		"none":                   {nic, func(k *kernel, dir string) { delete(k.MapFS, dir+"/sriov_numvfs") }, create, []string{"can have no virtual functions"}},
		"not readable": {nic, func(k *kernel, dir string) { k.file(dir+"/sriov_numvfs", "many") }, create,
			[]string{"0000:03:00.0", "sriov_numvfs", "many"}},
		"services with bound virtual functions": {qatHost, func(k *kernel, dir string) { k.setVFs(dir, "2") }, qatRule(2), []string{"would be destroyed", "vfdriver"}},
		"services that take virtual functions away": {qatHost, func(k *kernel, dir string) { k.setVFs(dir, "2") },
			provision.Rule{Selects: id(qatID), Settings: qat.Services{"dc"}}, []string{"has virtual functions"}},
		"services of another device": {nic, func(*kernel, string) {},
			provision.Rule{Selects: id(nicID), Settings: qat.Services{"dc"}}, []string{"i40e", "no such settings"}},
	} {
		t.Run(name, func(t *testing.T) {
			k, dir := test.host()
			test.spoil(k, dir)
			out, err := k.run(test.rule)
			if err == nil || len(k.writes) > 0 || out != "" {
				t.Fatalf("error %v, printed %q, wrote %q", err, out, k.writes)
			}
			for _, want := range append(test.want, filepath.Base(dir)) {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error does not name %q: %v", want, err)
				}
			}
		})
	}
}

// A function counts as in use if any of these files is unreadable.
func TestProvisionRefusesWhatCannotBeRead(t *testing.T) {
	const (
		dir       = pciRoot + "0000:03:00.0"
		subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
	)
	paths := func() *kernel {
		k := newKernel("nvme", "vfio-pci")
		k.function("0000:03:00.0", nicID, "010802", "nvme", nil)
		k.file(dir+"/nvme/nvme0/state", "live")
		k.link("sys/class/nvme-subsystem/nvme-subsys0", "../../../"+subsystem)
		k.link(subsystem+"/nvme0", "../../../../../"+dir+"/nvme/nvme0")
		k.file(dir+"/nvme/nvme0/nvme1c0n1/hidden", "1")
		k.file(subsystem+"/nvme1n1/dev", "259:7")
		k.link("sys/class/block/nvme1n1", "../../../"+subsystem+"/nvme1n1")
		k.file("proc/1/mountinfo", "36 35 259:7 / /shared rw,noatime shared:1 - ext4 /dev/nvme1n1 rw")
		return k
	}
	disk := func(name, text string) func() *kernel {
		return func() *kernel {
			k := newKernel("nvme", "vfio-pci")
			k.function("0000:03:00.0", nicID, "010802", "nvme", nil)
			k.disk(dir+"/nvme/nvme0", "nvme0n1", "259:1")
			k.alias()
			k.file(name, text)
			return k
		}
	}
	nic := func(class string) func() *kernel {
		return func() *kernel {
			k := newKernel("mlx5_core", "vfio-pci")
			k.function("0000:03:00.0", nicID, class, "mlx5_core", nil)
			k.netdev(dir, "eth0", "0x1002")
			k.file(dir+"/infiniband/mlx5_0/ports/1/link_layer", "Unknown")
			k.file("proc/1/net/route", "eth0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0")
			return k
		}
	}
	hidden := func() *kernel {
		k := newKernel("mlx5_core", "vfio-pci")
		k.function("0000:03:00.0", nicID, "020000", "mlx5_core", nil)
		k.file(dir+"/infiniband/mlx5_0/ports/1/link_layer", "Unknown")
		return k
	}
	bonded := func() *kernel {
		k := newKernel("mlx5_core", "vfio-pci")
		k.function("0000:03:00.0", nicID, "020000", "mlx5_core", nil)
		k.netdev(dir, "eth0", "0x1002")
		k.file(dir+"/net/eth0/upper_bond0/flags", "0x1003")
		return k
	}
	nodes := func() *kernel {
		k := newKernel("uio_pci_generic", "vfio-pci")
		k.function("0000:03:00.0", nicID, "120000", "uio_pci_generic", nil)
		k.file(dir+"/uio/uio0/dev", "240:0")
		k.link(dir+"/iommu_group", "../../../kernel/iommu_groups/7")
		k.file("sys/class/vfio/7/dev", "241:0")
		return k
	}
	const free = "proc/swaps"
	for name, test := range map[string]struct {
		host   func() *kernel
		broken string
	}{
		"mounts":              {paths, "proc/1/mountinfo"},
		"disks":               {paths, "sys/class/block"},
		"a disk":              {paths, "sys/class/block/nvme1n1"},
		"subsystems":          {paths, "sys/class/nvme-subsystem"},
		"a subsystem":         {paths, "sys/class/nvme-subsystem/nvme-subsys0"},
		"its controllers":     {paths, subsystem},
		"a controller":        {paths, subsystem + "/nvme0"},
		"swaps":               {disk(free, ""), "proc/swaps"},
		"XFS":                 {disk("sys/fs/xfs/nvme0n11/log/x", ""), "sys/fs/xfs"},
		"btrfs":               {disk("sys/fs/btrfs/1/devices/nvme0n1/x", ""), "sys/fs/btrfs/1/devices"},
		"bcachefs":            {disk("sys/fs/bcachefs/1/dev-0/x", ""), "sys/fs/bcachefs/1"},
		"journals":            {disk("proc/fs/jbd2/nvme0n11-8/info", ""), "proc/fs/jbd2"},
		"RNBD":                {disk("sys/class/rnbd-server/ctl/devices/a/block_dev", ""), "sys/class/rnbd-server/ctl/devices"},
		"NVMe target":         {disk("sys/kernel/config/nvmet/subsystems/a/namespaces/1/device_path", "/dev/nvme0n11"), "sys/kernel/config/nvmet/subsystems"},
		"its namespaces":      {disk("sys/kernel/config/nvmet/subsystems/a/namespaces/1/device_path", "/dev/nvme0n11"), "sys/kernel/config/nvmet/subsystems/a/namespaces"},
		"an export":           {disk("sys/kernel/config/nvmet/subsystems/a/namespaces/1/device_path", "/dev/nvme0n11"), "sys/kernel/config/nvmet/subsystems/a/namespaces/1/device_path"},
		"a link to swap":      {disk("proc/swaps", "/dev/alias partition 1 0 -2"), "dev/alias"},
		"a link to that":      {disk("proc/swaps", "/dev/alias partition 1 0 -2"), "dev/mapper/x"},
		"a link to a mount":   {disk("proc/1/mountinfo", "36 35 0:98 / /data rw - btrfs /dev/alias rw"), "dev/mapper/x"},
		"numbers":             {disk(free, ""), dir + "/nvme/nvme0/block/nvme0n1/dev"},
		"holders":             {disk(dir+"/nvme/nvme0/block/nvme0n1/holders/dm-0/x", ""), dir + "/nvme/nvme0/block/nvme0n1/holders"},
		"a loop device":       {disk("sys/class/block/loop3/loop/backing_file", "/dev/nvme0n11"), "sys/class/block/loop3/loop/backing_file"},
		"another mount table": {disk("proc/47/mountinfo", "36 35 259:1 / /data rw - xfs /dev/x rw"), "proc/47/ns/mnt"},
		"a node":              {nodes, dir + "/uio/uio0/dev"},
		"nodes":               {nodes, dir + "/uio"},
		"a group's node":      {nodes, "sys/class/vfio/7/dev"},
		"open files":          {nodes, "proc/1/fd"},
		"an open file":        {nodes, "proc/1/fd/0"},
		"interfaces":          {nic("020000"), "sys/class/net"},
		"an interface":        {nic("020000"), "sys/class/net/eth0"},
		"routes":              {nic("020000"), "proc/1/net/route"},
		"what is above":       {bonded, "sys/class/net/eth0"},
		"flags":               {nic("010000"), dir + "/net/eth0/flags"},
		"the link layer":      {hidden, dir + "/infiniband/mlx5_0/ports/1/link_layer"},
		"RDMA devices":        {hidden, dir + "/infiniband"},
		"the driver":          {hidden, dir + "/driver"},
	} {
		t.Run(name, func(t *testing.T) {
			k := test.host()
			k.broken[test.broken] = true
			if _, err := k.run(provision.Rule{Selects: id(nicID), Driver: "vfio-pci"}); err == nil || len(k.writes) > 0 {
				t.Errorf("error %v, wrote %q", err, k.writes)
			}
		})
	}
	for name, host := range map[string]func() *kernel{"a disk": disk(free, ""), "RDMA without an interface": hidden, "a node": nodes} {
		if _, err := host().run(provision.Rule{Selects: id(nicID), Driver: "vfio-pci"}); err != nil {
			t.Errorf("%s without a user: %v", name, err)
		}
	}
}

// A device that is allocated, or may be, is not changed.
func TestProvisionRefusesWhatContainersHave(t *testing.T) {
	for name, test := range map[string]struct {
		held map[string]string
		err  error
		want string
	}{
		"the function": {map[string]string{"pci-0000-6b-00-0": "claim a/b"}, nil, "claim a/b has pci-0000-6b-00-0"},
		"a part":       {map[string]string{"pci-0000-6b-00-0-wq-1": "claim a/b"}, nil, "claim a/b has"},
		"not told":     {nil, errors.New("a record is damaged"), "a record is damaged"},
	} {
		t.Run(name, func(t *testing.T) {
			k, _ := qatHost()
			_, err := k.runHeld(test.held, test.err, qatRule(2))
			if err == nil || !strings.Contains(err.Error(), test.want) || len(k.writes) > 0 {
				t.Errorf("error %v, wrote %q", err, k.writes)
			}
		})
	}
	k, dir := qatHost()
	k.file(dir+"/a297db4a-f4c2-11e6-90f6-d3b88d6c9525/mdev_type/name", "x")
	if _, err := k.runHeld(map[string]string{"mdev-a297db4a-f4c2-11e6-90f6-d3b88d6c9525": "claim a/b"}, nil, qatRule(2)); err == nil || !strings.Contains(err.Error(), "claim a/b has") || len(k.writes) > 0 {
		t.Errorf("a mediated device: error %v, wrote %q", err, k.writes)
	}
	k, _ = qatHost()
	if _, err := k.runHeld(map[string]string{"pci-0000-6b-00-1": "claim a/b"}, nil, qatRule(2)); err != nil {
		t.Errorf("another function is held: %v", err)
	}
}

// A failure at one virtual function does not prevent work on other virtual functions, nor does
// a failure at one function prevent work on others.
func TestProvisionFailures(t *testing.T) {
	t.Run("a virtual function in use", func(t *testing.T) {
		k, dir := qatHost()
		k.file(dir+"/qat/cfg_services", "sym;dc")
		k.setVFs(dir, "2")
		k.netdev(pciRoot+"0000:6b:01.0", "eth7", "0x1003")
		out, err := k.run(qatRule(2))
		if err == nil || !strings.Contains(err.Error(), "0000:6b:00.0 virtfn0: bind to vfio-pci: in use: interface eth7") {
			t.Errorf("error %v", err)
		}
		if !strings.Contains(out, "virtfn1/driver: none -> vfio-pci") || strings.Contains(out, "virtfn0") {
			t.Errorf("printed\n%s", out)
		}
	})
	t.Run("a driver that does not bind", func(t *testing.T) {
		k, _ := qatHost()
		k.rejects["vfio-pci"] = true
		_, err := k.run(qatRule(1))
		if err == nil || !strings.Contains(err.Error(), "virtfn0: was written without effect: /sys/devices/pci0000:00/0000:6b:00.0/virtfn0/driver: none -> vfio-pci") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("a function that gets no group from an IOMMU that could add one", func(t *testing.T) {
		k := newKernel("i40e", "vfio-pci")
		dir := k.function("0000:03:00.0", nicID, "020000", "", nil)
		delete(k.MapFS, dir+"/iommu_group")
		k.file("sys/class/iommu/virtio0/name", "")
		k.rejects["vfio-pci"] = true
		_, err := k.run(provision.Rule{Selects: id(nicID), Driver: "vfio-pci"})
		if err == nil || !strings.Contains(err.Error(), "0000:03:00.0: driver vfio-pci did not take it: has no IOMMU group") || !strings.Contains(err.Error(), "enable_unsafe_noiommu_mode") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("services that the kernel refuses", func(t *testing.T) {
		k, dir := qatHost()
		k.refuses[dir+"/qat/cfg_services"] = syscall.EINVAL
		k.function("0000:6c:00.0", "8086:4940", "0b4000", "4xxx", map[string]string{
			"qat/state": "up", "qat/cfg_services": "sym;dc", "sriov_numvfs": "0", "sriov_totalvfs": "16", "sriov_drivers_autoprobe": "0"})
		_, err := k.run(qatRule(1))
		if err == nil || !strings.Contains(err.Error(), `0000:6b:00.0: write "sym;dc" to /`+dir+"/qat/cfg_services: invalid argument") || strings.Contains(err.Error(), "6c:00.0") {
			t.Errorf("error %v", err)
		}
		if state := k.text(dir + "/qat/state"); state != "up" {
			t.Errorf("left %s", state)
		}
		if vfs := k.text(dir + "/sriov_numvfs"); vfs != "0" {
			t.Errorf("%s virtual functions of a function that is not as it should be", vfs)
		}
		if vfs := k.text(pciRoot + "0000:6c:00.0/sriov_numvfs"); vfs != "1" {
			t.Errorf("%s virtual functions of the other", vfs)
		}
	})
	t.Run("virtual functions that cannot be created", func(t *testing.T) {
		k, dir := qatHost()
		k.refuses[dir+"/sriov_numvfs"] = syscall.EBUSY
		_, err := k.run(qatRule(1))
		if err == nil || !errors.Is(err, syscall.EBUSY) || !strings.Contains(err.Error(), "has virtual functions already") {
			t.Errorf("error %v", err)
		}
		if probes := k.text(dir + "/sriov_drivers_autoprobe"); probes != "1" {
			t.Errorf("left sriov_drivers_autoprobe at %s", probes)
		}
	})
	t.Run("nothing that was begun to be ended", func(t *testing.T) {
		k, dir := qatHost()
		k.refuses[dir+"/qat/state"] = syscall.EBUSY
		if _, err := k.run(qatRule(1)); err == nil || len(k.writes) != 1 {
			t.Errorf("error %v, wrote %q", err, k.writes)
		}
	})
}

// Virtual functions belong to the rule of their physical function, before and after creation.
func TestVirtualFunctionsAreOneRules(t *testing.T) {
	k, _ := qatHost()
	rules := []provision.Rule{qatRule(1), {Selects: id("8086:4941"), Driver: "vfdriver"}}
	for range 2 {
		if out, err := k.run(rules...); err != nil || strings.Contains(out, "vfdriver") {
			t.Errorf("error %v, printed\n%s", err, out)
		}
	}
}

// After an interruption, the error names the remaining work.
func TestProvisionInterrupted(t *testing.T) {
	k, _ := qatHost()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	p := &provision.Provisioner{Host: &discovery.Host{FS: k.MapFS}, Rules: []provision.Rule{qatRule(1)}, Write: k.write, Out: &bytes.Buffer{}}
	if err := p.Run(ctx); err == nil || errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "0000:6b:00.0") || len(k.writes) > 0 {
		t.Errorf("error %v, wrote %q", err, k.writes)
	}
}

func TestWriter(t *testing.T) {
	dir := t.TempDir()
	outside := filepath.Join(t.TempDir(), "attribute")
	for _, name := range []string{"sys/a", "etc"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{outside, filepath.Join(dir, "sys/a/attribute"), filepath.Join(dir, "etc/passwd")} {
		if err := os.WriteFile(file, []byte("a longer text\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "sys/a/fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{"sys/within": "a", "sys/out": outside} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	write, err := provision.Writer(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := write("sys/within/attribute", "16"); err != nil {
		t.Error(err)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "sys/a/attribute")); string(data) != "16\n" {
		t.Errorf("wrote %q, %v", data, err)
	}
	for _, name := range []string{"sys/out", "sys/a", "sys/a/fifo", "sys/a/missing", "etc/passwd", "sys/../etc/passwd", "/sys/a/attribute"} {
		if err := write(name, "16"); err == nil {
			t.Errorf("wrote to %s", name)
		}
	}
	if data, _ := os.ReadFile(outside); string(data) != "a longer text\n" {
		t.Errorf("outside is %q", data)
	}
	if _, err := os.Stat(filepath.Join(dir, "sys/a/missing")); err == nil {
		t.Error("made a file")
	}
	if _, err := provision.Writer(filepath.Join(dir, "missing")); err == nil {
		t.Error("no error for a root that is missing")
	}
}
