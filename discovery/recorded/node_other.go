//go:build !linux

package recorded

import (
	"errors"
	"io/fs"
	"os"
)

// mknod returns an error: device nodes are created only on Linux.
func mknod(*os.Root, entry) error { return errors.ErrUnsupported }

// deviceNumbers returns zeros: the numbers are known only on Linux.
func deviceNumbers(fs.FileInfo) (major, minor uint32) { return 0, 0 }

// nodeStat returns nil, because deviceNumbers reads nothing on this system.
func nodeStat(entry) any { return nil }
