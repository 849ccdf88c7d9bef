package simulation

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/simulation/agents"
)

// check checks the invariants.
func (w *World) check() {
	w.checkCalls()
	users := slices.DeleteFunc(w.allUses(), func(u *use) bool { return u.forgotten })
	counters := make(map[string]map[string]resource.Quantity)
	parts := make(map[string]part)
	for i, a := range users {
		for _, b := range users[:i] {
			if why := w.exclusionReason(a, b); why != "" {
				w.history.Fail("%s has two users, %s: %s, and %s", a.silicon, why, b, a)
				return
			}
		}
		for _, why := range []string{w.unrecordedUse(a), w.checkForm(a), w.checkMode(a)} {
			if why != "" {
				w.history.Fail("%s, and %s", a, why)
				return
			}
		}
		same := func(b *use) bool {
			unit := a.classic && a.container == b.container && strings.HasPrefix(a.silicon, "iommu-group-") // one ID stands for the unit
			return a.claim != "" && a.claim == b.claim && a.device == b.device && a.share == b.share || unit && a.silicon == b.silicon
		}
		if a.open || a.back || slices.ContainsFunc(users[:i], same) {
			continue
		}
		if a.part != nil { // all shares together take what the device takes
			if parts[a.device] == nil {
				parts[a.device] = make(part)
			}
			if capacity := parts[a.device].add(a.part); capacity != "" {
				w.history.Fail("more than all of the %s of %s is in use, last by %s", capacity, a.device, a)
				return
			}
			continue
		}
		if why := a.count(counters); why != "" {
			w.history.Fail("%s, last by %s", why, a)
			return
		}
	}
}

// unrecordedUse returns the error in a claim's record that would make a new agent give the
// container's device to others, "" if there is none. A missing record is being written or was lost;
// see missing.
func (w *World) unrecordedUse(u *use) string {
	record, there := w.disk.FileContent(w.recordOf(u.claim))
	switch {
	case !there || u.claim == "" || u.device == "" || w.wiped:
		return ""
	case !bytes.Contains(record, []byte(strconv.Quote(w.boot))):
		return "its record is of an earlier boot"
	case !bytes.Contains(record, []byte(`"source": `+strconv.Quote(u.device))):
		return "its record is of something else"
	}
	return ""
}

// checkReallocated fails if another claim has a device of the claim whose record is about to be
// removed: as long as the record exists, the devices must not go to other claims.
func (w *World) checkReallocated(name, boot string) {
	mine := w.exclusiveDevices(name, boot)
	if len(mine) == 0 {
		return
	}
	for _, other := range w.disk.Files(agents.StateDir + "/claims") {
		if other == name {
			continue
		}
		for device := range w.exclusiveDevices(other, boot) {
			if mine[device] {
				w.history.Fail("%s was given twice, by %s and by %s", device, name, other)
			}
		}
	}
}

// exclusiveDevices returns the devices that a record of a boot gives exclusively to its claim.
func (w *World) exclusiveDevices(name, boot string) map[string]bool {
	if path.Ext(name) != ".record" {
		return nil
	}
	var c allocation.Claim
	data, _ := w.disk.FileContent(name)
	_, body, _ := bytes.Cut(data, []byte("\n"))
	if json.Unmarshal(body, &c) != nil || c.Boot != boot {
		return nil
	}
	devices := make(map[string]bool)
	for _, r := range c.Results {
		if !r.Shared && !r.Admin && r.Consumes == nil {
			devices[r.Source] = true
		}
	}
	return devices
}

func (w *World) recordOf(claim types.UID) string {
	return agents.StateDir + "/claims/" + string(claim) + ".record"
}

// count adds the counters that a use takes from its silicon, and returns an error text if a counter
// is exceeded.
func (u *use) count(counters map[string]map[string]resource.Quantity) string {
	if counters[u.silicon] == nil {
		counters[u.silicon] = make(map[string]resource.Quantity)
	}
	for counter, q := range u.takes {
		sum := counters[u.silicon][counter]
		sum.Add(q)
		counters[u.silicon][counter] = sum
		if limit := u.has[counter]; sum.Cmp(limit) > 0 {
			return fmt.Sprintf("%s has %s %s and %s are in use", u.silicon, limit.String(), counter, sum.String())
		}
	}
	return ""
}
