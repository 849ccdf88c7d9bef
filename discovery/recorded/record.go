package recorded

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"golang.org/x/tools/txtar"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pciids"
	"chandler.dev/discovery/scan"
)

// RecordHost returns a recorded host with everything that a scan with the given families reads, and
// nothing else except the names of the devices in the PCI ID Repository. A scan of the recorded host gives the same snapshot. The comment precedes the first
// entry.
//
// Files are recorded unchanged: the record includes serial numbers, UUIDs and similar data. A file
// that is listed or inspected but not read is recorded empty. Three kinds of entries are recorded
// as unreadable, with the reason: unreadable files and directories, links that lead out of the
// host, and files that look like an entry of the archive.
func RecordHost(host *discovery.Host, families []*discovery.Family, comment string) ([]byte, error) {
	r := &recorder{fsys: host.FS, entries: make(map[string]entry)}
	observed := *host
	observed.FS = r
	found := scan.ReadHost(&observed, families)
	if names := pciids.Read(host.FS, found.Devices); len(names) > 0 {
		r.entries[pciids.File] = entry{path: pciids.File, data: names.Text()}
	}
	archive := &txtar.Archive{Comment: []byte(strings.TrimSpace(comment) + "\n\n")}
	for _, name := range slices.Sorted(maps.Keys(r.entries)) {
		if e := r.entries[name]; e.kind != directory || !r.parents()[name] {
			archive.Files = append(archive.Files, txtar.File{Name: e.name(), Data: e.data})
		}
	}
	archive.Files = append(archive.Files, txtar.File{Name: endMarker})
	data := txtar.Format(archive)
	if _, err := Parse(data); err != nil {
		return nil, fmt.Errorf("record host: %w", err)
	}
	return data, nil
}

// recorder is a file system that records the reads of another file system.
type recorder struct {
	fsys    fs.FS
	entries map[string]entry
	above   map[string]bool // see parents
}

// parents returns the directories that need no entry of their own.
func (r *recorder) parents() map[string]bool {
	if r.above == nil {
		r.above = make(map[string]bool)
		for name := range r.entries {
			r.above[path.Dir(name)] = true
		}
	}
	return r.above
}

// Open implements fs.FS.
func (r *recorder) Open(name string) (fs.File, error) {
	at := r.walk(name, true)
	f, err := r.fsys.Open(name)
	if err != nil {
		r.keepFailure(at, err)
		return nil, err
	}
	if info, err := f.Stat(); err == nil {
		r.recordEntry(at, info)
	}
	return &recordedFile{File: f, recorder: r, path: at}, nil
}

// Stat implements fs.StatFS.
func (r *recorder) Stat(name string) (fs.FileInfo, error) {
	return r.recordStat(fs.Stat, name, true)
}

// Lstat implements fs.ReadLinkFS.
func (r *recorder) Lstat(name string) (fs.FileInfo, error) {
	return r.recordStat(fs.Lstat, name, false)
}

func (r *recorder) recordStat(stat func(fs.FS, string) (fs.FileInfo, error), name string, follow bool) (fs.FileInfo, error) {
	at := r.walk(name, follow)
	info, err := stat(r.fsys, name)
	if err != nil {
		r.keepFailure(at, err)
		return nil, err
	}
	r.recordEntry(at, info)
	return info, nil
}

// ReadLink implements fs.ReadLinkFS.
func (r *recorder) ReadLink(name string) (string, error) {
	r.walk(name, false)
	return fs.ReadLink(r.fsys, name)
}

// ReadDir implements fs.ReadDirFS.
func (r *recorder) ReadDir(name string) ([]fs.DirEntry, error) {
	at := r.walk(name, true)
	list, err := fs.ReadDir(r.fsys, name)
	if err != nil {
		r.keepFailure(at, err)
		return list, err
	}
	if at != "" && at != "." {
		r.entries[at] = entry{path: at, kind: directory}
	}
	for _, d := range list {
		if info, err := d.Info(); err == nil {
			r.recordEntry(path.Join(at, d.Name()), info)
		}
	}
	return list, nil
}

// walk follows and records the links on a path, including a link in the last element if follow is
// true. It returns the resolved path, or "" if the path leads out of the root.
func (r *recorder) walk(name string, follow bool) string {
	at, rest := ".", strings.Split(name, "/")
	for links := 0; len(rest) > 0; {
		element := rest[0]
		rest = rest[1:]
		switch element {
		case "..":
			if at == "." {
				return ""
			}
			at = path.Dir(at)
			continue
		case ".", "":
			continue
		}
		next := path.Join(at, element)
		target, err := fs.ReadLink(r.fsys, next)
		if err != nil {
			at = next
			continue
		}
		r.keepLink(next, target)
		if len(rest) == 0 && !follow {
			return next
		}
		if links++; links > 40 || path.IsAbs(target) {
			return ""
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return at
}

// recordEntry records the entry at a path without links.
func (r *recorder) recordEntry(name string, info fs.FileInfo) {
	if _, known := r.entries[name]; known || name == "" || name == "." {
		return
	}
	e := entry{path: name}
	switch mode := info.Mode(); {
	case mode&fs.ModeSymlink != 0:
		target, err := fs.ReadLink(r.fsys, name)
		if err != nil {
			r.keepFailure(name, err)
			return
		}
		r.keepLink(name, target)
		return
	case mode.IsDir():
		e.kind = directory
	case mode&fs.ModeDevice != 0:
		e.kind, e.block = node, mode&fs.ModeCharDevice == 0
		e.major, e.minor = deviceNumbers(info)
	}
	r.entries[name] = e
}

func (r *recorder) keepLink(name, target string) {
	e := entry{path: name, kind: link, target: target}
	if checkTarget(name, target) != nil {
		e = entry{path: name, kind: unreadable, reason: fmt.Sprintf("a link to %q", target)}
	}
	r.entries[name] = e
}

// keepFailure records an unreadable entry. A missing file needs no entry.
func (r *recorder) keepFailure(name string, err error) {
	if name == "" || errors.Is(err, fs.ErrNotExist) {
		return
	}
	if pathError, ok := errors.AsType[*fs.PathError](err); ok {
		err = pathError.Err
	}
	// A path below a file is not a directory, and the file has its own entry.
	if info, lerr := fs.Lstat(r.fsys, name); lerr == nil && info.IsDir() == (r.entries[name].kind == directory) {
		r.entries[name] = entry{path: name, kind: unreadable, reason: strings.Join(strings.Fields(err.Error()), " ")}
	}
}

// recordedFile records the reads of a file.
type recordedFile struct {
	fs.File
	recorder *recorder
	path     string
	data     bytes.Buffer
}

// Read implements fs.File.
func (f *recordedFile) Read(p []byte) (int, error) {
	n, err := f.File.Read(p)
	f.data.Write(p[:n])
	if err != nil && !errors.Is(err, io.EOF) {
		f.recorder.keepFailure(f.path, err)
	}
	return n, err
}

// Close implements fs.File.
func (f *recordedFile) Close() error {
	e, ok := f.recorder.entries[f.path]
	if ok && e.kind == file && f.data.Len() > len(e.data) {
		e.data = bytes.Clone(f.data.Bytes())
		if _, stray := strayMarker(e.data); stray {
			e = entry{path: f.path, kind: unreadable, reason: "holds a line that begins as an entry does"}
		}
		f.recorder.entries[f.path] = e
	}
	return f.File.Close()
}
