// Package outputs writes the files of prepared claims for the ledger: their CDI specs, and the
// metadata of their devices.
package outputs

import (
	"errors"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/cdi"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
)

// CDISpecs is the ledger output for the CDI specs of claims.
type CDISpecs struct{ cdi.Dir }

var _ interface {
	ledger.Output
	ledger.Namer
	ledger.TemporaryRemover
} = CDISpecs{}

// Write implements [ledger.Output].
func (s CDISpecs) Write(e allocation.Entry) error {
	if c, ok := e.(*allocation.Claim); ok {
		return s.WriteClaim(c.UID, cdiDevices(c))
	}
	return nil
}

// Remove implements [ledger.Output].
func (s CDISpecs) Remove(e allocation.Entry, others []allocation.Entry) error {
	uid := e.Owner().UID
	if uid == "" || haveUID(others, uid) {
		return nil
	}
	return s.RemoveClaim(uid)
}

// haveUID reports whether one of the entries has the claim's UID.
func haveUID(entries []allocation.Entry, uid types.UID) bool {
	return slices.ContainsFunc(entries, func(e allocation.Entry) bool { return e.Owner().UID == uid })
}

// RemoveOrphans implements [ledger.Output].
func (s CDISpecs) RemoveOrphans(look func(types.UID, func() error) (bool, error)) error {
	uids, err := s.Claims()
	errs := []error{err}
	for _, uid := range uids {
		_, err := look(uid, func() error { return s.RemoveClaim(uid) })
		errs = append(errs, err)
	}
	return joinErrors("sweep CDI specs", errs)
}

// Named implements [ledger.Namer].
func (s CDISpecs) Named() (map[string][]allocation.SealedDevice, error) {
	uids, err := s.Claims()
	if err != nil {
		return nil, err
	}
	var errs []error
	named := make(map[string][]allocation.SealedDevice, len(uids))
	for _, uid := range uids {
		devices, err := s.ClaimDevices(uid)
		errs = append(errs, err)
		named[string(uid)] = make([]allocation.SealedDevice, 0, len(devices))
		for i := range devices {
			d := allocation.SealedDevice{Name: devices[i].Name, Nodes: allocation.NodesIn(devices[i].Edits.DeviceNodes)}
			named[string(uid)] = append(named[string(uid)], d)
		}
	}
	return named, joinErrors("read CDI specs", errs)
}

// cdiDevices returns the devices of a claim's CDI spec.
func cdiDevices(c *allocation.Claim) []cdi.Device {
	devices := make([]cdi.Device, 0, len(c.Results))
	for _, result := range c.Results {
		devices = append(devices, cdi.Device{Name: result.CDI, Edits: result.Edits})
	}
	return devices
}

// joinErrors joins the errors of a step, if there are any.
func joinErrors(step string, errs []error) error {
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s: %w", step, err)
	}
	return nil
}
