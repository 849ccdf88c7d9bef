// Package atomicfile replaces and removes files so that a crash at any moment
// leaves the old file or the new one and never a part of either, and so that
// what has been reported as done survives a loss of power. It knows nothing of
// what the files hold.
package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// suffix ends the names of temporary files. Container runtimes load only
// .json and .yaml (scanSpecDirs in tags.cncf.io/container-device-interface).
const suffix = ".tmp"

// Op is one step of what is done to a file.
type Op string

// The steps in which a file is written, and those in which one is moved or
// removed.
const (
	Create  Op = "create"
	Write   Op = "write"
	Sync    Op = "sync"
	Rename  Op = "rename"
	Remove  Op = "remove"
	SyncDir Op = "sync directory"
)

// Files writes files. The zero value is ready to use.
type Files struct {
	// Before is called before each step; if it returns an error, the step is
	// not done and has that error. Tests use it to fail or stop at a step.
	Before func(op Op, name string) error

	// Unsynced files may be lost with the power, or be empty after it, which
	// takes less time. It is for what is written again then.
	Unsynced bool
}

// Write makes data the content of the file, whose directory is made if it is
// missing. If it returns an error, the file may be the old or the new one.
func (f Files) Write(name string, data []byte, mode fs.FileMode) error {
	dir := filepath.Dir(name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
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
	if err := f.before(Create, filepath.Join(dir, base)); err != nil {
		return "", err
	}
	file, err := os.CreateTemp(dir, "."+base+".*"+suffix)
	if err != nil {
		return "", err
	}
	err = f.fill(file, data, mode)
	if err = errors.Join(err, file.Close()); err != nil {
		return "", errors.Join(err, f.remove(file.Name()))
	}
	return file.Name(), nil
}

func (f Files) fill(file *os.File, data []byte, mode fs.FileMode) error {
	if err := f.before(Write, file.Name()); err != nil {
		return err
	}
	if _, err := file.Write(data); err != nil {
		return err
	}
	if err := file.Chmod(mode); err != nil {
		return err
	}
	if f.Unsynced {
		return nil
	}
	if err := f.before(Sync, file.Name()); err != nil {
		return err
	}
	return file.Sync()
}

// Rename moves a file within its directory, in place of what is there.
func (f Files) Rename(from, to string) error {
	if err := f.before(Rename, to); err != nil {
		return err
	}
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return f.syncDir(filepath.Dir(to))
}

// Remove removes a file. One that is missing is no error.
func (f Files) Remove(name string) error {
	if _, err := os.Lstat(name); errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil
	}
	if err := f.remove(name); err != nil {
		return err
	}
	return f.syncDir(filepath.Dir(name))
}

// RemoveTemporary removes what crashed writers of files whose names begin with
// prefix left in dir. Nobody may be writing there.
func (f Files) RemoveTemporary(dir, prefix string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, entry := range entries {
		if name := entry.Name(); strings.HasPrefix(name, "."+prefix) && strings.HasSuffix(name, suffix) {
			errs = append(errs, f.remove(filepath.Join(dir, name)))
		}
	}
	return errors.Join(errs...)
}

func (f Files) remove(name string) error {
	if err := f.before(Remove, name); err != nil {
		return err
	}
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// syncDir makes names that were added to dir or removed from it durable.
func (f Files) syncDir(dir string) error {
	if f.Unsynced {
		return nil
	}
	if err := f.before(SyncDir, dir); err != nil {
		return err
	}
	file, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close())
}

func (f Files) before(op Op, name string) error {
	if f.Before == nil {
		return nil
	}
	if err := f.Before(op, name); err != nil {
		return fmt.Errorf("%s %s: %w", op, name, err)
	}
	return nil
}
