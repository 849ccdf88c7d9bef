package provision

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"syscall"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// disks are the block devices of a host and what they are in use for.
type disks struct {
	host  *discovery.Host
	all   []sysfs.Device    // partitions too
	users map[string]string // what uses one, by its numbers "259:1" or its name "nvme0n1p1"
	err   error
}

// maxTable bounds what is read of a table in /proc, in bytes.
const maxTable = 16 << 20

func readDisks(host *discovery.Host) disks {
	d := disks{host: host, users: make(map[string]string)}
	var err error
	if d.all, err = sysfs.Class(host.FS, "block"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.err = err
		return d
	}
	d.err = errors.Join(d.addMounts(), d.addSwaps(), d.addLoops(), d.addExports())
	for pattern, user := range map[string]string{
		"sys/fs/btrfs/*/devices/*": "btrfs",
		// A directory for each mounted file system, in whichever mount namespace.
		"sys/fs/ext4/*":   "its ext4 file system is mounted",
		"sys/fs/xfs/*":    "its XFS file system is mounted",
		"sys/fs/f2fs/*":   "its F2FS file system is mounted",
		"proc/fs/jbd2/*":  "the journal of a mounted file system is on it", // "sda1-8", or "sdb1" on a disk of its own
		"sys/fs/erofs/*":  "its EROFS file system is mounted",
		"sys/fs/nilfs2/*": "its NILFS file system is mounted",
	} {
		members, _ := fs.Glob(host.FS, pattern)
		for _, member := range members {
			name := path.Base(member)
			d.users[name] = user
			if number := strings.LastIndexByte(name, '-'); number > 0 && strings.HasPrefix(pattern, "proc/fs/jbd2") {
				d.users[name[:number]] = user
			}
		}
	}
	d.addLinks("sys/fs/bcachefs/*/dev-*/block", "bcachefs")
	d.addLinks("sys/class/rnbd-server/ctl/devices/*/block_dev", "it is exported by RNBD")
	if _, err := fs.Stat(host.FS, "proc/spl/kstat/zfs"); err == nil && d.err == nil {
		d.err = errors.New("the disks of ZFS pools are not told by the kernel")
	}
	return d
}

// addMounts adds what is mounted in the mount namespace of each process: a
// container may have mounted a disk that the host has not.
func (d *disks) addMounts() error {
	first, err := sysfs.ReadText(d.host.FS, "proc/1/mountinfo", maxTable)
	if err != nil {
		return err
	}
	seen := map[string]bool{d.namespace("1"): true}
	tables := []string{first}
	entries, err := fs.ReadDir(d.host.FS, "proc")
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	for _, entry := range entries {
		namespace := d.namespace(entry.Name())
		if namespace == "" || seen[namespace] {
			continue
		}
		table, err := sysfs.ReadText(d.host.FS, path.Join("proc", entry.Name(), "mountinfo"), maxTable)
		switch {
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) || errors.Is(err, syscall.EINVAL):
			continue // it has ended
		case err != nil:
			return err
		}
		seen[namespace] = true
		tables = append(tables, table)
	}
	for _, table := range tables {
		for line := range strings.Lines(table) {
			d.addMount(strings.Fields(line))
		}
	}
	return nil
}

// namespace returns what names the mount namespace of a process, "" if that is
// not known.
func (d *disks) namespace(process string) string {
	namespace, _ := fs.ReadLink(d.host.FS, path.Join("proc", process, "ns/mnt"))
	return namespace
}

// addSwaps adds the disks that the host swaps to. A kernel may be without swap.
func (d *disks) addSwaps() error {
	swaps, err := sysfs.ReadText(d.host.FS, "proc/swaps", maxTable)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for line := range strings.Lines(swaps) {
		if fields := strings.Fields(line); len(fields) > 0 && strings.HasPrefix(fields[0], "/dev/") {
			d.users[d.name(fields[0])] = "swap"
		}
	}
	return err
}

// addLoops adds the disks that loop devices are made of. The kernel itself has
// those open, and no process does: so kubelets keep the disks of pods that have
// volumes in block mode.
func (d *disks) addLoops() error {
	var errs []error
	for _, disk := range d.all {
		file, err := disk.Text("loop/backing_file")
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			errs = append(errs, err)
		default:
			errs = append(errs, d.addFile(file, "the loop device "+disk.Name()+" is on it"))
		}
	}
	return errors.Join(errs...)
}

// exports are the files of configfs that name the disks which the kernel's own
// servers hand out to other machines, and those servers' modules.
var exports = []struct{ module, pattern, user string }{
	{"nvmet", "sys/kernel/config/nvmet/subsystems/*/namespaces/*/device_path", "it is exported by the NVMe target"},
	{"target_core_mod", "sys/kernel/config/target/core/*/*/udev_path", "it is exported by the SCSI target"},
}

// addExports adds the disks that the kernel hands out to other machines.
func (d *disks) addExports() error {
	for _, export := range exports {
		_, loadedErr := fs.Stat(d.host.FS, "sys/module/"+export.module)
		root := strings.Join(strings.Split(export.pattern, "/")[:4], "/") // sys/kernel/config/nvmet
		if _, err := fs.Stat(d.host.FS, root); loadedErr == nil && err != nil {
			return fmt.Errorf("module %s is loaded, and its exports cannot be read: %w", export.module, err)
		}
		files, _ := fs.Glob(d.host.FS, export.pattern)
		for _, file := range files {
			disk, err := sysfs.ReadText(d.host.FS, file, maxTable)
			if err == nil && path.IsAbs(disk) { // else none is set
				err = d.addFile(disk, export.user)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// addFile adds the user of a file, if it is the node of a disk. A file of a file
// system needs no note: the file system is mounted.
func (d *disks) addFile(file, user string) error {
	if strings.HasPrefix(file, "/dev/") {
		d.users[d.name(file)] = user
		return nil
	}
	info, err := fs.Stat(d.host.FS, strings.TrimPrefix(path.Clean(file), "/"))
	if err != nil {
		return fmt.Errorf("%s, whose file cannot be looked at: %w", user, err)
	}
	if numbers, ok := strings.CutPrefix(numbersOf(info), "b "); ok {
		d.users[numbers] = user
	}
	return nil
}

// addLinks adds the user of the disks that links in sysfs lead to.
func (d *disks) addLinks(pattern, user string) {
	links, _ := fs.Glob(d.host.FS, pattern)
	for _, link := range links {
		if target, err := fs.ReadLink(d.host.FS, link); err == nil {
			d.users[path.Base(target)] = user
		}
	}
}

// addMount adds a line of mountinfo, such as "36 35 98:0 /mnt1 /mnt2 rw,noatime
// master:1 - ext3 /dev/root rw" (proc_pid_mountinfo(5)). The numbers are the
// disk's where the file system lies on one, and its name is said otherwise. The
// source may be several disks ("/dev/sda:/dev/sdb"), options may name more
// ("logdev=/dev/sdc"), and the mounted thing may be the node of a disk, which
// kubelets mount for volumes in block mode.
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
	if fields[separator+1] == "devtmpfs" && fields[3] != "/" {
		d.users[d.name("/dev"+fields[3])] = "its node is mounted on " + fields[4]
	}
	for _, word := range fields[separator+2:] {
		for _, name := range strings.FieldsFunc(word, func(r rune) bool { return strings.ContainsRune(":,=", r) }) {
			if strings.HasPrefix(name, "/dev/") {
				d.users[d.name(name)] = user
			}
		}
	}
}

// name returns the kernel's name of a disk by a path in /dev, which may be a
// link of udev's such as /dev/disk/by-uuid/….
func (d *disks) name(node string) string {
	if target, err := fs.ReadLink(d.host.FS, strings.TrimPrefix(path.Clean(node), "/")); err == nil {
		node = "/dev/" + path.Base(target)
	}
	return strings.ReplaceAll(strings.TrimPrefix(node, "/dev/"), "/", "!") // "cciss!c0d0"
}

// below tells whether a disk on the function is in use.
func (d *disks) below(function sysfs.Device) error {
	subsystems := d.subsystems(function)
	var hidden error
	for _, disk := range d.all {
		on := below(disk, function)
		for _, subsystem := range subsystems {
			if !on && below(disk, subsystem) {
				on = true
				hidden = fmt.Errorf("whether NVMe namespace %s is in use cannot be told: the function is one path to it, and the kernel has the namespace below %s (native multipath)", disk.Name(), subsystem.Name())
			}
		}
		if !on {
			continue
		}
		if d.err != nil {
			return fmt.Errorf("whether disk %s is in use cannot be told: %w", disk.Name(), d.err)
		}
		if user := d.user(disk); user != "" {
			return fmt.Errorf("in use: disk %s: %s", disk.Name(), user)
		}
	}
	return hidden
}

func (d *disks) user(disk sysfs.Device) string {
	attrs := disk.Attrs()
	numbers, _ := attrs.Text("dev")
	if attrs.Err() != nil {
		return attrs.Err().Error()
	}
	for _, key := range []string{numbers, disk.Name()} {
		if user, ok := d.users[key]; ok && key != "" {
			return user
		}
	}
	if disk.Exists("bcache") { // a cache shows no holders
		return "bcache"
	}
	holders, err := fs.ReadDir(d.host.FS, disk.Child("holders").Path)
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err.Error()
	case len(holders) > 0:
		return "it is part of " + holders[0].Name()
	}
	return ""
}

// subsystems returns the NVMe subsystems that the function is a controller of.
// A namespace that may have several paths is a child of the subsystem, and of no
// controller (nvme_mpath_set_live in drivers/nvme/host/multipath.c).
func (d *disks) subsystems(function sysfs.Device) (found []sysfs.Device) {
	all, _ := sysfs.Class(d.host.FS, "nvme-subsystem")
	for _, subsystem := range all {
		entries, _ := fs.ReadDir(d.host.FS, subsystem.Path)
		for _, entry := range entries {
			if controller, ok := subsystem.LinkTo(entry.Name()); ok && below(controller, function) {
				found = append(found, subsystem)
			}
		}
	}
	return found
}
