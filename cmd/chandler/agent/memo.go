package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/internal/disk"
)

// readLimit is how long a file that cannot be read is tried again before the agent
// does without it: a passing error of the disk should not cost what the file says.
const readLimit = 10 * time.Second

// memo is a file in which the agent writes down what it decided or saw, so that a
// restart changes nothing.
type memo struct {
	files disk.Files
	file  string
	said  []byte // what the file says
	lost  bool   // the file could be neither read nor set aside
}

// openMemo reads a file by a function that says whether it is understood. If the file
// cannot be read or understood, it is set aside, and the agent begins anew.
func openMemo(ctx context.Context, files disk.Files, file string, parse func(data []byte) error) *memo {
	m := &memo{files: files, file: file}
	for began := time.Now(); ; waitFor(ctx, nil, time.Second) {
		data, err := files.Read(file)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return m
		case err == nil:
			err = parse(data)
		case ctx.Err() != nil:
			m.lost = true
			return m
		case time.Since(began) < readLimit:
			continue
		}
		if err == nil {
			m.said = data
			return m
		}
		aside := file + ".unreadable"
		renamed := files.Rename(file, aside)
		m.lost = renamed != nil
		klog.FromContext(ctx).Error(errors.Join(fmt.Errorf("read %s: %w", file, err), renamed),
			"The agent does not know any more what it decided or saw, and begins anew", "setAside", aside)
		return m
	}
}

// write makes the file say something, unless it does already. If that fails, or
// somebody removes the file, the next call writes it.
func (m *memo) write(ctx context.Context, data []byte) {
	if m.lost {
		return
	}
	if _, err := m.files.Lstat(m.file); bytes.Equal(m.said, data) && !errors.Is(err, fs.ErrNotExist) {
		return
	}
	if _, err := m.files.Write(m.file, data, 0o600); err != nil {
		klog.FromContext(ctx).Error(err, "Writing down what a restart should find")
		return
	}
	m.said = data
}
