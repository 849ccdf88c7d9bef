package agent

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

// readLimit is how long the agent retries to read a file before starting without it. A transient
// disk error should not lose the content.
const readLimit = 10 * time.Second

// stateFile is a file with a decision or observation of the agent, so that a restart changes
// nothing.
type stateFile struct {
	files    disk.Files
	file     string
	digest   [sha256.Size]byte // of the content of the file, zero if there is none
	unusable bool              // the file could be neither read nor renamed
}

// openMemo reads a file and calls parse with the content. A file that cannot be read or parsed is
// renamed to NAME.unreadable, and the agent starts without its content.
func openMemo(ctx context.Context, files disk.Files, file string, parse func(data []byte) error) *stateFile {
	m := &stateFile{files: files, file: file}
	for began := time.Now(); ; waitFor(ctx, nil, time.Second) {
		data, err := files.Read(file)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return m
		case err == nil:
			err = parse(data)
		case ctx.Err() != nil:
			m.unusable = true
			return m
		case time.Since(began) < readLimit:
			continue
		}
		if err == nil {
			m.digest = sha256.Sum256(data)
			return m
		}
		aside := file + ".unreadable"
		renamed := files.Rename(file, aside)
		m.unusable = renamed != nil
		klog.FromContext(ctx).Error(errors.Join(fmt.Errorf("read %s: %w", file, err), renamed),
			"The agent has lost its earlier decisions and observations, and starts without them", "setAside", aside)
		return m
	}
}

// write writes the data to the file unless the file has this content. It returns false after an error.
// Then, or if the file was removed, the next call writes the data. If the file is unusable, write does
// nothing and returns true.
func (m *stateFile) write(ctx context.Context, data []byte) bool {
	if m.unusable {
		return true
	}
	digest := sha256.Sum256(data)
	if m.digest == digest && m.exists() {
		return true
	}
	if _, err := m.files.Write(m.file, data, 0o600); err != nil {
		klog.FromContext(ctx).Error(err, "Writing a decision or observation for the next start failed", "file", m.file)
		return false
	}
	m.digest = digest
	return true
}

// exists reports whether the file was not removed.
func (m *stateFile) exists() bool {
	_, err := m.files.Lstat(m.file)
	return !errors.Is(err, fs.ErrNotExist)
}
