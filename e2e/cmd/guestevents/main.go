// Command guestevents prints each kernel uevent of a guest with the time in microseconds. Like the
// agent, the command receives the uevents of the network namespace in which it was started.
package main

import (
	"bytes"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20)
	fmt.Println("listening")
	message := make([]byte, 8192)
	for {
		n, err := unix.Read(fd, message)
		if err != nil {
			return fmt.Errorf("read: %w", err)
		}
		what, _, _ := bytes.Cut(message[:n], []byte{0})
		fmt.Printf("event %d %s\n", time.Now().UnixMicro(), what)
	}
}
