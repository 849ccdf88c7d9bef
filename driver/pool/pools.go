package pool

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
)

// recordPool records the pool that a claim names for a device, for the name of the device, its common
// name, and its physical device as recorded and at present.
func (b *builder) recordPool(r *allocation.Result) {
	b.recordPoolOf(r.Device, r.Pool)
	if r.Silicon != r.Device {
		b.recordPoolOf(r.Silicon, r.Pool)
	}
	if device, present := b.Snapshot.Lookup(r.Source); present && device.Silicon() != r.Silicon {
		b.recordPoolOf(device.Silicon(), r.Pool)
	}
}

func (b *builder) recordPoolOf(name, pool string) {
	if !discovery.IsPoolOf(b.Node, pool) {
		return
	}
	before, recorded := b.recorded[name]
	b.torn[name] = b.torn[name] || recorded && before != pool
	b.recorded[name] = pool
}

// poolOf returns the pool for the devices of a physical device or common name, given first. While a
// claim has one of these devices, all of them are in the pool that the claim names: the scheduler
// would take a device in another pool for a free one. Otherwise their kind decides. The last name is
// that of a physical device.
func (b *builder) poolOf(names ...string) string {
	for _, name := range names {
		if pool, recorded := b.recorded[name]; recorded {
			return pool
		}
	}
	return discovery.PoolName(b.Node, b.near.main[names[len(names)-1]])
}

// poolOfGone returns the pool for an allocated device missing from the snapshot: the pool of the
// counters that it consumes, or that of the allocation.
func (b *builder) poolOfGone(r *allocation.Result, device resourceapi.Device) string {
	switch {
	case consumesCounters(device):
		return b.poolOf(device.ConsumesCounters[0].CounterSet)
	case discovery.IsPoolOf(b.Node, r.Pool):
		return r.Pool
	}
	return discovery.PoolName(b.Node, true)
}

// checkPool returns an error if claims have devices of the same physical device by both pools. An
// agent of an earlier version, or with other kinds, published the device when one of them was
// allocated.
func (b *builder) checkPool(d *rules.Offered) error {
	if b.torn[d.Silicon()] {
		return fmt.Errorf("claims have devices of %s by both pools of the node; it is left out until the claims of one pool end", d.Silicon())
	}
	return nil
}
