package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// registryDir contains a record for each machine of this host, locked by the machine's
// supervisor. The last machine to end removes the directory.
const registryDir = "/run/chandler-e2e"

// leftovers are the resources of a machine that remain after the death of all its processes.
type leftovers struct {
	Cgroups []string `json:"cgroups"`
	Paths   []string `json:"paths"`
}

// remove removes all leftovers. Missing ones are not an error.
func (l leftovers) remove() error {
	var errs []error
	for _, dir := range l.Cgroups {
		errs = append(errs, removeCgroup(dir))
	}
	for _, path := range l.Paths {
		errs = append(errs, os.RemoveAll(path))
	}
	return errors.Join(errs...)
}

// A record lists the leftovers of a machine, for removal after the death of its supervisor.
// The supervisor holds a lock on the record's file, which the kernel releases at the
// supervisor's end. A reused name or process ID therefore cannot cause confusion.
type record struct {
	leftovers leftovers
	file      *os.File
	path      string
}

// register writes and locks a record, and only then gives the file its name. Other processes
// therefore see complete, locked records only.
func register(dir, id string, l leftovers) (*record, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	file, err := os.CreateTemp(dir, ".new-*")
	if err != nil {
		return nil, err
	}
	r := &record{leftovers: l, file: file, path: filepath.Join(dir, id+".json")}
	err = errors.Join(
		unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB),
		json.NewEncoder(file).Encode(l),
	)
	if err == nil {
		err = os.Rename(file.Name(), r.path)
	}
	if err != nil {
		_ = os.Remove(file.Name())
		_ = file.Close()
		return nil, err
	}
	return r, nil
}

// close removes the record, and the directory after the last record.
func (r *record) close() {
	_ = os.Remove(r.path)
	_ = os.Remove(filepath.Dir(r.path)) // fails while other records exist
	_ = r.file.Close()
}

// sweep removes the leftovers of machines without a supervisor.
func sweep(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") { // still being written
			continue
		}
		if err := sweepRecord(filepath.Join(dir, entry.Name())); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", entry.Name(), err))
		}
	}
	return errors.Join(errs...)
}

func sweepRecord(path string) error {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) { // the machine has just ended
		return nil
	}
	if err != nil {
		return err
	}
	if unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil { // the supervisor is alive
		return file.Close()
	}
	if !stillThere(file, path) {
		return file.Close()
	}
	r := &record{file: file, path: path}
	if err := json.NewDecoder(file).Decode(&r.leftovers); err != nil {
		return errors.Join(fmt.Errorf("read: %w", err), file.Close())
	}
	if err := r.leftovers.remove(); err != nil {
		return errors.Join(err, file.Close()) // the record remains for the next attempt
	}
	r.close()
	return nil
}

// stillThere reports whether path still is the opened file, and was not removed by the
// supervisor in the meantime.
func stillThere(file *os.File, path string) bool {
	opened, err := file.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(path)
	return err == nil && os.SameFile(opened, named)
}
