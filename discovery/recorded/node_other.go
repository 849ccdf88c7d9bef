//go:build !linux

package recorded

import (
	"errors"
	"io/fs"
	"os"
)

// mknod says that device nodes are made on Linux only.
func mknod(*os.Root, entry) error { return errors.ErrUnsupported }

// deviceNumbers knows no numbers but those of Linux.
func deviceNumbers(fs.FileInfo) (major, minor uint32) { return 0, 0 }

// nodeStat says nothing, since nobody could read it.
func nodeStat(entry) any { return nil }
