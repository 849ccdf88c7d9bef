package sysfs

import (
	"errors"
	"io/fs"
	"syscall"
)

// IsReadOnly reports whether writing an attribute failed because sysfs is mounted read-only, as in
// a container, or because the process lacks the permission.
func IsReadOnly(err error) bool {
	return errors.Is(err, syscall.EROFS) || errors.Is(err, fs.ErrPermission)
}
