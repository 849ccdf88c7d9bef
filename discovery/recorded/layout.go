package recorded

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
)

// WriteHost writes the host's files and links below dir. It creates dir if dir does not exist. If
// dir contains another host, WriteHost replaces the files that both hosts have and keeps the
// others: the last host wins.
//
// Empty files replace device nodes. An entry that was unreadable when the host was recorded becomes
// an empty directory, which is not readable as a file either.
//
// WriteHost follows no links: neither the archive nor the content of dir can make WriteHost write
// outside of dir.
func (h *Host) WriteHost(dir string) error {
	_, err := h.layOut(dir, false)
	return err
}

// LayoutNodes is [Host.WriteHost] with real device nodes with their recorded numbers. A process
// that opens such a node opens this machine's device with the same number. If this process is not
// permitted to create nodes, empty files replace them, and LayoutNodes returns their paths in the
// form of fs.FS.
func (h *Host) LayoutNodes(dir string) (standIns []string, err error) { return h.layOut(dir, true) }

func (h *Host) layOut(dir string, nodes bool) (standIns []string, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("lay out host: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("lay out host: %w", err)
	}
	defer root.Close()
	l := layout{root: root, nodes: nodes, made: map[string]bool{".": true}}
	for _, e := range h.entries {
		if err := l.write(e); err != nil {
			return l.standIns, fmt.Errorf("lay out %s: %w", e.path, err)
		}
	}
	return l.standIns, nil
}

type layout struct {
	root     *os.Root
	nodes    bool            // create real device nodes
	made     map[string]bool // paths known to be directories, not links
	standIns []string
}

func (l *layout) write(e entry) error {
	if e.kind == directory || e.kind == unreadable {
		return l.mkdir(e.path)
	}
	if err := l.mkdir(path.Dir(e.path)); err != nil {
		return err
	}
	// Remove the entry of any other host first, so that nothing is written through a link or into a
	// device node.
	if err := l.root.RemoveAll(e.path); err != nil {
		return err
	}
	switch e.kind {
	case link:
		return l.root.Symlink(e.target, e.path)
	case node:
		return l.mknod(e)
	}
	return l.create(e.path, e.data)
}

// mkdir creates a directory and its parents, in place of any other existing entry.
func (l *layout) mkdir(name string) error {
	if l.made[name] {
		return nil
	}
	if err := l.mkdir(path.Dir(name)); err != nil {
		return err
	}
	info, err := l.root.Lstat(name)
	if err == nil && !info.IsDir() {
		if err := l.root.Remove(name); err != nil {
			return err
		}
		err = fs.ErrNotExist
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = l.root.Mkdir(name, 0o755)
	}
	l.made[name] = err == nil
	return err
}

func (l *layout) create(name string, data []byte) error {
	f, err := l.root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Close())
}

// mknod creates a device node if nodes are requested and permitted, and otherwise an empty file.
// The numbers 0:0 belong to no device; overlayfs uses them for deleted files.
func (l *layout) mknod(e entry) error {
	err := fs.ErrPermission
	if l.nodes && (e.major != 0 || e.minor != 0) {
		err = mknod(l.root, e)
	}
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, errors.ErrUnsupported) {
		l.standIns = append(l.standIns, e.path)
		return l.create(e.path, nil)
	}
	return err
}
