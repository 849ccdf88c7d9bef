package disk

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
)

// Records are values of one type that are kept as JSON, each in a file of one directory that has the name of the
// record. Only this user may read them.
type Records[T any] struct {
	Files Files
	Dir   string
}

const recordSuffix = ".json"

// ErrUnread says that the disk does not give a record, whatever it says. Later it may.
var ErrUnread = errors.New("the disk does not read it")

// File returns the file of a record.
func (r Records[T]) File(name string) string { return filepath.Join(r.Dir, name+recordSuffix) }

// Names returns the names of the records that there are, in order.
func (r Records[T]) Names() (names []string, err error) {
	entries, err := r.Files.List(r.Dir)
	for _, entry := range entries {
		if name, ok := strings.CutSuffix(entry.Name(), recordSuffix); ok && name != "" && name[0] != '.' {
			names = append(names, name)
		}
	}
	return names, err
}

// Read returns a record. The error is [fs.ErrNotExist] if there is none, [ErrUnread] if the disk does not give
// it, and another one if it is no JSON of that type.
func (r Records[T]) Read(name string) (*T, error) {
	data, err := r.Files.Read(r.File(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnread, err)
	}
	record := new(T)
	if err := json.Unmarshal(data, record); err != nil {
		return nil, err
	}
	return record, nil
}

// Write keeps a record, and says which one is there afterwards; see [Files.Write].
func (r Records[T]) Write(name string, record *T) (InPlace, error) {
	data, err := json.Marshal(record)
	if err != nil {
		return Old, err
	}
	return r.Files.Write(r.File(name), data, 0o600)
}

// Remove removes a record, if there is one.
func (r Records[T]) Remove(name string) error { return r.Files.Remove(r.File(name)) }

// Lacks reports whether there is no such record. A file that cannot be looked at may be there.
func (r Records[T]) Lacks(name string) bool { return r.Files.Lacks(r.File(name)) }
