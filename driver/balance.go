package driver

import (
	"fmt"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// balance adds up what is taken of what a result takes of: the counters of its
// silicon, and the capacity of its device.
type balance struct {
	wanted   *result
	counters account[string]
	capacity account[resourceapi.QualifiedName]
	counted  map[string]bool // devices whose takes are in counters: all shares of one take together what it takes
}

// account is what is taken of each of some things of which there is so much.
type account[K ~string] struct {
	taken, limits map[K]resource.Quantity
}

func newBalance(wanted *result, lookup lookup) *balance {
	b := &balance{
		wanted:   wanted,
		counters: newAccount(wanted.Takes),
		capacity: newAccount(wanted.Consumes),
		counted:  map[string]bool{wanted.Source: true},
	}
	device, _ := lookup(wanted.Source)
	for counter := range wanted.Takes {
		b.counters.limits[counter] = resource.Quantity{}
		if device.PartOf != nil {
			b.counters.limits[counter] = device.PartOf.Counters[counter]
		}
	}
	for name, capacity := range device.Capacity {
		b.capacity.limits[name] = capacity.Value
	}
	return b
}

func newAccount[K ~string](taken map[K]resource.Quantity) account[K] {
	return account[K]{taken: maps.Clone(taken), limits: make(map[K]resource.Quantity)}
}

// add counts what another result takes and returns, in words, of what there is
// then not enough, "" if there is enough of all.
func (b *balance) add(other *result) string {
	if b.wanted.Shared || other.Admin || other.Shared || other.Silicon != b.wanted.Silicon {
		return ""
	}
	if other.Source == b.wanted.Source {
		if capacity := b.capacity.add(other.Consumes); capacity != "" {
			return fmt.Sprintf("%s would have to give more of its %s than there is", b.wanted.Source, capacity)
		}
	}
	if b.counted[other.Source] {
		return ""
	}
	b.counted[other.Source] = true
	if counter := b.counters.add(other.Takes); counter != "" {
		return fmt.Sprintf("%s would have to give more of counter %s than there is", b.wanted.Silicon, counter)
	}
	return ""
}

// add counts what another takes of what is in the account, and returns of what
// there is then not enough. Of what has no limit any more, since the device has
// changed, the scheduler was the last to know.
func (a *account[K]) add(takes map[K]resource.Quantity) K {
	for _, name := range slices.Sorted(maps.Keys(takes)) {
		total, counted := a.taken[name]
		if !counted {
			continue
		}
		total = total.DeepCopy()
		total.Add(takes[name])
		a.taken[name] = total
		if limit, limited := a.limits[name]; limited && total.Cmp(limit) > 0 {
			return name
		}
	}
	return ""
}
