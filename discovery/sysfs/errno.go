package sysfs

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrnoName returns what the kernel calls the error that it answered with, such as "EBUSY",
// or "" if an error is none of the kernel's.
func ErrnoName(err error) string {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return ""
	}
	return unix.ErrnoName(errno)
}
