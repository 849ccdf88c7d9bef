package passthroughtest

import (
	"io/fs"
	"path"
)

// HangFile returns a host in which every attempt to open a file with the given name blocks until
// the channel is closed.
func HangFile(fsys fs.FS, name string, until <-chan struct{}) fs.FS {
	return hangingFile{fsys, name, until}
}

type hangingFile struct {
	fs.FS

	name  string
	until <-chan struct{}
}

// Open implements [fs.FS].
func (h hangingFile) Open(name string) (fs.File, error) {
	if path.Base(name) == h.name {
		<-h.until
	}
	return h.FS.Open(name)
}

// ReadDir implements [fs.ReadDirFS].
func (h hangingFile) ReadDir(name string) ([]fs.DirEntry, error) { return fs.ReadDir(h.FS, name) }

// ReadLink implements [fs.ReadLinkFS].
func (h hangingFile) ReadLink(name string) (string, error) { return fs.ReadLink(h.FS, name) }

// Lstat implements [fs.ReadLinkFS].
func (h hangingFile) Lstat(name string) (fs.FileInfo, error) { return fs.Lstat(h.FS, name) }

// Stat implements [fs.StatFS].
func (h hangingFile) Stat(name string) (fs.FileInfo, error) { return fs.Stat(h.FS, name) }
