package scan

import (
	"context"
	"io/fs"
	"net"
	"path"
	"slices"
	"strconv"
	"time"

	"chandler.dev/discovery/sysfs"
)

// netClass is the directory of the host's network interfaces. The mount of the host's /sys
// determines the network namespace of these interfaces.
const netClass = "sys/class/net"

// SharesNetwork reports whether this process is in the network namespace of the given host: both
// have the same interfaces by name, number and address. The process then receives the kernel's
// events about these interfaces.
func SharesNetwork(host fs.FS) bool {
	own, err := net.Interfaces()
	if err != nil {
		return false
	}
	for _, i := range own {
		attrs := sysfs.At(host, path.Join(netClass, i.Name)).Attrs()
		index, _ := attrs.Text("ifindex")
		address, _ := attrs.Text("address")
		if parsed, _ := net.ParseMAC(address); index != strconv.Itoa(i.Index) || i.Flags&net.FlagLoopback == 0 && !slices.Equal(parsed, i.HardwareAddr) {
			return false
		}
	}
	return len(interfaceNames(host)) == len(own)
}

// FollowInterfaces sends changes to events whenever the names of a host's network interfaces
// change, until the context ends. The channel must have a buffer of one. FollowInterfaces reads one
// directory each time. It serves processes that receive no events about interfaces. The kernel
// offers no other notification: inotify does not report changes of sysfs, and entering another
// network namespace needs CAP_SYS_ADMIN there (setns(2)).
func FollowInterfaces(ctx context.Context, host fs.FS, every time.Duration, events chan Changes) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	last := make(map[string]string)
	followNames(host, last)
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if changed := followNames(host, last); len(changed) > 0 {
			Changes{Uevents: changed}.Send(events)
		}
	}
}

// followNames updates dirs, the directories of network interfaces by name, and returns events for
// added and removed names in the form of the kernel's events.
func followNames(host fs.FS, dirs map[string]string) (changed []Uevent) {
	names := interfaceNames(host)
	for name, dir := range dirs {
		if _, found := slices.BinarySearch(names, name); !found {
			changed = append(changed, Uevent{Path: dir, Subsystem: "net"})
			delete(dirs, name)
		}
	}
	for _, name := range names {
		if dirs[name] == "" {
			dirs[name] = path.Join(netClass, name)
			if device, ok := sysfs.At(host, netClass).LinkTo(name); ok {
				dirs[name] = device.Path
			}
			changed = append(changed, Uevent{Path: dirs[name], Subsystem: "net"})
		}
	}
	return changed
}

// interfaceNames returns the names of the host's network interfaces in order.
func interfaceNames(host fs.FS) (names []string) {
	entries, _ := fs.ReadDir(host, netClass)
	for _, entry := range entries {
		if entry.Type()&fs.ModeSymlink != 0 { // else "bonding_masters"
			names = append(names, entry.Name())
		}
	}
	return names
}
