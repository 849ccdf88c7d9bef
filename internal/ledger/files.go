package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/disk"
)

// files reads and writes the files of a ledger: claims/<uid>.record, claims/<uid>.bad<n> for a record
// that could not be decoded, grants/grants.json, and boot, which names the boot of the last claim that
// was given.
type files struct {
	dir    string
	claims disk.Files // records of claims, which are void after a reboot
	synced disk.Files // the other files, and records of claims with chosen devices, which survive a reboot
}

const (
	claimsDir  = "claims"
	grantsFile = "grants/grants.json"
	bootFile   = "boot"

	claimExtension = ".record"
	badExtension   = ".bad"
)

// readTries is the number of attempts to read a file before the ledger opens without the file.
const readTries = 3

func (f *files) path(name string) string { return filepath.Join(f.dir, name) }

func (f *files) claimFile(uid types.UID) string {
	return f.path(filepath.Join(claimsDir, string(uid)+claimExtension))
}

// asideOf returns the files of a claim that were set aside.
func (f *files) asideOf(uid types.UID) ([]string, error) {
	entries, err := f.claims.ListDir(f.path(claimsDir))
	if err != nil {
		return nil, err
	}
	var files []string
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), string(uid)+badExtension) {
			files = append(files, f.path(filepath.Join(claimsDir, entry.Name())))
		}
	}
	return files, nil
}

// read reads a file, with several attempts: a disk may recover.
func (f *files) read(name string) (data []byte, err error) {
	for range readTries {
		if data, err = f.synced.Read(f.path(name)); err == nil || errors.Is(err, fs.ErrNotExist) {
			return data, err
		}
	}
	return nil, err
}

// makeDirs creates the directories of the ledger, and synchronizes their names. The name of the
// file boot is included: a killed agent may have left the name unsynchronized. Other programs
// create directories without synchronizing, and their files may be lost.
func (f *files) makeDirs() error {
	for _, dir := range []string{f.dir, f.path(claimsDir), filepath.Dir(f.path(grantsFile))} {
		if err := f.synced.MakeDir(dir, 0o700); err != nil {
			return err
		}
		if err := f.synced.SyncDir(filepath.Dir(dir)); err != nil {
			return err
		}
	}
	return nil
}

// writeSynced writes a file and synchronizes it against a power failure.
func (f *files) writeSynced(name string, data []byte) error {
	if _, err := f.synced.Lstat(f.path(name)); errors.Is(err, fs.ErrNotExist) {
		if err := f.makeDirs(); err != nil { // another program may have removed the directories
			return err
		}
	}
	_, err := f.synced.Write(f.path(name), data, 0o600)
	return err
}

// writeClaim writes the record of a claim, and reports which content a failed write has left. A claim
// with chosen devices must get the same devices after a reboot, so its record is synchronized.
func (f *files) writeClaim(c *Claim, data []byte) (disk.InPlace, error) {
	to := f.claims
	if slices.ContainsFunc(c.Results, func(r Result) bool { return r.IsChosen() }) {
		to = f.synced
	}
	return to.Write(f.claimFile(c.UID), data, 0o600)
}

// setAside renames an invalid file, to make room for a new one.
func (f *files) setAside(uid types.UID) error {
	files, err := f.asideOf(uid)
	if err == nil {
		err = f.claims.Rename(f.claimFile(uid), fmt.Sprintf("%s%d", f.path(filepath.Join(claimsDir, string(uid)+badExtension)), len(files)))
	}
	if err != nil {
		return fmt.Errorf("set aside the record of claim %s: %w", uid, err)
	}
	return nil
}

// recordNames returns the names of the claims' files, or nil if listing fails.
func (f *files) recordNames() (map[string]bool, error) {
	files, err := f.claims.ListDir(f.path(claimsDir))
	if err != nil {
		return nil, fmt.Errorf("list records: %w", err)
	}
	names := make(map[string]bool, len(files))
	for _, file := range files {
		names[file.Name()] = true
	}
	return names, nil
}
