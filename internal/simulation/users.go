package simulation

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/simulation/agents"
	"chandler.dev/internal/simulation/kubelet"
	"chandler.dev/internal/simulation/machine"
)

// use is the use of one device by a container.
type use struct {
	container *kubelet.Container
	classic   bool
	id        string    // of the device plugin API
	back      bool      // the kubelet has released the ID while the container still runs
	claim     types.UID // of DRA
	device    string    // of the machine
	silicon   string
	whole     bool
	open      bool
	takes     map[string]resource.Quantity // of the silicon's counters
	has       map[string]resource.Quantity // the silicon's counters
	part      part                         // of the device
	portion   portion                      // the record of the part, in the device plugin API
	share     types.UID                    // by DRA
	stranger  bool                         // another plugin allocated the device
	forgotten bool                         // no record of the use remains
	replaced  bool                         // another card with another UUID has replaced the card since
	vfio      bool                         // the device is under vfio
	group     []string                     // the functions of its IOMMU group at the container's start
	address   string                       // of its PCI function, at the container's start
	nodes     []string                     // numbers of its own device nodes, at the container's start
}

func (u *use) String() string {
	api := "DRA"
	if u.classic {
		api = "classic"
	}
	return fmt.Sprintf("pod %s has %s of %s (%s)", u.container.Pod, u.part, u.device, api)
}

// inGroup reports whether the container has a function of an IOMMU group. A function that left its
// group was removed from the container's open files.
func (u *use) inGroup() bool { return u.vfio && len(u.group) > 0 }

// useOf returns the use of a part of a device by a container.
func (w *World) useOf(c *kubelet.Container, d *rules.Offered, part part) *use {
	u := &use{container: c, device: d.Name, address: w.cardOf(d.Name), silicon: d.Silicon(), whole: d.PartOf == nil, open: d.Shareable, takes: d.Takes, part: part}
	if d.PartOf != nil {
		u.has = d.PartOf.Counters
	}
	return u
}

// runtimeSpecs returns the CDI devices that a container runtime finds.
func (w *World) runtimeSpecs() map[string]specs.ContainerEdits {
	found := make(map[string]specs.ContainerEdits)
	for _, name := range w.disk.Files(agents.CDIRoot) {
		if path.Ext(name) != ".json" {
			continue
		}
		data, _ := w.disk.FileContent(name)
		var spec specs.Spec
		if err := json.Unmarshal(data, &spec); err != nil {
			continue // container runtimes ignore such a file
		}
		for _, device := range spec.Devices {
			found[spec.Kind+"="+device.Name] = device.ContainerEdits
		}
	}
	return found
}

// startContainer starts a container as a container runtime does, which looks up each CDI device in
// the existing specs.
func (w *World) startContainer(c *kubelet.Container) error {
	found := w.runtimeSpecs()
	var uses []*use
	nodes := c.Nodes
	for uid, ids := range c.Claims {
		claim := w.server.Claim(c.Pod.Namespace, c.Names[uid])
		if claim == nil || claim.UID != uid || claim.Status.Allocation == nil {
			return fmt.Errorf("claim %s is gone", c.Names[uid])
		}
		for _, id := range ids {
			if _, there := found[id]; !there {
				// Metadata that could not be written is left out; kubelets up to 1.36 keep the
				// metadata's CDI ID.
				_, of := deviceOf(id, uid)
				if !w.mayLackSpecs() && w.isOf(ids, claim) && !w.isEnding(c.Ending[uid]) && !w.lacksRecord(c, uid) && (of || !w.failedOnce()) {
					w.history.Fail("pod %s cannot start: claim %s is prepared, and CDI device %s is in no spec", c.Pod, c.Names[uid], id)
				}
				return fmt.Errorf("unresolvable CDI devices %s", id)
			}
			device, of := deviceOf(id, uid)
			if !of {
				continue // a metadata file
			}
			r := resourceapi.DeviceRequestAllocationResult{Device: device}
			if now := w.resultOf(claim, device); now != nil {
				r = *now
			}
			u := w.claimUse(c, uid, device, &r)
			u.nodes = w.ownNodes(found[id])
			mps := machine.RequestsMPS(claim)
			u.vfio, u.group = len(claim.Status.Allocation.Devices.Config) > 0 && !mps, w.host.FunctionsOf(pathsOf(found[id]))
			if why := w.supervisor.LacksDaemon(uid); mps && !w.wiped && !w.isEnding(c.Ending[uid]) && why != "" {
				w.history.Fail("%s, and %s", u, why)
			}
			nodes = append(slices.Clone(nodes), pathsOf(found[id])...)
			if why := w.checkHandover(c, u); why != "" {
				w.history.Fail("%s, and %s", u, why)
			}
			uses = append(uses, u)
		}
	}
	for resourceName, ids := range c.Devices {
		for _, id := range ids {
			for _, u := range w.classicUses(c, resourceName, id) {
				if why := w.checkPromised(u); why != "" && !c.Again {
					w.history.Fail("%s, and %s", u, why)
				}
				if why := w.checkHandover(c, u); why != "" {
					w.history.Fail("%s, and %s", u, why)
				}
				uses = append(uses, u)
			}
		}
	}
	c.Note = uses
	w.startProcess(c, uses, nodes)
	return nil
}

// checkPromised returns an error text if a claim was allocated the physical device of a container
// that gets it by the device plugin API: the claim's pod would be refused the device. The ledger has
// not excluded the claim, because the claim is not prepared yet. A restarted container has got the
// device before.
func (w *World) checkPromised(u *use) string {
	if u.open || u.stranger || w.wiped || w.swapped {
		return ""
	}
	for _, claim := range w.server.Claims() {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, r := range claim.Status.Allocation.Devices.Results {
			name, _ := shareStem(r.Device)
			if d := w.machine.Devices[name]; d.Name == name && d.Silicon() == u.silicon && (r.AdminAccess == nil || !*r.AdminAccess) {
				return fmt.Sprintf("claim %s was allocated %s before", claim.Name, r.Device)
			}
		}
	}
	return ""
}

// isEnding reports whether the outputs of a claim may be missing because the kubelet has asked to
// unprepare the claim: an agent is removing the outputs, or writes them again after a failed
// removal.
func (w *World) isEnding(asked time.Time) bool {
	return !asked.IsZero() && (time.Since(asked) < heal || time.Since(w.agents.Lock.HeldSince()) < heal)
}

// lacksRecord reports whether the record of a claim is set aside, or only its devices are known: an
// agent was killed while it ended the claim, or the record was damaged. Nothing can write the specs of
// such a claim again. It keeps its devices until the kubelet unprepares it, and its containers cannot
// start until then, which is safe. The record is gone if the agent was killed after it had removed the
// record, and a pod joined the claim before the kubelet repeated the call.
func (w *World) lacksRecord(c *kubelet.Container, claim types.UID) bool {
	records := w.disk.Files(agents.StateDir + "/claims")
	is := func(suffix string) bool {
		return slices.ContainsFunc(records, func(name string) bool {
			return strings.HasPrefix(path.Base(name), string(claim)+suffix)
		})
	}
	return is(".bad") || c.HadUnprepare(claim) && !is("")
}

// isOf reports whether CDI devices belong to a claim's present allocation. The claim may have been
// allocated again, or may have got another one of several interchangeable devices after a reboot. The
// kubelet does not prepare a claim with another allocation again, and up to 1.36 keeps the earlier
// devices beside those of later answers.
func (w *World) isOf(ids []string, claim *resourceapi.ResourceClaim) bool {
	chosen := make(map[*resourceapi.DeviceRequestAllocationResult]int64)
	return !slices.ContainsFunc(ids, func(id string) bool {
		device, of := deviceOf(id, claim.UID)
		if !of {
			return false
		}
		r := w.resultOf(claim, device)
		if r == nil {
			return true
		}
		chosen[r]++
		amount := r.ConsumedCapacity[discovery.Shares]
		return len(w.machine.DevicesNamed(r.Device)) > 0 && chosen[r] > max(1, amount.Value())
	})
}

// resultOf returns the result of a claim's allocation for a CDI device, nil if there is none. A
// whole device from an earlier allocation does not match a result for a share of that device.
func (w *World) resultOf(claim *resourceapi.ResourceClaim, device string) *resourceapi.DeviceRequestAllocationResult {
	results := claim.Status.Allocation.Devices.Results
	i := slices.IndexFunc(results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		given, of := givenDevice(device, &r)
		return of && (given == r.Device || w.machine.Devices[given].Interchangeable == r.Device)
	})
	if i < 0 {
		return nil
	}
	return &results[i]
}

// givenDevice returns the device in the name of a CDI device, and whether the name has the share of an
// allocation result.
func givenDevice(device string, r *resourceapi.DeviceRequestAllocationResult) (given string, of bool) {
	if r.ShareID == nil {
		return device, true
	}
	return strings.CutSuffix(device, "-"+string(*r.ShareID))
}

// heal is the time limit for an agent to write missing files again.
const heal = time.Minute

// mayLackSpecs reports whether specs may be missing: they were removed, or the disk failed, a
// moment ago, or no record of them remains.
func (w *World) mayLackSpecs() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lost || w.hurt || w.isHurt()
}

// isHurt reports whether the disk fails now or failed a moment ago. The caller holds w.mu.
func (w *World) isHurt() bool {
	return w.ongoing[diskFault] != nil || time.Now().Before(w.healed)
}

// failedOnce reports whether the disk has ever failed.
func (w *World) failedOnce() bool {
	return w.history.FaultCount("diskFull", "readsFail", "writesFail", "syncsFail", "readOnly") > 0
}

// startHealing gives agents time to write missing files again.
func (w *World) startHealing() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.healed, w.hurt = time.Now().Add(heal), false
}

// recordHurt records that an agent dies that may have had files to write again.
func (w *World) recordHurt() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hurt = w.hurt || w.isHurt()
}

// deviceOf returns the name of the device in a CDI ID of a claim.
func deviceOf(id string, claim types.UID) (device string, found bool) {
	_, name, _ := strings.Cut(id, "=")
	rest, found := strings.CutPrefix(name, string(claim)+"-")
	_, device, numbered := strings.Cut(rest, "-")
	return device, found && numbered && strings.HasPrefix(id, "chandler.dev/claim=")
}

// ownNodes returns the numbers of the device nodes that belong to a single card. For a node without
// numbers, the container runtime reads those of the host's node (fillMissingInfo in
// pkg/cdi/container-edits_unix.go of tags.cncf.io/container-device-interface).
func (w *World) ownNodes(edits specs.ContainerEdits) (numbers []string) {
	for _, node := range edits.DeviceNodes {
		if !w.isOwn(node.Path) {
			continue
		}
		if node.Major != 0 || node.Minor != 0 {
			numbers = append(numbers, fmt.Sprintf("%d:%d", node.Major, node.Minor))
		} else if present, found := w.host.Node(cmp.Or(node.HostPath, node.Path)); found {
			numbers = append(numbers, present)
		}
	}
	return numbers
}

func (w *World) isOwn(node string) bool {
	for _, d := range w.machine.Devices {
		if d.Interchangeable != "" && slices.Contains(machine.NodesOf(&d), strings.TrimPrefix(node, "/")) {
			return true
		}
	}
	return slices.ContainsFunc(w.machine.Cards, func(c machine.Card) bool { return slices.Contains(c.Nodes, strings.TrimPrefix(node, "/")) })
}

// claimUse returns the use of a CDI device for a result of a claim's allocation.
func (w *World) claimUse(c *kubelet.Container, claim types.UID, device string, r *resourceapi.DeviceRequestAllocationResult) *use {
	name, _ := shareStem(r.Device)
	if given, _ := givenDevice(device, r); w.machine.Devices[given].Interchangeable == r.Device {
		name = given
	}
	d, found := w.machine.Devices[name]
	p := portion{claim: true, of: claim, device: r.Device}
	if end := len(name) - len(claim); !found && end > 0 { // a share of an earlier allocation
		d = w.machine.Devices[name[:end-1]]
		p.device, p.share = d.Name, types.UID(name[end:])
	}
	if r.ShareID != nil {
		p.share = *r.ShareID
	}
	w.markPrepared(p)
	u := w.useOf(c, &d, w.portionSize(p, nil))
	u.claim, u.share = claim, p.share
	u.open = u.open || r.AdminAccess != nil && *r.AdminAccess
	return u
}

// classicUses returns the uses for a device plugin ID. A pod keeps its devices even if the ID
// stands for other devices by now.
func (w *World) classicUses(c *kubelet.Container, resourceName, id string) (uses []*use) {
	devices, has := w.withID(resourceName, id, c.Listed[resourceName])
	stranger := strings.HasPrefix(c.Pod.Name, "old-")
	if stranger && has != nil {
		has = part{} // the number of shares in the other plugin is unknown
	}
	p := portion{of: c.Pod.UID, device: resourceName + " " + id}
	has = w.portionSize(p, has)
	var nodes []string
	for _, node := range c.Nodes {
		if len(c.Devices) > 1 || len(c.Devices[resourceName]) > 1 {
			break // the nodes cannot be matched to the devices
		}
		if numbers, there := w.host.Node(node); there && w.isOwn(node) {
			nodes = append(nodes, numbers)
		}
	}
	for _, d := range devices {
		given := func(node string) bool { return slices.Contains(c.Nodes, "/"+node) }
		if w.parted[d.Silicon()] && !slices.ContainsFunc(machine.NodesOf(d), given) {
			continue // the ID stood for less than the whole card
		}
		u := w.useOf(c, d, has)
		u.vfio, u.group = d.Want[discovery.Driver] == discovery.DriverVFIO, w.host.FunctionsOf(c.Nodes)
		u.classic, u.id, u.nodes, u.stranger, u.portion = true, id, nodes, stranger, p
		uses = append(uses, u)
	}
	return uses
}

// withID returns the devices behind a device plugin ID, and the part of them that the ID stands
// for: according to the last list for the kubelet, or else according to any settings of the
// administrator so far.
func (w *World) withID(resourceName, id string, listed map[string]bool) (devices []*rules.Offered, has part) {
	most := 0
	for _, f := range slices.Backward(w.forms) {
		var found []*rules.Offered
		ids, of := 0, part(nil)
		for _, d := range f {
			for _, offer := range d.Offers {
				if offer.Resource != resourceName || !slices.Contains(offer.IDs, id) {
					continue
				}
				found, ids = append(found, &d), len(offer.IDs)
				if slices.ContainsFunc(offer.IDs, func(id string) bool { return !listed[id] }) {
					ids = 1 // this form is not the listed one
				}
				if d.Sharing != nil {
					of = part{d.Sharing.Capacity: 1 / float64(len(offer.IDs))}
				}
			}
		}
		if len(found) > 0 && ids > most {
			devices, has, most = found, of, ids
		}
	}
	if most > 0 {
		return devices, has
	}
	base, _, _ := strings.Cut(id, strangerInfix)
	for _, d := range w.machine.Devices {
		for _, offer := range d.Offers {
			if offer.Resource == resourceName && slices.Contains(offer.IDs, base) {
				devices = append(devices, &d)
			}
		}
	}
	return devices, part{}
}

// forgetUses records what a newly started agent cannot know about containers, because the agents'
// records are gone: devices that the kubelet does not list either, or lists with the UUID of a card
// that another card has replaced, and the device nodes of containers. The kubelet does not list init
// containers, unless they are restartable (pkg/kubelet/apis/podresources/server_v1.go, List, in 1.31
// to 1.37).
func (w *World) forgetUses() {
	var written strings.Builder
	for _, name := range w.disk.Files(agents.StateDir + "/grants") {
		data, _ := w.disk.FileContent(name)
		written.Write(data)
	}
	for _, c := range w.kubelet.Containers() {
		uses, _ := c.Note.([]*use)
		says := len(w.kubelet.HasDevices(c.Pod.UID)) > 0 && !c.Pod.Init
		for _, u := range uses {
			if !u.classic {
				w.forgetClaim(u)
				continue
			}
			if strings.Contains(written.String(), strconv.Quote(u.id)) {
				continue
			}
			u.nodes = nil
			u.forgotten = u.forgotten || !says || u.replaced
			if u.part != nil || w.sharesNow(u) {
				u.part = part{}
				w.forgetSize(u.portion)
			}
		}
	}
}

// sharesNow reports whether the ID of a use is one of several IDs of its device in the present
// configuration. An agent without a record of such an ID considers it a share, even if the
// container got the whole device before the configuration changed: without sharing, "card1-0" is
// the whole device, and with sharing, it is the first share ([discovery.Dialect], Stem).
// PodResources, the container's entry in the kubelet's checkpoint, and the plugin's answer in that
// entry are the same for both.
func (w *World) sharesNow(u *use) bool {
	return slices.ContainsFunc(w.wantedForm()[u.device].Offers, func(offer discovery.Offer) bool {
		return allocation.GrantKey(offer.Resource, u.id) == u.portion.device && len(offer.IDs) > 1 && slices.Contains(offer.IDs, u.id)
	})
}

// forgetClaim records what no agent can know about a claim without a record and without a spec.
// PodResources names the claim's device, which may have other nodes by now. A kubelet that has lost
// its checkpoint does not list the claim either: the kubelet prepares claims only for a new sandbox
// (pkg/kubelet/kuberuntime/kuberuntime_manager.go, SyncPod), and leaves out claims without an entry in
// its cache (pkg/kubelet/cm/container_manager_linux.go, GetDynamicResources). In that case, only the
// API server still has the allocation. The agent reads allocations from its own files and from the
// kubelet, not from the API server (docs/stability.md).
func (w *World) forgetClaim(u *use) {
	_, recorded := w.disk.FileContent(w.recordOf(u.claim))
	_, specified := w.disk.FileContent(agents.CDIRoot + "/chandler.dev-claim_" + string(u.claim) + ".json")
	if !recorded && !specified {
		u.nodes = nil
		u.forgotten = u.forgotten || len(w.kubelet.PreparedClaims()[u.claim]) == 0
	}
}

// takenBack reports whether the kubelet has unprepared a claim whose container may still run after
// a forced deletion of its pod. An agent killed between the removal and its answer has still
// unprepared the claim.
func (w *World) takenBack(c *kubelet.Container, claim types.UID) bool {
	_, recorded := w.disk.FileContent(w.recordOf(claim))
	return !w.kubelet.HasClaim(c, claim) || w.kubelet.GaveUp(c, claim) && !recorded
}

// allUses returns the uses of containers that the kubelet still counts: a claim until Unprepare, a
// device of the device plugin API while the kubelet's records have the device, and, against claims
// by DRA, until the container has ended.
func (w *World) allUses() (all []*use) {
	for _, c := range w.kubelet.Containers() {
		uses, _ := c.Note.([]*use)
		for _, u := range uses {
			if !u.classic && w.takenBack(c, u.claim) {
				continue
			}
			now := *u
			now.back = u.classic && len(w.kubelet.HasDevices(c.Pod.UID)) == 0
			all = append(all, &now)
		}
	}
	return all
}

// belongsTogether reports whether two uses belong together: several pods share the claim, or one
// container has both.
func (u *use) belongsTogether(other *use) bool {
	return u.claim != "" && u.claim == other.claim || u.container == other.container
}

// exclusionReason returns the reason why two uses must not exist at the same time, "" if they may.
func (w *World) exclusionReason(u, other *use) string {
	switch {
	case u.open || other.open || u.belongsTogether(other):
		return ""
	case u.classic && other.classic && (u.back || other.back):
		return "" // the kubelet has allocated the ID again
	case w.swapped && (u.stranger || other.stranger):
		return "" // the card may be gone, so that the ID stands for no device
	case u.back && u.stranger || other.back && other.stranger:
		return "" // only the kubelet had a record, and lost it
	case u.silicon != other.silicon:
		if slices.ContainsFunc(u.nodes, func(n string) bool { return slices.Contains(other.nodes, n) }) {
			return "one node"
		}
		if u.inGroup() && other.inGroup() && (slices.Contains(u.group, w.addressOf(other.device)) || slices.Contains(other.group, w.addressOf(u.device))) {
			return "one IOMMU group"
		}
		return ""
	case u.device != other.device && w.parted[u.silicon]:
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
