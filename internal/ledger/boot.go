package ledger

import (
	"errors"
	"fmt"
	"io/fs"
)

// sayBoot writes the present boot to the file boot. While the file has another boot, unreadable
// records of claims count as records of an earlier boot, so sayBoot removes such records first.
func (l *Ledger) sayBoot() error {
	defer l.writingBoot.takeTurn()()
	l.mu.Lock()
	booted := l.bootRecorded
	l.mu.Unlock()
	if _, err := l.files.synced.Lstat(l.files.path(bootFile)); booted && !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := l.dropPast(true); err != nil {
		return err
	}
	if err := l.files.writeSynced(bootFile, l.bootText()); err != nil {
		return fmt.Errorf("write down the boot: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bootRecorded = true
	return nil
}

// dropPast removes invalid files of an earlier boot: once the file boot has the present boot, their
// boot is not recognizable. Temporarily unreadable files are kept until then, unless all is set.
func (l *Ledger) dropPast(all bool) error {
	l.mu.Lock()
	accounts := l.accounts.sorted()
	l.mu.Unlock()
	for _, a := range accounts {
		s, sealed := a.entry.(*Sealed)
		if !sealed || a.state != Ended || s.unread && !all {
			continue
		}
		files, err := l.files.asideOf(s.UID)
		if now := l.accountOf(string(s.UID)); now == nil || now.state == Reserved {
			files = append(files, l.files.claimFile(s.UID))
		}
		for _, file := range files {
			err = errors.Join(err, l.files.claims.Remove(file))
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
