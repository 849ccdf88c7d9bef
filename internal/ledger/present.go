package ledger

import "chandler.dev/discovery/rules"

// Present is the [Stock] of a snapshot without classic IDs.
type Present struct {
	Snapshot *rules.Snapshot // may be nil
}

// Device implements [Stock].
func (p *Present) Device(name string) (rules.Offered, bool) {
	if p == nil || p.Snapshot == nil {
		return rules.Offered{}, false
	}
	return p.Snapshot.Lookup(name)
}

// Names implements [Stock].
func (p *Present) Names() (names []string) {
	if p == nil || p.Snapshot == nil {
		return nil
	}
	for i := range p.Snapshot.Devices {
		names = append(names, p.Snapshot.Devices[i].Name)
	}
	return names
}

// WithID implements [Stock].
func (p *Present) WithID(string, string) (*Grant, bool) { return nil, false }
