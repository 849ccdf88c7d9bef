package discovery

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

// netClass is where the network interfaces of a host are: those of the network
// namespace in which its /sys was mounted.
const netClass = "sys/class/net"

// SharesNetwork reports whether this process is in the network namespace of the host
// whose file system it is given: it has the same interfaces, by name, number and
// address. Then it hears the kernel's events about them.
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

// FollowInterfaces sends changes to events, which must have room for one value, whenever
// a host's network interfaces have other names than before, until the context
// ends. It reads one directory each time. This is for a process that does not hear of
// interfaces: the kernel has no other way to tell, since inotify sees no change of sysfs,
// and another network namespace can only be entered with CAP_SYS_ADMIN there
// (setns(2)).
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

// followNames updates the directories of network interfaces, by their names, and returns
// events for the names that have come and gone, as the kernel would send them.
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
