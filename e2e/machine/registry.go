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

// registryDir holds a record for each machine of this host, locked by its supervisor. It is gone when the last
// machine is.
const registryDir = "/run/chandler-e2e"

// leftovers are what a machine leaves on the host when all its processes are dead.
type leftovers struct {
	Cgroups []string `json:"cgroups"`
	Paths   []string `json:"paths"`
}

// remove removes it all. It is no error if something is missing.
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

// A record tells the leftovers of a machine to whoever comes after its supervisor. Its lock tells whether that lives:
// the kernel drops it with the process, so neither a name nor a process ID that another took over can mislead.
type record struct {
	leftovers leftovers
	file      *os.File
	path      string
}

// register writes a record and locks it. It is given its name last, so a record that others see is complete and
// locked.
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

// close removes the record, and the directory if it was the last one.
func (r *record) close() {
	_ = os.Remove(r.path)
	_ = os.Remove(filepath.Dir(r.path)) // refused while there are others
	_ = r.file.Close()
}

// sweep removes what machines have left whose supervisor no longer lives.
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
		if strings.HasPrefix(entry.Name(), ".") { // being written
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
	if errors.Is(err, fs.ErrNotExist) { // its machine has just ended
		return nil
	}
	if err != nil {
		return err
	}
	if unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil { // its supervisor lives
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
		return errors.Join(err, file.Close()) // kept, for another try
	}
	r.close()
	return nil
}

// stillThere tells whether path is still the file that was opened, and not removed by its supervisor meanwhile.
func stillThere(file *os.File, path string) bool {
	opened, err := file.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(path)
	return err == nil && os.SameFile(opened, named)
}
