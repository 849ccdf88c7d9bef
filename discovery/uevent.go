package discovery

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// kernelGroup is the multicast group of events that the kernel sends itself;
// group 2 carries what udev makes of them (lib/kobject_uevent.c).
const kernelGroup = 1

// Listen sends a value to events, which should have room for one, when it has begun
// to listen, and whenever the kernel says something about a device: added, removed,
// changed, bound. The message itself is not passed on, since the scan that follows looks
// at everything anew. Only how recoveries from errors ended, which no file says, is kept
// in recoveries, unless that is nil.
//
// The kernel says what concerns no network namespace in all of those that belong to
// the first user namespace, and what concerns network interfaces only in theirs
// (kobject_uevent_net_broadcast in lib/kobject_uevent.c, since Linux 4.18). So an agent
// in a container hears of devices, except in a user namespace of its own, which is an
// error. It hears of interfaces only if it [SharesNetwork]; else see [FollowInterfaces].
//
// Listen returns nil when the context ends. A reader that is slow misses
// nothing, since two values that wait are the same as one.
func Listen(ctx context.Context, events chan<- struct{}, recoveries *Recoveries) error {
	if err := reached(); err != nil {
		return err
	}
	socket, err := ueventSocket()
	if err != nil {
		return err
	}
	defer socket.Close()
	defer context.AfterFunc(ctx, func() { socket.Close() })() // ends the Read below
	message := make([]byte, 8192)                             // more than the kernel's UEVENT_BUFFER_SIZE
	for {
		select {
		case events <- struct{}{}:
		default:
		}
		n, err := socket.Read(message)
		if ctx.Err() != nil {
			return nil
		}
		// ENOBUFS says that events were lost, which is an event too.
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("read uevent socket: %w", err)
		}
		if recoveries != nil && err == nil {
			recoveries.hear(message[:n])
		}
	}
}

// firstUserNamespace is the inode of the user namespace that the kernel starts with
// (PROC_USER_INIT_INO in include/linux/proc_ns.h).
const firstUserNamespace = 0xEFFFFFFD

// reached returns why the kernel's events do not reach this process, nil if they do or
// it cannot be told.
func reached() error {
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
	if err != nil && !errors.Is(err, unix.EPERM) { // an owner that this process must not see
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
