package allocation

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

// Files reads and writes the files of a ledger: claims/<uid>.record, claims/<uid>.bad<n> for a
// record that could not be decoded, grants/grants.json, and boot, which names the boot of the last
// claim that was given.
type Files struct {
	dir    string
	Claims disk.Files // records of claims, which are void after a reboot
	Synced disk.Files // the other files, and records of claims with chosen devices, which survive a reboot
}

// NewFiles returns the files in a directory of a disk, the operating system's if nil.
func NewFiles(dir string, fs disk.FS) Files {
	return Files{dir: dir, Claims: disk.Files{FS: fs}, Synced: disk.Files{FS: fs, Synced: true}}
}

// The names of the files and directories, relative to the directory of the ledger.
const (
	ClaimsDir  = "claims"
	GrantsFile = "grants/grants.json"
	BootFile   = "boot"

	ClaimExtension = ".record"
	BadExtension   = ".bad"
)

// readTries is the number of attempts to read a file before the ledger opens without the file.
const readTries = 3

// Path returns the path of a file of the ledger.
func (f *Files) Path(name string) string { return filepath.Join(f.dir, name) }

// ClaimFile returns the path of the record of a claim.
func (f *Files) ClaimFile(uid types.UID) string {
	return f.Path(filepath.Join(ClaimsDir, string(uid)+ClaimExtension))
}

// AsideFiles returns the files of a claim that were set aside.
func (f *Files) AsideFiles(uid types.UID) ([]string, error) {
	entries, err := f.Claims.ListDir(f.Path(ClaimsDir))
	if err != nil {
		return nil, err
	}
	var files []string
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), string(uid)+BadExtension) {
			files = append(files, f.Path(filepath.Join(ClaimsDir, entry.Name())))
		}
	}
	return files, nil
}

// Read reads a file, with several attempts: a disk may recover.
func (f *Files) Read(name string) (data []byte, err error) {
	for range readTries {
		if data, err = f.Synced.Read(f.Path(name)); err == nil || errors.Is(err, fs.ErrNotExist) {
			return data, err
		}
	}
	return nil, err
}

// MakeDirs creates the directories of the ledger, and synchronizes their names. The name of the
// file boot is included: a killed agent may have left the name unsynchronized. Other programs
// create directories without synchronizing, and their files may be lost.
func (f *Files) MakeDirs() error {
	for _, dir := range []string{f.dir, f.Path(ClaimsDir), filepath.Dir(f.Path(GrantsFile))} {
		if err := f.Synced.MakeDir(dir, 0o700); err != nil {
			return err
		}
		if err := f.Synced.SyncDir(filepath.Dir(dir)); err != nil {
			return err
		}
	}
	return nil
}

// WriteSynced writes a file and synchronizes it against a power failure.
func (f *Files) WriteSynced(name string, data []byte) error {
	if _, err := f.Synced.Lstat(f.Path(name)); errors.Is(err, fs.ErrNotExist) {
		if err := f.MakeDirs(); err != nil { // another program may have removed the directories
			return err
		}
	}
	_, err := f.Synced.Write(f.Path(name), data, 0o600)
	return err
}

// LacksClaims reports whether the directory of claims' files is missing.
func (f *Files) LacksClaims() bool { return f.Claims.IsMissing(f.Path(ClaimsDir)) }

// WriteClaim writes the record of a claim, and reports which content a failed write has left. A claim
// with chosen devices must get the same devices after a reboot, so its record is synchronized.
func (f *Files) WriteClaim(c *Claim, data []byte) (disk.InPlace, error) {
	to := f.Claims
	if slices.ContainsFunc(c.Results, func(r Result) bool { return r.IsChosen() }) {
		to = f.Synced
	}
	return to.Write(f.ClaimFile(c.UID), data, 0o600)
}

// SetAside renames an invalid file, to make room for a new one.
func (f *Files) SetAside(uid types.UID) error {
	files, err := f.AsideFiles(uid)
	if err == nil {
		err = f.Claims.Rename(f.ClaimFile(uid), fmt.Sprintf("%s%d", f.Path(filepath.Join(ClaimsDir, string(uid)+BadExtension)), len(files)))
	}
	if err != nil {
		return fmt.Errorf("set aside the record of claim %s: %w", uid, err)
	}
	return nil
}

// RecordNames returns the names of the claims' files, or nil if listing fails.
func (f *Files) RecordNames() (map[string]bool, error) {
	files, err := f.Claims.ListDir(f.Path(ClaimsDir))
	if err != nil {
		return nil, fmt.Errorf("list records: %w", err)
	}
	names := make(map[string]bool, len(files))
	for _, file := range files {
		names[file.Name()] = true
	}
	return names, nil
}
