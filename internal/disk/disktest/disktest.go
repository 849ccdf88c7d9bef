// Package disktest provides a disk for tests with injected failures.
package disktest

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"chandler.dev/internal/disk"
)

// Op is an operation on a file.
type Op string

// The operations: all changes, and reading.
const (
	Create    Op = "create"
	Write     Op = "write"
	Sync      Op = "sync"
	Rename    Op = "rename"
	Remove    Op = "remove"
	RemoveAll Op = "remove all"
	SyncDir   Op = "sync directory"
	Read      Op = "read"
)

// Disk is the operating system's disk with injected failures.
type Disk struct {
	disk.OS

	// Before is called before each operation except reads. If Before returns an error, the
	// operation fails with the error and has no effect. name is the final name of the file.
	Before func(op Op, name string) error

	// BeforeRead is called before a file or a directory is read.
	BeforeRead func(name string) error
}

var _ disk.FS = (*Disk)(nil)

func (d *Disk) before(op Op, name string) error {
	if d.Before == nil {
		return nil
	}
	if err := d.Before(op, finalName(name)); err != nil {
		return fmt.Errorf("%s %s: %w", op, name, err)
	}
	return nil
}

// finalName returns the final name of a temporary file.
func finalName(name string) string {
	dir, base := filepath.Split(name)
	if hidden, ok := strings.CutPrefix(base, "."); ok && strings.HasSuffix(base, ".tmp") {
		hidden = strings.TrimSuffix(hidden, ".tmp")
		return filepath.Join(dir, strings.TrimSuffix(hidden, filepath.Ext(hidden)))
	}
	return name
}

// CreateTemp implements [disk.FS].
func (d *Disk) CreateTemp(dir, pattern string) (disk.File, error) {
	if err := d.before(Create, filepath.Join(dir, pattern)); err != nil {
		return nil, err
	}
	f, err := d.OS.CreateTemp(dir, pattern)
	if err != nil {
		return nil, err
	}
	return &file{f, d}, nil
}

// Rename implements [disk.FS].
func (d *Disk) Rename(from, to string) error {
	if err := d.before(Rename, to); err != nil {
		return err
	}
	return d.OS.Rename(from, to)
}

// Remove implements [disk.FS].
func (d *Disk) Remove(name string) error {
	if err := d.before(Remove, name); err != nil {
		return err
	}
	return d.OS.Remove(name)
}

// RemoveAll implements [disk.FS].
func (d *Disk) RemoveAll(dir string) error {
	if err := d.before(RemoveAll, dir); err != nil {
		return err
	}
	return d.OS.RemoveAll(dir)
}

// SyncDir implements [disk.FS].
func (d *Disk) SyncDir(dir string) error {
	if err := d.before(SyncDir, dir); err != nil {
		return err
	}
	return d.OS.SyncDir(dir)
}

// ReadFile implements [disk.FS].
func (d *Disk) ReadFile(name string) ([]byte, error) {
	if err := d.beforeRead(name); err != nil {
		return nil, err
	}
	return d.OS.ReadFile(name)
}

// ReadDir implements [disk.FS].
func (d *Disk) ReadDir(dir string) ([]fs.DirEntry, error) {
	if err := d.beforeRead(dir); err != nil {
		return nil, err
	}
	return d.OS.ReadDir(dir)
}

func (d *Disk) beforeRead(name string) error {
	if d.BeforeRead == nil {
		return nil
	}
	if err := d.BeforeRead(name); err != nil {
		return fmt.Errorf("%s %s: %w", Read, name, err)
	}
	return nil
}

// file is a new file with injected failures.
type file struct {
	disk.File
	disk *Disk
}

func (f *file) Write(data []byte) (int, error) {
	if err := f.disk.before(Write, f.Name()); err != nil {
		return 0, err
	}
	return f.File.Write(data)
}

func (f *file) Sync() error {
	if err := f.disk.before(Sync, f.Name()); err != nil {
		return err
	}
	return f.File.Sync()
}
