package sysfs

import (
	"errors"
	"io/fs"
	"syscall"
)

// IsReadOnly reports whether an attribute could not be written because whoever wrote it may not: sysfs is
// mounted read-only there, as in a container, or privilege is missing.
func IsReadOnly(err error) bool {
	return errors.Is(err, syscall.EROFS) || errors.Is(err, fs.ErrPermission)
}
