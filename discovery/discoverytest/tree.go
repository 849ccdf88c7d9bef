package discoverytest

import (
	"bytes"
	"cmp"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Tree is a host's file system in memory. A Tree is immutable: its methods return another
// tree, which shares all but the directories on the path. So a change is cheap, and a scan of a
// tree needs no system call. Paths are resolved as in package hostfs: no link leads out of the
// tree.
type Tree struct {
	root *entry

	seen *sync.Map // the accessed entries, nil if accesses are not recorded
}

var (
	_ fs.ReadLinkFS = &Tree{}
	_ fs.ReadDirFS  = &Tree{}
	_ fs.StatFS     = &Tree{}
)

// ChangingTree is the file system of a host that changes: the present tree of several.
type ChangingTree struct{ atomic.Pointer[Tree] }

var (
	_ fs.ReadLinkFS = &ChangingTree{}
	_ fs.ReadDirFS  = &ChangingTree{}
	_ fs.StatFS     = &ChangingTree{}
)

// Open implements [fs.FS].
func (c *ChangingTree) Open(name string) (fs.File, error) { return c.Load().Open(name) }

// Stat implements [fs.StatFS].
func (c *ChangingTree) Stat(name string) (fs.FileInfo, error) { return c.Load().Stat(name) }

// Lstat implements [fs.ReadLinkFS].
func (c *ChangingTree) Lstat(name string) (fs.FileInfo, error) { return c.Load().Lstat(name) }

// ReadLink implements [fs.ReadLinkFS].
func (c *ChangingTree) ReadLink(name string) (string, error) { return c.Load().ReadLink(name) }

// ReadDir implements [fs.ReadDirFS].
func (c *ChangingTree) ReadDir(name string) ([]fs.DirEntry, error) { return c.Load().ReadDir(name) }

// entry is a file, a directory, a link or a device node of a tree.
type entry struct {
	name    string // the last element of its path
	mode    fs.FileMode
	data    []byte            // of a file
	target  string            // of a link
	entries map[string]*entry // of a directory
	listed  []fs.DirEntry     // of a directory, in name order
	sys     any               // of a device node: its numbers in the form of [fs.FileInfo]
}

// ReadTree copies a file system into memory. It opens no device nodes. An unreadable directory
// becomes an empty directory.
func ReadTree(fsys fs.FS) (*Tree, error) {
	root, err := readEntry(fsys, ".")
	return &Tree{root: root}, err
}

func readEntry(fsys fs.FS, name string) (*entry, error) {
	info, err := fs.Lstat(fsys, name)
	if err != nil {
		return nil, err
	}
	e := &entry{name: path.Base(name), mode: info.Mode()}
	switch {
	case e.mode.IsRegular():
		e.data, err = fs.ReadFile(fsys, name)
	case e.mode&fs.ModeSymlink != 0:
		e.target, err = fs.ReadLink(fsys, name)
	case e.mode.IsDir():
		listed, _ := fs.ReadDir(fsys, name)
		below := make(map[string]*entry, len(listed))
		for _, found := range listed {
			if below[found.Name()], err = readEntry(fsys, path.Join(name, found.Name())); err != nil {
				return nil, err
			}
		}
		e = newDirectory(e.name, e.mode, below)
	default:
		e.sys = info.Sys()
	}
	return e, err
}

// newDirectory returns a directory with the given entries.
func newDirectory(name string, mode fs.FileMode, entries map[string]*entry) *entry {
	listed := make([]fs.DirEntry, 0, len(entries))
	for _, e := range entries {
		listed = append(listed, e)
	}
	slices.SortFunc(listed, func(a, b fs.DirEntry) int { return cmp.Compare(a.Name(), b.Name()) })
	return &entry{name: name, mode: mode, entries: entries, listed: listed}
}

// WithFile returns the tree with a file in place of any entry of the same name. Missing parent
// directories are created.
func (t *Tree) WithFile(name string, data []byte) *Tree {
	return t.with(name, &entry{mode: 0o644, data: data})
}

// WithLink returns the tree with a link in place of any entry of the same name.
func (t *Tree) WithLink(name, target string) *Tree {
	return t.with(name, &entry{mode: fs.ModeSymlink | 0o777, target: target})
}

// WithDirectory returns the tree with an empty directory in place of any entry of the same name.
func (t *Tree) WithDirectory(name string) *Tree {
	return t.with(name, newDirectory("", fs.ModeDir|0o755, nil))
}

// WithoutFile returns the tree without the entry of the given name, including everything below the
// entry.
func (t *Tree) WithoutFile(name string) *Tree { return t.with(name, nil) }

func (t *Tree) with(name string, e *entry) *Tree {
	return &Tree{root: t.root.with(strings.Split(name, "/"), e)}
}

// with returns the directory with leaf at the given path, or without an entry at the path if leaf
// is nil. It does not follow links.
func (e *entry) with(elements []string, leaf *entry) *entry {
	below := make(map[string]*entry, len(e.entries)+1)
	maps.Copy(below, e.entries)
	name := elements[0]
	switch next := below[name]; {
	case len(elements) > 1 && (next == nil || !next.mode.IsDir()):
		below[name] = newDirectory(name, fs.ModeDir|0o755, nil).with(elements[1:], leaf)
	case len(elements) > 1:
		below[name] = next.with(elements[1:], leaf)
	case leaf == nil:
		delete(below, name)
	default:
		named := *leaf
		named.name = name
		below[name] = &named
	}
	return newDirectory(e.name, e.mode, below)
}

// maxLinks is the number of links that the kernel follows in one path (MAXSYMLINKS in
// include/linux/namei.h).
const maxLinks = 40

// find returns the entry of a path. It follows links; a link in the last element only if follow is
// true. No link leads above the root.
func (t *Tree) find(op, name string, follow bool) (*entry, error) {
	failed := func(err error) error { return &fs.PathError{Op: op, Path: name, Err: err} }
	if !fs.ValidPath(name) {
		return nil, failed(fs.ErrInvalid)
	}
	way := []*entry{t.root} // the directories from the root to the current directory
	links := 0
	rest := name
	for rest != "" {
		var element string
		element, rest, _ = strings.Cut(rest, "/")
		here := way[len(way)-1]
		switch {
		case !here.mode.IsDir():
			return nil, failed(syscall.ENOTDIR)
		case element == "" || element == ".":
			continue
		case element == "..":
			way = way[:max(1, len(way)-1)]
			continue
		}
		next := here.entries[element]
		t.markSeen(next)
		switch {
		case next == nil:
			return nil, failed(syscall.ENOENT)
		case next.mode&fs.ModeSymlink == 0 || rest == "" && !follow:
			way = append(way, next)
			continue
		}
		if links++; links > maxLinks {
			return nil, failed(syscall.ELOOP)
		}
		if path.IsAbs(next.target) {
			way = way[:1]
		}
		switch {
		case rest != "":
			rest = next.target + "/" + rest
		case strings.HasSuffix(next.target, "/"):
			rest = next.target + "." // the target must be a directory
		default:
			rest = next.target
		}
	}
	return way[len(way)-1], nil
}

// Open implements [fs.FS].
func (t *Tree) Open(name string) (fs.File, error) {
	e, err := t.find("open", name, true)
	switch {
	case err != nil:
		return nil, err
	case e.mode&fs.ModeDevice != 0:
		return nil, &fs.PathError{Op: "open", Path: name, Err: syscall.ENXIO}
	case e.mode.IsDir():
		t.lookInto(e)
		return &openDirectory{entry: e, path: name}, nil
	}
	return &openFile{*bytes.NewReader(e.data), e}, nil
}

// Stat implements [fs.StatFS].
func (t *Tree) Stat(name string) (fs.FileInfo, error) { return t.info("stat", name, true) }

// Lstat implements [fs.ReadLinkFS].
func (t *Tree) Lstat(name string) (fs.FileInfo, error) { return t.info("lstat", name, false) }

func (t *Tree) info(op, name string, follow bool) (fs.FileInfo, error) {
	e, err := t.find(op, name, follow)
	if err != nil {
		return nil, err
	}
	return entryInfo{e, path.Base(name)}, nil
}

// ReadLink implements [fs.ReadLinkFS].
func (t *Tree) ReadLink(name string) (string, error) {
	e, err := t.find("readlink", name, false)
	if err == nil && e.mode&fs.ModeSymlink == 0 {
		err = &fs.PathError{Op: "readlink", Path: name, Err: syscall.ENOENT} // the error of readlinkat(2) for an open file
	}
	if err != nil {
		return "", err
	}
	return e.target, nil
}

// ReadDir implements [fs.ReadDirFS].
func (t *Tree) ReadDir(name string) ([]fs.DirEntry, error) {
	e, err := t.find("open", name, true)
	if err == nil && !e.mode.IsDir() {
		err = &fs.PathError{Op: "open", Path: name, Err: syscall.ENOTDIR}
	}
	if err != nil {
		return nil, err
	}
	t.lookInto(e)
	return slices.Clone(e.listed), nil
}

func (t *Tree) markSeen(e *entry) {
	if t.seen != nil {
		t.seen.Store(e, true)
	}
}

// lookInto records that the entries of a directory were listed.
func (t *Tree) lookInto(directory *entry) {
	if t.seen != nil {
		for _, e := range directory.entries {
			t.markSeen(e)
		}
	}
}

// FilesRead returns the paths of the files, links and nodes that read accesses: opens, follows,
// inspects or lists. Other files do not affect the result of read.
func (t *Tree) FilesRead(read func(fs.FS)) []string {
	watched := &Tree{root: t.root, seen: &sync.Map{}}
	read(watched)
	return slices.DeleteFunc(t.Files(), func(name string) bool {
		e, err := t.find("lstat", name, false)
		_, seen := watched.seen.Load(e)
		return err == nil && !seen
	})
}

// Files returns the paths of all entries except directories, in order.
func (t *Tree) Files() []string { return t.root.files(nil, "") }

func (e *entry) files(names []string, dir string) []string {
	for _, listed := range e.listed {
		below := e.entries[listed.Name()]
		if name := path.Join(dir, below.name); below.mode.IsDir() {
			names = below.files(names, name)
		} else {
			names = append(names, name)
		}
	}
	return names
}

// Name returns the name of the entry. Name, IsDir, Type and Info implement [fs.DirEntry].
func (e *entry) Name() string               { return e.name }
func (e *entry) IsDir() bool                { return e.mode.IsDir() }
func (e *entry) Type() fs.FileMode          { return e.mode.Type() }
func (e *entry) Info() (fs.FileInfo, error) { return entryInfo{e, e.name}, nil }

// entryInfo is the FileInfo of an entry, with the last element of the path in the call as its name.
type entryInfo struct {
	entry *entry
	name  string
}

func (i entryInfo) Name() string       { return i.name }
func (i entryInfo) Size() int64        { return int64(len(i.entry.data)) }
func (i entryInfo) Mode() fs.FileMode  { return i.entry.mode }
func (i entryInfo) ModTime() time.Time { return time.Time{} }
func (i entryInfo) IsDir() bool        { return i.entry.mode.IsDir() }
func (i entryInfo) Sys() any           { return i.entry.sys }

// openFile is an open file of a tree.
type openFile struct {
	bytes.Reader

	entry *entry
}

func (f *openFile) Stat() (fs.FileInfo, error) { return f.entry.Info() }
func (f *openFile) Close() error               { return nil }

// openDirectory is an open directory of a tree.
type openDirectory struct {
	entry *entry
	path  string
	read  int // the number of entries read
}

func (d *openDirectory) Stat() (fs.FileInfo, error) {
	return entryInfo{d.entry, path.Base(d.path)}, nil
}
func (d *openDirectory) Close() error { return nil }

func (d *openDirectory) Read([]byte) (int, error) {
	return 0, &fs.PathError{Op: "read", Path: d.path, Err: syscall.EISDIR}
}

// ReadDir implements [fs.ReadDirFile].
func (d *openDirectory) ReadDir(n int) ([]fs.DirEntry, error) {
	rest := d.entry.listed[d.read:]
	if n > 0 {
		if len(rest) == 0 {
			return nil, io.EOF
		}
		rest = rest[:min(n, len(rest))]
	}
	d.read += len(rest)
	return slices.Clone(rest), nil
}
