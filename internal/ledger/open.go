package ledger

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// readTries is the number of attempts to read a file before the ledger opens without the file.
const readTries = 3

// Open reads all entries and makes their outputs match. The caller holds the node's lock. problems
// are failed reads and writes, which [Ledger.Run] repeats.
func (l *Ledger) Open(ctx context.Context) (problems []error, err error) {
	_, err = l.claims.Lstat(l.file(claimsDir))
	without := errors.Is(err, fs.ErrNotExist)
	if err := l.makeDirs(); err != nil {
		return nil, fmt.Errorf("open ledger: %w", err)
	}
	problems = append(problems, l.removeTemporary(0))
	named, err := l.named()
	if named == nil {
		return nil, fmt.Errorf("open ledger: %w", err)
	}
	problems = append(problems, err)
	past, err := l.readBoot()
	problems = append(problems, err)
	if l.bootRecorded && without {
		l.recordsLost = true
		problems = append(problems, l.writeSynced(bootFile, l.bootText()))
	}
	more, err := l.readClaims(named, past)
	if err != nil {
		return nil, fmt.Errorf("open ledger: %w", err)
	}
	problems = append(problems, more...)
	for key, devices := range named {
		if l.accounts[key] == nil && l.accounts[sealedKey(key)] == nil && !past {
			klog.FromContext(ctx).Info("A claim has a CDI spec and no record; what the spec names is kept for it until it is unprepared", "uid", key)
			l.put(newAccount(seal(types.UID(key), nil, devices, l.config.Boot, past), Allocated))
			notify(l.changed) // Run writes the entry
		}
	}
	problems = append(problems, l.dropPast(false), l.readGrants())
	problems = append(problems, l.sweepOutputs())
	for _, a := range sorted(l.accounts) {
		if a.state == Allocated {
			problems = append(problems, l.Write(a.entry.Key()))
		}
	}
	close(l.openedSignal)
	return slices.DeleteFunc(problems, func(err error) bool { return err == nil }), nil
}

// makeDirs creates the directories of the ledger, and synchronizes their names. The name of the
// file boot is included: a killed agent may have left the name unsynchronized. Other programs
// create directories without synchronizing, and their files may be lost.
func (l *Ledger) makeDirs() error {
	for _, dir := range []string{l.config.Dir, l.file(claimsDir), filepath.Dir(l.file(grantsFile))} {
		if err := l.synced.MakeDir(dir, 0o700); err != nil {
			return err
		}
		if err := l.synced.SyncDir(filepath.Dir(dir)); err != nil {
			return err
		}
	}
	return nil
}

// writeSynced writes a file and synchronizes it against a power failure.
func (l *Ledger) writeSynced(name string, data []byte) error {
	if _, err := l.synced.Lstat(l.file(name)); errors.Is(err, fs.ErrNotExist) {
		if err := l.makeDirs(); err != nil { // another program may have removed the directories
			return err
		}
	}
	_, err := l.synced.Write(l.file(name), data, 0o600)
	return err
}

// named returns the devices in the outputs of claims, or nil if the claims with outputs are not
// known.
func (l *Ledger) named() (map[string][]SealedDevice, error) {
	named := make(map[string][]SealedDevice)
	var errs []error
	for _, o := range l.outputs {
		namer, ok := o.(Namer)
		if !ok {
			continue
		}
		more, err := namer.Named()
		if more == nil && err != nil {
			return nil, err
		}
		errs = append(errs, err)
		for key, devices := range more {
			named[key] = append(named[key], devices...)
		}
	}
	return named, errors.Join(errs...)
}

// readBoot reports whether all claims with records are of an earlier boot.
func (l *Ledger) readBoot() (past bool, err error) {
	data, err := l.read(bootFile)
	if errors.Is(err, fs.ErrNotExist) {
		l.recordsLost = true // or an earlier version of the agent wrote none
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the boot: %w", err)
	}
	boot, rest, _ := strings.Cut(strings.TrimSpace(string(data)), "\n")
	l.bootRecorded = boot == l.config.Boot
	l.recordsLost = l.bootRecorded && rest == wipedWord
	return !l.bootRecorded && l.isBoot(boot), nil
}

// bootText returns the content of the file boot. The content also records a loss of claims' files
// in the present boot, for later agents. An agent version without the feature treats the text as
// damaged, and writes the file again.
func (l *Ledger) bootText() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.recordsLost {
		return []byte(l.config.Boot + "\n" + wipedWord + "\n")
	}
	return []byte(l.config.Boot + "\n")
}

// isBoot reports whether a text may be the ID of another boot. A damaged file is not evidence of
// another boot. All boot IDs of a kernel have the same length.
func (l *Ledger) isBoot(text string) bool {
	return len(text) == len(l.config.Boot) && strings.Trim(text, "-0123456789abcdefghijklmnopqrstuvwxyz") == ""
}

// read reads a file, with several attempts: a disk may recover.
func (l *Ledger) read(name string) (data []byte, err error) {
	for range readTries {
		if data, err = l.synced.Read(l.file(name)); err == nil || errors.Is(err, fs.ErrNotExist) {
			return data, err
		}
	}
	return nil, err
}

// readClaims reads the files of all claims.
func (l *Ledger) readClaims(named map[string][]SealedDevice, past bool) (problems []error, err error) {
	files, err := l.claims.ListDir(l.file(claimsDir))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		name := file.Name()
		uid := types.UID(strings.TrimSuffix(name, filepath.Ext(name)))
		switch extension := filepath.Ext(name); {
		case strings.HasPrefix(name, "."):
		case extension == claimExtension:
			problems = append(problems, l.readClaim(uid, named[string(uid)], past))
		case strings.HasPrefix(extension, badExtension):
			problems = append(problems, l.readAside(uid, name, named[string(uid)], past))
		}
	}
	return problems, nil
}

// readClaim reads the file of a claim, or sets an invalid file aside. A temporarily unreadable file
// stays in place.
func (l *Ledger) readClaim(uid types.UID, named []SealedDevice, past bool) error {
	file := l.claimFile(uid)
	data, err := l.read(filepath.Join(claimsDir, string(uid)+claimExtension))
	if err != nil {
		sealed := seal(uid, nil, named, l.config.Boot, past)
		sealed.unread = true
		l.put(sealed.newAccount())
		return fmt.Errorf("record %s: %w; it is read again, and until then the devices that its claim may have stay with it", file, err)
	}
	c, err := DecodeClaim(data)
	if err == nil && c.UID != uid {
		err = fmt.Errorf("is of claim %s", c.UID)
	}
	if err == nil {
		l.put(newAccount(c, l.stateOf(c)))
		return nil
	}
	sealed := l.mergeSealed(seal(uid, data, named, l.config.Boot, past))
	l.put(sealed.newAccount())
	if sealed.past {
		return nil // a power failure damaged the file, and it is removed
	}
	return errors.Join(fmt.Errorf("record %s: %w; it is set aside, and the devices that it names stay with its claim until that is unprepared", file, err),
		l.setAside(uid))
}

// stateOf returns the state of a claim from a file.
func (l *Ledger) stateOf(c *Claim) State {
	switch {
	case c.Boot != l.config.Boot:
		return Ended
	case c.Configuring:
		return Configuring
	}
	return Allocated
}

// mergeSealed merges a sealed entry with the claim's other sealed entry.
func (l *Ledger) mergeSealed(s *Sealed) *Sealed {
	if a := l.accounts[s.Key()]; a != nil {
		other := a.entry.(*Sealed)
		s.Devices, s.all = append(s.Devices, other.Devices...), s.all || other.all
		s.past = s.past && other.past
	}
	return s
}

// readAside reads a set-aside file. If the agent understands the file, as a newer version may, and
// the claim has no other file, the file becomes the claim's record again.
func (l *Ledger) readAside(uid types.UID, name string, named []SealedDevice, past bool) error {
	aside := filepath.Join(claimsDir, name)
	data, readErr := l.read(aside)
	if c, err := DecodeClaim(data); readErr == nil && err == nil && c.UID == uid {
		_, statErr := l.claims.Lstat(l.claimFile(uid))
		others, err := l.asideOf(uid)
		if errors.Is(statErr, fs.ErrNotExist) && err == nil && len(others) == 1 && l.claims.Rename(l.file(aside), l.claimFile(uid)) == nil {
			l.put(newAccount(c, l.stateOf(c)))
			return nil
		}
	}
	l.put(l.mergeSealed(seal(uid, data, named, l.config.Boot, past)).newAccount())
	return readErr
}

// setAside renames an invalid file, to make room for a new one.
func (l *Ledger) setAside(uid types.UID) error {
	files, err := l.asideOf(uid)
	if err == nil {
		err = l.claims.Rename(l.claimFile(uid), fmt.Sprintf("%s%d", l.file(filepath.Join(claimsDir, string(uid)+badExtension)), len(files)))
	}
	if err != nil {
		return fmt.Errorf("set aside the record of claim %s: %w", uid, err)
	}
	return nil
}

// readGrants reads the file of grants, unless it was read before. An invalid file is set aside;
// PodResources still lists the containers' devices. While the file cannot be read or set aside, it
// is not written either.
func (l *Ledger) readGrants() error {
	defer l.saving.takeTurn()()
	l.mu.Lock()
	unread := l.grantsUnread
	l.mu.Unlock()
	if !unread {
		return nil
	}
	data, err := l.read(grantsFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read grants: %w; they are read again, and until then no container and no new claim gets what others may have", err)
	}
	var grants []*Grant
	var damaged error
	if err == nil {
		grants, damaged = decodeGrants(data)
	}
	if damaged != nil {
		file, aside := l.file(grantsFile), l.file(grantsFile)+".unreadable"
		damaged = fmt.Errorf("read grants: %s, set aside as %s: %w", file, aside, damaged)
		if err := l.synced.Rename(file, aside); err != nil {
			return errors.Join(damaged, err)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.grantsUnread = false
	for _, g := range grants {
		delete(l.listing.foreign, g.Key())
		l.put(newAccount(g, Allocated))
	}
	if l.isOpen() {
		notify(l.changed) // their outputs may be missing
	}
	return damaged
}
