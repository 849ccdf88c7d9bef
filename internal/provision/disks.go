package provision

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

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
	mounts, err := sysfs.ReadText(host.FS, "proc/1/mountinfo", maxTable)
	swaps, swapsErr := sysfs.ReadText(host.FS, "proc/swaps", maxTable)
	if errors.Is(swapsErr, fs.ErrNotExist) { // a kernel without swap
		swapsErr = nil
	}
	d.err = errors.Join(err, swapsErr)
	for line := range strings.Lines(mounts) {
		d.addMount(strings.Fields(line))
	}
	for line := range strings.Lines(swaps) {
		if fields := strings.Fields(line); len(fields) > 0 && strings.HasPrefix(fields[0], "/dev/") {
			d.users[d.name(fields[0])] = "swap"
		}
	}
	members, _ := fs.Glob(host.FS, "sys/fs/btrfs/*/devices/*")
	for _, member := range members {
		d.users[path.Base(member)] = "btrfs"
	}
	if _, err := fs.Stat(host.FS, "proc/spl/kstat/zfs"); err == nil && d.err == nil {
		d.err = errors.New("the disks of ZFS pools are not told by the kernel")
	}
	return d
}

// addMount adds a line of mountinfo, such as "36 35 98:0 /mnt1 /mnt2 rw,noatime
// master:1 - ext3 /dev/root rw" (proc_pid_mountinfo(5)). The numbers are the
// disk's where the file system lies on one, and its name is said otherwise.
func (d *disks) addMount(fields []string) {
	if len(fields) < 10 {
		return
	}
	user := "it is mounted on " + fields[4]
	d.users[fields[2]] = user
	for i, field := range fields[6:] {
		if field == "-" && len(fields) > i+8 && strings.HasPrefix(fields[i+8], "/dev/") {
			d.users[d.name(fields[i+8])] = user
			return
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
	for _, disk := range d.all {
		on := below(disk, function)
		for _, subsystem := range subsystems {
			on = on || below(disk, subsystem)
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
	return nil
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
// Where a disk may have several paths, it is a child of the subsystem and not of
// any controller (drivers/nvme/host/multipath.c).
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
