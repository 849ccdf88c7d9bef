package guest_test

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"chandler.dev/e2e/guest"
)

// TestProvision changes functions of a real kernel with the command provision: it must not change
// functions in use, of any kind of use, and a killed command must be completed by the next one.
func TestProvision(t *testing.T) {
	t.Run("newer", func(t *testing.T) { testProvision(t, guest.Newer) })
	t.Run("debian12", func(t *testing.T) {
		guest.Long(t)
		testProvision(t, guest.Debian12)
	})
}

func testProvision(t *testing.T, version guest.Version) {
	disk := filepath.Join(t.TempDir(), "nvme")
	if err := os.WriteFile(disk, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(disk, 64<<20); err != nil {
		t.Fatal(err)
	}
	config := guest.Config{
		Kernel: version, QEMU: version, IOMMU: "intel",
		Modules:  []string{"nvme", "vfio-pci", "loop", "configfs"},
		Carry:    []string{"nvmet", "raid1", "target_core_iblock", "macvlan", "bonding"},
		Tools:    []string{"mke2fs", "losetup", "mdadm", "ip"},
		Programs: map[string]string{"guestuse": guest.Build(t, "chandler.dev/e2e/cmd/guestuse")},
		Args: []string{
			"-device", "pcie-root-port,id=rp0,chassis=1",
			"-drive", "if=none,id=namespace,format=raw,file=" + disk,
			"-device", "nvme-subsys,id=subsystem",
			"-device", "nvme,id=nvme,serial=A,subsys=subsystem,bus=rp0,max_ioqpairs=26,msix_qsize=28,sriov_max_vfs=4,sriov_vq_flexible=8,sriov_vi_flexible=4",
			"-device", "nvme-ns,drive=namespace,bus=nvme",
		},
	}
	if version == guest.Newer { // the older QEMU has no igb
		// Without IPv6, because QEMU's router would announce a default route.
		config.Modules = append(config.Modules, "igb", "igbvf")
		config.Args = append(config.Args, "-device", "pcie-root-port,id=rp1,chassis=2",
			"-netdev", "user,id=net,restrict=on,ipv6=off", "-device", "igb,netdev=net,bus=rp1")
	}
	p := &provisioned{Guest: guest.Boot(t, config)}
	t.Logf("Linux %s in QEMU %s", p.Kernel, p.QEMU)
	p.function = p.physical(t, "nvme")
	t.Run("disk", p.disk)
	t.Run("vfio", p.vfio)
	t.Run("killed", p.killed)
	t.Run("refused by the kernel", p.refused)
	if version == guest.Newer {
		p.function = p.physical(t, "igb")
		t.Run("network", p.network)
		if !testing.Short() {
			t.Run("network, killed", p.killed)
		}
	}
}

// provisioned is a guest with the physical function to provision.
type provisioned struct {
	*guest.Guest

	function string
}

func (p *provisioned) physical(t *testing.T, driver string) string {
	t.Helper()
	return strings.TrimSpace(p.Sh(t, "cd /sys/bus/pci/drivers/"+driver+"; ls -d 0000:*"))
}

// config writes a configuration for the function, and returns the arguments of the command.
func (p *provisioned) config(t *testing.T, wanted string) []string {
	t.Helper()
	const file = "/tmp/provision.yaml"
	p.WriteFile(t, file, fmt.Sprintf(`apiVersion: chandler.dev/v1alpha1
kind: ProvisionConfig
functions:
- cel: device.attributes["resource.kubernetes.io"].pciBusID == %q
  %s
`, p.function, wanted), 0o644)
	return []string{"chandler", "provision", "--config", file}
}

// run provisions the function, which must succeed, and returns the output.
func (p *provisioned) run(t *testing.T, wanted string, more ...string) string {
	t.Helper()
	return p.Must(t, append(p.config(t, wanted), more...)...)
}

func (p *provisioned) driver(t *testing.T, function string) string {
	t.Helper()
	return strings.TrimSpace(p.Sh(t, "basename $(readlink /sys/bus/pci/devices/"+function+"/driver || echo none)"))
}

// A user is a use of the function: a script to begin the use, a script to end it, and the command's
// message. In between, "hold" keeps descriptors open. The short selection leaves out users with a
// name that ends with "…".
type user struct {
	name, begin, hold, end string
	says                   []string
}

// isRefused checks that the function is not taken from the user, and keeps its driver.
func (p *provisioned) isRefused(t *testing.T, u user, wanted string) {
	t.Helper()
	if testing.Short() && strings.HasSuffix(u.name, "…") {
		return
	}
	before := p.driver(t, p.function)
	p.Sh(t, u.begin)
	var holder *guest.Process
	if u.hold != "" {
		holder = p.Start(t, "sh", "-euc", u.hold)
		holder.Until(t, "ready")
	}
	r := p.Run(t, p.config(t, wanted)...)
	if r.Code == 0 || r.Stdout != "" {
		t.Errorf("%s: exit status %d, printed\n%s%s", u.name, r.Code, r.Stdout, r.Stderr)
	}
	for _, want := range append(u.says, p.function) {
		if !strings.Contains(r.Stderr, want) {
			t.Errorf("%s: the error does not say %q:\n%s", u.name, want, r.Stderr)
		}
	}
	if after := p.driver(t, p.function); after != before {
		t.Fatalf("%s: the function was bound to %s, and is to %s", u.name, before, after)
	}
	if holder != nil {
		holder.Stop(t)
	}
	p.Sh(t, u.end)
}

const wait = "; echo ready; exec sleep 1000"

// disk uses the namespace of the controller. Its subsystem may have several controllers, so the
// disk is below the subsystem in sysfs, and not below the function.
func (p *provisioned) disk(t *testing.T) {
	if at := p.Must(t, "readlink", "-f", "/sys/class/block/nvme0n1"); !strings.Contains(at, "/nvme-subsystem/") {
		t.Fatalf("the disk is at %s", at)
	}
	const (
		node      = "mknod /root/other b $(tr : ' ' < /sys/class/block/nvme0n1/dev); "
		subsystem = "/sys/kernel/config/nvmet/subsystems/a"
		target    = "/sys/kernel/config/target/core/iblock_0/disk"
	)
	p.Sh(t, "mkdir -p /sys/kernel/config /mnt; mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config")
	p.Sh(t, "modprobe -a nvmet raid1 target_core_iblock; mke2fs -q -F -t ext4 /dev/nvme0n1 32M; mount -t ext4 /dev/nvme0n1 /mnt; echo kept > /mnt/file; umount /mnt")
	p.Sh(t, "echo pattern | dd of=/dev/nvme0n1 bs=1M seek=48 conv=fsync 2>/dev/null")
	intact := func() {
		t.Helper()
		if got := p.Sh(t, "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/nvme0n1 bs=1M skip=48 count=1 2>/dev/null | head -c 7"); got != "pattern" {
			t.Fatalf("the data are %q", got)
		}
	}
	for _, u := range []user{
		{"open…", "", "exec 3</dev/nvme0n1" + wait, "", []string{"nvme0n1: process", "(sleep) has it open"}},
		{"open by another name", node, "exec 3</root/other" + wait, "rm /root/other", []string{"nvme0n1: process"}},
		{"open by a name that is gone…", node, "exec 3</root/other; rm /root/other" + wait, "", []string{"nvme0n1: process"}},
		{"character device", "", "exec 3</dev/ng0n1" + wait, "", []string{"ng0n1: process"}},
		{"controller", "mknod /root/other c $(tr : ' ' < /sys/class/nvme/nvme0/dev)", "exec 3</root/other" + wait, "rm /root/other", []string{"/dev/nvme0: process"}},
		{"registers…", "", "exec 3</sys/bus/pci/devices/" + p.function + "/resource0" + wait, "", []string{"as a whole"}},
		{"mounted…", "mount -t ext4 /dev/nvme0n1 /mnt", "", "grep -q kept /mnt/file; umount /mnt", []string{"nvme0n1", "mounted on /mnt"}},
		{"mounted in another namespace…", "", "exec unshare -m sh -euc 'mount -t ext4 /dev/nvme0n1 /mnt; cd /" + wait + "'", "", []string{"nvme0n1", "mounted"}},
		{"mounted, and the mount taken away", "mount -t ext4 /dev/nvme0n1 /mnt", "exec 3</mnt/file; umount -l /mnt" + wait, "", []string{"nvme0n1", "mounted"}},
		{"swap file…", "mount -t ext4 /dev/nvme0n1 /mnt; dd if=/dev/zero of=/mnt/swap bs=1M count=4 2>/dev/null; chmod 600 /mnt/swap; mkswap /mnt/swap >/dev/null; swapon /mnt/swap",
			"", "swapoff /mnt/swap; rm /mnt/swap; umount /mnt", []string{"nvme0n1", "mounted"}},
		{"swap file, and its mount taken away…", "mount -t ext4 /dev/nvme0n1 /mnt; dd if=/dev/zero of=/mnt/swap bs=1M count=4 2>/dev/null; chmod 600 /mnt/swap; mkswap /mnt/swap >/dev/null; swapon /mnt/swap; exec 3</mnt/swap; umount -l /mnt; mount -t ext4 /dev/nvme0n1 /mnt; swapoff /mnt/swap; rm /mnt/swap",
			"", "umount /mnt", []string{"nvme0n1", "mounted"}},
		{"loop device with a mounted file system", "losetup /dev/loop0 /dev/nvme0n1; mount -t ext4 /dev/loop0 /mnt", "", "grep -q kept /mnt/file; umount /mnt; losetup -d /dev/loop0",
			[]string{"nvme0n1", "loop device loop0"}},
		{"loop device by a name that is gone", node + "losetup /dev/loop0 /root/other; rm /root/other", "", "losetup -d /dev/loop0", []string{"nvme0n1", "loop device loop0"}},
		{"loop device in a file of a mount that was taken away…", "mount -t ext4 /dev/nvme0n1 /mnt; dd if=/dev/zero of=/mnt/image bs=1M count=1 2>/dev/null; losetup /dev/loop0 /mnt/image; umount -l /mnt",
			"", "losetup -d /dev/loop0", []string{"nvme0n1"}},
		{"exported", node + "mkdir " + subsystem + "; mkdir " + subsystem + "/namespaces/1; echo -n /root/other > " + subsystem + "/namespaces/1/device_path; echo 1 > " + subsystem + "/namespaces/1/enable",
			"", "rmdir " + subsystem + "/namespaces/1 " + subsystem + "; rm /root/other", []string{"nvme0n1", "NVMe target"}},
		{"SCSI target…", "mkdir -p " + target + "; echo -n udev_path=/dev/nvme0n1 > " + target + "/control; echo 1 > " + target + "/enable",
			"", "rmdir " + target + " " + path.Dir(target), []string{"nvme0n1", "SCSI target"}},
		{"part of an array", "mdadm --quiet --build /dev/md0 --force --level=1 --raid-devices=2 /dev/nvme0n1 missing", "", "mdadm --quiet --stop /dev/md0", []string{"nvme0n1", "part of md0"}},
	} {
		p.isRefused(t, u, "driver: vfio-pci")
		intact()
	}
	if dry, done := p.run(t, "driver: vfio-pci", "--dry-run"), p.run(t, "driver: vfio-pci"); dry != done || p.driver(t, p.function) != "vfio-pci" {
		t.Errorf("free, the function is bound to %s; planned\n%sdone\n%s", p.driver(t, p.function), dry, done)
	}
	p.run(t, "driver: nvme")
	p.Sh(t, "while ! [ -b /dev/nvme0n1 ]; do sleep 0.05; done")
	intact()
}

// vfio uses the function's group in a process, once through a node of another name, and once
// without a node.
func (p *provisioned) vfio(t *testing.T) {
	p.run(t, "driver: vfio-pci")
	group := strings.TrimSpace(p.Sh(t, "basename $(readlink /sys/bus/pci/devices/"+p.function+"/iommu_group)"))
	for _, u := range []user{
		{"group…", "", "exec 3<>/dev/vfio/" + group + wait, "", []string{"/dev/vfio/" + group + ": process"}},
		{"group by another name", "mknod /root/other c $(tr : ' ' < /sys/class/vfio/" + group + "/dev)", "exec 3<>/root/other" + wait, "rm /root/other", []string{"/dev/vfio/" + group + ": process"}},
		{"the function alone", "", "exec guestuse vfio " + p.function, "", []string{"/dev/vfio/" + group + ": a program has it open, perhaps process"}},
	} {
		p.isRefused(t, u, "driver: nvme")
	}
	if again := p.run(t, "driver: vfio-pci"); again != "nothing to do\n" {
		t.Errorf("again:\n%s", again)
	}
	p.run(t, "driver: nvme")
}

const twoFunctions = "virtualFunctions: {count: 2, driver: vfio-pci}"

// killed kills the command after each of its writes, and runs it again.
func (p *provisioned) killed(t *testing.T) {
	dir := "/sys/bus/pci/devices/" + p.function
	state := func() string {
		return p.Sh(t, "cd "+dir+"; cat sriov_numvfs sriov_drivers_autoprobe; for vf in virtfn*; do echo $vf $(basename $(readlink $vf/driver || echo none)) $(cat $vf/driver_override); done; ls /run/chandler")
	}
	reset := func() { p.Sh(t, "echo 0 > "+dir+"/sriov_numvfs; echo 1 > "+dir+"/sriov_drivers_autoprobe") }
	reset()
	planned := p.run(t, twoFunctions, "--dry-run")
	if done := p.run(t, twoFunctions); done != planned {
		t.Errorf("planned\n%sdone\n%s", planned, done)
	}
	want := state()
	if !strings.HasPrefix(want, "2\n1\nvirtfn0 vfio-pci") {
		t.Fatalf("the function is\n%s", want)
	}
	writes := strings.Count(planned, "\n")
	for n := range writes {
		if testing.Short() && n != 1 && n != 2 { // these leave a state that no plan would notice
			continue
		}
		reset()
		if r := p.Run(t, append([]string{"guestuse", "kill", fmt.Sprint(n)}, p.config(t, twoFunctions)...)...); r.Code != 137 {
			t.Fatalf("exit status %d of a command to be killed after %d of %d writes:\n%s%s", r.Code, n, writes, r.Stdout, r.Stderr)
		}
		left := state()
		planned := p.run(t, twoFunctions, "--dry-run")
		if done := p.run(t, twoFunctions); done != planned {
			t.Errorf("killed after %d writes, which left\n%splanned\n%sdone\n%s", n, left, planned, done)
		}
		if got := state(); got != want {
			t.Errorf("killed after %d writes, which left\n%sand run again:\n%swant\n%s", n, left, got, want)
		}
	}
	if again := p.run(t, twoFunctions); again != "nothing to do\n" {
		t.Errorf("again:\n%s", again)
	}
	if r := p.Run(t, p.config(t, strings.Replace(twoFunctions, "2", "3", 1))...); r.Code == 0 || !strings.Contains(r.Stderr, "would be destroyed, and is bound to vfio-pci") || state() != want {
		t.Errorf("another number: exit status %d\n%s", r.Code, r.Stderr)
	}
}

// refused checks writes that the kernel refuses.
func (p *provisioned) refused(t *testing.T) {
	dir := "/sys/bus/pci/devices/" + p.function
	p.Sh(t, "echo 0 > "+dir+"/sriov_numvfs")
	if r := p.Run(t, p.config(t, "virtualFunctions: {count: 5, driver: vfio-pci}")...); r.Code == 0 || !strings.Contains(r.Stderr, "5 virtual functions are wanted, and it can have 4") {
		t.Errorf("too many: exit status %d\n%s", r.Code, r.Stderr)
	}
	line := regexp.MustCompile(`.*sriov_numvfs: 0 -> 2\n`)
	planned := p.run(t, twoFunctions, "--dry-run")
	before := strings.Count(planned[:line.FindStringIndex(planned)[0]], "\n")
	held := p.Start(t, append([]string{"guestuse", "hold", fmt.Sprint(before)}, p.config(t, twoFunctions)...)...)
	held.Until(t, "held")
	if r := p.Run(t, p.config(t, twoFunctions)...); r.Code == 0 || !strings.Contains(r.Stderr, "another chandler provision runs") {
		t.Errorf("a second command: exit status %d\n%s", r.Code, r.Stderr)
	}
	if err := p.WriteAttribute(t, dir+"/sriov_numvfs", "1"); err != nil {
		t.Fatal(err)
	}
	held.Signal(t, syscall.SIGUSR1)
	if r := held.Wait(t); r.Code == 0 || !strings.Contains(r.Stderr, "device or resource busy (the function has virtual functions already") {
		t.Errorf("another program created one: exit status %d\n%s", r.Code, r.Stderr)
	}
	if got := p.ReadFile(t, dir+"/sriov_drivers_autoprobe"); got != "1\n" {
		t.Errorf("sriov_drivers_autoprobe is %q", got)
	}
	p.Sh(t, "echo 0 > "+dir+"/sriov_numvfs")
}

// network uses the interface of the function.
func (p *provisioned) network(t *testing.T) {
	name := strings.TrimSpace(p.Must(t, "ls", "/sys/bus/pci/devices/"+p.function+"/net"))
	for _, u := range []user{
		{"up", "ip link set " + name + " up", "", "ip link set " + name + " down", []string{"interface " + name, "is up"}},
		{"below another", "modprobe macvlan; ip link add link " + name + " name above type macvlan", "", "ip link del above", []string{"interface " + name, "above is on it"}},
		{"in another namespace", "ip netns add other; ip link set " + name + " netns other", "", "ip netns del other; while ! [ -e /sys/class/net/" + name + " ]; do sleep 0.05; done", []string{"network namespace"}},
		{"below a bond…", "modprobe bonding max_bonds=0; ip link add above type bond; ip link set " + name + " master above; ip link set " + name + " down", "", "ip link del above; ip link set " + name + " down", []string{"interface " + name, "above is on it"}},
	} {
		p.isRefused(t, u, "driver: vfio-pci")
	}
	p.isRefused(t, user{"route", "ip link set " + name + " up; ip addr add 192.0.2.1/24 dev " + name, "", "ip addr flush dev " + name + "; ip link set " + name + " down",
		[]string{"interface " + name, "a route of the host leads through it"}}, twoFunctions)
}
