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

// part is how much somebody has of a device: of each of its capacities, from 0 to 1.
// Nil is all of the device, and an empty one a share of which the size is not known.
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

// goesWith reports whether both are shares that can be compared: then it counts how much
// they are together.
func (p part) goesWith(other part) bool {
	if p == nil || other == nil {
		return false
	}
	return len(p) == 0 || len(other) == 0 || slices.ContainsFunc(slices.Collect(maps.Keys(p)), func(capacity resourceapi.QualifiedName) bool {
		_, both := other[capacity]
		return both
	})
}

// portion is what an allocation has of a device, or a pod by a classic ID.
type portion struct {
	claim  bool      // by DRA
	of     types.UID // the claim or the pod
	device string    // as the allocation names it, or the resource with the ID
	share  types.UID
}

// notePortions notes how much of each device an allocation has, by the slices that
// it was made of.
func (w *World) notePortions(claim types.UID, results []resourceapi.DeviceRequestAllocationResult, of []*resourceapi.ResourceSlice) {
	for _, r := range results {
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
						continue // shares by number take none of the memory unless they ask
					case capacity == discovery.Shares && total.Value() != w.shares(d.Name):
						continue
					}
					has[capacity] = taken.AsApproximateFloat64() / total.AsApproximateFloat64()
				}
			}
		}
		if device, numbered := stem(r.Device); numbered {
			if has = (part{}); numberOf(device, of) == w.shares(device) {
				has[discovery.Shares] = 1 / float64(w.shares(device))
			}
		}
		w.portion(p, has)
	}
}

// numberOf returns of how many shares of a device there is one device each in slices.
func numberOf(device string, in []*resourceapi.ResourceSlice) int64 {
	names := make(map[string]bool)
	for _, s := range in {
		for i := range s.Spec.Devices {
			if of, numbered := stem(s.Spec.Devices[i].Name); numbered && of == device {
				names[s.Spec.Devices[i].Name] = true
			}
		}
	}
	return int64(len(names))
}

// shares returns into how many shares the administrator wants a device cut at present. An
// agent cannot know of how many one is that was allocated by slices of another number.
func (w *World) shares(device string) int64 {
	d := w.wanted()[device]
	return d.Shares()
}

// forgetNumbers notes which claims an agent cannot know the size of that starts now, or is
// told of another number of shares: those that were allocated by number, and not prepared in
// this boot. A prepared claim has the number in its record, as long as that stays the same.
func (w *World) forgetNumbers() {
	w.mu.Lock()
	all := maps.Clone(w.portions)
	w.mu.Unlock()
	for p, has := range all {
		if _, numbered := has[discovery.Shares]; !numbered || !p.claim {
			continue
		}
		record, _ := w.disk.Content(w.recordOf(p.of))
		if bytes.Contains(record, []byte(w.boot)) {
			w.mu.Lock()
			w.recorded[p] = record
			w.mu.Unlock()
		} else {
			w.forgetSize(p)
		}
	}
}

// prepared notes that nobody knows how much a portion is if an agent that never knew has
// prepared it anew.
func (w *World) prepared(p portion) {
	w.mu.Lock()
	before, told := w.recorded[p]
	w.mu.Unlock()
	if record, _ := w.disk.Content(w.recordOf(p.of)); told && !bytes.Equal(before, record) {
		w.forgetSize(p)
	}
}

// forgetSize notes that nobody knows how much a portion is.
func (w *World) forgetSize(p portion) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.portions[p] = part{}
}

// portion returns how much a portion is: as much as was said the first time.
func (w *World) portion(p portion, has part) part {
	w.mu.Lock()
	defer w.mu.Unlock()
	if before, known := w.portions[p]; known {
		return before
	}
	w.portions[p] = has
	return has
}

// add adds another part, and returns the capacity of which there is then not enough.
func (p part) add(other part) (exceeded resourceapi.QualifiedName) {
	for capacity, amount := range other {
		if p[capacity] += amount; p[capacity] > 1.001 {
			exceeded = capacity
		}
	}
	return exceeded
}
