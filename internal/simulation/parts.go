package simulation

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
)

// part is the allocated fraction of each capacity of a device, from 0 to 1. Nil is the whole
// device, and an empty part is a share of unknown size.
type part map[resourceapi.QualifiedName]float64

func (p part) String() string {
	if p == nil {
		return "all"
	}
	var words []string
	for _, capacity := range slices.Sorted(maps.Keys(p)) {
		words = append(words, fmt.Sprintf("%.3g of the %s", p[capacity], capacity))
	}
	return cmp.Or(strings.Join(words, ", "), "a share")
}

// goesWith reports whether two parts are comparable shares, so that their sum matters.
func (p part) goesWith(other part) bool {
	if p == nil || other == nil {
		return false
	}
	return len(p) == 0 || len(other) == 0 || slices.ContainsFunc(slices.Collect(maps.Keys(p)), func(capacity resourceapi.QualifiedName) bool {
		_, both := other[capacity]
		return both
	})
}

// portion identifies a device of an allocation, or of a pod's device plugin ID.
type portion struct {
	claim  bool      // by DRA
	of     types.UID // UID of the claim or the pod
	device string    // device name in the allocation, or the resource with the ID
	share  types.UID
}

// notePortions records the allocated part of each device, by the slices behind the allocation.
func (w *World) notePortions(claim types.UID, results []resourceapi.DeviceRequestAllocationResult, of []*resourceapi.ResourceSlice) {
	for _, r := range results {
		if len(w.machine.DevicesNamed(r.Device)) > 0 {
			continue // a claim has the chosen devices whole
		}
		p, has := portion{claim: true, of: claim, device: r.Device}, part(nil)
		for _, s := range of {
			for i := range s.Spec.Devices {
				d := &s.Spec.Devices[i]
				if r.ShareID == nil || d.Name != r.Device {
					continue
				}
				p.share, has = *r.ShareID, part{}
				for capacity, taken := range r.ConsumedCapacity {
					total := d.Capacity[capacity].Value
					switch {
					case taken.IsZero():
						continue // shares by number use no memory unless requested
					case capacity == discovery.Shares && total.Value() != w.configuredShares(d.Name):
						continue
					}
					has[capacity] = taken.AsApproximateFloat64() / total.AsApproximateFloat64()
				}
			}
		}
		if device, numbered := shareStem(r.Device); numbered {
			if has = (part{}); numberOf(device, of) == w.configuredShares(device) {
				has[discovery.Shares] = 1 / float64(w.configuredShares(device))
			}
		}
		w.portionSize(p, has)
	}
}

// numberOf returns the number of shares of a device with a slice device of their own.
func numberOf(device string, in []*resourceapi.ResourceSlice) int64 {
	names := make(map[string]bool)
	for _, s := range in {
		for i := range s.Spec.Devices {
			if of, numbered := shareStem(s.Spec.Devices[i].Name); numbered && of == device {
				names[s.Spec.Devices[i].Name] = true
			}
		}
	}
	return int64(len(names))
}

// configuredShares returns the number of shares that the present configuration requests for a
// device. An agent cannot determine the size of a share from slices with another number of shares.
func (w *World) configuredShares(device string) int64 {
	d := w.wantedForm()[device]
	return d.Shares()
}

// forgetNumbers records the claims with a size unknown to an agent that starts now or receives
// another number of shares: claims that were allocated by number and not prepared in this boot. The
// record of a prepared claim has the number, as long as the number does not change.
func (w *World) forgetNumbers() {
	w.mu.Lock()
	all := maps.Clone(w.portions)
	w.mu.Unlock()
	for p, has := range all {
		if _, numbered := has[discovery.Shares]; !numbered || !p.claim {
			continue
		}
		record, _ := w.disk.FileContent(w.recordOf(p.of))
		if bytes.Contains(record, []byte(w.boot)) {
			w.mu.Lock()
			w.recorded[p] = record
			w.mu.Unlock()
		} else {
			w.forgetSize(p)
		}
	}
}

// markPrepared marks the size of a portion as unknown if an agent without the size has prepared the
// claim again.
func (w *World) markPrepared(p portion) {
	w.mu.Lock()
	before, told := w.recorded[p]
	w.mu.Unlock()
	if record, _ := w.disk.FileContent(w.recordOf(p.of)); told && !bytes.Equal(before, record) {
		w.forgetSize(p)
	}
}

// forgetSize marks the size of a portion as unknown.
func (w *World) forgetSize(p portion) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.portions[p] = part{}
}

// portionSize returns the size of a portion. The first recorded size stays.
func (w *World) portionSize(p portion, has part) part {
	w.mu.Lock()
	defer w.mu.Unlock()
	if before, known := w.portions[p]; known {
		return before
	}
	w.portions[p] = has
	return has
}

// add adds another part, and returns a capacity with a sum above the total, or "".
func (p part) add(other part) (exceeded resourceapi.QualifiedName) {
	for capacity, amount := range other {
		if p[capacity] += amount; p[capacity] > 1.001 {
			exceeded = capacity
		}
	}
	return exceeded
}
