package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// Open reads all entries and makes their outputs match. The caller holds the node's lock. problems
// are failed reads and writes, which [Ledger.Run] repeats.
func (l *Ledger) Open(ctx context.Context) (problems []error, err error) {
	past, err := l.readBoot()
	problems = append(problems, err)
	if l.bootRecorded && l.files.LacksClaims() { // before the directory is created, which hides the loss
		l.recordsLost = true
		problems = append(problems, l.files.WriteSynced(allocation.BootFile, l.bootText()))
	}
	if err := l.files.MakeDirs(); err != nil {
		return nil, fmt.Errorf("open ledger: %w", err)
	}
	problems = append(problems, l.removeTemporary(0))
	named, err := l.outputs.namedDevices()
	if named == nil {
		return nil, fmt.Errorf("open ledger: %w", err)
	}
	problems = append(problems, err)
	more, err := l.readClaims(named, past)
	if err != nil {
		return nil, fmt.Errorf("open ledger: %w", err)
	}
	problems = append(problems, more...)
	for key, devices := range named {
		if l.accounts.byKey[key] == nil && l.accounts.byKey[allocation.SealedKey(key)] == nil && !past {
			klog.FromContext(ctx).Info("A claim has a CDI spec and no record; what the spec names is kept for it until it is unprepared", "uid", key)
			l.accounts.put(exclusion.NewAccount(allocation.Seal(types.UID(key), nil, devices, l.config.Boot, past), allocation.Allocated))
			notify(l.changed) // Run writes the entry
		}
	}
	problems = append(problems, l.dropPast(false), l.Grants.read())
	problems = append(problems, l.outputs.sweepOrphans(l.RemoveUnknown))
	for _, a := range l.accounts.sorted() {
		if a.State == allocation.Allocated {
			problems = append(problems, l.Write(a.Entry.Key()))
		}
	}
	close(l.openedSignal)
	return slices.DeleteFunc(problems, func(err error) bool { return err == nil }), nil
}

// readClaims reads the files of all claims.
func (l *Ledger) readClaims(named map[string][]allocation.SealedDevice, past bool) (problems []error, err error) {
	files, err := l.files.Claims.ListDir(l.files.Path(allocation.ClaimsDir))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		name := file.Name()
		uid := types.UID(strings.TrimSuffix(name, filepath.Ext(name)))
		switch extension := filepath.Ext(name); {
		case strings.HasPrefix(name, "."):
		case extension == allocation.ClaimExtension:
			problems = append(problems, l.readClaim(uid, named[string(uid)], past))
		case strings.HasPrefix(extension, allocation.BadExtension):
			problems = append(problems, l.readAside(uid, name, named[string(uid)], past))
		}
	}
	return problems, nil
}

// readClaim reads the file of a claim, or sets an invalid file aside. A temporarily unreadable file
// stays in place.
func (l *Ledger) readClaim(uid types.UID, named []allocation.SealedDevice, past bool) error {
	file := l.files.ClaimFile(uid)
	data, err := l.files.Read(filepath.Join(allocation.ClaimsDir, string(uid)+allocation.ClaimExtension))
	if err != nil {
		sealed := l.withOtherFiles(allocation.Seal(uid, nil, named, l.config.Boot, past))
		sealed.Unread = true
		l.accounts.put(newSealedAccount(sealed))
		return fmt.Errorf("record %s: %w; it is read again, and until then the devices that its claim may have stay with it", file, err)
	}
	c, err := allocation.DecodeClaim(data)
	if err == nil && c.UID != uid {
		err = fmt.Errorf("is of claim %s", c.UID)
	}
	if err == nil {
		l.accounts.put(exclusion.NewAccount(c, l.config.stateOf(c)))
		return nil
	}
	sealed := l.withOtherFiles(allocation.Seal(uid, data, named, l.config.Boot, past))
	l.accounts.put(newSealedAccount(sealed))
	if sealed.EarlierBoot {
		return nil // a power failure damaged the file, and it is removed
	}
	return errors.Join(fmt.Errorf("record %s: %w; it is set aside, and the devices that it names stay with its claim until that is unprepared", file, err),
		l.files.SetAside(uid))
}

// stateOf returns the state of a claim from a file.
func (config *Config) stateOf(c *allocation.Claim) allocation.State {
	switch {
	case c.Boot != config.Boot:
		return allocation.Ended
	case c.Configuring:
		return allocation.Configuring
	}
	return allocation.Allocated
}

// withOtherFiles merges a sealed entry with the claim's other sealed entry.
func (l *Ledger) withOtherFiles(s *allocation.Sealed) *allocation.Sealed {
	if a := l.accounts.byKey[s.Key()]; a != nil {
		mergeSealed(s, a.Entry.(*allocation.Sealed))
	}
	return s
}

// mergeSealed adds the content of another file of the same claim to a sealed entry.
func mergeSealed(s, other *allocation.Sealed) {
	s.Devices, s.AnyDevice = append(s.Devices, other.Devices...), s.AnyDevice || other.AnyDevice
	s.EarlierBoot = s.EarlierBoot && other.EarlierBoot
	s.Namespace, s.Name = cmp.Or(s.Namespace, other.Namespace), cmp.Or(s.Name, other.Name)
}

// readAside reads a set-aside file. If the agent understands the file, as a newer version may, and
// the claim has no other file, the file becomes the claim's record again.
func (l *Ledger) readAside(uid types.UID, name string, named []allocation.SealedDevice, past bool) error {
	aside := filepath.Join(allocation.ClaimsDir, name)
	data, readErr := l.files.Read(aside)
	if c, err := allocation.DecodeClaim(data); readErr == nil && err == nil && c.UID == uid {
		_, statErr := l.files.Claims.Lstat(l.files.ClaimFile(uid))
		others, err := l.files.AsideFiles(uid)
		if errors.Is(statErr, fs.ErrNotExist) && err == nil && len(others) == 1 && l.files.Claims.Rename(l.files.Path(aside), l.files.ClaimFile(uid)) == nil {
			l.accounts.put(exclusion.NewAccount(c, l.config.stateOf(c)))
			return nil
		}
	}
	l.accounts.put(newSealedAccount(l.withOtherFiles(allocation.Seal(uid, data, named, l.config.Boot, past))))
	return readErr
}
