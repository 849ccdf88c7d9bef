// Package disk is a model of a disk for simulations: files and directories in
// memory that lose at a loss of power what was not synchronised, fill up, fail
// and become read-only. A process has it through a view of its own, which ends
// with the process. It is no part of the product.
package disk

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"chandler.dev/internal/disk"
)

// Op is one thing that is done to a disk.
type Op string

// The operations, as faults see them.
const (
	MakeDir Op = "mkdir"
	Create  Op = "create"
	Write   Op = "write"
	Chmod   Op = "chmod"
	Sync    Op = "sync"
	Rename  Op = "rename"
	Remove  Op = "remove"
	SyncDir Op = "sync directory"
	Read    Op = "read"
	List    Op = "list"
	Stat    Op = "stat"
)

// Changes reports whether the operation changes what is on the disk.
func (o Op) Changes() bool { return o != Read && o != List && o != Stat && o != Sync && o != SyncDir }

// Fault is asked before each operation of any view. What it returns is the
// operation's error if it is not nil; a write with an error leaves a part of
// what was to be written.
type Fault func(op Op, name string) error

// Disk is a disk. Directories are made durable at once: the file systems that
// nodes have commit them with the first file that is synchronised in them.
type Disk struct {
	mu      sync.Mutex
	dirs    map[string]*dir
	serial  int
	fault   Fault
	log     func(string)
	lost    int // how often something was lost with the power
	Syncs   int // how often something was synchronised
	Changes int // operations that changed something
}

// dir is a directory.
type dir struct {
	mode    fs.FileMode
	files   map[string]*file
	pending map[string][]*file // what each name may be after a loss of power: as it is durably, and after each change since
}

// file is what a name stands for. It is never of two names.
type file struct {
	data   []byte
	synced []byte // nil until it was synchronised
	mode   fs.FileMode
	time   time.Time
}

// New returns an empty disk. What is done to it is told to log, if that is not
// nil.
func New(log func(string)) *Disk {
	if log == nil {
		log = func(string) {}
	}
	return &Disk{dirs: map[string]*dir{"/": newDir(0o755)}, log: log}
}

func newDir(mode fs.FileMode) *dir {
	return &dir{mode: mode, files: make(map[string]*file), pending: make(map[string][]*file)}
}

// SetFault has a fault asked before each operation from now on; nil ends it.
func (d *Disk) SetFault(f Fault) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fault = f
}

// set makes f the file of a name, nil for none.
func (d *dir) set(name string, f *file) {
	if _, changed := d.pending[name]; !changed {
		d.pending[name] = []*file{d.files[name]}
	}
	d.pending[name] = append(d.pending[name], f)
	if f == nil {
		delete(d.files, name)
	} else {
		d.files[name] = f
	}
}

// LosePower makes the disk what it may be after a loss of power: each name is
// what it durably was or what any change since made it, and the content of a file
// that was not synchronised is there, in part, as zeros or not at all. Of volatile
// directories nothing is left. It reports whether anything was lost.
func (d *Disk) LosePower(random *rand.Rand, volatile ...string) (lost bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(d.dirs)) {
		if isBelow(name, volatile) {
			lost = lost || len(d.dirs[name].files) > 0
			delete(d.dirs, name)
			continue
		}
		in := d.dirs[name]
		for _, base := range slices.Sorted(maps.Keys(in.pending)) {
			states := in.pending[base]
			was := states[random.IntN(len(states))]
			if was == in.files[base] {
				continue
			}
			lost = true
			if was == nil {
				delete(in.files, base)
			} else {
				in.files[base] = was
			}
		}
		in.pending = make(map[string][]*file)
		for _, base := range slices.Sorted(maps.Keys(in.files)) {
			lost = in.files[base].losePower(random) || lost
		}
	}
	if lost {
		d.lost++
	}
	return lost
}

// losePower makes the content what it may be, and reports whether that is less.
func (f *file) losePower(random *rand.Rand) (lost bool) {
	if f.synced != nil && bytes.Equal(f.synced, f.data) {
		return false
	}
	switch random.IntN(4) {
	case 0:
	case 1:
		f.data, lost = bytes.Clone(f.synced), true
	case 2:
		f.data, lost = make([]byte, len(f.data)), true
	case 3:
		f.data, lost = bytes.Clone(f.data[:random.IntN(len(f.data)+1)]), true
	}
	f.synced = append([]byte{}, f.data...)
	return lost
}

// Reboot makes the disk what it is after a shutdown in good order: all is there
// but volatile directories.
func (d *Disk) Reboot(volatile ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, in := range d.dirs {
		if isBelow(name, volatile) {
			delete(d.dirs, name)
			continue
		}
		in.pending = make(map[string][]*file)
		for _, f := range in.files {
			f.synced = append([]byte{}, f.data...)
		}
	}
}

// isBelow reports whether a path is one of the directories or below one.
func isBelow(name string, dirs []string) bool {
	return slices.ContainsFunc(dirs, func(dir string) bool { return name == dir || strings.HasPrefix(name, strings.TrimSuffix(dir, "/")+"/") })
}

// Wipe removes a directory with all that is in it, as people do.
func (d *Disk) Wipe(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.dirs, func(dir string, _ *dir) bool { return isBelow(dir, []string{name}) })
}

// Damage changes the content of a file, as a bit that flips does. It reports
// whether there is such a file.
func (d *Disk) Damage(name string, to func([]byte) []byte) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	f := d.find(name)
	if f == nil {
		return false
	}
	f.data = to(bytes.Clone(f.data))
	f.synced = append([]byte{}, f.data...)
	return true
}

// Delete removes a file, as people do. It reports whether there was one.
func (d *Disk) Delete(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	in, base := d.dirs[path.Dir(name)], path.Base(name)
	if in == nil || in.files[base] == nil {
		return false
	}
	delete(in.files, base)
	delete(in.pending, base)
	return true
}

func (d *Disk) find(name string) *file {
	if in := d.dirs[path.Dir(name)]; in != nil {
		return in.files[path.Base(name)]
	}
	return nil
}

// Files returns the names of all files below a directory, in order.
func (d *Disk) Files(below string) (names []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for dir, in := range d.dirs {
		if isBelow(dir, []string{below}) {
			for base := range in.files {
				names = append(names, path.Join(dir, base))
			}
		}
	}
	slices.Sort(names)
	return names
}

// Content returns what is in a file, and whether it is there.
func (d *Disk) Content(name string) ([]byte, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := d.find(name); f != nil {
		return bytes.Clone(f.data), true
	}
	return nil, false
}

// View is the disk as one process has it.
type View struct {
	disk *Disk
	gate Fault
}

var _ disk.FS = View{}

// View returns the disk for a process. Each of its operations is put to the
// gate first, which tells when the process is dead; it may be nil.
func (d *Disk) View(gate Fault) View { return View{d, gate} }

// begin locks the disk, unless the operation fails.
func (v View) begin(op Op, name string) error {
	if v.gate != nil {
		if err := v.gate(op, name); err != nil {
			return &fs.PathError{Op: string(op), Path: name, Err: err}
		}
	}
	v.disk.mu.Lock()
	fault := v.disk.fault
	v.disk.mu.Unlock()
	if fault != nil {
		if err := fault(op, name); err != nil {
			v.disk.log(fmt.Sprintf("%s %s: %v", op, name, err))
			return &fs.PathError{Op: string(op), Path: name, Err: err}
		}
	}
	if op != Read && op != List && op != Stat && op != Chmod {
		v.disk.log(fmt.Sprintf("%s %s", op, name))
	}
	v.disk.mu.Lock()
	switch {
	case op == Sync || op == SyncDir:
		v.disk.Syncs++
	case op.Changes():
		v.disk.Changes++
	}
	return nil
}

func (v View) end() { v.disk.mu.Unlock() }

func missing(op Op, name string) error {
	return &fs.PathError{Op: string(op), Path: name, Err: syscall.ENOENT}
}

// MkdirAll implements [disk.FS].
func (v View) MkdirAll(name string, mode fs.FileMode) error {
	v.disk.mu.Lock()
	_, there := v.disk.dirs[name]
	v.disk.mu.Unlock()
	if there {
		return nil
	}
	if err := v.begin(MakeDir, name); err != nil {
		return err
	}
	defer v.end()
	for made := name; v.disk.dirs[made] == nil; made = path.Dir(made) {
		if v.disk.find(made) != nil {
			return &fs.PathError{Op: string(MakeDir), Path: made, Err: syscall.ENOTDIR}
		}
		v.disk.dirs[made] = newDir(mode)
	}
	return nil
}

// CreateTemp implements [disk.FS].
func (v View) CreateTemp(in, pattern string) (disk.File, error) {
	if err := v.begin(Create, path.Join(in, pattern)); err != nil {
		return nil, err
	}
	defer v.end()
	dir := v.disk.dirs[in]
	if dir == nil {
		return nil, missing(Create, in)
	}
	v.disk.serial++
	name := strings.Replace(pattern, "*", fmt.Sprint(v.disk.serial), 1)
	f := &file{mode: 0o600, time: time.Now()}
	dir.set(name, f)
	return &open{View: v, name: path.Join(in, name), file: f}, nil
}

// Rename implements [disk.FS].
func (v View) Rename(from, to string) error {
	if err := v.begin(Rename, to); err != nil {
		return err
	}
	defer v.end()
	f := v.disk.find(from)
	if f == nil {
		return missing(Rename, from)
	}
	if v.disk.dirs[path.Dir(to)] == nil {
		return missing(Rename, to)
	}
	v.disk.dirs[path.Dir(from)].set(path.Base(from), nil)
	v.disk.dirs[path.Dir(to)].set(path.Base(to), f)
	return nil
}

// Remove implements [disk.FS].
func (v View) Remove(name string) error {
	if err := v.begin(Remove, name); err != nil {
		return err
	}
	defer v.end()
	if v.disk.find(name) != nil {
		v.disk.dirs[path.Dir(name)].set(path.Base(name), nil)
		return nil
	}
	dir := v.disk.dirs[name]
	if dir == nil {
		return missing(Remove, name)
	}
	if len(dir.files) > 0 || slices.ContainsFunc(slices.Collect(maps.Keys(v.disk.dirs)), func(other string) bool { return path.Dir(other) == name && other != name }) {
		return &fs.PathError{Op: string(Remove), Path: name, Err: syscall.ENOTEMPTY}
	}
	delete(v.disk.dirs, name)
	return nil
}

// RemoveAll implements [disk.FS].
func (v View) RemoveAll(name string) error {
	if len(path.Base(name)) > 255 {
		return &fs.PathError{Op: string(Remove), Path: name, Err: syscall.ENAMETOOLONG}
	}
	if err := v.begin(Remove, name); err != nil {
		return err
	}
	defer v.end()
	if v.disk.find(name) != nil {
		v.disk.dirs[path.Dir(name)].set(path.Base(name), nil)
	}
	maps.DeleteFunc(v.disk.dirs, func(dir string, _ *dir) bool { return isBelow(dir, []string{name}) })
	return nil
}

// SyncDir implements [disk.FS].
func (v View) SyncDir(name string) error {
	if err := v.begin(SyncDir, name); err != nil {
		return err
	}
	defer v.end()
	dir := v.disk.dirs[name]
	if dir == nil {
		return missing(SyncDir, name)
	}
	dir.pending = make(map[string][]*file)
	return nil
}

// ReadFile implements [disk.FS].
func (v View) ReadFile(name string) ([]byte, error) {
	if err := v.begin(Read, name); err != nil {
		return nil, err
	}
	defer v.end()
	f := v.disk.find(name)
	if f == nil {
		return nil, missing(Read, name)
	}
	return append([]byte{}, f.data...), nil
}

// ReadDir implements [disk.FS].
func (v View) ReadDir(name string) (entries []fs.DirEntry, err error) {
	if err := v.begin(List, name); err != nil {
		return nil, err
	}
	defer v.end()
	dir := v.disk.dirs[name]
	if dir == nil {
		return nil, missing(List, name)
	}
	for base, f := range dir.files {
		entries = append(entries, fs.FileInfoToDirEntry(info{base, f.mode, int64(len(f.data)), f.time}))
	}
	for other, d := range v.disk.dirs {
		if path.Dir(other) == name && other != "/" {
			entries = append(entries, fs.FileInfoToDirEntry(info{path.Base(other), d.mode | fs.ModeDir, 0, time.Time{}}))
		}
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return entries, nil
}

// Stat implements [disk.FS].
func (v View) Stat(name string) (fs.FileInfo, error) {
	if len(path.Base(name)) > 255 {
		return nil, &fs.PathError{Op: string(Stat), Path: name, Err: syscall.ENAMETOOLONG}
	}
	if err := v.begin(Stat, name); err != nil {
		return nil, err
	}
	defer v.end()
	if f := v.disk.find(name); f != nil {
		return info{path.Base(name), f.mode, int64(len(f.data)), f.time}, nil
	}
	if dir := v.disk.dirs[name]; dir != nil {
		return info{path.Base(name), dir.mode | fs.ModeDir, 0, time.Time{}}, nil
	}
	return nil, missing(Stat, name)
}

// Lstat implements [disk.FS]; there are no links.
func (v View) Lstat(name string) (fs.FileInfo, error) { return v.Stat(name) }

// open is a file that is being written.
type open struct {
	View
	name   string
	file   *file
	closed bool
}

// Name implements [disk.File].
func (o *open) Name() string { return o.name }

// Write implements [disk.File].
func (o *open) Write(data []byte) (int, error) {
	if err := o.begin(Write, o.name); err != nil {
		if errors.Is(err, ErrDead) {
			return 0, err
		}
		o.disk.mu.Lock()
		defer o.disk.mu.Unlock()
		part := data[:len(data)/2]
		o.file.data = append(o.file.data, part...)
		return len(part), err
	}
	defer o.end()
	o.file.data = append(o.file.data, data...)
	return len(data), nil
}

// Chmod implements [disk.File].
func (o *open) Chmod(mode fs.FileMode) error {
	if err := o.begin(Chmod, o.name); err != nil {
		return err
	}
	defer o.end()
	o.file.mode = mode
	return nil
}

// Sync implements [disk.File].
func (o *open) Sync() error {
	if err := o.begin(Sync, o.name); err != nil {
		return err
	}
	defer o.end()
	o.file.synced = append([]byte{}, o.file.data...)
	return nil
}

// Close implements [disk.File].
func (o *open) Close() error {
	if o.closed {
		return &fs.PathError{Op: "close", Path: o.name, Err: fs.ErrClosed}
	}
	o.closed = true
	return nil
}

// ErrDead is what the operations of a process meet that was killed: they do
// nothing any more.
var ErrDead = errors.New("the process was killed")

// info describes a file.
type info struct {
	name string
	mode fs.FileMode
	size int64
	time time.Time
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return i.size }
func (i info) Mode() fs.FileMode  { return i.mode }
func (i info) ModTime() time.Time { return i.time }
func (i info) IsDir() bool        { return i.mode.IsDir() }
func (i info) Sys() any           { return nil }
