package ledger

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/hostfile"
	"chandler.dev/internal/ledger/allocation"
)

// HostFiles is the output of host files: each file exists for as long as an entry needs the file.
type HostFiles struct{ hostfile.Writer }

var _ Output = HostFiles{}

// Write implements [Output]. If the directory of a file does not exist, no program reads the file,
// and Write skips the file.
func (w HostFiles) Write(e allocation.Entry) error {
	files := e.Files()
	if len(files) == 0 {
		return nil
	}
	_, err := w.Writer.Write(files)
	return err
}

// Remove implements [Output].
func (w HostFiles) Remove(e allocation.Entry, others []allocation.Entry) error {
	var gone []string
	for _, f := range e.Files() {
		if !slices.ContainsFunc(others, func(other allocation.Entry) bool {
			return slices.ContainsFunc(other.Files(), func(kept discovery.HostFile) bool { return kept.Path == f.Path })
		}) {
			gone = append(gone, f.Path)
		}
	}
	return w.Writer.Remove(gone)
}

// RemoveOrphans implements [Output] and does nothing, because host files do not name their owner.
func (w HostFiles) RemoveOrphans(func(types.UID, func() error) (bool, error)) error { return nil }
