package hook

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"chandler.dev/internal/disk"
)

// Install copies a program, which may be a link to it, to a path at which container runtimes can
// call it, unless it is there already. A container that calls it meanwhile has either the old
// one or the new.
func Install(program, name string) error {
	from, err := os.Open(program)
	if err != nil {
		return err
	}
	defer from.Close()
	want, err := from.Stat()
	if err != nil {
		return err
	}
	if got, err := os.Stat(name); err == nil && sameFile(got, want) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	to, err := os.CreateTemp(filepath.Dir(name), "."+prefix+"*.tmp")
	if err != nil {
		return err
	}
	defer os.Remove(to.Name()) // there is none once it has its name
	defer to.Close()
	_, err = io.Copy(to, from)
	if err := errors.Join(err, to.Chmod(0o755), to.Sync(), to.Close()); err != nil {
		return err
	}
	if err := os.Chtimes(to.Name(), time.Time{}, want.ModTime()); err != nil {
		return err
	}
	return os.Rename(to.Name(), name)
}

const prefix = "chandler." // of files that an installation leaves if it is cut short; see [disk.Files.Sweep]

// sameFile reports whether an installed program is the one that is to be installed. As with
// rsync, the size and the time tell: the time is copied with the program.
func sameFile(installed, program fs.FileInfo) bool {
	return installed.Mode().IsRegular() && installed.Mode().Perm() == 0o755 &&
		installed.Size() == program.Size() && installed.ModTime().Equal(program.ModTime())
}

// Keep has a program installed, looks every interval whether it is still there, and installs it
// again if it is not: without it no container that calls it can start. It returns when the
// context ends. Told are failures, each once until it is another or there is none.
func Keep(ctx context.Context, program, name string, interval time.Duration, failed func(error)) {
	if err := (disk.Files{}).Sweep(filepath.Dir(name), disk.Abandoned, prefix); err != nil {
		failed(err)
	}
	var last string
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		err := Install(program, name)
		if err != nil {
			if err.Error() != last {
				failed(fmt.Errorf("install the program for hooks: %w", err))
			}
			last = err.Error()
		} else {
			last = ""
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
