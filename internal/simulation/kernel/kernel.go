// Package kernel is a model of a kernel for simulations: the /sys, /proc and
// /dev of a recorded host in memory, in which devices vanish, return, are
// replaced by others and renumbered, and files cannot be read or are read for
// ever. It is no part of the product.
package kernel

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/tools/txtar"
)

// Host is a machine. It is a file system whose links do not lead outside.
type Host struct {
	mu     sync.Mutex
	root   *node
	inodes uint64             // the number of directories so far
	gone   map[string][]entry // by PCI address: the entries that vanished with the function
	hanged chan struct{}      // closed when hanging reads continue
	hang   string             // reads of files with this in their path hang
	sick   string             // reads of files with this in their path fail

	// Changed is called, with mu held, after a write has changed something. It must not block.
	Changed func()

	driven    []Function
	functions map[string]*function // the present functions, by address
	processes map[int]*process
	pids      int
	boots     int
	trouble   Trouble
	stuck     chan struct{} // closed when hanging writes continue
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

// New returns the machine of a host recording.
func New(text []byte) *Host {
	h := &Host{gone: make(map[string][]entry)}
	h.root = h.newDir()
	for _, f := range txtar.Parse(text).Files {
		h.add(f)
	}
	return h
}

// newDir returns a directory with an inode number that no earlier directory has had. So a function
// that vanished and returned has another number, as on a real kernel (kernfs_new_node in
// fs/kernfs/dir.c, Linux 6.12).
func (h *Host) newDir() *node {
	h.inodes++
	return &node{mode: fs.ModeDir | 0o755, inode: h.inodes, children: make(map[string]*node)}
}

func (h *Host) add(f txtar.File) {
	switch {
	case f.Name == "end":
	case strings.Contains(f.Name, " -> "):
		name, target, _ := strings.Cut(f.Name, " -> ")
		h.put(name, &node{mode: fs.ModeSymlink | 0o777, target: target})
	case strings.Contains(f.Name, " ! "):
		name, _, _ := strings.Cut(f.Name, " ! ")
		h.put(name, &node{mode: 0o444, unread: true})
	case nodeName.MatchString(f.Name):
		m := nodeName.FindStringSubmatch(f.Name)
		mode := fs.ModeDevice | 0o666
		if m[2] == "c" {
			mode |= fs.ModeCharDevice
		}
		major, _ := strconv.ParseUint(m[3], 10, 32)
		minor, _ := strconv.ParseUint(m[4], 10, 32)
		h.put(m[1], &node{mode: mode, rdev: unix.Mkdev(uint32(major), uint32(minor))})
	case strings.HasSuffix(f.Name, "/"):
		h.put(strings.TrimSuffix(f.Name, "/"), h.newDir())
	default:
		h.put(f.Name, &node{mode: 0o444, data: f.Data})
	}
}

// put stores n at a path, and creates missing directories.
func (h *Host) put(name string, n *node) {
	dir := h.root
	parts := strings.Split(name, "/")
	for _, part := range parts[:len(parts)-1] {
		if dir.children[part] == nil {
			dir.children[part] = h.newDir()
		}
		dir = dir.children[part]
	}
	dir.children[parts[len(parts)-1]] = n
}

// eachEntry calls f for each entry except non-empty directories, in order.
func (h *Host) eachEntry(f func(e entry)) {
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
	walk("", h.root)
}

// remove removes a path, and the parent directories below sys/devices that are empty afterwards.
func (h *Host) remove(name string) {
	for name != "." && name != "" {
		parent := h.find(path.Dir(name))
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
func (h *Host) find(name string) *node {
	n := h.root
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

// VanishFunction removes a PCI function from the machine, together with the given nodes. It reports
// whether the function was present.
func (h *Host) VanishFunction(address string, nodes ...string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.gone[address] != nil {
		return false
	}
	if f := h.functions[address]; f != nil {
		h.removeAllVirtual(f)
		h.bind(f, "")
		delete(h.functions, address)
	}
	var gone []entry
	h.eachEntry(func(e entry) {
		if has(e.path, address) || has(e.node.target, address) || slices.Contains(nodes, e.path) {
			gone = append(gone, e)
		}
	})
	for _, e := range gone {
		h.remove(e.path)
	}
	if len(gone) > 0 {
		h.gone[address] = gone
	}
	return len(gone) > 0
}

// has reports whether a path contains an element.
func has(name, element string) bool { return strings.Contains("/"+name+"/", "/"+element+"/") }

// ReturnFunction puts a vanished function back, with the content of its files passed through
// change. It reports whether the function had vanished.
func (h *Host) ReturnFunction(address string, change func(name string, data []byte) []byte) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	gone := h.gone[address]
	delete(h.gone, address)
	for _, e := range gone {
		if change != nil && e.node.mode.IsRegular() {
			e.node.data = change(e.path, bytes.Clone(e.node.data))
		}
		h.put(e.path, e.node)
	}
	for _, f := range h.driven {
		if f.Address == address && gone != nil {
			h.probeAnew(f)
		}
	}
	return gone != nil
}

// ExchangeFunctions exchanges the class devices and nodes of two vanished functions, which appear
// when the functions return: the kernel numbers class devices in the order of their discovery by
// the driver.
func (h *Host) ExchangeFunctions(one, other, class string, nodes ...string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	numbered := func(e entry) bool { return has(e.path, class) || slices.Contains(nodes, e.path) }
	moved := func(from, to string) (all []entry) {
		for _, e := range h.gone[from] {
			if numbered(e) {
				n := *e.node
				n.target = h.at(from, to, n.target)
				all = append(all, entry{h.at(from, to, e.path), &n})
			}
		}
		return all
	}
	toOne, toOther := moved(other, one), moved(one, other)
	for address, with := range map[string][]entry{one: toOne, other: toOther} {
		h.gone[address] = append(slices.DeleteFunc(h.gone[address], numbered), with...)
	}
}

// at translates a path below one function to the corresponding path below another.
func (h *Host) at(from, to, name string) string {
	for _, e := range h.gone[from] {
		for _, f := range h.gone[to] {
			if e.path == "sys/bus/pci/devices/"+from && f.path == "sys/bus/pci/devices/"+to {
				below := func(target string) string { return strings.TrimPrefix(target, "../../../") }
				return strings.Replace(name, below(e.node.target), below(f.node.target), 1)
			}
		}
	}
	return name
}

// HasVanished reports whether a function has vanished.
func (h *Host) HasVanished(address string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.gone[address] != nil
}

// ChangeFiles changes the content of the files whose path contains an element.
func (h *Host) ChangeFiles(element string, change func(name string, data []byte) []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.eachEntry(func(e entry) {
		if has(e.path, element) && e.node.mode.IsRegular() {
			e.node.data = change(e.path, bytes.Clone(e.node.data))
		}
	})
}

// MakeUnreadable makes files with part in their path unreadable; "" makes all files readable again.
func (h *Host) MakeUnreadable(part string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sick = part
}

// HangReads makes reads of files with part in their path hang until Release.
func (h *Host) HangReads(part string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hang, h.hanged = part, make(chan struct{})
}

// Release lets hanging reads continue.
func (h *Host) Release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.hanged != nil {
		close(h.hanged)
		h.hang, h.hanged = "", nil
	}
}

// Node returns the numbers of a device node, and whether the node exists.
func (h *Host) Node(name string) (numbers string, found bool) {
	info, err := h.Stat(strings.TrimPrefix(name, "/"))
	if err != nil {
		return "", false
	}
	stat, is := info.Sys().(*syscall.Stat_t)
	if !is {
		return "", false
	}
	return fmt.Sprintf("%d:%d", unix.Major(stat.Rdev), unix.Minor(stat.Rdev)), true
}

// walk returns the node of a path, and follows links.
func (h *Host) walk(op, name string, last bool) (*node, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: op, Path: name, Err: fs.ErrInvalid}
	}
	whole, rest, dir := name, name, h.root
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
			rest, dir = whole, h.root
			continue
		}
		rest, dir = after, n
	}
	return dir, nil
}

// Open implements [fs.FS].
func (h *Host) Open(name string) (fs.File, error) {
	h.mu.Lock()
	n, err := h.walk("open", name, true)
	h.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return &file{host: h, name: name, node: n}, nil
}

// ReadFile implements [fs.ReadFileFS].
func (h *Host) ReadFile(name string) ([]byte, error) {
	h.mu.Lock()
	n, err := h.walk("open", name, true)
	h.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return h.read(name, n)
}

// read returns the content of a file, and may hang.
func (h *Host) read(name string, n *node) ([]byte, error) {
	h.mu.Lock()
	hanged := h.hanged
	hangs := h.hang != "" && strings.Contains(name, h.hang)
	h.mu.Unlock()
	if hangs {
		<-hanged
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.awaitWriter(name)
	switch {
	case n.unread, h.sick != "" && strings.Contains(name, h.sick):
		return nil, &fs.PathError{Op: "read", Path: name, Err: syscall.EIO}
	case n.mode.IsDir():
		return nil, &fs.PathError{Op: "read", Path: name, Err: syscall.EISDIR}
	case !n.mode.IsRegular():
		return nil, &fs.PathError{Op: "read", Path: name, Err: syscall.EINVAL}
	}
	return bytes.Clone(n.data), nil
}

// ReadDir implements [fs.ReadDirFS].
func (h *Host) ReadDir(name string) (entries []fs.DirEntry, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := h.walk("open", name, true)
	if err != nil {
		return nil, err
	}
	if n.children == nil {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: syscall.ENOTDIR}
	}
	for _, base := range slices.Sorted(maps.Keys(n.children)) {
		entries = append(entries, fs.FileInfoToDirEntry(info{base, n.children[base]}))
	}
	return entries, nil
}

// Stat implements [fs.StatFS].
func (h *Host) Stat(name string) (fs.FileInfo, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := h.walk("stat", name, true)
	if err != nil {
		return nil, err
	}
	return info{path.Base(name), n}, nil
}

// Lstat implements [fs.ReadLinkFS].
func (h *Host) Lstat(name string) (fs.FileInfo, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := h.walk("lstat", name, false)
	if err != nil {
		return nil, err
	}
	return info{path.Base(name), n}, nil
}

// ReadLink implements [fs.ReadLinkFS].
func (h *Host) ReadLink(name string) (string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := h.walk("readlink", name, false)
	if err != nil {
		return "", err
	}
	if n.mode&fs.ModeSymlink == 0 {
		return "", &fs.PathError{Op: "readlink", Path: name, Err: syscall.EINVAL}
	}
	return n.target, nil
}

// file is an open file.
type file struct {
	host   *Host
	name   string
	node   *node
	reader *bytes.Reader
	listed bool
}

func (f *file) Stat() (fs.FileInfo, error) { return info{path.Base(f.name), f.node}, nil }
func (f *file) Close() error               { return nil }

func (f *file) Read(into []byte) (int, error) {
	if f.reader == nil {
		data, err := f.host.read(f.name, f.node)
		if err != nil {
			return 0, err
		}
		f.reader = bytes.NewReader(data)
	}
	return f.reader.Read(into)
}

// ReadDir implements [fs.ReadDirFile].
func (f *file) ReadDir(n int) ([]fs.DirEntry, error) {
	if f.listed && n > 0 {
		return nil, io.EOF
	}
	f.listed = true
	return f.host.ReadDir(f.name)
}

// info is the [fs.FileInfo] of a node.
type info struct {
	name string
	node *node
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return int64(len(i.node.data)) }
func (i info) Mode() fs.FileMode  { return i.node.mode }
func (i info) ModTime() time.Time { return time.Time{} }
func (i info) IsDir() bool        { return i.node.mode.IsDir() }

// Sys returns the same type as a Linux file system, for the numbers of device nodes and the inode
// numbers of directories.
func (i info) Sys() any {
	if i.node.mode&fs.ModeDevice == 0 && !i.node.mode.IsDir() {
		return nil
	}
	return &syscall.Stat_t{Rdev: i.node.rdev, Ino: i.node.inode}
}
