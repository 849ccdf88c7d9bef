package agent

import (
	"path/filepath"

	"chandler.dev/internal/upkeep"
)

// upkeepDir is where programs of families keep up what claims want.
func (a *agent) upkeepDir() string { return filepath.Join(a.StateDir, "upkeep") }

// newOverseer makes what orders of those programs.
func (a *agent) newOverseer() *upkeep.Overseer {
	var families []string
	for _, f := range a.Families {
		if f.Order != nil {
			families = append(families, f.Name)
		}
	}
	return upkeep.New(upkeep.Config{
		Host:     a.host,
		Files:    a.files(),
		Dir:      a.upkeepDir(),
		Families: families,
		Ledger:   a.ledger,
		Changed:  a.rescan,
	})
}
