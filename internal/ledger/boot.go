package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"chandler.dev/internal/ledger/allocation"
)

// wipedWord is in the file boot if records of claims were lost in this boot.
const wipedWord = "wiped"

// readBoot reports whether all claims with records are of an earlier boot.
func (l *Ledger) readBoot() (past bool, err error) {
	data, err := l.files.Read(allocation.BootFile)
	if errors.Is(err, fs.ErrNotExist) {
		l.recordsLost = true // or an earlier version of the agent wrote none
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the boot: %w", err)
	}
	boot, rest, _ := strings.Cut(strings.TrimSpace(string(data)), "\n")
	l.bootRecorded = boot == l.config.Boot
	l.recordsLost = l.recordsLost || l.bootRecorded && rest == wipedWord
	return !l.bootRecorded && isBootID(boot, l.config.Boot), nil
}

// recordBoot writes the present boot to the file boot, before the file of a claim is written. While the
// file boot has another boot, unreadable records of claims count as records of an earlier boot, so
// recordBoot removes such records first. If another program has removed all files of claims, recordBoot
// records this loss: the next agent would not see it after one of the files is written again.
func (l *Ledger) recordBoot() error {
	defer l.writingBoot.takeTurn()()
	l.mu.Lock()
	booted := l.bootRecorded
	l.mu.Unlock()
	lost := booted && l.files.LacksClaims()
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
		return fmt.Errorf("record the boot: %w", err)
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
			return fmt.Errorf("remove the files of claim %s of an earlier boot: %w", s.UID, err)
		}
		l.mu.Lock()
		l.accounts.drop(s.Key())
		l.mu.Unlock()
	}
	return nil
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

// isBootID reports whether a text may be the ID of another boot than the present one. A damaged
// file is not evidence of another boot. All boot IDs of a kernel have the same length.
func isBootID(text, present string) bool {
	return len(text) == len(present) && strings.Trim(text, "-0123456789abcdefghijklmnopqrstuvwxyz") == ""
}
