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

// reader reads the files of a host and remembers the first error. That a file is
// missing is an answer and no error.
type reader struct {
	fs.FS

	err error
}

func (r *reader) note(err error) {
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
		r.fail(err)
	}
}

// fail keeps the first error. An error for want of privilege gives way to any other.
func (r *reader) fail(err error) {
	if r.err == nil || errors.Is(r.err, fs.ErrPermission) && !errors.Is(err, fs.ErrPermission) {
		r.err = err
	}
}

func (r *reader) Open(name string) (fs.File, error) {
	opened, err := r.FS.Open(name)
	r.note(err)
	return opened, err
}

func (r *reader) ReadDir(name string) ([]fs.DirEntry, error) {
	entries, err := fs.ReadDir(r.FS, name)
	r.note(err)
	return entries, err
}

func (r *reader) Stat(name string) (fs.FileInfo, error) {
	info, err := fs.Stat(r.FS, name)
	r.note(err)
	return info, err
}

func (r *reader) Lstat(name string) (fs.FileInfo, error) {
	info, err := fs.Lstat(r.FS, name)
	r.note(err)
	return info, err
}

func (r *reader) ReadLink(name string) (string, error) {
	target, err := fs.ReadLink(r.FS, name)
	r.note(err)
	return target, err
}

// text returns a file, "" if it is missing.
func (r *reader) text(name string) string {
	text, err := sysfs.ReadText(r, name, maxTable)
	r.note(err)
	return text
}

// list returns the entries of a directory, none if it is missing.
func (r *reader) list(name string) []fs.DirEntry {
	entries, _ := r.ReadDir(name)
	return entries
}

// glob returns the paths that match a pattern. Unlike [fs.Glob], it does not hide
// that a directory could not be read, and what follows the last star may be missing.
func (r *reader) glob(pattern string) []string {
	found := []string{""}
	for element := range strings.SplitSeq(pattern, "/") {
		var next []string
		for _, dir := range found {
			if !strings.Contains(element, "*") {
				next = append(next, path.Join(dir, element))
				continue
			}
			for _, entry := range r.list(dir) {
				if ok, _ := path.Match(element, entry.Name()); ok {
					next = append(next, path.Join(dir, entry.Name()))
				}
			}
		}
		found = next
	}
	return found
}

// maxLinks is how many links the kernel follows in one path (MAXSYMLINKS).
const maxLinks = 40

// follow returns where a path leads if it is a link, or a link to a link. There may be
// nothing at the end.
func (r *reader) follow(name string) string {
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

// textOf returns a file of the host, of which the caller knows why it may be missing.
func textOf(host fs.FS, name string) (string, error) { return sysfs.ReadText(host, name, maxTable) }
