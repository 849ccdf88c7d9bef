package provision

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/sysfs"
)

// The journal contains the writes to execute if the command is killed between a write and the
// write that undoes it, such as a write to sriov_drivers_autoprobe. Like the attributes, the
// file does not survive a reboot: it is below /run.
const (
	journalDir  = "run/chandler"
	journalFile = journalDir + "/provision.json"
)

// journal is the content of the file.
type journal struct {
	Boot   string            `json:"boot"`
	Writes []discovery.Write `json:"writes"`
}

// Journal is the journal file of a host. It is locked, so only one command uses it at a time.
type Journal struct {
	root *os.Root
	lock *os.File
}

// OpenJournal opens and locks the journal of the host whose root is dir. It fails if another
// command has the lock.
func OpenJournal(dir string) (*Journal, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("host root: %w", err)
	}
	if err := root.MkdirAll(journalDir, 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of the journal: %w", err)
	}
	lock, err := root.OpenFile(journalDir+"/provision.lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the journal's lock: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("another chandler provision runs: lock /%s/provision.lock: %w", journalDir, err), lock.Close())
	}
	return &Journal{root: root, lock: lock}, nil
}

// Close closes the journal and releases the lock.
func (j *Journal) Close() error { return errors.Join(j.lock.Close(), j.root.Close()) }

// KeepJournal writes the file, or removes the file if data is nil. The file is renamed into place,
// so that a reader finds either the old or the new contents.
func (j *Journal) KeepJournal(data []byte) error {
	if data == nil {
		if err := j.root.Remove(journalFile); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	if err := j.root.WriteFile(journalFile+".new", data, 0o600); err != nil {
		return err
	}
	return j.root.Rename(journalFile+".new", journalFile)
}

// keepJournal writes the journal with the given writes and with the outstanding writes of an
// earlier command.
func (p *Provisioner) keepJournal(writes []discovery.Write) (err error) {
	var data []byte
	writes = slices.Concat(p.missingWrites(p.outstanding), writes)
	if len(writes) > 0 {
		data, err = json.Marshal(journal{p.bootID(), writes})
	}
	if err == nil {
		err = p.Keep(data)
	}
	if err != nil {
		return fmt.Errorf("write the journal /%s: %w", journalFile, err)
	}
	return nil
}

func (p *Provisioner) bootID() string {
	boot, _ := p.Host.ReadText("/proc/sys/kernel/random/boot_id") // on error, boot is the same for all boots
	return boot
}

// errJournal is the error of an unreadable journal. Run then changes nothing.
var errJournal = errors.New("read what a command that was killed left to be done")

// unfinishedWrites returns the outstanding writes of a command that was killed in the current boot.
func (p *Provisioner) unfinishedWrites() (left []discovery.Write, err error) {
	data, err := fs.ReadFile(p.Host.FS, journalFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var j journal
	if err == nil {
		err = json.Unmarshal(data, &j)
	}
	if err != nil {
		return nil, fmt.Errorf("%w; if it is damaged, remove it: /%s: %w", errJournal, journalFile, err)
	}
	if j.Boot != p.bootID() {
		return nil, nil
	}
	for _, w := range j.Writes {
		now, err := sysfs.ReadText(p.Host.FS, w.Shows, maxJournal)
		if err != nil || now == w.To || !strings.HasPrefix(w.Path, "sys/") { // or the function is gone
			continue
		}
		w.From = now
		left = append(left, w)
	}
	return left, nil
}

// maxJournal is the maximum size of an attribute in bytes, with a large margin.
const maxJournal = 64 << 10

// resumeWrites executes the outstanding writes of a killed command. A failed write remains in the
// journal. In a dry run, resumeWrites adds the results of the writes to the host's files in memory,
// as the basis for the plan.
func (p *Provisioner) resumeWrites() (changes int, err error) {
	writes, err := p.unfinishedWrites()
	if err != nil {
		return 0, err
	}
	p.outstanding = writes
	for _, w := range writes { // the writes belong to different functions, so a failure does not affect the others
		err = errors.Join(err, p.write(part{"left by a command that was killed", []discovery.Write{w}}))
	}
	if p.Write != nil {
		if p.Keep != nil {
			err = errors.Join(err, p.keepJournal(nil))
		}
		return len(writes), err
	}
	overlay := hostfs.NewOverlay(p.Host.FS)
	for _, w := range writes {
		overlay.Set(w.Shows, []byte(w.To+"\n"))
	}
	host := *p.Host
	host.FS = overlay
	p.Host = &host
	return len(writes), err
}

// restoringWrites returns the writes that restore a value changed by an earlier write.
func (p *Provisioner) restoringWrites(writes []discovery.Write) (ends []discovery.Write) {
	for _, w := range writes {
		if w.Always && p.currentValue(w.Shows) == w.To {
			ends = append(ends, w)
		}
	}
	return ends
}

// missingWrites returns the writes whose effect is missing.
func (p *Provisioner) missingWrites(ends []discovery.Write) []discovery.Write {
	return slices.DeleteFunc(slices.Clone(ends), func(w discovery.Write) bool { return p.currentValue(w.Shows) == w.To })
}
