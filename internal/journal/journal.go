// Package journal keeps records of changes of the host that last until the next reboot, so that an
// agent that starts after a crash can undo them. A record is on disk before the first change and is
// removed after the last one is undone. The directory belongs on tmpfs: a full disk blocks no
// change, and a reboot removes the records together with the changes. The package does not
// interpret the records' bodies.
package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"chandler.dev/internal/disk"
)

// Record is one change of the host. A record is never modified after a call has passed it to a
// [Journal].
type Record[T any] struct {
	Boot    string   `json:"boot"`              // the kernel's boot ID; the journal sets it
	Trade   string   `json:"trade"`             // the kind of change; the journal sets it
	Group   string   `json:"group"`             // the unit that changes as a whole, and the name of the file
	Silicon string   `json:"silicon,omitempty"` // the physical device
	Devices []string `json:"devices,omitempty"` // the names of the devices
	Body    T        `json:"body"`              // data for the undo of the change
}

// Config is the place of a journal.
type Config struct {
	Files disk.Files
	Dir   string // the directory of all journals of the agent, absolute
	Boot  string // the kernel's boot ID; records of another boot are removed
}

// Earlier describes records of earlier versions of the agent. A journal converts them when it
// opens.
type Earlier[T any] struct {
	Dir string // absolute

	// Convert returns the record for a file, with Boot set. The name is the file's name without
	// ".json". A file without a record and without an error is removed. A file without a record and
	// with an error stays for inspection, and the error is reported. With both, the record is used
	// and the error is reported.
	Convert func(name string, data []byte) (*Record[T], error)

	// Merge returns the record of a group that already has a record, perhaps from another file of
	// the same group. Nil means that the existing record remains unchanged.
	Merge func(there, converted *Record[T]) *Record[T]
}

// Journal has the records of one trade. It keeps the records in memory, too: after Open and
// ReadAgain, the disk is only written.
type Journal[T any] struct {
	// Damaged returns the replacement for the invalid record of a group. If Damaged is nil, or
	// returns nil, the group has no record, and the file stays for inspection. Damaged must be set
	// before the journal is opened.
	Damaged func(group string) *Record[T]

	// Check returns why the body of a record is not valid, nil if valid. Optional. Check must be
	// set before the journal is opened.
	Check func(r *Record[T]) error

	config  Config
	trade   string
	earlier Earlier[T]
	filing  chan struct{} // holds one value while a call reads, writes or removes files; a mutex is never held for so long

	mu        sync.Mutex
	records   map[string]*Record[T] // by group
	unwritten map[string]bool       // groups whose files may be older than the record in memory
	replaced  map[string][]string   // by group, the files of earlier versions that the group's record replaces
	unread    map[string]bool       // files that could not be read
	unlisted  map[string]bool       // directories that could not be listed
	littered  bool                  // the directory may have temporary files
}

// New returns the journal of a trade, without records until [Journal.Open]. A zero Earlier means
// that no earlier version had such records.
func New[T any](config Config, trade string, earlier Earlier[T]) *Journal[T] {
	return &Journal[T]{
		config: config, trade: trade, earlier: earlier, filing: make(chan struct{}, 1),
		records: make(map[string]*Record[T]), unwritten: make(map[string]bool), replaced: make(map[string][]string),
		unread: make(map[string]bool), unlisted: make(map[string]bool),
	}
}

const suffix = ".json"

// Dir returns the directory of the journal's records.
func (j *Journal[T]) Dir() string { return filepath.Join(j.config.Dir, j.trade) }

// File returns the file of a group's record.
func (j *Journal[T]) File(group string) string { return filepath.Join(j.Dir(), group+suffix) }

// Open reads the records of earlier agents. A record of another boot is removed. An invalid file
// stays for inspection and is reported. A directory or file that cannot be read is reported, and
// [Journal.ReadAgain] reads it later. The caller must ensure that no other agent writes to the
// directory.
func (j *Journal[T]) Open() []error {
	problems := []error{j.removeTemporary()}
	_, more := j.readRecords(j.recordDirs())
	return slices.DeleteFunc(append(problems, more...), func(err error) bool { return err == nil })
}

// ReadAgain reads directories and files that could not be read before, and returns the records
// found. unread is true if some still cannot be read.
func (j *Journal[T]) ReadAgain() (found []*Record[T], problems []error, unread bool) {
	j.mu.Lock()
	dirs := slices.DeleteFunc(j.recordDirs(), func(dir string) bool { return !j.unlisted[dir] })
	files := slices.Sorted(maps.Keys(j.unread))
	j.mu.Unlock()
	for _, file := range files {
		r, err := j.read(file)
		problems = append(problems, err)
		if r != nil {
			found = append(found, r)
		}
	}
	more, errs := j.readRecords(dirs)
	found = append(found, more...)
	problems = slices.DeleteFunc(append(problems, errs...), func(err error) bool { return err == nil || errors.Is(err, errUnread) })
	j.mu.Lock()
	defer j.mu.Unlock()
	return found, problems, len(j.unread)+len(j.unlisted) > 0
}

// MayLack reports whether there may be records that could not be listed or read.
func (j *Journal[T]) MayLack() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.unread)+len(j.unlisted) > 0
}

var errUnread = errors.New("the disk does not read it; trying again")

// recordDirs returns the directories with records, the present one first.
func (j *Journal[T]) recordDirs() []string {
	if j.earlier.Dir == "" {
		return []string{j.Dir()}
	}
	return []string{j.Dir(), j.earlier.Dir}
}

// readRecords reads all records of directories.
func (j *Journal[T]) readRecords(dirs []string) (found []*Record[T], problems []error) {
	for _, dir := range dirs {
		entries, err := j.config.Files.ListDir(dir)
		j.mu.Lock()
		delete(j.unlisted, dir)
		if err != nil {
			j.unlisted[dir] = true
		}
		j.mu.Unlock()
		if err != nil {
			problems = append(problems, fmt.Errorf("list the records of %s: %w: %w", j.trade, errUnread, err))
			continue
		}
		for _, entry := range entries {
			name, isRecord := strings.CutSuffix(entry.Name(), suffix)
			if !isRecord || name == "" || name[0] == '.' {
				continue
			}
			r, err := j.read(filepath.Join(dir, entry.Name()))
			problems = append(problems, err)
			if r != nil {
				found = append(found, r)
			}
		}
	}
	return found, problems
}

// read adds the record of a file, nil if there is none.
func (j *Journal[T]) read(file string) (*Record[T], error) {
	defer j.takeTurn()()
	data, err := j.config.Files.Read(file)
	missing := errors.Is(err, fs.ErrNotExist)
	j.mu.Lock()
	delete(j.unread, file)
	if err != nil && !missing {
		j.unread[file] = true
	}
	j.mu.Unlock()
	switch {
	case missing:
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("record %s: %w: %w", file, errUnread, err)
	case filepath.Dir(file) == j.Dir():
		return j.takeOver(file, data)
	}
	return j.convert(file, data)
}

// takeOver adds a record of the present form. The caller has the turn.
func (j *Journal[T]) takeOver(file string, data []byte) (*Record[T], error) {
	group := strings.TrimSuffix(filepath.Base(file), suffix)
	if j.Get(group) != nil {
		return nil, nil // the group was changed again before its old record could be read
	}
	r := new(Record[T])
	err := json.Unmarshal(data, r)
	switch {
	case err == nil && r.Boot != "" && r.Boot != j.config.Boot:
		return nil, j.config.Files.Remove(file)
	case err == nil && (r.Group != group || r.Trade != j.trade):
		err = fmt.Errorf("the record is for group %q of trade %q", r.Group, r.Trade)
	case err == nil && j.Check != nil:
		err = j.Check(r)
	}
	if err == nil {
		j.keepRecord(r)
		return r, nil
	}
	if j.Damaged != nil {
		if r = j.Damaged(group); r != nil {
			r.Boot, r.Trade = j.config.Boot, j.trade
			return r, errors.Join(fmt.Errorf("record %s is not valid: %w", file, err), j.saveRecord(r))
		}
	}
	return nil, fmt.Errorf("record %s is not valid and stays for inspection: %w", file, err)
}

// convert adds a record of an earlier version. The new file is written before the old one is
// removed; after a disk error, [Journal.RestoreRecords] tries again. The caller has the turn.
func (j *Journal[T]) convert(file string, data []byte) (*Record[T], error) {
	r, err := j.earlier.Convert(strings.TrimSuffix(filepath.Base(file), suffix), data)
	if err != nil {
		err = fmt.Errorf("record %s: %w", file, err)
	}
	if r == nil && err != nil {
		return nil, err
	}
	if r == nil || r.Boot != j.config.Boot {
		return nil, j.config.Files.Remove(file)
	}
	there := j.Get(r.Group)
	if there != nil && j.earlier.Merge != nil {
		r = j.earlier.Merge(there, r)
	} else if there != nil {
		r = there
	}
	if r != there {
		r.Boot, r.Trade = j.config.Boot, j.trade
	}
	j.mu.Lock()
	j.replaced[r.Group] = append(j.replaced[r.Group], file)
	j.mu.Unlock()
	return r, errors.Join(err, j.saveRecord(r))
}

// takeTurn waits until no other call uses the files.
func (j *Journal[T]) takeTurn() (done func()) {
	j.filing <- struct{}{}
	return func() { <-j.filing }
}

// keepRecord sets a group's record in memory, after the record was read from or written to the
// file.
func (j *Journal[T]) keepRecord(r *Record[T]) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.records[r.Group] = r
	delete(j.unwritten, r.Group)
	delete(j.unread, j.File(r.Group))
}

// Get returns the record of a group, nil if there is none.
func (j *Journal[T]) Get(group string) *Record[T] {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.records[group]
}

// All returns all records, ordered by group.
func (j *Journal[T]) All() []*Record[T] {
	j.mu.Lock()
	defer j.mu.Unlock()
	all := make([]*Record[T], 0, len(j.records))
	for _, group := range slices.Sorted(maps.Keys(j.records)) {
		all = append(all, j.records[group])
	}
	return all
}

// Put writes a record before the host is changed, in place of the group's earlier record. If Put
// returns an error, the host must not be changed. A record that may be on disk despite the error is
// kept, see [disk.Files.Write]; the undo then finds nothing to do. A caller that finds the record
// later calls [Journal.EnsureWritten] before it changes the host.
func (j *Journal[T]) Put(r *Record[T]) error {
	defer j.takeTurn()()
	r.Boot, r.Trade = j.config.Boot, j.trade
	there, err := j.write(r)
	if there != disk.Old {
		j.keepRecord(r)
	}
	if there == disk.Unknown {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.unwritten[r.Group] = true
	}
	return err
}

// AmendRecord writes a record after the host was changed. If AmendRecord returns an error, the
// record is kept in memory, and [Journal.RestoreRecords] writes it later.
func (j *Journal[T]) AmendRecord(r *Record[T]) error {
	defer j.takeTurn()()
	r.Boot, r.Trade = j.config.Boot, j.trade
	return j.saveRecord(r)
}

// saveRecord keeps a record, writes it, and then removes the files of earlier versions. The caller
// has the turn.
func (j *Journal[T]) saveRecord(r *Record[T]) error {
	_, err := j.write(r)
	j.keepRecord(r)
	if err == nil {
		err = j.removeReplaced(r.Group)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if err != nil {
		j.unwritten[r.Group] = true
	}
	return err
}

// write writes the file of a record. The caller has the turn.
func (j *Journal[T]) write(r *Record[T]) (disk.InPlace, error) {
	if r.Group == "" || r.Group[0] == '.' || strings.ContainsRune(r.Group, filepath.Separator) {
		return disk.Old, fmt.Errorf("record of %s: group %q cannot be the name of a file", j.trade, r.Group)
	}
	data, err := json.Marshal(r)
	if err != nil {
		return disk.Old, fmt.Errorf("record of %s: %w", r.Group, err)
	}
	there, err := j.config.Files.Write(j.File(r.Group), data, 0o600)
	if err != nil {
		j.mu.Lock()
		j.littered = true
		j.mu.Unlock()
		err = fmt.Errorf("write the record of %s: %w; %s must be a writable directory on tmpfs that containers of the agent share with the host (flag --run-dir)", r.Group, err, j.config.Dir)
	}
	return there, err
}

// removeReplaced removes the files of earlier versions that a group's record replaces. The caller
// has the turn.
func (j *Journal[T]) removeReplaced(group string) error {
	j.mu.Lock()
	files := j.replaced[group]
	j.mu.Unlock()
	for _, file := range files {
		if err := j.config.Files.Remove(file); err != nil {
			return fmt.Errorf("remove a record of an earlier version: %w", err)
		}
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.replaced, group)
	return nil
}

// RestoreRecords writes records whose files were removed by others, and records that could not be
// written before. It removes temporary files that could not be removed before.
func (j *Journal[T]) RestoreRecords() error {
	var errs []error
	j.mu.Lock()
	littered := j.littered
	j.mu.Unlock()
	if littered {
		errs = append(errs, j.removeTemporary())
	}
	for _, r := range j.All() {
		errs = append(errs, j.EnsureWritten(r.Group))
	}
	return errors.Join(errs...)
}

// EnsureWritten writes the record of a group if its file is missing or may be older than the record.
func (j *Journal[T]) EnsureWritten(group string) error {
	j.mu.Lock()
	due := j.unwritten[group]
	j.mu.Unlock()
	if !due && !j.config.Files.IsMissing(j.File(group)) {
		return nil
	}
	return j.restoreRecord(group)
}

func (j *Journal[T]) restoreRecord(group string) error {
	defer j.takeTurn()()
	r := j.Get(group)
	if r == nil {
		return nil // removed before the turn
	}
	return j.saveRecord(r)
}

// removeTemporary removes the temporary files that a killed agent or a failed write left.
func (j *Journal[T]) removeTemporary() error {
	defer j.takeTurn()()
	err := j.config.Files.SweepTemporary(j.Dir(), 0, "")
	j.mu.Lock()
	defer j.mu.Unlock()
	j.littered = err != nil
	return err
}

// Remove removes the record of a group once nothing of the change is left.
func (j *Journal[T]) Remove(group string) error {
	defer j.takeTurn()()
	if err := j.removeReplaced(group); err != nil {
		return err
	}
	if err := j.config.Files.Remove(j.File(group)); err != nil {
		return fmt.Errorf("remove the record of %s: %w", group, err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.records, group)
	delete(j.unwritten, group)
	return nil
}
