package sysfs

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrnoName returns the kernel's name of an error, such as "EBUSY", or "" if the error is not from
// the kernel.
func ErrnoName(err error) string {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return ""
	}
	return unix.ErrnoName(errno)
}
