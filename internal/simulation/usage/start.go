package usage

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/internal/simulation/agents"
	"chandler.dev/internal/simulation/damage"
	"chandler.dev/internal/simulation/kubelet"
	"chandler.dev/internal/simulation/machine"
)

// StartContainer starts a container as a container runtime does, which looks up each CDI device in
// the existing specs.
func (t *Tracker) StartContainer(c *kubelet.Container) error {
	found := t.runtimeSpecs()
	var uses []*use
	nodes := c.Nodes
	for uid, ids := range c.Claims {
		claim := t.Server.Claim(c.Pod.Namespace, c.Names[uid])
		if claim == nil || claim.UID != uid || claim.Status.Allocation == nil {
			return fmt.Errorf("claim %s is gone", c.Names[uid])
		}
		for _, id := range ids {
			if _, there := found[id]; !there {
				// Metadata that could not be written is left out; kubelets up to 1.36 keep the
				// metadata's CDI ID.
				_, of := deviceOf(id, uid)
				if !t.Damage.MayLackSpecs() && t.isOf(ids, claim) && !t.isEnding(c.Ending[uid]) && !t.lacksRecord(c, uid) && (of || !t.Damage.HasFailedDisk()) {
					t.History.Fail("pod %s cannot start: claim %s is prepared, and CDI device %s is in no spec", c.Pod, c.Names[uid], id)
				}
				return fmt.Errorf("unresolvable CDI devices %s", id)
			}
			device, of := deviceOf(id, uid)
			if !of {
				continue // a metadata file
			}
			r := resourceapi.DeviceRequestAllocationResult{Device: device}
			if now := t.resultOf(claim, device); now != nil {
				r = *now
			}
			u := t.claimUse(c, uid, device, &r)
			u.nodes = t.ownNodes(found[id])
			mps := machine.RequestsMPS(claim)
			u.vfio, u.group = len(claim.Status.Allocation.Devices.Config) > 0 && !mps, t.Host.FunctionsOf(pathsOf(found[id]))
			if why := t.Supervisor.LacksDaemon(uid); mps && !t.Damage.HasLostRecords() && !t.isEnding(c.Ending[uid]) && why != "" {
				t.History.Fail("%s, and %s", u, why)
			}
			nodes = append(slices.Clone(nodes), pathsOf(found[id])...)
			if why := t.Processes.checkReclaim(c, u); why != "" {
				t.History.Fail("%s, and %s", u, why)
			}
			uses = append(uses, u)
		}
	}
	for resourceName, ids := range c.Devices {
		for _, id := range ids {
			for _, u := range t.classicUses(c, resourceName, id) {
				if why := t.checkPromised(u); why != "" && !c.Again {
					t.History.Fail("%s, and %s", u, why)
				}
				if why := t.Processes.checkReclaim(c, u); why != "" {
					t.History.Fail("%s, and %s", u, why)
				}
				uses = append(uses, u)
			}
		}
	}
	c.Note = uses
	t.Processes.start(c, uses, nodes)
	return nil
}

// runtimeSpecs returns the CDI devices that a container runtime finds.
func (t *Tracker) runtimeSpecs() map[string]specs.ContainerEdits {
	found := make(map[string]specs.ContainerEdits)
	for _, name := range t.Disk.Files(agents.CDIRoot) {
		if path.Ext(name) != ".json" {
			continue
		}
		data, _ := t.Disk.FileContent(name)
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

// checkPromised returns an error text if a claim was allocated the physical device of a container
// that gets it by the device plugin API: the claim's pod would be refused the device. The ledger has
// not excluded the claim, because the claim is not prepared yet. A restarted container has got the
// device before.
func (t *Tracker) checkPromised(u *use) string {
	if u.open || u.stranger || t.Damage.HasLostRecords() || t.Damage.HasReplacedCard() {
		return ""
	}
	for _, claim := range t.Server.Claims() {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, r := range claim.Status.Allocation.Devices.Results {
			name, _ := machine.ShareStem(r.Device)
			if d := t.Machine.Devices[name]; d.Name == name && d.Silicon() == u.silicon && (r.AdminAccess == nil || !*r.AdminAccess) {
				return fmt.Sprintf("claim %s was allocated %s before", claim.Name, r.Device)
			}
		}
	}
	return ""
}

// isEnding reports whether the outputs of a claim may be missing because the kubelet has asked to
// unprepare the claim: an agent is removing the outputs, or writes them again after a failed
// removal.
func (t *Tracker) isEnding(asked time.Time) bool {
	return !asked.IsZero() && (time.Since(asked) < damage.HealTime || time.Since(t.Lock.HeldSince()) < damage.HealTime)
}

// lacksRecord reports whether the record of a claim is set aside, or only its devices are known: an
// agent was killed while it ended the claim, or the record was damaged. Nothing can write the specs of
// such a claim again. It keeps its devices until the kubelet unprepares it, and its containers cannot
// start until then, which is safe. The record is gone if the agent was killed after it had removed the
// record, and a pod joined the claim before the kubelet repeated the call.
func (t *Tracker) lacksRecord(c *kubelet.Container, claim types.UID) bool {
	records := t.Disk.Files(agents.StateDir + "/claims")
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
func (t *Tracker) isOf(ids []string, claim *resourceapi.ResourceClaim) bool {
	chosen := make(map[*resourceapi.DeviceRequestAllocationResult]int64)
	return !slices.ContainsFunc(ids, func(id string) bool {
		device, of := deviceOf(id, claim.UID)
		if !of {
			return false
		}
		r := t.resultOf(claim, device)
		if r == nil {
			return true
		}
		chosen[r]++
		amount := r.ConsumedCapacity[discovery.Shares]
		return len(t.Machine.DevicesNamed(r.Device)) > 0 && chosen[r] > max(1, amount.Value())
	})
}

// resultOf returns the result of a claim's allocation for a CDI device, nil if there is none. A
// whole device from an earlier allocation does not match a result for a share of that device.
func (t *Tracker) resultOf(claim *resourceapi.ResourceClaim, device string) *resourceapi.DeviceRequestAllocationResult {
	results := claim.Status.Allocation.Devices.Results
	i := slices.IndexFunc(results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		given, of := givenDevice(device, &r)
		return of && (given == r.Device || t.Machine.Devices[given].Interchangeable == r.Device)
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

// deviceOf returns the name of the device in a CDI ID of a claim.
func deviceOf(id string, claim types.UID) (device string, found bool) {
	_, name, _ := strings.Cut(id, "=")
	rest, found := strings.CutPrefix(name, string(claim)+"-")
	_, device, numbered := strings.Cut(rest, "-")
	return device, found && numbered && strings.HasPrefix(id, "chandler.dev/claim=")
}
