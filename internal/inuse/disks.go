package inuse

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/sysfs"
)

// disks are the block devices of a host with their uses.
type disks struct {
	all         []sysfs.Device    // including partitions
	controllers []controller      // of NVMe subsystems
	users       map[string]string // use of a disk, by its numbers "259:1" ("c 241:0" for a character device) or by its name "nvme0n1p1"

	tags map[string]string // mount points of file systems that a host shares with its guest, by tag

	lists *reader // reads the lists above; after an error, any function may have an unlisted disk
	reads *reader // reads the uses of disks
}

// controller is a controller of an NVMe subsystem.
type controller struct {
	sysfs.Device

	subsystem sysfs.Device
	paths     []string // paths to namespaces, "nvme0c1n2"
}

// isPathTo reports whether the controller is a path to a namespace of its subsystem, or to the
// namespace of a partition. The kernel names the path to nvme0n2 through controller 1 nvme0c1n2
// (nvme_mpath_set_disk_name in drivers/nvme/host/multipath.c).
func (c controller) isPathTo(disk sysfs.Device) bool {
	head := strings.TrimPrefix(disk.Path, c.subsystem.Path+"/")
	head, _, _ = strings.Cut(head, "/")
	subsystem, namespace, ok := cutLast(head, "n")
	if !ok {
		return true // not a name of a namespace
	}
	_, instance, ok := cutLast(c.Name(), "nvme")
	return !ok || slices.Contains(c.paths, subsystem+"c"+instance+"n"+namespace)
}

// cutLast splits a text at the last separator.
func cutLast(text, separator string) (before, after string, found bool) {
	i := strings.LastIndex(text, separator)
	if i < 0 {
		return text, "", false
	}
	return text[:i], text[i+len(separator):], true
}

// maxTable is the maximum size of a table in /proc, in bytes.
const maxTable = 16 << 20

// listDisks lists the disks without their uses.
func listDisks(host *discovery.Host) *disks {
	d := &disks{users: make(map[string]string), tags: make(map[string]string), lists: &reader{FS: host.FS}, reads: &reader{FS: host.FS}}
	d.all, _ = sysfs.ClassDevices(d.lists, "block")
	d.addControllers()
	return d
}

func readDisks(host *discovery.Host) *disks {
	d := listDisks(host)
	d.addMounts(host.FS)
	d.addSwaps()
	d.addLoops()
	d.addExports()
	d.addTargets()
	for pattern, user := range map[string]string{
		"sys/fs/btrfs/*/devices/*": "btrfs",
		// One directory for each mounted file system, in any mount namespace.
		"sys/fs/ext4/*":   "its ext4 file system is mounted",
		"sys/fs/xfs/*":    "its XFS file system is mounted",
		"sys/fs/f2fs/*":   "its F2FS file system is mounted",
		"proc/fs/jbd2/*":  "the journal of a mounted file system is on it", // "sda1-8", or "sdb1" for a separate journal disk
		"sys/fs/erofs/*":  "its EROFS file system is mounted",
		"sys/fs/nilfs2/*": "its NILFS file system is mounted",
	} {
		for _, member := range d.reads.glob(pattern) {
			name := path.Base(member)
			d.users[name] = user
			if number := strings.LastIndexByte(name, '-'); number > 0 && strings.HasPrefix(pattern, "proc/fs/jbd2") {
				d.users[name[:number]] = user
			}
		}
	}
	d.addLinks("sys/fs/bcachefs/*/dev-*/block", "bcachefs")
	d.addLinks("sys/class/rnbd-server/ctl/devices/*/block_dev", "it is exported by RNBD")
	if _, err := d.reads.Stat("proc/spl/kstat/zfs"); err == nil {
		d.reads.fail(errors.New("the kernel does not report the disks of ZFS pools"))
	}
	return d
}

// addControllers adds the controllers of NVMe subsystems. A namespace with several possible paths
// is a child of the subsystem, not of a controller (nvme_mpath_set_live in
// drivers/nvme/host/multipath.c).
func (d *disks) addControllers() {
	subsystems, _ := sysfs.ClassDevices(d.lists, "nvme-subsystem")
	for _, subsystem := range subsystems {
		for _, entry := range d.lists.listDir(subsystem.Path) {
			if entry.Type()&fs.ModeSymlink == 0 {
				continue
			}
			if device, ok := subsystem.LinkTo(entry.Name()); ok {
				c := controller{Device: device, subsystem: subsystem}
				for _, child := range d.lists.listDir(device.Path) {
					c.paths = append(c.paths, child.Name())
				}
				d.controllers = append(d.controllers, c)
			}
		}
	}
}

// addMounts adds the mounts of all processes' mount namespaces: a container may have mounted a disk
// without a mount on the host.
func (d *disks) addMounts(host fs.FS) {
	first, err := sysfs.ReadText(host, "proc/1/mountinfo", maxTable)
	if err != nil {
		d.reads.fail(err)
		return
	}
	own, _ := d.reads.ReadLink("proc/1/ns/mnt")
	seen := map[string]bool{own: true}
	tables := []string{first}
	for _, entry := range d.reads.listDir("proc") {
		if _, err := strconv.ParseUint(entry.Name(), 10, 32); err != nil {
			continue
		}
		dir := path.Join("proc", entry.Name())
		namespace, err := fs.ReadLink(host, path.Join(dir, "ns/mnt"))
		if err == nil && !seen[namespace] {
			var table string
			if table, err = sysfs.ReadText(host, path.Join(dir, "mountinfo"), maxTable); err == nil {
				seen[namespace] = true
				tables = append(tables, table)
			}
		}
		if err != nil && !hasEnded(host, dir, err) {
			d.reads.fail(err)
		}
	}
	for _, table := range tables {
		for line := range strings.Lines(table) {
			d.addMount(strings.Fields(line))
		}
	}
}

// hasEnded reports whether a file of a process is unreadable because the process has ended or has
// closed the file.
func hasEnded(host fs.FS, name string, err error) bool {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) || errors.Is(err, syscall.EINVAL) {
		return true
	}
	_, err = fs.Lstat(host, name)
	return errors.Is(err, fs.ErrNotExist)
}

// addSwaps adds the swap disks. A kernel may have no swap support.
func (d *disks) addSwaps() {
	for line := range strings.Lines(d.reads.text("proc/swaps")) {
		if fields := strings.Fields(line); len(fields) > 0 && path.IsAbs(fields[0]) {
			d.addFile(unescape.Replace(fields[0]), "swap")
		}
	}
}

// unescape reverts the escaping of paths in /proc (seq_path in fs/seq_file.c).
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`)

// addLoops adds the disks behind loop devices, and the backing disks of zram devices. The kernel
// has these disks open, no process has: kubelets keep the disks of pods with block-mode volumes in
// this way.
func (d *disks) addLoops() {
	for _, disk := range d.all {
		if file := d.reads.text(path.Join(disk.Path, "loop/backing_file")); file != "" {
			user := "the loop device " + disk.Name() + " is on it"
			if !d.addBehind(disk, user) {
				d.addFile(file, user)
			}
		}
		// See Documentation/admin-guide/blockdev/zram.rst: "none" means no backing disk.
		if file := d.reads.text(path.Join(disk.Path, "backing_dev")); path.IsAbs(file) {
			d.addFile(file, disk.Name()+" writes to it")
		}
	}
}

// addBehind queries a loop device for the numbers of the disk or file behind the device. The path
// in sysfs may belong to another mount namespace, or may lead to another file by now. If the query
// fails, addBehind returns false.
func (d *disks) addBehind(loop sysfs.Device, user string) bool {
	node, err := loop.In(d.reads.FS).Node("/dev")
	if err != nil {
		return false
	}
	file, err := hostfs.OpenDisk(d.reads.FS, strings.TrimPrefix(node.Path, "/"), node.Major, node.Minor, false)
	if err != nil {
		return false
	}
	defer file.Close()
	info, err := unix.IoctlLoopGetStatus64(int(file.Fd()))
	if err != nil {
		return false
	}
	behind := info.Device // device of the file's file system (loop_get_status in drivers/block/loop.c)
	if info.Rdevice != 0 {
		behind = info.Rdevice
	}
	d.users[fmt.Sprintf("%d:%d", unix.Major(behind), unix.Minor(behind))] = user
	return true
}

// exports are the configfs files with the disks of the kernel's own servers, which export disks to
// other machines, and the modules of these servers.
var exports = []struct{ module, pattern, user string }{
	{"nvmet", "sys/kernel/config/nvmet/subsystems/*/namespaces/*/device_path", "it is exported by the NVMe target"},
	{"nvmet", "sys/kernel/config/nvmet/subsystems/*/passthru/device_path", "the NVMe target passes it through"},
	{"usb_f_mass_storage", "sys/kernel/config/usb_gadget/*/functions/mass_storage.*/lun.*/file", "it is exported as a USB disk"},
	{"target_core_mod", "sys/kernel/config/target/core/*/*/udev_path", "it is exported by the SCSI target"},
}

// addExports adds the disks of the kernel's own servers.
func (d *disks) addExports() {
	for _, export := range exports {
		_, loadedErr := d.reads.Stat("sys/module/" + export.module)
		root := strings.Join(strings.Split(export.pattern, "/")[:4], "/") // sys/kernel/config/nvmet
		if _, err := d.reads.Stat(root); loadedErr == nil && err != nil {
			d.reads.fail(fmt.Errorf("module %s is loaded, and its exports cannot be read: %w", export.module, err))
		}
		for _, file := range d.reads.glob(export.pattern) {
			// The NVMe target opens a disk when its namespace is enabled, and closes the disk when the
			// namespace is disabled (nvmet_ns_enable and nvmet_ns_disable in
			// drivers/nvme/target/core.c). A passthrough controller is referenced while it is enabled
			// (nvmet_passthru_ctrl_enable in drivers/nvme/target/passthru.c).
			if export.module == "nvmet" && d.reads.text(path.Join(path.Dir(file), "enable")) == "0" {
				continue
			}
			if disk := d.reads.text(file); path.IsAbs(disk) { // otherwise no disk is set
				d.addFile(disk, export.user)
			}
		}
	}
}

// scsiTarget matches the numbers of the disk behind a SCSI target (iblock_show_configfs_dev_params
// in drivers/target/target_core_iblock.c).
var scsiTarget = regexp.MustCompile(`Major: (\d+) +Minor: (\d+)`)

// addTargets adds the disks of the SCSI target by number. The path that administration tools store
// separately (udev_path) may be missing.
func (d *disks) addTargets() {
	for _, file := range d.reads.glob("sys/kernel/config/target/core/*/*/info") {
		for _, found := range scsiTarget.FindAllStringSubmatch(d.reads.text(file), -1) {
			d.users[found[1]+":"+found[2]] = "it is exported by the SCSI target"
		}
	}
}

// addFile adds the user of a file, if the file is the node of a disk. A regular file needs no
// entry, because its file system is mounted. A missing or deleted file could have been the node of
// any disk, unless a disk has its name.
func (d *disks) addFile(file, user string) {
	node, deleted := strings.CutSuffix(file, " (deleted)") // d_path in fs/d_path.c
	disk, found := d.addNode(node, user)
	named := func(d sysfs.Device) bool { return d.Name() == disk }
	if (deleted || !found) && !slices.ContainsFunc(d.all, named) {
		d.reads.fail(fmt.Errorf("%s, whose file cannot be read: %s", user, file))
	}
}

// addNode adds the user of a disk by the path of the disk's node, which may be a udev link such as
// /dev/disk/by-uuid/…. addNode returns the kernel's name of the disk, "cciss!c0d0" for
// /dev/cciss/c0d0, and whether the path exists.
func (d *disks) addNode(node, user string) (disk string, found bool) {
	node = strings.TrimPrefix(path.Clean(node), "/")
	info, err := d.reads.Stat(node)
	if err == nil {
		d.users[strings.TrimPrefix(numbersOf(info), "b ")] = user
	}
	if name, ok := strings.CutPrefix(d.reads.resolveLinks(node), "dev/"); ok {
		disk = strings.ReplaceAll(name, "/", "!")
		d.users[disk] = user
	}
	return disk, err == nil
}

// addLinks adds the user of the target disks of links in sysfs.
func (d *disks) addLinks(pattern, user string) {
	for _, link := range d.reads.glob(pattern) {
		if target, err := d.reads.ReadLink(link); err == nil {
			d.users[path.Base(target)] = user
		}
	}
}

// addMount adds a line of mountinfo, such as "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3
// /dev/root rw" (proc_pid_mountinfo(5)). The numbers identify the disk if the file system is on a
// single disk; otherwise the source has its name. The source may list several disks
// ("/dev/sda:/dev/sdb"), options may name more ("logdev=/dev/sdc"), and the mounted file may be the
// node of a disk: kubelets mount nodes for block-mode volumes.
func (d *disks) addMount(fields []string) {
	if len(fields) < 10 {
		return
	}
	user := "it is mounted on " + fields[4]
	d.users[fields[2]] = user
	separator := slices.Index(fields[6:], "-") + 6
	if separator < 6 || len(fields) <= separator+2 {
		return
	}
	if kind := fields[separator+1]; kind == "9p" || kind == "virtiofs" {
		d.tags[unescape.Replace(fields[separator+2])] = fields[4]
	}
	if fields[separator+1] == "devtmpfs" && fields[3] != "/" {
		node, _ := strings.CutSuffix(unescape.Replace(fields[3]), "//deleted") // dentry_path in fs/d_path.c
		d.addNode("/dev"+node, "its node is mounted on "+fields[4])
	}
	for _, word := range fields[separator+2:] {
		for _, name := range strings.FieldsFunc(word, func(r rune) bool { return strings.ContainsRune(":,=", r) }) {
			if strings.HasPrefix(name, "/dev/") {
				d.addNode(unescape.Replace(name), user)
			}
		}
	}
}

// disksOn returns the disks on the function: the disks below the function, and the namespaces of an
// NVMe subsystem above its controllers (native multipath).
func (d *disks) disksOn(function sysfs.Device) (found []sysfs.Device) {
	for _, disk := range d.all {
		on := isBelow(disk, function)
		for _, c := range d.controllers {
			on = on || isBelow(c.Device, function) && isBelow(disk, c.subsystem) && c.isPathTo(disk)
		}
		if on {
			found = append(found, disk)
		}
	}
	return found
}

// usesOn returns the uses of the disks on the function.
func (d *disks) usesOn(function sysfs.Device) Uses { return d.usesBelow(function, d.user) }

// usesBelow returns the uses of the disks on the function. user returns the use of one disk.
func (d *disks) usesBelow(function sysfs.Device, user func(sysfs.Device) (string, error)) (uses Uses) {
	if d.lists.err != nil {
		return Uses{{Object: "a disk", ReadError: d.lists.err}}
	}
	for _, disk := range d.disksOn(function) {
		how, err := user(disk)
		switch {
		case how != "":
			uses = append(uses, Use{Object: "disk " + disk.Name(), How: how})
		case err != nil:
			uses = append(uses, Use{Object: "disk " + disk.Name(), ReadError: err})
		}
	}
	return uses
}

// user returns the use of a disk, "" if no use is visible.
func (d *disks) user(disk sysfs.Device) (string, error) {
	if user, err := d.userInTables(disk); user != "" || err != nil {
		return user, err
	}
	return d.claimedByKernel(disk)
}

// userInTables returns the use of a disk by the kernel's tables. It does not open the disk.
func (d *disks) userInTables(disk sysfs.Device) (string, error) {
	r := &reader{FS: d.reads.FS, err: d.reads.err}
	for _, key := range []string{r.text(path.Join(disk.Path, "dev")), disk.Name()} {
		if user, ok := d.users[key]; ok && key != "" {
			return user, nil
		}
	}
	if disk.In(r).HasEntry("bcache") { // a cache has no holders
		return "bcache", nil
	}
	if holders := r.listDir(path.Join(disk.Path, "holders")); len(holders) > 0 {
		return "it is part of " + holders[0].Name(), nil
	}
	return "", r.err
}

// claimedByKernel reports whether the kernel uses a disk without an entry in the tables above, for
// example for a file system that is busy in no mount namespace at all. If the host has no node of
// the disk, the kernel cannot be queried and claimedByKernel returns "".
func (d *disks) claimedByKernel(disk sysfs.Device) (string, error) {
	node, err := disk.In(d.reads.FS).Node("/dev")
	if err != nil || node.Major == 0 && node.Minor == 0 { // a path of a namespace has no node
		return "", nil
	}
	file, err := hostfs.OpenDisk(d.reads.FS, strings.TrimPrefix(node.Path, "/"), node.Major, node.Minor, true)
	switch {
	case err == nil:
		return "", file.Close()
	case errors.Is(err, syscall.EBUSY):
		return "the kernel, or a process, has it for itself (O_EXCL)", nil
	case errors.Is(err, fs.ErrPermission):
		return "", err
	}
	return "", nil
}
