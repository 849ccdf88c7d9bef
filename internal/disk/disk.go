// Package disk writes, reads and removes files. If the process is killed, either the old or
// the new file remains, never a partial file. After a loss of power, neither may remain unless
// files are synced. The package is independent of the files' contents.
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

// suffix is the suffix of temporary files. Container runtimes load only .json and .yaml files
// (scanSpecDirs in tags.cncf.io/container-device-interface).
const suffix = ".tmp"

// InPlace is the outcome of a write: the file that is in place afterwards.
type InPlace int

// Old is the previous file or its absence, and New the written file. Unknown means that the
// file is unreadable.
const (
	Unknown InPlace = iota
	Old
	New
)

// String returns a word for messages.
func (p InPlace) String() string { return [...]string{"unknown", "old", "new"}[p] }

// Files writes files. The zero value is ready to use.
type Files struct {
	// FS is the disk; nil stands for [OS].
	FS FS

	// Synced files survive a loss of power after a write, provided that their directories do; see
	// SyncDir. Other files may be lost or empty after a loss of power, or may reappear after a
	// removal.
	Synced bool
}

// Write replaces the content of a file, and creates missing directories. After an error, Write
// reads the file back to determine which file is in place.
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

// UpdateFile writes the file unless its content equals data. If data is nil, UpdateFile removes the
// file.
func (f Files) UpdateFile(name string, data []byte, mode fs.FileMode) error {
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

// writeTemporary writes data to a new file in dir and returns its path. Readers of specs and
// records ignore the file's name.
func (f Files) writeTemporary(dir, base string, data []byte, mode fs.FileMode) (string, error) {
	file, err := f.fileSystem().CreateTemp(dir, "."+base+".*"+suffix)
	if err != nil {
		return "", err
	}
	err = f.fillFile(file, data, mode)
	if err = errors.Join(err, file.Close()); err != nil {
		return "", errors.Join(err, f.remove(file.Name()))
	}
	return file.Name(), nil
}

func (f Files) fillFile(file File, data []byte, mode fs.FileMode) error {
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

// Rename moves a file within its directory, replacing any file at the destination.
func (f Files) Rename(from, to string) error {
	if err := f.fileSystem().Rename(from, to); err != nil {
		return err
	}
	return f.SyncDir(filepath.Dir(to))
}

// Remove removes a file. A missing file is not an error. The file may reappear after a loss of
// power.
func (f Files) Remove(name string) error {
	if _, err := f.fileSystem().Lstat(name); isMissing(err) {
		return nil
	}
	return f.remove(name)
}

// RemoveAll removes a directory and its contents. A missing directory is not an error.
func (f Files) RemoveAll(dir string) error {
	if err := f.fileSystem().RemoveAll(dir); !isMissing(err) {
		return err
	}
	return nil
}

// Read returns the contents of a file.
func (f Files) Read(name string) ([]byte, error) { return f.fileSystem().ReadFile(name) }

// Stat describes a file, following links.
func (f Files) Stat(name string) (fs.FileInfo, error) { return f.fileSystem().Stat(name) }

// Lstat describes a file without following links.
func (f Files) Lstat(name string) (fs.FileInfo, error) { return f.fileSystem().Lstat(name) }

// IsMissing reports whether a file does not exist. It returns false on other errors.
func (f Files) IsMissing(name string) bool {
	_, err := f.Lstat(name)
	return errors.Is(err, fs.ErrNotExist)
}

// ListDir returns the entries of a directory, or none if the directory does not exist.
func (f Files) ListDir(dir string) ([]fs.DirEntry, error) {
	entries, err := f.fileSystem().ReadDir(dir)
	if isMissing(err) {
		return nil, nil
	}
	return entries, err
}

// MakeDir creates a directory with its parents, if missing. It may disappear after a loss of
// power.
func (f Files) MakeDir(dir string, mode fs.FileMode) error {
	if info, err := f.fileSystem().Stat(dir); err == nil && info.IsDir() {
		return nil
	}
	return f.fileSystem().MkdirAll(dir, mode)
}

// SyncDir ensures that changes of names in a directory survive a loss of power, if files are
// synced.
func (f Files) SyncDir(dir string) error {
	if !f.Synced {
		return nil
	}
	return f.fileSystem().SyncDir(dir)
}

// trial begins the names of the files created by [Files.CheckWritable].
const trial = ".chandler."

// CheckWritable returns the error of creating a file in a directory, or nil.
func (f Files) CheckWritable(dir string) error {
	file, err := f.fileSystem().CreateTemp(dir, trial+"*"+suffix)
	if err != nil {
		return err
	}
	return errors.Join(file.Close(), f.remove(file.Name()))
}

// earlier matches the test files of earlier agents in writable directories.
var earlier = regexp.MustCompile(`^\.(writable|chandler)-[0-9]+$`)

// Abandoned is the age from which a temporary file is considered abandoned. A slower writer gets
// an error.
const Abandoned = time.Minute

// SweepTemporary removes the temporary files of a minimum age that writers left in a directory
// because they were killed or failed: those of files with one of the prefixes, and those of
// Writable. With an age below [Abandoned], no process may be writing such files in the directory.
func (f Files) SweepTemporary(dir string, age time.Duration, prefixes ...string) error {
	entries, err := f.ListDir(dir)
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
	if err := f.fileSystem().Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (f Files) fileSystem() FS {
	if f.FS == nil {
		return OS{}
	}
	return f.FS
}

// isMissing reports whether an error means that the file does not exist: the name does not
// exist, a directory of the path is a file, or the name is too long.
func isMissing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ENAMETOOLONG)
}
