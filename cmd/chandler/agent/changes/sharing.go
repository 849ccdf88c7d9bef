package changes

import (
	"chandler.dev/internal/sharing"
)

// newSharingDaemons creates the [sharing.Manager], which gives instructions to the family programs.
func (c *Manager) newSharingDaemons() *sharing.Manager {
	var families []string
	for _, f := range c.config.Families {
		if f.Order != nil {
			families = append(families, f.Name)
		}
	}
	return sharing.New(sharing.Config{
		Host:     c.config.Host,
		Files:    c.config.Journal.Files,
		Boot:     c.config.Journal.Boot,
		Dir:      c.config.SharingDir,
		Families: families,
		Ledger:   c.config.Ledger,
		Changed:  c.config.RequestScan,

		Transport: c.config.SharingPrograms,
	})
}
