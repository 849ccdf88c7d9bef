// Package disk writes, reads and removes files. A killed process leaves the old
// file or the new one and never a part of either. A loss of power may leave
// neither, unless files are synchronised. It knows nothing of what they say.
package disk

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// suffix ends the names of temporary files. Container runtimes load only
// .json and .yaml (scanSpecDirs in tags.cncf.io/container-device-interface).
const suffix = ".tmp"

// InPlace says which file is there after a write.
type InPlace int

// After a write, the file is the one that was to be written, the one that was
// there before, which may be none, or cannot be read.
const (
	Unknown InPlace = iota
	Old
	New
)

// String returns a word for a message.
func (p InPlace) String() string { return [...]string{"unknown", "old", "new"}[p] }

// Files writes files. The zero value is ready to use.
type Files struct {
	// FS is the disk that they are on; nil is [OS].
	FS FS

	// Synced files survive a loss of power once they were written, if the
	// directories that they are in do; see SyncDir. Others may be lost with it, be
	// empty, or be there again after they were removed.
	Synced bool
}

// Write makes data the content of the file, whose directory is made if it is
// missing. If there is an error, the file is read back to say which one is in
// place.
func (f Files) Write(name string, data []byte, mode fs.FileMode) (InPlace, error) {
	err := f.replace(name, data, mode)
	if err == nil {
		return New, nil
	}
	there, readErr := f.Read(name)
	switch {
	case readErr == nil && bytes.Equal(there, data):
		return New, err
	case readErr == nil || isMissing(readErr):
		return Old, err
	}
	return Unknown, errors.Join(err, fmt.Errorf("read back: %w", readErr))
}

// Keep makes data the content of the file, and writes nothing if it is. There is no file
// if the data is nil.
func (f Files) Keep(name string, data []byte, mode fs.FileMode) error {
	if data == nil {
		return f.Remove(name)
	}
	if there, err := f.Read(name); err == nil && bytes.Equal(there, data) {
		return nil
	}
	_, err := f.Write(name, data, mode)
	return err
}

func (f Files) replace(name string, data []byte, mode fs.FileMode) error {
	dir := filepath.Dir(name)
	if err := f.MakeDir(dir, 0o755); err != nil {
		return err
	}
	temporary, err := f.writeTemporary(dir, filepath.Base(name), data, mode)
	if err != nil {
		return err
	}
	if err := f.Rename(temporary, name); err != nil {
		return errors.Join(err, f.remove(temporary))
	}
	return nil
}

// writeTemporary writes data to a new file in dir, whose name no reader of
// specs or records looks at, and returns its path.
func (f Files) writeTemporary(dir, base string, data []byte, mode fs.FileMode) (string, error) {
	file, err := f.fs().CreateTemp(dir, "."+base+".*"+suffix)
	if err != nil {
		return "", err
	}
	err = f.fill(file, data, mode)
	if err = errors.Join(err, file.Close()); err != nil {
		return "", errors.Join(err, f.remove(file.Name()))
	}
	return file.Name(), nil
}

func (f Files) fill(file File, data []byte, mode fs.FileMode) error {
	if _, err := file.Write(data); err != nil {
		return err
	}
	if err := file.Chmod(mode); err != nil {
		return err
	}
	if !f.Synced {
		return nil
	}
	return file.Sync()
}

// Rename moves a file within its directory, in place of what is there.
func (f Files) Rename(from, to string) error {
	if err := f.fs().Rename(from, to); err != nil {
		return err
	}
	return f.SyncDir(filepath.Dir(to))
}

// Remove removes a file. One that is missing is no error. It may be there again
// after a loss of power.
func (f Files) Remove(name string) error {
	if _, err := f.fs().Lstat(name); isMissing(err) {
		return nil
	}
	return f.remove(name)
}

// RemoveAll removes a directory and all that is in it. One that is missing is
// no error.
func (f Files) RemoveAll(dir string) error {
	if err := f.fs().RemoveAll(dir); !isMissing(err) {
		return err
	}
	return nil
}

// Read returns what is in a file.
func (f Files) Read(name string) ([]byte, error) { return f.fs().ReadFile(name) }

// Stat describes a file, or what a link leads to.
func (f Files) Stat(name string) (fs.FileInfo, error) { return f.fs().Stat(name) }

// Lstat describes a file.
func (f Files) Lstat(name string) (fs.FileInfo, error) { return f.fs().Lstat(name) }

// Lacks reports whether there is no such file. A file that cannot be looked at may be there.
func (f Files) Lacks(name string) bool {
	_, err := f.Lstat(name)
	return errors.Is(err, fs.ErrNotExist)
}

// List returns what is in a directory, nothing if there is no such directory.
func (f Files) List(dir string) ([]fs.DirEntry, error) {
	entries, err := f.fs().ReadDir(dir)
	if isMissing(err) {
		return nil, nil
	}
	return entries, err
}

// MakeDir makes a directory, and those that it is in, if it is missing. It may be
// lost with the power.
func (f Files) MakeDir(dir string, mode fs.FileMode) error {
	if info, err := f.fs().Stat(dir); err == nil && info.IsDir() {
		return nil
	}
	return f.fs().MkdirAll(dir, mode)
}

// SyncDir has the names that are in a directory survive a loss of power, if files
// are synchronised.
func (f Files) SyncDir(dir string) error {
	if !f.Synced {
		return nil
	}
	return f.fs().SyncDir(dir)
}

// trial begins the names of files by which [Files.Writable] tries a directory.
const trial = ".chandler."

// Writable reports why no file can be made in a directory, nil if one can.
func (f Files) Writable(dir string) error {
	file, err := f.fs().CreateTemp(dir, trial+"*"+suffix)
	if err != nil {
		return err
	}
	return errors.Join(file.Close(), f.remove(file.Name()))
}

// earlier matches the files by which earlier agents tried a directory.
var earlier = regexp.MustCompile(`^\.(writable|chandler)-[0-9]+$`)

// Abandoned is the age from which nobody writes a temporary file any more. A
// writer that takes longer meets an error.
const Abandoned = time.Minute

// Sweep removes temporary files of an age that writers left in a directory which
// were killed or could not remove them: those of files whose names begin with one
// of the prefixes, and those by which a directory was tried. With an age below
// [Abandoned], nobody may be writing such files there.
func (f Files) Sweep(dir string, age time.Duration, prefixes ...string) error {
	entries, err := f.List(dir)
	if err != nil {
		return fmt.Errorf("sweep %s: %w", dir, err)
	}
	var errs []error
	for _, entry := range entries {
		if !entry.Type().IsRegular() || !isTemporary(entry.Name(), prefixes) {
			continue
		}
		if info, err := entry.Info(); err == nil && time.Since(info.ModTime()) < age {
			continue
		}
		errs = append(errs, f.remove(filepath.Join(dir, entry.Name())))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("sweep %s: %w", dir, err)
	}
	return nil
}

func isTemporary(name string, prefixes []string) bool {
	if earlier.MatchString(name) {
		return true
	}
	if !strings.HasSuffix(name, suffix) {
		return false
	}
	for _, prefix := range prefixes {
		if strings.HasPrefix(name, "."+prefix) {
			return true
		}
	}
	return strings.HasPrefix(name, trial)
}

func (f Files) remove(name string) error {
	if err := f.fs().Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (f Files) fs() FS {
	if f.FS == nil {
		return OS{}
	}
	return f.FS
}

// isMissing reports whether an error says that there is no such file: none has
// the name, a directory of the path is a file, or the name is longer than any
// can be.
func isMissing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ENAMETOOLONG)
}
