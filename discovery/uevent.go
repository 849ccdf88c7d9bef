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

// Listen sends a value to events, which should have room for one, whenever the
// kernel says something about a device: added, removed, changed, bound. What
// it said is not passed on, since each scan looks at everything anew. A
// container sees these events too, for all devices that do not belong to a
// network namespace (since Linux 4.18).
//
// Listen returns nil when the context ends. A reader that is slow misses
// nothing, since two values that wait are the same as one.
func Listen(ctx context.Context, events chan<- struct{}) error {
	socket, err := ueventSocket()
	if err != nil {
		return err
	}
	defer socket.Close()
	defer context.AfterFunc(ctx, func() { socket.Close() })() // ends the Read below
	message := make([]byte, 8192)                             // more than the kernel's UEVENT_BUFFER_SIZE
	for {
		_, err := socket.Read(message)
		if ctx.Err() != nil {
			return nil
		}
		// ENOBUFS says that events were lost, which is an event too.
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("read uevent socket: %w", err)
		}
		select {
		case events <- struct{}{}:
		default:
		}
	}
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
