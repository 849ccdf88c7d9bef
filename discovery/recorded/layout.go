package recorded

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
)

// Layout writes the host's files and links below dir, which is made if it is
// not there. If dir holds another host, Layout replaces the files that both
// hosts have and keeps the others: of several hosts the last one wins.
//
// Empty files stand in for device nodes. An entry that could not be read when
// the host was recorded becomes an empty directory, which cannot be read as a
// file either.
//
// No link is followed: neither the archive nor the content of dir can make
// Layout write anywhere else.
func (h *Host) Layout(dir string) error {
	_, err := h.layOut(dir, false)
	return err
}

// LayoutNodes is Layout with real device nodes, which have their recorded
// numbers. A process that opens such a node opens this machine's device of that
// number. Where this process may make no nodes, empty files stand in for them, and
// LayoutNodes returns their paths, as of fs.FS.
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
	nodes    bool            // make real device nodes
	made     map[string]bool // directories known to be directories and no links
	standIns []string
}

func (l *layout) write(e entry) error {
	if e.kind == directory || e.kind == unreadable {
		return l.mkdir(e.path)
	}
	if err := l.mkdir(path.Dir(e.path)); err != nil {
		return err
	}
	// Remove what another host left here first, so that nothing is written
	// through a link or into a device node.
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

// mkdir makes a directory and those above it, in the place of anything else
// that is there.
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

// mknod makes a device node if nodes are asked for and allowed, else an empty
// file. No device has the numbers 0:0, which overlayfs takes for a deleted file.
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
