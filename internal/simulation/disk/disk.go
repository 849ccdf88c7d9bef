// Package disk is a model of a disk for simulations: files and directories in memory. At a power
// failure the disk loses unsynchronized data. It can fill up, fail and become read-only. Each
// process has its own view of the disk, which ends with the process. The package is not part of the
// product.
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

// Op is an operation on a disk.
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

// ChangesDisk reports whether the operation changes the content of the disk.
func (o Op) ChangesDisk() bool {
	return o != Read && o != List && o != Stat && o != Sync && o != SyncDir
}

// Fault is called before each operation of any view. If it returns an error, the operation fails
// with the error. A failed write writes a part of the data.
type Fault func(op Op, name string) error

// Disk is a disk. It guarantees no more than POSIX, and writes nothing back by itself: a name is
// durable once its directory was synchronized, and, like files, a directory by its own name.
type Disk struct {
	mu      sync.Mutex
	dirs    map[string]*dir
	removed map[string]*dir // durable directories that were removed since; they may reappear
	serial  int
	fault   Fault
	log     func(string)
	lost    int // number of losses at a power failure
	Syncs   int // number of synchronizations
	Changes int // number of operations with a change
}

// dir is a directory.
type dir struct {
	mode    fs.FileMode
	durable bool // the name in the parent directory is durable
	files   map[string]*file
	pending map[string][]*file // possible files of each name after a power failure: the durable file, and the file after each later change
}

// file is the target of a name. No two names share a file.
type file struct {
	data   []byte
	synced []byte // nil until the first synchronization
	mode   fs.FileMode
	time   time.Time
}

// New returns a disk with some directories and their parents, all durable. log receives the
// operations, if not nil.
func New(log func(string), dirs ...string) *Disk {
	if log == nil {
		log = func(string) {}
	}
	d := &Disk{dirs: map[string]*dir{"/": newDir(0o755)}, removed: make(map[string]*dir), log: log}
	for _, name := range dirs {
		_ = d.make(name, 0o755) // no file has the name
	}
	for _, in := range d.dirs {
		in.durable = true
	}
	return d
}

func newDir(mode fs.FileMode) *dir {
	return &dir{mode: mode, files: make(map[string]*file), pending: make(map[string][]*file)}
}

// SetFault sets the fault for each operation from now on; nil removes the fault.
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

// LosePower changes the disk to a possible state after a power failure. Each name is in its durable
// state or in the state after any later change. Unsynchronized content survives, survives in part,
// becomes zeros or is lost. Volatile directories are lost. LosePower reports whether anything was
// lost.
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

// loseDirs changes the directories to a possible state, and reports whether any directory was lost
// or has reappeared.
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

// remove removes a directory with its content. The durable part may reappear after a power failure.
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

// losePower changes the content to a possible state, and reports whether any was lost.
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

// Reboot changes the disk to the state after an orderly shutdown: everything survives except
// volatile directories.
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

// WipeDir removes a directory with its content, as an administrator may do.
func (d *Disk) WipeDir(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.dirs, func(dir string, _ *dir) bool { return isBelow(dir, []string{name}) })
}

// DamageFile changes the content of a file, like a flipped bit. It reports whether the file exists.
func (d *Disk) DamageFile(name string, to func([]byte) []byte) bool {
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

// AddFile adds an empty file and its directories, all durable, if there is no such file. It never
// fails and is not logged.
func (d *Disk) AddFile(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.find(name) != nil {
		return
	}
	_ = d.make(path.Dir(name), 0o755) // no file has the name
	for dir := path.Dir(name); !d.dirs[dir].durable; dir = path.Dir(dir) {
		d.dirs[dir].durable = true
	}
	d.dirs[path.Dir(name)].files[path.Base(name)] = &file{mode: 0o600, synced: []byte{}, time: time.Now()}
}

// Delete removes a file, as an administrator may do. It reports whether the file existed.
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

// Files returns the names of all files below a directory, sorted.
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

// FileContent returns the content of a file, and whether the file exists.
func (d *Disk) FileContent(name string) ([]byte, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := d.find(name); f != nil {
		return bytes.Clone(f.data), true
	}
	return nil, false
}
