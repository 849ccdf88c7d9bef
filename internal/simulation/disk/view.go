package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"chandler.dev/internal/disk"
)

// View is the disk for one process.
type View struct {
	disk *Disk
	gate Fault
}

var _ disk.FS = View{}

// View returns the disk for a process. Before each operation the view calls the gate, which fails
// for a dead process and may be nil. Faults come first, because they may take time.
func (d *Disk) View(gate Fault) View { return View{d, gate} }

// begin locks the disk, unless the operation fails.
func (v View) begin(op Op, name string) error {
	v.disk.mu.Lock()
	fault := v.disk.fault
	v.disk.mu.Unlock()
	if fault != nil {
		if err := fault(op, name); err != nil {
			v.disk.log(fmt.Sprintf("%s %s: %v", op, name, err))
			return &fs.PathError{Op: string(op), Path: name, Err: err}
		}
	}
	if v.gate != nil {
		if err := v.gate(op, name); err != nil {
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
	case op.ChangesDisk():
		v.disk.Changes++
	}
	return nil
}

func (v View) end() { v.disk.mu.Unlock() }

func missingError(op Op, name string) error {
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
	return v.disk.make(name, mode)
}

// make creates a directory with its parents.
func (d *Disk) make(name string, mode fs.FileMode) error {
	for made := name; d.dirs[made] == nil; made = path.Dir(made) {
		if d.find(made) != nil {
			return &fs.PathError{Op: string(MakeDir), Path: made, Err: syscall.ENOTDIR}
		}
		d.dirs[made] = newDir(mode)
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
		return nil, missingError(Create, in)
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
		return missingError(Rename, from)
	}
	if v.disk.dirs[path.Dir(to)] == nil {
		return missingError(Rename, to)
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
		return missingError(Remove, name)
	}
	if len(dir.files) > 0 || slices.ContainsFunc(slices.Collect(maps.Keys(v.disk.dirs)), func(other string) bool { return path.Dir(other) == name && other != name }) {
		return &fs.PathError{Op: string(Remove), Path: name, Err: syscall.ENOTEMPTY}
	}
	v.disk.remove(name)
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
	v.disk.remove(name)
	return nil
}

// SyncDir implements [disk.FS].
func (v View) SyncDir(name string) error {
	if err := v.begin(SyncDir, name); err != nil {
		return err
	}
	defer v.end()
	synced := v.disk.dirs[name]
	if synced == nil {
		return missingError(SyncDir, name)
	}
	synced.pending = make(map[string][]*file)
	for below, in := range v.disk.dirs {
		in.durable = in.durable || path.Dir(below) == name
	}
	maps.DeleteFunc(v.disk.removed, func(below string, _ *dir) bool { return path.Dir(below) == name })
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
		return nil, missingError(Read, name)
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
		return nil, missingError(List, name)
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
	return nil, missingError(Stat, name)
}

// Lstat implements [disk.FS]; there are no links.
func (v View) Lstat(name string) (fs.FileInfo, error) { return v.Stat(name) }

// open is a file opened for writing.
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

// ErrDead is the error of all operations after the process was killed. They have no effect.
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
