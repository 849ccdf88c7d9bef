package ledger

import (
	"errors"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/ledger/allocation"
)

// Output is a kind of file that exists because of entries. An Output ignores entries without such
// files.
type Output interface {
	// Write makes the files of an entry match the entry.
	Write(e allocation.Entry) error

	// Remove removes the files of an entry, except files of other entries.
	Remove(e allocation.Entry, others []allocation.Entry) error

	// RemoveOrphans calls look for each claim with files. The remove function removes the claim's
	// files; look calls remove for an unknown claim.
	RemoveOrphans(look func(uid types.UID, remove func() error) (known bool, err error)) error
}

// ClaimForgetter is an Output with stored copies of its files, which cannot be computed from an
// entry.
type ClaimForgetter interface {
	// ForgetClaim removes the copies of a claim's files. The ledger calls ForgetClaim after
	// everything else of the claim is removed: if the end of a claim fails, the claim is prepared
	// again.
	ForgetClaim(uid types.UID) error
}

// TemporaryRemover is an Output whose writers leave temporary files after a kill.
type TemporaryRemover interface {
	// RemoveTemporary removes temporary files of an age; see [disk.Files.SweepTemporary].
	RemoveTemporary(age time.Duration) error
}

// Namer is an Output whose files name their owners.
type Namer interface {
	// Named returns the devices in the files of each owner, by key. If the owners with files cannot
	// be determined, Named returns nil and an error.
	Named() (map[string][]allocation.SealedDevice, error)
}

// GrantReplacer is an [Output] that acts when the kubelet allocates an ID to a container while the
// ledger still has the previous container's grant. It withholds devices that the next container may
// not have yet.
type GrantReplacer interface {
	// GrantsReplaced is called with the earlier grants, which have ended.
	GrantsReplaced(earlier []*allocation.Grant) error
}

// outputs are written in order, and removed in reverse order.
type outputs []Output

// removeEntry removes the outputs of an entry in reverse order, except the files that other
// entries share.
func (all outputs) removeEntry(e allocation.Entry, others []allocation.Entry) error {
	for _, o := range slices.Backward(all) {
		if err := o.Remove(e, others); err != nil {
			return err
		}
	}
	return nil
}

// namedDevices returns the devices in the outputs of claims, or nil if the claims with outputs are
// not known.
func (all outputs) namedDevices() (map[string][]allocation.SealedDevice, error) {
	named := make(map[string][]allocation.SealedDevice)
	var errs []error
	for _, o := range all {
		namer, ok := o.(Namer)
		if !ok {
			continue
		}
		more, err := namer.Named()
		if more == nil && err != nil {
			return nil, err
		}
		errs = append(errs, err)
		for key, devices := range more {
			named[key] = append(named[key], devices...)
		}
	}
	return named, errors.Join(errs...)
}

// sweepOrphans removes the outputs of ended claims: outputs after a failed removal, and outputs
// restored from a backup. At its start an agent would treat such outputs as claims with lost files.
func (all outputs) sweepOrphans(removeUnknown func(types.UID, func() error) (bool, error)) error {
	var errs []error
	for _, o := range all {
		errs = append(errs, o.RemoveOrphans(removeUnknown))
	}
	return errors.Join(errs...)
}
