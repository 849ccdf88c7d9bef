package hostfs

import (
	"bytes"
	"io/fs"
	"maps"
	"path"
	"sync"
	"sync/atomic"
	"time"
)

// Overlay is a host's file system with an overlay of files in memory. The files contain facts about
// the host that are on no disk. They can be opened by name but do not appear in directories. An
// Overlay is safe for concurrent use.
type Overlay struct {
	base    fs.FS
	setting sync.Mutex
	files   atomic.Pointer[map[string][]byte]
}

var (
	_ fs.ReadLinkFS = &Overlay{}
	_ fs.ReadDirFS  = &Overlay{}
	_ fs.StatFS     = &Overlay{}
)

// NewOverlay returns an overlay of the file system without any files in memory.
func NewOverlay(base fs.FS) *Overlay {
	o := &Overlay{base: base}
	o.files.Store(&map[string][]byte{})
	return o
}

// Set adds a file to the overlay, which hides a file of the same name below. If data is nil, Set
// removes the file from the overlay. It reports whether the overlay changed. The name is a path of
// [fs.FS]: "run/a.json".
func (o *Overlay) Set(name string, data []byte) (changed bool) {
	o.setting.Lock()
	defer o.setting.Unlock()
	old, known := (*o.files.Load())[name]
	if known == (data != nil) && bytes.Equal(old, data) {
		return false
	}
	files := maps.Clone(*o.files.Load())
	delete(files, name)
	if data != nil {
		files[name] = bytes.Clone(data)
	}
	o.files.Store(&files)
	return true
}

func (o *Overlay) is(name string, magic int64) bool {
	base, ok := o.base.(interface {
		is(name string, magic int64) bool
	})
	return ok && base.is(name, magic)
}

// file returns a file of the overlay.
func (o *Overlay) file(name string) (memoryInfo, bool) {
	data, ok := (*o.files.Load())[name]
	return memoryInfo{path.Base(name), data}, ok
}

// Open implements [fs.FS].
func (o *Overlay) Open(name string) (fs.File, error) {
	if info, ok := o.file(name); ok {
		return memoryFile{bytes.NewReader(info.data), info}, nil
	}
	return o.base.Open(name)
}

// Stat implements [fs.StatFS].
func (o *Overlay) Stat(name string) (fs.FileInfo, error) {
	if info, ok := o.file(name); ok {
		return info, nil
	}
	return fs.Stat(o.base, name)
}

// Lstat implements [fs.ReadLinkFS].
func (o *Overlay) Lstat(name string) (fs.FileInfo, error) {
	if info, ok := o.file(name); ok {
		return info, nil
	}
	return fs.Lstat(o.base, name)
}

// ReadLink implements [fs.ReadLinkFS].
func (o *Overlay) ReadLink(name string) (string, error) {
	if _, ok := o.file(name); ok {
		return "", &fs.PathError{Op: "readlink", Path: name, Err: fs.ErrInvalid}
	}
	return fs.ReadLink(o.base, name)
}

// ReadDir implements [fs.ReadDirFS].
func (o *Overlay) ReadDir(name string) ([]fs.DirEntry, error) { return fs.ReadDir(o.base, name) }

// memoryFile is an open file of an overlay.
type memoryFile struct {
	*bytes.Reader

	info memoryInfo
}

func (f memoryFile) Stat() (fs.FileInfo, error) { return f.info, nil }
func (f memoryFile) Close() error               { return nil }

// memoryInfo describes a file of an overlay.
type memoryInfo struct {
	name string
	data []byte
}

func (i memoryInfo) Name() string       { return i.name }
func (i memoryInfo) Size() int64        { return int64(len(i.data)) }
func (i memoryInfo) Mode() fs.FileMode  { return 0o444 }
func (i memoryInfo) ModTime() time.Time { return time.Time{} }
func (i memoryInfo) IsDir() bool        { return false }
func (i memoryInfo) Sys() any           { return nil }
