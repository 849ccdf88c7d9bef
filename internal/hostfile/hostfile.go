// Package hostfile writes and removes the files of the host that go with
// devices while containers have them. It knows nothing of what they say, and
// nothing of who has what.
package hostfile

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

// Writer writes files in some directories of the host. Its zero value writes
// none. It may be used by several goroutines for different files.
type Writer struct {
	// Root is where the agent sees the root of the host in which files are
	// written, "/" if empty.
	Root string

	// Dirs are the directories of the host in which files may be, and no other.
	Dirs []string

	// Files writes them; its zero value is the one to use.
	Files disk.Files
}

// Write writes the files that are not there as they should be, in place of what
// is there, for all to read and nobody to change. It makes no directory: where
// one is missing nobody reads in it, and the paths of the files that would be
// there are returned.
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
		if w.written(name, f.Text) {
			continue
		}
		if _, err := w.Files.Write(name, []byte(f.Text), 0o444); err != nil {
			errs = append(errs, fmt.Errorf("write host file %s: %w", f.Path, err))
		}
	}
	return unwritten, errors.Join(errs...)
}

// written reports whether the file is there as it should be.
func (w Writer) written(name, text string) bool {
	info, err := w.Files.Lstat(name)
	if err != nil || info.Mode() != 0o444 || info.Size() != int64(len(text)) {
		return false
	}
	data, err := w.Files.Read(name)
	return err == nil && string(data) == text
}

// Remove removes files, and what a writer of theirs that crashed has left. It is
// no error if one is missing. A file in none of the directories is left alone: an
// agent that had other directories wrote it.
func (w Writer) Remove(paths []string) error {
	var errs []error
	for _, path := range paths {
		if (discovery.HostFile{Path: path}).CheckIn(w.Dirs) != nil {
			continue
		}
		name := w.name(path)
		if err := errors.Join(w.Files.Remove(name), w.Files.Sweep(filepath.Dir(name), 0, filepath.Base(name)+".")); err != nil {
			errs = append(errs, fmt.Errorf("remove host file %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

func (w Writer) name(path string) string { return filepath.Join("/", w.Root, path) }
