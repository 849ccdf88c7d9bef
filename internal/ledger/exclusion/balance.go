package exclusion

import (
	"fmt"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/allocation"
)

// balance adds up the use of the counters of the wanted device's physical device, and of the
// device's capacity.
type balance struct {
	wanted   *allocation.Hold
	counters sums[string]
	capacity sums[resourceapi.QualifiedName]
	counted  map[string]bool // devices whose takes are in counters; all shares of a device together count once
}

// sums is the taken amount and the limit of each counter or capacity.
type sums[K ~string] struct {
	taken, limits map[K]resource.Quantity
}

func newBalance(wanted *allocation.Hold, stock Stock) *balance {
	b := &balance{
		wanted:   wanted,
		counters: newSums(wanted.Takes),
		capacity: newSums(wanted.Amount),
		counted:  map[string]bool{wanted.Device: true},
	}
	device, _ := stock.Device(wanted.Device)
	for counter := range wanted.Takes {
		b.counters.limits[counter] = resource.Quantity{}
		if device.PartOf != nil {
			b.counters.limits[counter] = device.PartOf.Counters[counter]
		}
	}
	for name, capacity := range device.Capacity {
		b.capacity.limits[name] = capacity.Value
	}
	if wanted.Shares > 0 {
		b.capacity.limits[discovery.Shares] = *resource.NewQuantity(wanted.Shares, resource.DecimalSI)
	}
	return b
}

func newSums[K ~string](taken map[K]resource.Quantity) sums[K] {
	return sums[K]{taken: maps.Clone(taken), limits: make(map[K]resource.Quantity)}
}

// add counts another hold and returns a description of the exceeded counter or capacity, "" if
// there is enough of each.
func (b *balance) add(other *allocation.Hold) string {
	if b.wanted.Open || other.Open || other.Silicon != b.wanted.Silicon {
		return ""
	}
	if other.Device == b.wanted.Device {
		if capacity := b.capacity.add(other.Amount); capacity != "" {
			return fmt.Sprintf("%s would have to give more of its %s than there is", b.wanted.Device, capacity)
		}
	}
	if b.counted[other.Device] {
		return ""
	}
	b.counted[other.Device] = true
	if counter := b.counters.add(other.Takes); counter != "" {
		return fmt.Sprintf("%s would have to give more of counter %s than there is", b.wanted.Silicon, counter)
	}
	return ""
}

// add adds amounts of another hold to the sums and returns the first exceeded name. A name may have
// no limit any more because the device has changed; then the scheduler alone has checked the
// amount.
func (s *sums[K]) add(takes map[K]resource.Quantity) K {
	for _, name := range slices.Sorted(maps.Keys(takes)) {
		total, counted := s.taken[name]
		if !counted {
			continue
		}
		total = total.DeepCopy()
		total.Add(takes[name])
		s.taken[name] = total
		if limit, limited := s.limits[name]; limited && total.Cmp(limit) > 0 {
			return name
		}
	}
	return ""
}
