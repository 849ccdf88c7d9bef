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

// InstallProgram copies a program, or the target of a link, to a path at which container runtimes
// can run it, unless it is installed already. At any time, a container gets either the old program
// or the new one.
func InstallProgram(program, name string) error {
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
	defer os.Remove(to.Name()) // there is none after the rename
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

const prefix = "chandler." // of the files of an interrupted installation; see [disk.Files.SweepTemporary]

// sameFile reports whether the installed program is up to date. As with rsync, size and time
// decide: the time is copied with the program.
func sameFile(installed, program fs.FileInfo) bool {
	return installed.Mode().IsRegular() && installed.Mode().Perm() == 0o755 &&
		installed.Size() == program.Size() && installed.ModTime().Equal(program.ModTime())
}

// KeepInstalled installs a program, and checks at each interval whether it is still installed:
// without the program, no container with its hooks can start. KeepInstalled returns when the
// context ends. It calls failed for each failure, but only once for repeated equal failures.
func KeepInstalled(ctx context.Context, program, name string, interval time.Duration, failed func(error)) {
	if err := (disk.Files{}).SweepTemporary(filepath.Dir(name), disk.Abandoned, prefix); err != nil {
		failed(err)
	}
	var last string
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		err := InstallProgram(program, name)
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
