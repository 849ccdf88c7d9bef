package passthroughtest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// host is a directory with simulated device nodes below dev. The text of a file gives the numbers
// of the node. Real nodes would need privilege.
type host struct{ fs.FS }

// Stat implements [fs.StatFS].
func (h host) Stat(name string) (fs.FileInfo, error) {
	info, err := fs.Stat(h.FS, name)
	return h.node(name, info, err)
}

// Lstat implements [fs.ReadLinkFS].
func (h host) Lstat(name string) (fs.FileInfo, error) {
	info, err := fs.Lstat(h.FS, name)
	return h.node(name, info, err)
}

// ReadLink implements [fs.ReadLinkFS].
func (h host) ReadLink(name string) (string, error) { return fs.ReadLink(h.FS, name) }

// ReadDir implements [fs.ReadDirFS].
func (h host) ReadDir(name string) ([]fs.DirEntry, error) { return fs.ReadDir(h.FS, name) }

func (h host) node(name string, info fs.FileInfo, err error) (fs.FileInfo, error) {
	if err != nil || !strings.HasPrefix(name, "dev/") || !info.Mode().IsRegular() {
		return info, err
	}
	text, err := fs.ReadFile(h.FS, name)
	if err != nil {
		return nil, err
	}
	kind, major, minor, err := parseNumbers(string(text))
	if err != nil {
		return nil, &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	n := node{info, fs.ModeDevice | 0o600, &syscall.Stat_t{Rdev: unix.Mkdev(major, minor)}}
	if kind == 'c' {
		n.mode |= fs.ModeCharDevice
	}
	return n, nil
}

// node is the file information of a device node.
type node struct {
	fs.FileInfo

	mode fs.FileMode
	stat *syscall.Stat_t
}

// Mode implements [fs.FileInfo].
func (n node) Mode() fs.FileMode { return n.mode }

// Sys implements [fs.FileInfo].
func (n node) Sys() any { return n.stat }

// parseNumbers parses the text of a device node, such as "c 10:196".
func parseNumbers(text string) (kind rune, major, minor uint32, err error) {
	_, err = fmt.Sscanf(text, "%c %d:%d", &kind, &major, &minor)
	return kind, major, minor, err
}

// makeNode creates a device node, which requires root.
func makeNode(name, text string) error {
	kind, major, minor, err := parseNumbers(text)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	mode := uint32(unix.S_IFCHR)
	if kind == 'b' {
		mode = unix.S_IFBLK
	}
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return unix.Mknod(name, mode|0o600, int(unix.Mkdev(major, minor)))
}
