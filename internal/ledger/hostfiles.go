package ledger

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/hostfile"
)

// HostFiles is the output that is files of the host: each is there as long as
// anybody has it.
type HostFiles struct{ hostfile.Writer }

var _ Output = HostFiles{}

// Write implements [Output]. Where nobody made their directory nobody reads
// files either, and they are left out.
func (w HostFiles) Write(e Entry) error {
	files := e.Files()
	if len(files) == 0 {
		return nil
	}
	_, err := w.Writer.Write(files)
	return err
}

// Remove implements [Output].
func (w HostFiles) Remove(e Entry, others []Entry) error {
	var gone []string
	for _, f := range e.Files() {
		if !slices.ContainsFunc(others, func(other Entry) bool {
			return slices.ContainsFunc(other.Files(), func(kept discovery.HostFile) bool { return kept.Path == f.Path })
		}) {
			gone = append(gone, f.Path)
		}
	}
	return w.Writer.Remove(gone)
}

// Sweep implements [Output]. Which files of the host are ours is not known
// without their entries.
func (w HostFiles) Sweep(func(types.UID, func() error) (bool, error)) error { return nil }
