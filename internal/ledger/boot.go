package ledger

import (
	"errors"
	"fmt"
	"io/fs"
)

// sayBoot has the file boot say the present boot. As long as it says another,
// claims' files that cannot be read are of the past; there must be none then.
func (l *Ledger) sayBoot() error {
	defer l.saying.take()()
	l.mu.Lock()
	booted := l.booted
	l.mu.Unlock()
	if _, err := l.synced.Lstat(l.file(bootFile)); booted && !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := l.dropPast(true); err != nil {
		return err
	}
	if err := l.keep(bootFile, l.bootText()); err != nil {
		return fmt.Errorf("write down the boot: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.booted = true
	return nil
}

// dropPast removes the files of the past that are not understood: once the file
// boot says the present boot, nobody can tell of which they are. Those that cannot
// be read at present are kept until then, unless all are to go.
func (l *Ledger) dropPast(all bool) error {
	l.mu.Lock()
	accounts := sorted(l.accounts)
	l.mu.Unlock()
	for _, a := range accounts {
		s, sealed := a.entry.(*Sealed)
		if !sealed || a.state != Past || s.unread && !all {
			continue
		}
		files, err := l.asideOf(s.UID)
		if now := l.account(string(s.UID)); now == nil || now.state == Reserved {
			files = append(files, l.claimFile(s.UID))
		}
		for _, file := range files {
			err = errors.Join(err, l.claims.Remove(file))
		}
		if err != nil {
			return fmt.Errorf("remove what an earlier boot left of claim %s: %w", s.UID, err)
		}
		l.mu.Lock()
		l.drop(s.Key())
		l.mu.Unlock()
	}
	return nil
}
