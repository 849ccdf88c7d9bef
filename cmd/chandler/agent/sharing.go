package agent

import (
	"path/filepath"

	"chandler.dev/internal/sharing"
)

// sharingDir returns the directory for the daemons of family programs.
func (a *agent) sharingDir() string { return filepath.Join(a.StateDir, "sharing-daemons") }

// newSharingDaemons creates the [sharing.Manager], which gives instructions to the family programs.
func (a *agent) newSharingDaemons() *sharing.Manager {
	var families []string
	for _, f := range a.Families {
		if f.Order != nil {
			families = append(families, f.Name)
		}
	}
	return sharing.New(sharing.Config{
		Host:     a.host,
		Files:    a.files(),
		Boot:     a.BootID,
		Dir:      a.sharingDir(),
		Families: families,
		Ledger:   a.ledger,
		Changed:  a.requestScan,

		Transport: a.SharingPrograms,
	})
}
