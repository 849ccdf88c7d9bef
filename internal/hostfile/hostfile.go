// Package hostfile writes and removes host files that belong to allocated devices. It is
// independent of the contents of the files and of the allocations.
package hostfile

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

// Writer writes files in certain directories of the host. The zero Writer writes none. A
// Writer may be used by several goroutines for different files.
type Writer struct {
	// Root is the path of the host's root as seen by the agent, "/" if empty.
	Root string

	// Dirs are the directories of the host that may contain the files.
	Dirs []string

	// Files writes the files. The zero value is ready to use.
	Files disk.Files
}

// Write writes the files that are missing or different, readable by all and writable by none.
// An existing file is replaced. Write creates no directories: no program reads from a missing
// directory. It returns the paths of the files with a missing directory.
func (w Writer) Write(files []discovery.HostFile) (unwritten []string, err error) {
	var errs []error
	for _, f := range files {
		if err := f.CheckIn(w.Dirs); err != nil {
			errs = append(errs, err)
			continue
		}
		name := w.name(f.Path)
		if info, err := w.Files.Stat(filepath.Dir(name)); errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir() {
			unwritten = append(unwritten, f.Path)
			continue
		}
		if w.isWritten(name, f.Text) {
			continue
		}
		if _, err := w.Files.Write(name, []byte(f.Text), 0o444); err != nil {
			errs = append(errs, fmt.Errorf("write host file %s: %w", f.Path, err))
		}
	}
	return unwritten, errors.Join(errs...)
}

// isWritten reports whether the file exists with the right contents and mode.
func (w Writer) isWritten(name, text string) bool {
	info, err := w.Files.Lstat(name)
	if err != nil || info.Mode() != 0o444 || info.Size() != int64(len(text)) {
		return false
	}
	data, err := w.Files.Read(name)
	return err == nil && string(data) == text
}

// Remove removes files and their leftover temporary files. Missing files are not an error. A
// file outside of Dirs is kept, because an agent with different directories wrote it.
func (w Writer) Remove(paths []string) error {
	var errs []error
	for _, path := range paths {
		if (discovery.HostFile{Path: path}).CheckIn(w.Dirs) != nil {
			continue
		}
		name := w.name(path)
		if err := errors.Join(w.Files.Remove(name), w.Files.SweepTemporary(filepath.Dir(name), 0, filepath.Base(name)+".")); err != nil {
			errs = append(errs, fmt.Errorf("remove host file %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

func (w Writer) name(path string) string { return filepath.Join("/", w.Root, path) }
