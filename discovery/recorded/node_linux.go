package recorded

import (
	"io/fs"
	"os"
	"path"
	"syscall"

	"golang.org/x/sys/unix"
)

// mknod creates a device node that only its owner may open.
func mknod(root *os.Root, e entry) error {
	parent, err := root.Open(path.Dir(e.path))
	if err != nil {
		return err
	}
	defer parent.Close()
	mode := uint32(unix.S_IFCHR | 0o600)
	if e.block {
		mode = unix.S_IFBLK | 0o600
	}
	err = unix.Mknodat(int(parent.Fd()), path.Base(e.path), mode, int(unix.Mkdev(e.major, e.minor)))
	if err != nil {
		return &fs.PathError{Op: "mknodat", Path: e.path, Err: err}
	}
	return nil
}

// deviceNumbers returns the numbers of a device node, zeros if they are unknown.
func deviceNumbers(info fs.FileInfo) (major, minor uint32) {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0
	}
	return unix.Major(stat.Rdev), unix.Minor(stat.Rdev)
}

// nodeStat returns the numbers of a device node in the form that deviceNumbers reads, nil for any
// other entry.
func nodeStat(e entry) any {
	if e.kind != node {
		return nil
	}
	return &syscall.Stat_t{Rdev: unix.Mkdev(e.major, e.minor)}
}
