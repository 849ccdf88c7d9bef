package kernel

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	"golang.org/x/tools/txtar"
)

// tree is a file system in memory, without a lock.
type tree struct {
	root   *node
	inodes uint64 // the number of directories so far
}

// node is an entry of the file system.
type node struct {
	mode     fs.FileMode
	data     []byte
	target   string // of a link
	rdev     uint64
	inode    uint64 // of a directory
	unread   bool
	opened   *node // the target of a link in /proc/PID/fd, even if its path has changed
	children map[string]*node
}

// entry is a node with its path.
type entry struct {
	path string
	node *node
}

// nodeName matches "dev/kvm c 10:232", the format of package recorded.
var nodeName = regexp.MustCompile(`^(.+) ([bc]) ([0-9]+):([0-9]+)$`)

// newDir returns a directory with an inode number that no earlier directory has had. So a function
// that vanished and returned has another number, as on a real kernel (kernfs_new_node in
// fs/kernfs/dir.c, Linux 6.12).
func (t *tree) newDir() *node {
	t.inodes++
	return &node{mode: fs.ModeDir | 0o755, inode: t.inodes, children: make(map[string]*node)}
}

func (t *tree) add(f txtar.File) {
	switch {
	case f.Name == "end":
	case strings.Contains(f.Name, " -> "):
		name, target, _ := strings.Cut(f.Name, " -> ")
		t.put(name, &node{mode: fs.ModeSymlink | 0o777, target: target})
	case strings.Contains(f.Name, " ! "):
		name, _, _ := strings.Cut(f.Name, " ! ")
		t.put(name, &node{mode: 0o444, unread: true})
	case nodeName.MatchString(f.Name):
		m := nodeName.FindStringSubmatch(f.Name)
		mode := fs.ModeDevice | 0o666
		if m[2] == "c" {
			mode |= fs.ModeCharDevice
		}
		major, _ := strconv.ParseUint(m[3], 10, 32)
		minor, _ := strconv.ParseUint(m[4], 10, 32)
		t.put(m[1], &node{mode: mode, rdev: unix.Mkdev(uint32(major), uint32(minor))})
	case strings.HasSuffix(f.Name, "/"):
		t.put(strings.TrimSuffix(f.Name, "/"), t.newDir())
	default:
		t.put(f.Name, &node{mode: 0o444, data: f.Data})
	}
}

// put stores n at a path, and creates missing directories.
func (t *tree) put(name string, n *node) {
	dir := t.root
	parts := strings.Split(name, "/")
	for _, part := range parts[:len(parts)-1] {
		if dir.children[part] == nil {
			dir.children[part] = t.newDir()
		}
		dir = dir.children[part]
	}
	dir.children[parts[len(parts)-1]] = n
}

// eachEntry calls f for each entry except non-empty directories, in order.
func (t *tree) eachEntry(f func(e entry)) {
	var walk func(name string, n *node)
	walk = func(name string, n *node) {
		if len(n.children) == 0 {
			f(entry{name, n})
			return
		}
		for _, base := range slices.Sorted(maps.Keys(n.children)) {
			walk(path.Join(name, base), n.children[base])
		}
	}
	walk("", t.root)
}

// remove removes a path, and the parent directories below sys/devices that are empty afterwards.
func (t *tree) remove(name string) {
	for name != "." && name != "" {
		parent := t.find(path.Dir(name))
		if parent == nil {
			return
		}
		delete(parent.children, path.Base(name))
		if len(parent.children) > 0 || !strings.HasPrefix(path.Dir(name), "sys/devices/") {
			return
		}
		name = path.Dir(name)
	}
}

// find returns the node of a path without following links, nil if none.
func (t *tree) find(name string) *node {
	n := t.root
	if name == "." || name == "" {
		return n
	}
	for part := range strings.SplitSeq(name, "/") {
		if n = n.children[part]; n == nil {
			return nil
		}
	}
	return n
}

// walk returns the node of a path, and follows links.
func (t *tree) walk(op, name string, last bool) (*node, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: op, Path: name, Err: fs.ErrInvalid}
	}
	whole, rest, dir := name, name, t.root
	for links := 0; rest != "" && rest != "."; {
		part, after, _ := strings.Cut(rest, "/")
		n := dir.children[part]
		if n == nil {
			return nil, &fs.PathError{Op: op, Path: name, Err: syscall.ENOENT}
		}
		if n.opened != nil && after == "" && last {
			return n.opened, nil
		}
		if n.mode&fs.ModeSymlink != 0 && (after != "" || last) {
			if links++; links > 20 {
				return nil, &fs.PathError{Op: op, Path: name, Err: syscall.ELOOP}
			}
			whole = path.Join(strings.TrimSuffix(whole, rest), n.target, after)
			rest, dir = whole, t.root
			continue
		}
		rest, dir = after, n
	}
	return dir, nil
}

// text writes a file. An existing file stays the same node, so that open files see the change.
func (t *tree) text(name, text string) {
	if n := t.find(name); n != nil && n.mode.IsRegular() {
		n.data = []byte(text)
		return
	}
	t.put(name, &node{mode: 0o644, data: []byte(text)})
}

// createDevice creates the files and the node of a device.
func (t *tree) createDevice(dir, name string, major, minor uint32) {
	t.text(dir+"/dev", fmt.Sprintf("%d:%d\n", major, minor))
	t.text(dir+"/uevent", fmt.Sprintf("MAJOR=%d\nMINOR=%d\nDEVNAME=%s\n", major, minor, name))
	t.put("dev/"+name, &node{mode: fs.ModeDevice | fs.ModeCharDevice | 0o600, rdev: unix.Mkdev(major, minor)})
}

// dropPath removes a path with everything below.
func (t *tree) dropPath(name string) {
	if parent := t.find(path.Dir(name)); parent != nil {
		delete(parent.children, path.Base(name))
	}
}
