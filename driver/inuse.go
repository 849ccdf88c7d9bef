package driver

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
)

// Use is a device that claims have, and how it is for them.
type Use struct {
	Device string // its name in the snapshot
	Health discovery.Health
	Claims []types.NamespacedName
}

// InUse returns which devices containers may have by claims, and how they are as
// a snapshot has them. There is more than one of a device that is gone for some of
// its claims, since another has taken its place, and there for others. What a claim
// has for administration only is nobody's concern. It is empty until the records
// are read.
func (d *Driver) InUse(s *discovery.Snapshot) []Use {
	var uses []Use
	now := time.Now()
	for _, r := range d.recorded() {
		if r.Configuring {
			continue
		}
		for i := range r.Results {
			has := &r.Results[i]
			if has.Admin {
				continue
			}
			device, found := s.Lookup(has.Source)
			use := Use{Device: has.Source, Health: d.healthBy(&device, found, s.Gone, r, has, now)}
			i := slices.IndexFunc(uses, func(u Use) bool { return u.Device == use.Device && u.Health == use.Health })
			if i < 0 {
				i, uses = len(uses), append(uses, use)
			}
			if !slices.Contains(uses[i].Claims, r.Named()) {
				uses[i].Claims = append(uses[i].Claims, r.Named())
			}
		}
	}
	return uses
}
