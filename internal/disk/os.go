package disk

import (
	"errors"
	"io/fs"
	"os"
)

// FS is the file interface of an operating system. Paths are absolute. Errors are as in
// package os: a missing file is [fs.ErrNotExist].
type FS interface {
	MkdirAll(dir string, mode fs.FileMode) error
	// CreateTemp creates a new file as [os.CreateTemp] does.
	CreateTemp(dir, pattern string) (File, error)
	// Rename moves a file within its directory, replacing any file at the destination.
	Rename(from, to string) error
	Remove(name string) error
	RemoveAll(dir string) error
	// SyncDir ensures that names added to a directory or removed from it survive a loss of power.
	SyncDir(dir string) error

	ReadFile(name string) ([]byte, error)
	ReadDir(dir string) ([]fs.DirEntry, error)
	Stat(name string) (fs.FileInfo, error)
	Lstat(name string) (fs.FileInfo, error)
}

// File is a new file that is being written.
type File interface {
	Name() string
	Write(data []byte) (int, error)
	Chmod(mode fs.FileMode) error
	Sync() error
	Close() error
}

// OS is the disk of the operating system.
type OS struct{}

var _ FS = OS{}

// MkdirAll implements [FS].
func (OS) MkdirAll(dir string, mode fs.FileMode) error { return os.MkdirAll(dir, mode) }

// CreateTemp implements [FS].
func (OS) CreateTemp(dir, pattern string) (File, error) {
	file, err := os.CreateTemp(dir, pattern)
	if err != nil {
		return nil, err
	}
	return file, nil
}

// Rename implements [FS].
func (OS) Rename(from, to string) error { return os.Rename(from, to) }

// Remove implements [FS].
func (OS) Remove(name string) error { return os.Remove(name) }

// RemoveAll implements [FS].
func (OS) RemoveAll(dir string) error { return os.RemoveAll(dir) }

// SyncDir implements [FS].
func (OS) SyncDir(dir string) error {
	file, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close())
}

// ReadFile implements [FS].
func (OS) ReadFile(name string) ([]byte, error) { return os.ReadFile(name) }

// ReadDir implements [FS].
func (OS) ReadDir(dir string) ([]fs.DirEntry, error) { return os.ReadDir(dir) }

// Stat implements [FS].
func (OS) Stat(name string) (fs.FileInfo, error) { return os.Stat(name) }

// Lstat implements [FS].
func (OS) Lstat(name string) (fs.FileInfo, error) { return os.Lstat(name) }
