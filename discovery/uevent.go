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

// Uevents reports that the kernel said something about a device: added,
// removed, changed, bound. What it said is not passed on, since each scan
// looks at everything anew. A container sees these events too, for all devices
// that do not belong to a network namespace (since Linux 4.18).
//
// Values are sent until the context ends; a reader that is slow misses none,
// since values that wait are the same as one.
func Uevents(ctx context.Context) (<-chan struct{}, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, fmt.Errorf("open uevent socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: kernelGroup}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("bind uevent socket: %w", err)
	}
	socket := os.NewFile(uintptr(fd), "uevent socket")
	context.AfterFunc(ctx, func() { socket.Close() }) // ends the Read below
	events := make(chan struct{}, 1)
	go func() {
		message := make([]byte, 8192) // more than the kernel's UEVENT_BUFFER_SIZE
		for {
			_, err := socket.Read(message)
			// ENOBUFS says that events were lost, which is an event too.
			if err != nil && !errors.Is(err, unix.ENOBUFS) {
				return
			}
			select {
			case events <- struct{}{}:
			default:
			}
		}
	}()
	return events, nil
}
