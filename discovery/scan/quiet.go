package scan

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// trace is a host file system that records those answers read by a family that may change without a
// kernel event: health, sensors, nodes in /dev. A family returns the same result for the same host.
// As long as all recorded answers are unchanged and no event arrives, the family need not be read
// again.
type trace struct {
	fsys   fs.FS
	steps  map[string]*traced // by operation and name
	places map[string]bool    // the places in sysfs that were read; see [placeOf]
	mixed  bool               // one step had two different answers
}

// traced is a step and a digest of the answer.
type traced struct {
	operation, name string
	size            int // of the data that was read
	digest          uint64
}

// newTrace returns a trace, and the host with the trace as its file system.
func newTrace(host *discovery.Host) (*trace, *discovery.Host) {
	t := &trace{fsys: host.FS, steps: make(map[string]*traced), places: make(map[string]bool)}
	through := *host
	through.FS = t
	return t, &through
}

var seed = maphash.MakeSeed()

// reportedByEvents lists the attributes whose changes the kernel reports by events, and those that
// never change while the device exists (drivers/pci/pci-sysfs.c, drivers/base/core.c).
var reportedByEvents = map[string]bool{
	"vendor": true, "device": true, "class": true, "modalias": true, "subsystem_vendor": true, "subsystem_device": true,
	"revision": true, "numa_node": true, "max_link_speed": true, "max_link_width": true, "acpi_index": true, "label": true,
	"uevent": true, "dev": true, "sriov_totalvfs": true, "idVendor": true, "idProduct": true,
}

// hasEvents reports whether the kernel reports changes of a step's answer by events. The kernel
// reports added and removed files, directories and links of sysfs, except the links between stacked
// network interfaces.
func hasEvents(op, name string, err error) bool {
	if !strings.HasPrefix(name, "sys/") || strings.Contains(name, "/net/") {
		return false
	}
	return op != "read" || reportedByEvents[path.Base(name)] || errors.Is(err, fs.ErrNotExist)
}

// isUnboundLate reports whether a link is the driver link of a function under a vfio driver. While
// a process has the function open, the kernel removes the link at the beginning of an unbind, and
// sends the event only after the process has closed the function (__device_release_driver in
// drivers/base/dd.c and vfio_unregister_group_dev in drivers/vfio/vfio_main.c). Only since Linux
// 6.6 does an earlier event exist, of the class vfio-dev.
func isUnboundLate(op, name string, answer []string) bool {
	return op == "readlink" && path.Base(name) == "driver" && len(answer) == 1 && discovery.IsVFIO(path.Base(answer[0]))
}

// noteStep records a step.
func (t *trace) noteStep(op, name string, err error, answer ...string) {
	if place := placeOf(name); place != "" && !t.places[place] {
		t.places[strings.Clone(place)] = true
	}
	if hasEvents(op, name, err) && !isUnboundLate(op, name, answer) {
		return
	}
	step := newTraced(op, name, err, answer...)
	if known := t.steps[op+" "+name]; known != nil && *known != step {
		t.mixed = true
	}
	t.steps[op+" "+name] = &step
}

func newTraced(op, name string, err error, answer ...string) traced {
	var hash maphash.Hash
	hash.SetSeed(seed)
	size := 0
	for _, text := range answer {
		_, _ = hash.WriteString(text)
		_ = hash.WriteByte(0)
		size += len(text)
	}
	if err != nil {
		_, _ = hash.WriteString(err.Error())
	}
	return traced{op, name, size, hash.Sum64()}
}

// Open implements [fs.FS].
func (t *trace) Open(name string) (fs.File, error) {
	file, err := t.fsys.Open(name)
	if err != nil {
		t.noteStep("read", name, err, "")
		return nil, err
	}
	return &tracedFile{File: file, trace: t, name: name}, nil
}

// tracedFile notes the data that was read when the file is closed.
type tracedFile struct {
	fs.File

	trace *trace
	name  string
	data  []byte
	err   error
}

// Read implements [fs.File].
func (f *tracedFile) Read(p []byte) (int, error) {
	n, err := f.File.Read(p)
	f.data = append(f.data, p[:n]...)
	if err != nil && !errors.Is(err, io.EOF) {
		f.err = err
	}
	return n, err
}

// Close implements [fs.File].
func (f *tracedFile) Close() error {
	f.trace.noteStep("read", f.name, f.err, string(f.data))
	return f.File.Close()
}

// Stat implements [fs.StatFS].
func (t *trace) Stat(name string) (fs.FileInfo, error) {
	info, err := fs.Stat(t.fsys, name)
	t.noteStep("stat", name, err, kind(info))
	return info, err
}

// Lstat implements [fs.ReadLinkFS].
func (t *trace) Lstat(name string) (fs.FileInfo, error) {
	info, err := fs.Lstat(t.fsys, name)
	t.noteStep("lstat", name, err, kind(info))
	return info, err
}

// ReadLink implements [fs.ReadLinkFS].
func (t *trace) ReadLink(name string) (string, error) {
	target, err := fs.ReadLink(t.fsys, name)
	t.noteStep("readlink", name, err, target)
	return target, err
}

// ReadDir implements [fs.ReadDirFS].
func (t *trace) ReadDir(name string) ([]fs.DirEntry, error) {
	entries, err := fs.ReadDir(t.fsys, name)
	t.noteStep("readdir", name, err, names(entries)...)
	return entries, err
}

// kind returns the attributes of a file that discovery uses: the type and, for a device node, the
// numbers.
func kind(info fs.FileInfo) string {
	if info == nil {
		return ""
	}
	numbers := uint64(0)
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		numbers = stat.Rdev
	}
	return fmt.Sprint(info.Mode().Type(), numbers)
}

func names(entries []fs.DirEntry) []string {
	all := make([]string, len(entries))
	for i, entry := range entries {
		all[i] = entry.Name()
	}
	return all
}

// done returns the steps that differ from another trace's steps, sorted by name. ok is false if the
// steps cannot show whether the host is unchanged.
func (t *trace) done(other *trace) (steps []traced, ok bool) {
	for key, step := range t.steps {
		if other != nil && other.steps[key] != nil && *other.steps[key] == *step {
			continue
		}
		steps = append(steps, *step)
	}
	slices.SortFunc(steps, func(a, b traced) int { return strings.Compare(a.name, b.name) })
	return steps, !t.mixed
}

// stillHolds reports whether the step still has the recorded answer.
func (step traced) stillHolds(host *discovery.Host) bool {
	var answer []string
	var err error
	switch step.operation {
	case "read":
		var data string
		data, err = readUpTo(host.FS, step.name, step.size+1)
		answer = []string{data}
	case "stat":
		var info fs.FileInfo
		info, err = fs.Stat(host.FS, step.name)
		answer = []string{kind(info)}
	case "lstat":
		var info fs.FileInfo
		info, err = fs.Lstat(host.FS, step.name)
		answer = []string{kind(info)}
	case "readlink":
		var target string
		target, err = fs.ReadLink(host.FS, step.name)
		answer = []string{target}
	case "readdir":
		var entries []fs.DirEntry
		entries, err = fs.ReadDir(host.FS, step.name)
		answer = names(entries)
	}
	return step == newTraced(step.operation, step.name, err, answer...)
}

// readUpTo reads at most limit bytes of a file.
func readUpTo(fsys fs.FS, name string, limit int) (string, error) {
	file, err := fsys.Open(name)
	if err != nil {
		return "", err
	}
	defer file.Close()
	data, n := make([]byte, limit), 0
	for n < limit && err == nil {
		var read int
		read, err = file.Read(data[n:])
		n += read
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return string(data[:n]), err
}

// comparison is the result of comparing recorded answers with the host.
type comparison struct {
	quiet bool
	dirs  map[string]dirState // the directories below /dev with compared nodes, by name
}

// dirState identifies the entries of a directory: while the state is the same, no entry was added,
// removed or replaced. The zero value stands for an unknown state.
type dirState struct {
	inode   uint64
	changed time.Time
}

// clockTick exceeds the resolution of file times. A directory that has changed within this time may
// change again without a different time.
const clockTick = time.Second

// stateOf returns the state of a directory, or the zero value.
func stateOf(host *discovery.Host, dir string) dirState {
	info, err := fs.Stat(host.FS, dir)
	if err != nil || info.ModTime().IsZero() || time.Since(info.ModTime()) < clockTick {
		return dirState{}
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return dirState{}
	}
	return dirState{stat.Ino, info.ModTime()}
}

// isQuiet compares the recorded answers for the scan's devices with the host. If only sensor values
// have changed, isQuiet compares the resulting health readings: most changes of sensor values are
// harmless. Nodes in a directory with the state of the last comparison are not read.
func (l familyScan) isQuiet(host *discovery.Host) comparison {
	now := comparison{quiet: true, dirs: make(map[string]dirState)}
	changed := func(step traced) bool { return !now.holds(host, step, l.dirs) }
	if slices.ContainsFunc(l.steps, changed) {
		return comparison{}
	}
	if !slices.ContainsFunc(l.sensors, changed) {
		return now
	}
	health := pci.NewHealthReader(host)
	for function, readings := range l.functions {
		if !slices.Equal(health.OwnFaults(sysfs.At(host.FS, function)), readings) {
			return comparison{}
		}
	}
	return now
}

// holds reports whether the step still has the recorded answer. before contains the states of
// directories at the last comparison.
func (c *comparison) holds(host *discovery.Host, step traced, before map[string]dirState) bool {
	if step.operation != "stat" || !strings.HasPrefix(step.name, "dev/") {
		return step.stillHolds(host)
	}
	dir := path.Dir(step.name)
	state, known := c.dirs[dir]
	if !known {
		state = stateOf(host, dir)
		c.dirs[dir] = state
	}
	if state != (dirState{}) && state == before[dir] {
		return true
	}
	if info, err := fs.Lstat(host.FS, step.name); err == nil && info.Mode()&fs.ModeSymlink != 0 {
		c.dirs[dir] = dirState{} // the target is in another directory
	}
	return step.stillHolds(host)
}

// hasLists reports whether the last scan could read all lists of devices, and no read hangs. Only
// then do events and comparisons show every change.
func (s *scanner) hasLists() bool {
	return s.last != nil && len(s.looks[0].Problems) == 0 && len(*s.hanging.Load()) == 0
}

// compare compares the recorded answers with the host, and returns the number of families with
// changes, which it marks as changed. A family without a complete answer, or with problems, counts
// as changed.
func (s *scanner) compare(ctx context.Context) (changed int) {
	readings := make([]*reading[comparison], len(s.families))
	for i := range s.families {
		l := &s.looks[1+i]
		l.changed = !l.followsEvents() || len(l.Problems) > 0
		if !l.changed && len(l.steps)+len(l.sensors) > 0 {
			readings[i] = begin(s.patient, l.isQuiet)
		}
	}
	for i, r := range readings {
		l := &s.looks[1+i]
		switch {
		case r == nil:
		case !r.waitEnd(ctx):
			l.changed = true
		case !r.found.quiet:
			l.changed = true
		default:
			l.dirs = r.found.dirs
		}
		if l.changed {
			changed++
		}
	}
	return changed
}
