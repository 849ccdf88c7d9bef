package ledger

import (
	"errors"
	"fmt"

	"chandler.dev/internal/ledger/allocation"
)

// sayBoot writes the present boot to the file boot, before the file of a claim is written. While the
// file boot has another boot, unreadable records of claims count as records of an earlier boot, so
// sayBoot removes such records first. If another program has removed all files of claims, sayBoot
// records this loss: the next agent would not see it after one of the files is written again.
func (l *Ledger) sayBoot() error {
	defer l.writingBoot.takeTurn()()
	l.mu.Lock()
	booted := l.bootRecorded
	l.mu.Unlock()
	lost := booted && l.lacksRecords()
	if lost {
		l.mu.Lock()
		l.recordsLost = true
		l.mu.Unlock()
	}
	if booted && !lost && !l.files.Synced.IsMissing(l.files.Path(allocation.BootFile)) {
		return nil
	}
	if err := l.dropPast(true); err != nil {
		return err
	}
	if err := l.files.WriteSynced(allocation.BootFile, l.bootText()); err != nil {
		return fmt.Errorf("write down the boot: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bootRecorded = true
	return nil
}

// lacksRecords reports whether the directory of claims' files is missing.
func (l *Ledger) lacksRecords() bool {
	return l.files.Claims.IsMissing(l.files.Path(allocation.ClaimsDir))
}

// dropPast removes invalid files of an earlier boot: once the file boot has the present boot, their
// boot is not recognizable. Temporarily unreadable files are kept until then, unless all is set.
func (l *Ledger) dropPast(all bool) error {
	l.mu.Lock()
	accounts := l.accounts.sorted()
	l.mu.Unlock()
	for _, a := range accounts {
		s, sealed := a.Entry.(*allocation.Sealed)
		if !sealed || a.State != allocation.Ended || s.Unread && !all {
			continue
		}
		files, err := l.files.AsideFiles(s.UID)
		if now := l.accountOf(string(s.UID)); now == nil || now.State == allocation.Reserved {
			files = append(files, l.files.ClaimFile(s.UID))
		}
		for _, file := range files {
			err = errors.Join(err, l.files.Claims.Remove(file))
		}
		if err != nil {
			return fmt.Errorf("remove what an earlier boot left of claim %s: %w", s.UID, err)
		}
		l.mu.Lock()
		l.accounts.drop(s.Key())
		l.mu.Unlock()
	}
	return nil
}
