package scan

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Uevent names the device of a kernel event.
type Uevent struct {
	Path      string // the device's directory on the host: "sys/devices/virtual/misc/kvm"
	OldPath   string // the previous directory, if the event reports a new name
	Subsystem string // the device's bus or class, or else "module", "drivers" and the like
	Node      string // the path of the device node on the host, "" if none: "dev/kvm"
}

// Changes describes what may have changed on a host: everything, or the devices that Uevents name.
type Changes struct {
	Everything bool
	Uevents    []Uevent // none if Everything is set

	late bool // nothing has changed, but families without a complete answer may answer now
}

// maxUevents is the maximum number of events that are evaluated one by one. More events count as a
// change of everything.
const maxUevents = 1024

// Send sends changes to a [Watch] through a channel that has room for one value. If a value
// waits in the channel, Send adds the changes to that value. Send does not wait.
func (c Changes) Send(to chan Changes) {
	for {
		select {
		case to <- c:
			return
		case waiting := <-to:
			c = waiting.and(c)
		}
	}
}

// and returns the union of both changes.
func (c Changes) and(more Changes) Changes {
	if c.Everything || more.Everything || len(c.Uevents)+len(more.Uevents) > maxUevents {
		return Changes{Everything: true}
	}
	return Changes{Uevents: slices.Concat(c.Uevents, more.Uevents)}
}

// kernelGroup is the multicast group of events that the kernel itself sends; group 2 carries udev's
// versions of the events (lib/kobject_uevent.c).
const kernelGroup = 1

// Listen sends changes to events, which must have a buffer of one: first Everything, and then the
// device of each kernel event (added, removed, changed, bound). If the kernel dropped events
// because Listen was slow, or if a message cannot be parsed, Listen sends Everything. Listen
// records the results of recoveries from errors in recoveries, unless recoveries is nil.
//
// The kernel broadcasts events to all network namespaces that belong to the initial user namespace.
// Events about network interfaces reach only the interface's own network namespace
// (kobject_uevent_net_broadcast in lib/kobject_uevent.c, since Linux 4.18). An agent in a container
// therefore receives events about devices. In a separate user namespace no events arrive, and
// Listen returns an error. The agent receives events about interfaces only if [SharesNetwork] is
// true; otherwise see [FollowInterfaces].
//
// Listen returns nil when the context ends.
func Listen(ctx context.Context, events chan Changes, recoveries *Recoveries) error {
	if err := eventsUnreachable(); err != nil {
		return err
	}
	socket, err := ueventSocket()
	if err != nil {
		return err
	}
	defer socket.Close()
	defer context.AfterFunc(ctx, func() { socket.Close() })() // ends the Read below
	message := make([]byte, 8192)                             // more than the kernel's UEVENT_BUFFER_SIZE
	changes := Changes{Everything: true}
	for {
		changes.Send(events)
		n, err := socket.Read(message)
		if ctx.Err() != nil {
			return nil
		}
		switch {
		case err == nil:
			variables := ueventVariables(message[:n])
			changes = changesOf(variables)
			if recoveries != nil {
				recoveries.readEvent(variables)
			}
		case errors.Is(err, unix.ENOBUFS): // the kernel dropped events (netlink(7))
			changes = Changes{Everything: true}
		default:
			return fmt.Errorf("read uevent socket: %w", err)
		}
	}
}

// ueventVariables returns the variables of a kernel event. The message consists of zero-terminated
// strings; the first is "action@devpath" (kobject_uevent_env in lib/kobject_uevent.c).
func ueventVariables(message []byte) map[string]string {
	variables := make(map[string]string)
	for text := range strings.SplitSeq(string(message), "\x00") {
		if name, value, ok := strings.Cut(text, "="); ok {
			variables[name] = value
		}
	}
	return variables
}

// changesOf returns the changes for an event. The kernel sets DEVPATH and SUBSYSTEM in each event
// (kobject_uevent_env in lib/kobject_uevent.c).
func changesOf(variables map[string]string) Changes {
	hostPath := func(dir, name string) string {
		if name == "" {
			return ""
		}
		return path.Join(dir, name)
	}
	e := Uevent{
		Path: hostPath("sys", variables["DEVPATH"]), OldPath: hostPath("sys", variables["DEVPATH_OLD"]),
		Subsystem: variables["SUBSYSTEM"], Node: hostPath("dev", variables["DEVNAME"]),
	}
	if e.Path == "" || e.Subsystem == "" {
		return Changes{Everything: true}
	}
	return Changes{Uevents: []Uevent{e}}
}

// firstUserNamespace is the inode number of the initial user namespace (PROC_USER_INIT_INO in
// include/linux/proc_ns.h).
const firstUserNamespace = 0xEFFFFFFD

// eventsUnreachable returns an error if the kernel's events cannot reach this process.
// eventsUnreachable returns nil if they can, or if the answer is unknown.
func eventsUnreachable() error {
	network, err := os.Open("/proc/self/ns/net")
	if err != nil {
		return nil //nolint:nilerr // it cannot be told
	}
	defer network.Close()
	owner, err := unix.IoctlRetInt(int(network.Fd()), unix.NS_GET_USERNS)
	if err == nil {
		defer func() { _ = unix.Close(owner) }()
		var stat unix.Stat_t
		if err := unix.Fstat(owner, &stat); err != nil || stat.Ino == firstUserNamespace {
			return nil //nolint:nilerr // it cannot be told
		}
	}
	if err != nil && !errors.Is(err, unix.EPERM) { // EPERM: this process must not see the owner
		return nil //nolint:nilerr // it cannot be told
	}
	return errors.New("the kernel says nothing in network namespaces of users' own namespaces")
}

func ueventSocket() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, fmt.Errorf("open uevent socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: kernelGroup}); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("bind uevent socket: %w", err)
	}
	return os.NewFile(uintptr(fd), "uevent socket"), nil
}
