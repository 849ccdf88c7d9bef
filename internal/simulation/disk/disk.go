// Package disk is a model of a disk for simulations: files and directories in
// memory that lose at a loss of power what was not synchronised, fill up, fail
// and become read-only. A process has it through a view of its own, which ends
// with the process. It is no part of the product.
package disk

import (
	"bytes"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"sync"
	"time"
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

// Fault is asked before each operation of any view. If it returns an
// error, that is the operation's; a write with an error leaves a part of what was
// to be written.
type Fault func(op Op, name string) error

// Disk is a disk. It keeps no more than POSIX promises, and writes nothing back by
// itself: a name is durable once its directory was synchronised, and a directory
// by its own name, as files are.
type Disk struct {
	mu      sync.Mutex
	dirs    map[string]*dir
	removed map[string]*dir // durable directories that were removed since, which may be there again
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
	durable bool // its name in the directory that it is in
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

// New returns a disk that has some directories and those that they are in, durably.
// Log is told what is done to it, if it is not nil.
func New(log func(string), dirs ...string) *Disk {
	if log == nil {
		log = func(string) {}
	}
	d := &Disk{dirs: map[string]*dir{"/": newDir(0o755)}, removed: make(map[string]*dir), log: log}
	for _, name := range dirs {
		_ = d.make(name, 0o755) // no file is in the way
	}
	for _, in := range d.dirs {
		in.durable = true
	}
	return d
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
	lost = d.loseDirs(random)
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

// loseDirs makes the directories what they may be, and reports whether any was
// lost or is there again.
func (d *Disk) loseDirs(random *rand.Rand) (lost bool) {
	for _, name := range slices.Sorted(maps.Keys(d.dirs)) {
		if in := d.dirs[name]; in != nil && !in.durable && random.IntN(2) == 0 {
			lost = true
			d.remove(name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.removed)) {
		if d.dirs[name] == nil && d.dirs[path.Dir(name)] != nil && random.IntN(2) == 0 {
			lost = true
			d.dirs[name] = d.removed[name]
		}
	}
	for _, in := range d.dirs {
		in.durable = true
	}
	clear(d.removed)
	return lost
}

// remove removes a directory with all that is in it. Its durable part may be
// there again after a loss of power.
func (d *Disk) remove(name string) {
	for below, in := range d.dirs {
		if !isBelow(below, []string{name}) {
			continue
		}
		if in.durable {
			for base := range in.files {
				in.set(base, nil)
			}
			d.removed[below] = in
		}
		delete(d.dirs, below)
	}
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
	clear(d.removed)
	for name, in := range d.dirs {
		if isBelow(name, volatile) {
			delete(d.dirs, name)
			continue
		}
		in.durable = true
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
