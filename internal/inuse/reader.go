package inuse

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"syscall"

	"chandler.dev/discovery/sysfs"
)

// reader reads the files of a host and keeps the first error. A missing file is a valid result and
// not an error.
type reader struct {
	fs.FS

	err error
}

func (r *reader) noteError(err error) {
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
		r.fail(err)
	}
}

// fail keeps the first error. Any other error replaces a permission error.
func (r *reader) fail(err error) {
	if r.err == nil || errors.Is(r.err, fs.ErrPermission) && !errors.Is(err, fs.ErrPermission) {
		r.err = err
	}
}

func (r *reader) Open(name string) (fs.File, error) {
	opened, err := r.FS.Open(name)
	r.noteError(err)
	return opened, err
}

func (r *reader) ReadDir(name string) ([]fs.DirEntry, error) {
	entries, err := fs.ReadDir(r.FS, name)
	r.noteError(err)
	return entries, err
}

func (r *reader) Stat(name string) (fs.FileInfo, error) {
	info, err := fs.Stat(r.FS, name)
	r.noteError(err)
	return info, err
}

func (r *reader) Lstat(name string) (fs.FileInfo, error) {
	info, err := fs.Lstat(r.FS, name)
	r.noteError(err)
	return info, err
}

func (r *reader) ReadLink(name string) (string, error) {
	target, err := fs.ReadLink(r.FS, name)
	r.noteError(err)
	return target, err
}

// text returns the content of a file, "" if the file is missing.
func (r *reader) text(name string) string {
	text, err := sysfs.ReadText(r, name, maxTable)
	r.noteError(err)
	return text
}

// listDir returns the entries of a directory, none if the directory is missing.
func (r *reader) listDir(name string) []fs.DirEntry {
	entries, _ := r.ReadDir(name)
	return entries
}

// glob returns the paths with a pattern. Unlike [fs.Glob], glob records errors of reading
// directories, and the part after the last star need not exist.
func (r *reader) glob(pattern string) []string {
	found := []string{""}
	for element := range strings.SplitSeq(pattern, "/") {
		var next []string
		for _, dir := range found {
			if !strings.Contains(element, "*") {
				next = append(next, path.Join(dir, element))
				continue
			}
			for _, entry := range r.listDir(dir) {
				if ok, _ := path.Match(element, entry.Name()); ok {
					next = append(next, path.Join(dir, entry.Name()))
				}
			}
		}
		found = next
	}
	return found
}

// maxLinks is the kernel's limit of links in one path (MAXSYMLINKS).
const maxLinks = 40

// resolveLinks resolves a path through links to links. The final target need not exist.
func (r *reader) resolveLinks(name string) string {
	for range maxLinks {
		info, err := r.Lstat(name)
		if err != nil || info.Mode()&fs.ModeSymlink == 0 {
			return name
		}
		target, err := r.ReadLink(name)
		if err != nil {
			return name
		}
		if !path.IsAbs(target) {
			target = path.Join("/", path.Dir(name), target)
		}
		name = strings.TrimPrefix(path.Clean(target), "/")
	}
	r.fail(fmt.Errorf("%s: too many links", name))
	return name
}

// textOf returns the content of a file of the host. Callers distinguish the reasons for a missing
// file.
func textOf(host fs.FS, name string) (string, error) { return sysfs.ReadText(host, name, maxTable) }
