package usage

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/simulation/agents"
	"chandler.dev/internal/simulation/kernel"
)

// Check checks the uses of all containers, and fails at the first error.
func (t *Tracker) Check() {
	users := slices.DeleteFunc(t.allUses(), func(u *use) bool { return u.forgotten })
	counters := make(map[string]map[string]resource.Quantity)
	parts := make(map[string]part)
	for i, a := range users {
		for _, b := range users[:i] {
			if why := t.exclusionReason(a, b); why != "" {
				t.History.Fail("%s has two users, %s: %s, and %s", a.silicon, why, b, a)
				return
			}
		}
		for _, why := range []string{t.unrecordedUse(a), t.checkForm(a), t.checkMode(a)} {
			if why != "" {
				t.History.Fail("%s, and %s", a, why)
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
				t.History.Fail("more than all of the %s of %s is in use, last by %s", capacity, a.device, a)
				return
			}
			continue
		}
		if why := a.count(counters); why != "" {
			t.History.Fail("%s, last by %s", why, a)
			return
		}
	}
}

// exclusionReason returns the reason why two uses must not exist at the same time, "" if they may.
func (t *Tracker) exclusionReason(u, other *use) string {
	switch {
	case u.open || other.open || u.belongsTogether(other):
		return ""
	case u.classic && other.classic && (u.back || other.back):
		return "" // the kubelet has allocated the ID again
	case t.Damage.HasReplacedCard() && (u.stranger || other.stranger):
		return "" // the card may be gone, so that the ID stands for no device
	case u.back && u.stranger || other.back && other.stranger:
		return "" // only the kubelet had a record, and lost it
	case u.silicon != other.silicon:
		if slices.ContainsFunc(u.nodes, func(n string) bool { return slices.Contains(other.nodes, n) }) {
			return "one node"
		}
		if u.inGroup() && other.inGroup() && (slices.Contains(u.group, t.Machine.FunctionAddress(other.device)) || slices.Contains(other.group, t.Machine.FunctionAddress(u.device))) {
			return "one IOMMU group"
		}
		return ""
	case u.device != other.device && t.Damage.IsParted(u.silicon):
		return "" // while one function was gone, the other was a separate physical device
	case u.classic != other.classic:
		return "by two APIs"
	case u.device == other.device && u.part.goesWith(other.part):
		return "" // the sum of both is checked
	case u.device == other.device && u.part != nil && other.part != nil:
		return "in two forms"
	case u.device == other.device:
		return "the same device"
	case u.whole || other.whole:
		return "a whole"
	}
	return ""
}

// unrecordedUse returns the error in a claim's record that would make a new agent give the
// container's device to others, "" if there is none. A missing record is being written or was
// lost.
func (t *Tracker) unrecordedUse(u *use) string {
	record, there := t.Disk.FileContent(agents.RecordFile(u.claim))
	switch {
	case !there || u.claim == "" || u.device == "" || t.Damage.HasLostRecords():
		return ""
	case !bytes.Contains(record, []byte(strconv.Quote(t.Boot()))):
		return "its record is of an earlier boot"
	case !bytes.Contains(record, []byte(`"source": `+strconv.Quote(u.device))):
		return "its record is of something else"
	}
	return ""
}

// CheckReallocated fails if another claim has a device of the claim whose record is about to be
// removed: as long as the record exists, the devices must not go to other claims.
func (t *Tracker) CheckReallocated(name, boot string) {
	mine := t.exclusiveDevices(name, boot)
	if len(mine) == 0 {
		return
	}
	for _, other := range t.Disk.Files(agents.StateDir + "/claims") {
		if other == name {
			continue
		}
		for device := range t.exclusiveDevices(other, boot) {
			if mine[device] {
				t.History.Fail("%s was given twice, by %s and by %s", device, name, other)
			}
		}
	}
}

// exclusiveDevices returns the devices that a record of a boot gives exclusively to its claim.
func (t *Tracker) exclusiveDevices(name, boot string) map[string]bool {
	if path.Ext(name) != ".record" {
		return nil
	}
	var c allocation.Claim
	data, _ := t.Disk.FileContent(name)
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

// checkForm returns an error text if the driver of a container's device differs from the driver at
// the allocation.
func (t *Tracker) checkForm(u *use) string {
	address := t.Machine.FunctionAddress(u.device)
	if address == "" || t.Damage.HasLostRecords() || u.open || u.back || u.forgotten || t.Damage.HasLostDriver(address) {
		return ""
	}
	own := "nvme"
	if strings.Contains(address, ":10.") {
		own = "igbvf"
	}
	if u.vfio {
		own = kernel.VFIO
	}
	if driver, found := t.Host.Driver(address); driver != own {
		return fmt.Sprintf("it is to be under %s, and is under %q, there %v", own, driver, found)
	}
	if u.vfio {
		return t.keptFromVFIO(address)
	}
	return ""
}

// keptFromVFIO returns an error text if the host uses a function of the IOMMU group, which makes
// the other functions unusable under vfio. A function that vanished and returned in the meantime
// may be under its own driver.
func (t *Tracker) keptFromVFIO(address string) string {
	for _, member := range t.Host.Group(address) {
		if driver, _ := t.Host.Driver(member); driver != "" && driver != kernel.VFIO && !t.Damage.HasLostDriver(member) {
			return fmt.Sprintf("of its IOMMU group %s is under %s", member, driver)
		}
	}
	return ""
}

// checkMode returns an error text if the mode of a container's GPU does not fit, "" if it fits.
func (t *Tracker) checkMode(u *use) string {
	if !t.Machine.Daemons || t.Damage.HasLostRecords() || t.Damage.HasReplacedCard() || u.open || u.back || u.forgotten {
		return ""
	}
	d := t.Machine.Devices[u.device]
	return t.Supervisor.WrongMode(d.Identity, u.claim)
}
