package exclusion

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/allocation"
)

// balance is what is left of the counters of the wanted device's physical device, and of the device's
// capacity.
type balance struct {
	wanted   *allocation.Hold
	counters discovery.Budget[string]
	capacity discovery.Budget[resourceapi.QualifiedName]
	counted  map[string]bool // devices whose takes are in counters; all shares of a device together count once
}

// newBalance returns the balance after the wanted hold. It has only the names of that hold.
func newBalance(wanted *allocation.Hold, stock Stock) *balance {
	b := &balance{
		wanted:   wanted,
		counters: make(discovery.Budget[string]),
		capacity: make(discovery.Budget[resourceapi.QualifiedName]),
		counted:  map[string]bool{wanted.Device: true},
	}
	device, _ := stock.Device(wanted.Device)
	for counter := range wanted.Takes {
		b.counters[counter] = resource.Quantity{}
		if device.PartOf != nil {
			b.counters[counter] = device.PartOf.Counters[counter]
		}
	}
	for name := range wanted.Amount {
		// A name may have no limit any more because the device has changed; then the scheduler alone
		// has checked the amount.
		if capacity, limited := device.Capacity[name]; limited {
			b.capacity[name] = capacity.Value
		}
	}
	if _, wants := wanted.Amount[discovery.Shares]; wants && wanted.Shares > 0 {
		b.capacity[discovery.Shares] = *resource.NewQuantity(wanted.Shares, resource.DecimalSI)
	}
	b.counters.TakeAmounts(wanted.Takes)
	b.capacity.TakeAmounts(wanted.Amount)
	return b
}

// add counts another hold and returns a description of the exceeded counter or capacity, "" if
// there is enough of each.
func (b *balance) add(other *allocation.Hold) string {
	if b.wanted.Open || other.Open || other.Silicon != b.wanted.Silicon {
		return ""
	}
	if other.Device == b.wanted.Device {
		if capacity := b.capacity.TakeAmounts(other.Amount); capacity != "" {
			return fmt.Sprintf("%s would have to give more of its %s than there is", b.wanted.Device, capacity)
		}
	}
	if b.counted[other.Device] {
		return ""
	}
	b.counted[other.Device] = true
	if counter := b.counters.TakeAmounts(other.Takes); counter != "" {
		return fmt.Sprintf("%s would have to give more of counter %s than there is", b.wanted.Silicon, counter)
	}
	return ""
}
