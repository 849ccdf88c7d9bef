package exclusion

import (
	"fmt"

	"chandler.dev/internal/ledger/allocation"
)

// Blocked is the error that explains why a device is not available to an owner.
type Blocked struct {
	Device      string           // the wanted device
	Owner       allocation.Owner // the owner of the blocking entry, the zero Owner if unknown
	OwnedDevice string           // the owner's device
	Kind        BlockedKind

	// Starting is the blocking grant if the grant is for another function of the same IOMMU group
	// and its container is not known yet, nil otherwise. The wanted device may be for the same
	// container.
	Starting *allocation.Grant

	OwnerText string // describes the owner without the name of the device
}

// BlockedKind is the reason why a device is not available, for code that must act on the reason.
type BlockedKind string

// The kinds.
const (
	InUse      BlockedKind = ""           // an owner has the device
	Reclaiming BlockedKind = "Reclaiming" // the owner has ended or is ending, and the device is being reclaimed
	Changing   BlockedKind = "Changing"   // the agent is changing the device
	Overdue    BlockedKind = "Overdue"    // the agent is changing the device, and the kernel has not answered in time

	// ForgottenByKubelet means that the kubelet allocates the device again while it lists the pod
	// that has the device without the device. The device becomes available once that pod is known to
	// have ended.
	ForgottenByKubelet BlockedKind = "ForgottenByKubelet"
)

// IsTransient reports whether the device will usually be available within seconds.
func (b *Blocked) IsTransient() bool {
	return b.Kind == Reclaiming || b.Kind == Changing || b.Kind == Overdue
}

// Error names the device and its owner.
func (b *Blocked) Error() string {
	return fmt.Sprintf("device %s is in use by %s", b.Device, b.OwnerText)
}
