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
	"slices"
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
	files  tree
	gone   map[string][]entry // by PCI address: the entries that vanished with the function
	hanged chan struct{}      // closed when hanging reads continue
	hang   string             // reads of files with this in their path hang
	sick   string             // reads of files with this in their path fail

	// Changed is called, with mu held, after a write has changed something. It must not block.
	Changed func()

	driven    []Function // the functions at boot
	bus       bus
	processes processes
	boots     int
	stuck     chan struct{} // closed when hanging writes continue
}

// New returns the machine of a host recording.
func New(text []byte) *Host {
	h := &Host{gone: make(map[string][]entry)}
	h.bus.files, h.processes.files = &h.files, &h.files
	h.files.root = h.files.newDir()
	for _, f := range txtar.Parse(text).Files {
		h.files.add(f)
	}
	return h
}

// BootID returns the ID of the present boot. All boot IDs have the same length.
func (h *Host) BootID() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return fmt.Sprintf("boot-%02d", h.boots)
}

// VanishFunction removes a PCI function from the machine, together with the given nodes. It reports
// whether the function was present.
func (h *Host) VanishFunction(address string, nodes ...string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.gone[address] != nil {
		return false
	}
	if f := h.bus.functions[address]; f != nil {
		h.bus.removeAllVirtual(f)
		h.bus.bind(f, "")
		delete(h.bus.functions, address)
	}
	var gone []entry
	h.files.eachEntry(func(e entry) {
		if has(e.path, address) || has(e.node.target, address) || slices.Contains(nodes, e.path) {
			gone = append(gone, e)
		}
	})
	for _, e := range gone {
		h.files.remove(e.path)
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
		h.files.put(e.path, e.node)
	}
	for _, f := range h.driven {
		if f.Address == address && gone != nil {
			h.bus.probeAnew(f)
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
	h.files.eachEntry(func(e entry) {
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

// Open implements [fs.FS].
func (h *Host) Open(name string) (fs.File, error) {
	h.mu.Lock()
	n, err := h.files.walk("open", name, true)
	h.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return &file{host: h, name: name, node: n}, nil
}

// ReadFile implements [fs.ReadFileFS].
func (h *Host) ReadFile(name string) ([]byte, error) {
	h.mu.Lock()
	n, err := h.files.walk("open", name, true)
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
	n, err := h.files.walk("open", name, true)
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
	n, err := h.files.walk("stat", name, true)
	if err != nil {
		return nil, err
	}
	return info{path.Base(name), n}, nil
}

// Lstat implements [fs.ReadLinkFS].
func (h *Host) Lstat(name string) (fs.FileInfo, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := h.files.walk("lstat", name, false)
	if err != nil {
		return nil, err
	}
	return info{path.Base(name), n}, nil
}

// ReadLink implements [fs.ReadLinkFS].
func (h *Host) ReadLink(name string) (string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := h.files.walk("readlink", name, false)
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
