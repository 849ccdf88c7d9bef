package usage

import (
	"slices"
	"strconv"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/simulation/agents"
)

// ForgetUses records what a newly started agent cannot know about containers, because the agents'
// records are gone: devices that the kubelet does not list either, or lists with the UUID of a card
// that another card has replaced, and the device nodes of containers. The kubelet does not list init
// containers, unless they are restartable (pkg/kubelet/apis/podresources/server_v1.go, List, in 1.31
// to 1.37).
func (t *Tracker) ForgetUses() {
	var written strings.Builder
	for _, name := range t.Disk.Files(agents.StateDir + "/grants") {
		data, _ := t.Disk.FileContent(name)
		written.Write(data)
	}
	for _, c := range t.Kubelet.Containers() {
		says := len(t.Kubelet.HasDevices(c.Pod.UID)) > 0 && !c.Pod.Init
		for _, u := range usesOf(c) {
			if !u.classic {
				t.forgetClaim(u)
				continue
			}
			if strings.Contains(written.String(), strconv.Quote(u.id)) {
				continue
			}
			u.nodes = nil
			u.forgotten = u.forgotten || !says || u.replaced
			if u.part != nil || t.sharesNow(u) {
				u.part = part{}
				t.Parts.forgetSize(u.portion)
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
func (t *Tracker) sharesNow(u *use) bool {
	return slices.ContainsFunc(t.wantedForm()[u.device].Offers, func(offer discovery.Offer) bool {
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
func (t *Tracker) forgetClaim(u *use) {
	_, recorded := t.Disk.FileContent(agents.RecordFile(u.claim))
	_, specified := t.Disk.FileContent(agents.SpecFile(u.claim))
	if !recorded && !specified {
		u.nodes = nil
		u.forgotten = u.forgotten || len(t.Kubelet.PreparedClaims()[u.claim]) == 0
	}
}
