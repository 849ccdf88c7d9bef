package simulation

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/internal/simulation/kubelet"
)

// use is one device that a container has.
type use struct {
	container *kubelet.Container
	classic   bool
	back      bool      // a classic device that the kubelet has taken back from a container that still runs
	claim     types.UID // of DRA
	device    string    // of the machine
	silicon   string
	whole     bool
	open      bool
	takes     map[string]resource.Quantity // of the silicon's counters
	has       map[string]resource.Quantity // the silicon's counters
	share     string                       // "" if it has the device alone
	nodes     []string                     // numbers of its own device nodes, when the container was started
}

func (u *use) String() string {
	api := "DRA"
	if u.classic {
		api = "classic"
	}
	return fmt.Sprintf("pod %s has %s (%s)", u.container.Pod, u.device, api)
}

// startContainer starts a container as a runtime does, which looks for each CDI
// device in the specs that there are.
func (w *World) startContainer(c *kubelet.Container) error {
	found := make(map[string]specs.ContainerEdits)
	for _, name := range w.disk.Files(cdiRoot) {
		if path.Ext(name) != ".json" {
			continue
		}
		data, _ := w.disk.Content(name)
		var spec specs.Spec
		if err := json.Unmarshal(data, &spec); err != nil {
			continue // runtimes leave such a file out
		}
		for _, device := range spec.Devices {
			found[spec.Kind+"="+device.Name] = device.ContainerEdits
		}
	}
	var uses []*use
	for uid, ids := range c.Claims {
		claim := w.server.Claim(c.Pod.Namespace, c.Names[uid])
		if claim == nil || claim.UID != uid || claim.Status.Allocation == nil {
			return fmt.Errorf("claim %s is gone", c.Names[uid])
		}
		for _, id := range ids {
			if _, there := found[id]; !there {
				if !w.wiped && !w.diskFailed() && isOf(ids, claim) {
					w.fail("pod %s cannot start: claim %s is prepared, and CDI device %s is in no spec", c.Pod, c.Names[uid], id)
				}
				return fmt.Errorf("unresolvable CDI devices %s", id)
			}
			device, of := deviceOf(id, uid)
			if !of {
				continue // its metadata
			}
			r := resourceapi.DeviceRequestAllocationResult{Device: device}
			if now := resultOf(claim, device); now != nil {
				r = *now
			}
			u := w.useOf(c, &r)
			u.claim, u.nodes = uid, w.ownNodes(found[id])
			uses = append(uses, u)
		}
	}
	for resourceName, ids := range c.Devices {
		for _, id := range ids {
			uses = append(uses, w.classicUses(c, resourceName, id)...)
		}
	}
	c.Note = uses
	return nil
}

// isOf reports whether CDI devices are those of a claim's allocation. The claim may
// have been allocated anew. The kubelet does not ask again then, and to 1.36 it
// keeps the devices of before beside those that it is told of later.
func isOf(ids []string, claim *resourceapi.ResourceClaim) bool {
	return !slices.ContainsFunc(ids, func(id string) bool {
		device, of := deviceOf(id, claim.UID)
		return of && resultOf(claim, device) == nil
	})
}

// resultOf returns the result of a claim's allocation that a CDI device is for, nil
// if there is none.
func resultOf(claim *resourceapi.ResourceClaim, device string) *resourceapi.DeviceRequestAllocationResult {
	results := claim.Status.Allocation.Devices.Results
	i := slices.IndexFunc(results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return device == r.Device || r.ShareID != nil && device == r.Device+"-"+string(*r.ShareID)
	})
	if i < 0 {
		return nil
	}
	return &results[i]
}

// diskFailed reports whether the disk has failed an agent so far.
func (w *World) diskFailed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen["diskFull"]+w.seen["readsFail"]+w.seen["writesFail"]+w.seen["syncsFail"]+w.seen["readOnly"] > 0
}

// deviceOf returns of which device a CDI device of a claim is.
func deviceOf(id string, claim types.UID) (device string, found bool) {
	_, name, _ := strings.Cut(id, "=")
	rest, found := strings.CutPrefix(name, string(claim)+"-")
	_, device, numbered := strings.Cut(rest, "-")
	return device, found && numbered && strings.HasPrefix(id, "chandler.dev/claim=")
}

// ownNodes returns the numbers of device nodes that are of one card alone.
func (w *World) ownNodes(edits specs.ContainerEdits) (numbers []string) {
	for _, node := range edits.DeviceNodes {
		for _, card := range w.machine.cards {
			if slices.Contains(card.nodes, strings.TrimPrefix(node.Path, "/")) {
				numbers = append(numbers, fmt.Sprintf("%d:%d", node.Major, node.Minor))
			}
		}
	}
	return numbers
}

// useOf returns what a result of an allocation is.
func (w *World) useOf(c *kubelet.Container, r *resourceapi.DeviceRequestAllocationResult) *use {
	name, _, numbered := strings.Cut(r.Device, "-share-")
	d := w.devices[name]
	u := &use{container: c, device: name, silicon: d.Silicon(), whole: d.PartOf == nil, open: d.Open, takes: d.Takes}
	if d.PartOf != nil {
		u.has = d.PartOf.Counters
	}
	switch {
	case r.AdminAccess != nil && *r.AdminAccess:
		u.open = true
	case r.ShareID != nil:
		u.share = string(*r.ShareID)
	case numbered:
		u.share = r.Device
	}
	return u
}

// classicUses returns what a classic ID is.
func (w *World) classicUses(c *kubelet.Container, resourceName, id string) (uses []*use) {
	for _, d := range w.devices {
		for _, offer := range d.Offers {
			base, share, _ := strings.Cut(id, "::")
			if offer.Resource != resourceName || !slices.Contains(offer.IDs, base) {
				continue
			}
			u := &use{container: c, classic: true, device: d.Name, silicon: d.Silicon(), whole: d.PartOf == nil, open: d.Open, takes: d.Takes, share: share}
			if d.PartOf != nil {
				u.has = d.PartOf.Counters
			}
			uses = append(uses, u)
		}
	}
	return uses
}

// users returns what containers have, as long as the kubelet has not taken it
// back: a claim until it unprepares it, a classic device while its books have it
// or, for who wants it through DRA, until the container has ended.
func (w *World) users() (all []*use) {
	for _, c := range w.kubelet.Containers() {
		uses, _ := c.Note.([]*use)
		for _, u := range uses {
			if !u.classic && !w.kubelet.HasClaim(c, u.claim) {
				continue
			}
			now := *u
			now.back = u.classic && len(w.kubelet.HasDevices(c.Pod.UID)) == 0
			all = append(all, &now)
		}
	}
	return all
}

// excludes reports why two uses cannot be at once, "" if they can.
func (u *use) excludes(other *use) string {
	switch {
	case u.classic && other.classic && (u.back || other.back):
		return "" // the kubelet gave it anew
	case u.claim != "" && u.claim == other.claim:
		return "" // its pods have it together
	case u.open || other.open || u.silicon != other.silicon || u.container == other.container:
		return ""
	case u.device == other.device && u.share != "" && other.share != "" && u.share != other.share:
		return ""
	case u.device == other.device && u.share != "" && other.share != "":
		return "the same share"
	case u.whole || other.whole:
		return "a whole"
	case u.device == other.device:
		return "the same part"
	case u.classic != other.classic:
		return "parts by two APIs"
	}
	return ""
}

// check looks whether what must always hold holds.
func (w *World) check() {
	users := w.users()
	taken := make(map[string]map[string]resource.Quantity)
	for i, a := range users {
		for _, b := range users[:i] {
			if why := a.excludes(b); why != "" {
				w.fail("%s has two users, %s: %s, and %s", a.silicon, why, b, a)
				return
			}
			if a.container != b.container && (a.claim == "" || a.claim != b.claim) && !a.open && !b.open && a.silicon != b.silicon && slices.ContainsFunc(a.nodes, func(n string) bool { return slices.Contains(b.nodes, n) }) {
				w.fail("two containers have one node %v: %s, and %s", a.nodes, b, a)
				return
			}
		}
		together := func(b *use) bool { return a.claim != "" && a.claim == b.claim && a.device == b.device }
		if a.open || a.back || a.has == nil || slices.ContainsFunc(users[:i], together) {
			continue
		}
		if taken[a.silicon] == nil {
			taken[a.silicon] = make(map[string]resource.Quantity)
		}
		for counter, q := range a.takes {
			sum := taken[a.silicon][counter]
			sum.Add(q)
			taken[a.silicon][counter] = sum
			if limit := a.has[counter]; sum.Cmp(limit) > 0 {
				w.fail("%s has %s %s and %s are in use, last by %s", a.silicon, limit.String(), counter, sum.String(), a)
				return
			}
		}
	}
}
