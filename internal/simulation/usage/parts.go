package usage

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/simulation/agents"
	"chandler.dev/internal/simulation/machine"
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

// add adds another part, and returns a capacity with a sum above the total, or "".
func (p part) add(other part) (exceeded resourceapi.QualifiedName) {
	for capacity, amount := range other {
		if p[capacity] += amount; p[capacity] > 1.001 {
			exceeded = capacity
		}
	}
	return exceeded
}

// portion identifies a device of an allocation, or of a pod's device plugin ID.
type portion struct {
	claim  bool      // by DRA
	of     types.UID // UID of the claim or the pod
	device string    // device name in the allocation, or the resource with the ID
	share  types.UID
}

// Parts are the sizes of the allocated portions, as far as agents can know them. Any goroutine may call its
// methods.
type Parts struct {
	Config

	mu      sync.Mutex
	sizes   map[portion]part
	records map[portion][]byte // the records of portions when an agent last had to learn the sizes from these records
}

// NoteAllocation records the allocated part of each device, by the slices behind the allocation.
func (a *Parts) NoteAllocation(claim types.UID, results []resourceapi.DeviceRequestAllocationResult, of []*resourceapi.ResourceSlice) {
	for _, r := range results {
		if len(a.Machine.DevicesNamed(r.Device)) > 0 {
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
					case capacity == discovery.Shares && total.Value() != a.configuredShares(d.Name):
						continue
					}
					has[capacity] = taken.AsApproximateFloat64() / total.AsApproximateFloat64()
				}
			}
		}
		if device, numbered := machine.ShareStem(r.Device); numbered {
			if has = (part{}); numberOf(device, of) == a.configuredShares(device) {
				has[discovery.Shares] = 1 / float64(a.configuredShares(device))
			}
		}
		a.size(p, has)
	}
}

// numberOf returns the number of shares of a device with a slice device of their own.
func numberOf(device string, in []*resourceapi.ResourceSlice) int64 {
	names := make(map[string]bool)
	for _, s := range in {
		for i := range s.Spec.Devices {
			if of, numbered := machine.ShareStem(s.Spec.Devices[i].Name); numbered && of == device {
				names[s.Spec.Devices[i].Name] = true
			}
		}
	}
	return int64(len(names))
}

// configuredShares returns the number of shares that the present configuration requests for a
// device. An agent cannot determine the size of a share from slices with another number of shares.
func (a *Parts) configuredShares(device string) int64 {
	d := a.wantedForm()[device]
	return d.Shares()
}

// ForgetNumbers records the claims with a size unknown to an agent that starts now or receives
// another number of shares: claims that were allocated by number and not prepared in this boot. The
// record of a prepared claim has the number, as long as the number does not change.
func (a *Parts) ForgetNumbers() {
	a.mu.Lock()
	all := maps.Clone(a.sizes)
	a.mu.Unlock()
	for p, has := range all {
		if _, numbered := has[discovery.Shares]; !numbered || !p.claim {
			continue
		}
		record, _ := a.Disk.FileContent(agents.RecordFile(p.of))
		if bytes.Contains(record, []byte(a.Boot())) {
			a.mu.Lock()
			a.records[p] = record
			a.mu.Unlock()
		} else {
			a.forgetSize(p)
		}
	}
}

// markPrepared marks the size of a portion as unknown if an agent without the size has prepared the
// claim again.
func (a *Parts) markPrepared(p portion) {
	a.mu.Lock()
	before, told := a.records[p]
	a.mu.Unlock()
	if record, _ := a.Disk.FileContent(agents.RecordFile(p.of)); told && !bytes.Equal(before, record) {
		a.forgetSize(p)
	}
}

// forgetSize marks the size of a portion as unknown.
func (a *Parts) forgetSize(p portion) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sizes[p] = part{}
}

// size returns the size of a portion. The first recorded size stays.
func (a *Parts) size(p portion, has part) part {
	a.mu.Lock()
	defer a.mu.Unlock()
	if before, known := a.sizes[p]; known {
		return before
	}
	a.sizes[p] = has
	return has
}
