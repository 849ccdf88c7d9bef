// Package statefile keeps decisions and observations of the agent in files, so that a restart changes
// nothing.
package statefile

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/internal/disk"
)

// ReadLimit is how long the agent retries to read a file before starting without it. A transient
// disk error should not lose the content.
const ReadLimit = 10 * time.Second

// File is a file with a decision or observation of the agent. Open it with [Open].
type File struct {
	Path string

	files    disk.Files
	digest   [sha256.Size]byte // of the content of the file, zero if there is none
	unusable bool              // the file could be neither read nor renamed
}

// Open reads a file and calls parse with the content. A file that cannot be read or parsed is
// renamed to NAME.unreadable, and the agent starts without its content.
func Open(ctx context.Context, files disk.Files, path string, parse func(data []byte) error) *File {
	f := &File{files: files, Path: path}
	for began := time.Now(); ; waitSecond(ctx) {
		data, err := files.Read(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return f
		case err == nil:
			err = parse(data)
		case ctx.Err() != nil:
			f.unusable = true
			return f
		case time.Since(began) < ReadLimit:
			continue
		}
		if err == nil {
			f.digest = sha256.Sum256(data)
			return f
		}
		aside := path + ".unreadable"
		renamed := files.Rename(path, aside)
		f.unusable = renamed != nil
		klog.FromContext(ctx).Error(errors.Join(fmt.Errorf("read %s: %w", path, err), renamed),
			"The agent has lost its earlier decisions and observations, and starts without them", "setAside", aside)
		return f
	}
}

// Write writes the data to the file unless the file has this content. It returns false after an error.
// Then, or if the file was removed, the next call writes the data. If the file is unusable, Write does
// nothing and returns true.
func (f *File) Write(ctx context.Context, data []byte) bool {
	if f.unusable {
		return true
	}
	digest := sha256.Sum256(data)
	if f.digest == digest && f.IsPresent() {
		return true
	}
	if _, err := f.files.Write(f.Path, data, 0o600); err != nil {
		klog.FromContext(ctx).Error(err, "Writing a decision or observation for the next start failed", "file", f.Path)
		return false
	}
	f.digest = digest
	return true
}

// IsPresent reports whether the file was not removed.
func (f *File) IsPresent() bool {
	_, err := f.files.Lstat(f.Path)
	return !errors.Is(err, fs.ErrNotExist)
}

// waitSecond returns after a second, or when the context ends.
func waitSecond(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(time.Second):
	}
}
