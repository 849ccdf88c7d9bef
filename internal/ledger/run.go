package ledger

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/internal/disk"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// reconcileInterval is the time between two comparisons of the files with the entries.
const reconcileInterval = 30 * time.Second

// Run reconciles the files with the entries until the context ends: at once after a failed write or
// removal, otherwise at an interval. The ledger must be open.
func (l *Ledger) Run(ctx context.Context) {
	ticker := time.NewTicker(reconcileInterval)
	defer ticker.Stop()
	last := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-l.changed:
		}
		problem := ""
		if err := l.ReconcileFiles(ctx); err != nil {
			problem = err.Error()
		}
		if problem != "" && problem != last {
			klog.FromContext(ctx).Info("Files of what claims and containers have are not as they should be; trying again", "reason", problem)
		}
		last = problem
	}
}

// ReconcileFiles makes the files match the entries, once.
func (l *Ledger) ReconcileFiles(ctx context.Context) error {
	read := l.Grants.read()
	l.mu.Lock()
	accounts, left := l.accounts.sorted(), l.Grants.unremoved
	l.Grants.unremoved = nil
	l.mu.Unlock()
	present, err := l.files.RecordNames()
	errs := []error{read, err, l.removeTemporary(disk.Abandoned), l.outputs.sweepOrphans(l.RemoveUnknown)}
	if len(left) > 0 {
		errs = append(errs, l.Grants.endReplaced(left))
	}
	for _, a := range accounts {
		if ctx.Err() != nil {
			return nil
		}
		errs = append(errs, l.reconcileEntry(a.Entry, present))
	}
	return errors.Join(append(errs, l.restoreFiles())...)
}

// RemoveUnknown calls remove, which removes files of a claim, unless the ledger has an entry of the
// claim, and reports whether there is an entry. If a call for the claim is in progress,
// RemoveUnknown leaves the files to the call.
func (l *Ledger) RemoveUnknown(uid types.UID, remove func() error) (known bool, err error) {
	unlock, busy := l.locks.tryLock(string(uid))
	if busy != nil {
		return true, nil
	}
	defer unlock()
	for _, key := range []string{string(uid), allocation.SealedKey(string(uid))} {
		if a := l.accountOf(key); a != nil && a.State != allocation.Ended {
			return true, nil
		}
	}
	return false, remove()
}

// removeTemporary removes temporary files of an age or older.
func (c *core) removeTemporary(age time.Duration) error {
	var errs []error
	for _, dir := range append([]string{"", allocation.ClaimsDir, filepath.Dir(allocation.GrantsFile)}, c.config.OtherDirs...) {
		errs = append(errs, c.files.Synced.SweepTemporary(c.files.Path(dir), age, ""))
	}
	for _, o := range c.outputs {
		if t, ok := o.(TemporaryRemover); ok {
			errs = append(errs, t.RemoveTemporary(age))
		}
	}
	return errors.Join(errs...)
}

// reconcileEntry makes the files of one entry match the entry, unless a call for the entry is in
// progress.
func (l *Ledger) reconcileEntry(e allocation.Entry, present map[string]bool) error {
	key := e.Key()
	if s, ok := e.(*allocation.Sealed); ok {
		key = string(s.UID)
	}
	unlock, busy := l.locks.tryLock(key)
	if busy != nil {
		return nil
	}
	defer unlock()
	if s, ok := e.(*allocation.Sealed); ok {
		err := l.readSealed(s)
		if a := l.accountOf(s.Key()); a != nil { // possibly another entry
			err = errors.Join(err, l.restoreSealed(a.Entry.(*allocation.Sealed), present))
		}
		return err
	}
	if err := l.SettleClaim(key); err != nil {
		return err
	}
	now := l.accountOf(key)
	if now == nil {
		return nil
	}
	if c, isClaim := now.Entry.(*allocation.Claim); isClaim && isInUse(now) && present != nil && !present[string(c.UID)+allocation.ClaimExtension] {
		if err := l.restoreClaim(c); err != nil {
			return err
		}
	}
	return l.Write(key)
}

// restoreClaim writes the lost file of a claim.
func (l *Ledger) restoreClaim(c *allocation.Claim) error {
	file := l.files.ClaimFile(c.UID)
	if _, err := l.files.Claims.Lstat(file); !errors.Is(err, fs.ErrNotExist) {
		return nil // written meanwhile
	}
	data, err := c.Encode()
	if err == nil {
		err = l.recordBoot()
	}
	if err == nil {
		_, err = l.files.WriteClaim(c, data)
	}
	if err != nil {
		return fmt.Errorf("write record %s again: %w", file, err)
	}
	return nil
}

// restoreSealed writes a record for a claim without a file. Otherwise the next agent would not know
// the claim.
func (l *Ledger) restoreSealed(s *allocation.Sealed, present map[string]bool) error {
	a := l.accountOf(s.Key())
	if a == nil || a.Entry != allocation.Entry(s) || a.State == allocation.Ended || s.Unread || present == nil {
		return nil
	}
	for name := range present {
		if strings.HasPrefix(name, string(s.UID)+allocation.BadExtension) {
			return nil
		}
	}
	data, err := s.Encode(l.config.Boot)
	if err == nil {
		err = l.recordBoot() // as before any file of a claim
	}
	if err == nil {
		_, err = l.files.Claims.Write(l.files.Path(filepath.Join(allocation.ClaimsDir, string(s.UID)+allocation.BadExtension+"0")), data, 0o600)
	}
	if err != nil {
		return fmt.Errorf("record claim %s: %w", s.UID, err)
	}
	return nil
}

// readSealed reads a previously unreadable file of a claim again.
func (l *Ledger) readSealed(s *allocation.Sealed) error {
	if a := l.accountOf(s.Key()); !s.Unread || a == nil || a.Entry != allocation.Entry(s) {
		return nil
	}
	if l.accountOf(string(s.UID)) != nil {
		return nil // the claim was prepared again
	}
	data, err := l.files.Claims.Read(l.files.ClaimFile(s.UID))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read record %s: %w", l.files.ClaimFile(s.UID), err)
	}
	aside, err := l.files.AsideFiles(s.UID)
	if err != nil {
		return fmt.Errorf("read record %s: %w", l.files.ClaimFile(s.UID), err)
	}
	c, decodeErr := allocation.DecodeClaim(data)
	isValid := decodeErr == nil && c.UID == s.UID
	read := *s
	if s.AnyDevice {
		read = allocation.Sealed{UID: s.UID} // without a CDI spec, only the files name the devices
	}
	read.Unread = false
	add := func(data []byte) {
		named := allocation.Seal(s.UID, data, nil, l.config.Boot, s.EarlierBoot)
		named.AnyDevice = named.AnyDevice && s.AnyDevice
		mergeSealed(&read, named)
	}
	if !isValid {
		add(data)
	}
	for _, file := range aside {
		data, err := l.files.Claims.Read(file)
		if err != nil {
			return fmt.Errorf("read record %s: %w", file, err)
		}
		add(data)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if isValid {
		l.accounts.put(exclusion.NewAccount(c, l.config.stateOf(c)))
		if len(aside) == 0 {
			l.accounts.drop(s.Key())
			return nil
		}
	}
	// The file is damaged and stays in place, another program removed it, or the claim also has files
	// that were set aside. The claim keeps the devices until it ends.
	l.accounts.put(newSealedAccount(&read))
	return nil
}

// restoreFiles writes the shared files of several entries, if the files are missing or their last
// write failed.
func (l *Ledger) restoreFiles() error {
	l.mu.Lock()
	unsaved, some, booted := l.Grants.unsaved, len(l.Grants.sorted()) > 0, l.bootRecorded
	l.mu.Unlock()
	var errs []error
	if _, err := l.files.Synced.Lstat(l.files.Path(allocation.GrantsFile)); unsaved || some && errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, l.Grants.save())
	}
	if booted {
		errs = append(errs, l.recordBoot())
	}
	return errors.Join(errs...)
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
