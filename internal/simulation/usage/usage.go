// Package usage records which container uses which part of which device, and checks the invariants of the
// uses: a device has one consumer at a time, its parts add up to at most the whole device, and its record
// and its driver are those of the consumer. Like a container runtime, the package looks up the CDI devices
// of a container and opens device nodes. It causes no faults.
package usage

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/simulation/agents"
	"chandler.dev/internal/simulation/apiserver"
	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/cluster"
	"chandler.dev/internal/simulation/damage"
	"chandler.dev/internal/simulation/disk"
	"chandler.dev/internal/simulation/history"
	"chandler.dev/internal/simulation/kernel"
	"chandler.dev/internal/simulation/kubelet"
	"chandler.dev/internal/simulation/machine"
	"chandler.dev/internal/simulation/supervisor"
)

// Config holds the node whose devices are used.
type Config struct {
	Machine    *machine.Machine
	Host       *kernel.Host
	Disk       *disk.Disk
	Server     *apiserver.Server
	Cluster    *cluster.Cluster
	Kubelet    *kubelet.Kubelet
	Supervisor *supervisor.Supervisor // of MPS daemons
	Lock       *agents.Lock           // of the node
	Damage     *damage.Damage
	History    *history.History
	Chance     *chance.Chance

	Boot   func() string              // returns the ID of the present boot
	Forms  func() []machine.Form      // returns the devices under all settings of the administrator so far, the present last
	CardOf func(device string) string // returns the present address of the card with a device
}

// wantedForm returns the devices with the present configuration.
func (c *Config) wantedForm() machine.Form {
	forms := c.Forms()
	return forms[len(forms)-1]
}

// Tracker tracks the uses of the devices of a node.
type Tracker struct {
	Config
	Parts     *Parts
	Processes *Processes
	Writes    *Writes
}

// New returns a tracker of a node without containers.
func New(config Config) *Tracker {
	t := &Tracker{
		Config:    config,
		Parts:     &Parts{Config: config, sizes: make(map[portion]part), records: make(map[portion][]byte)},
		Processes: &Processes{Config: config},
	}
	t.Writes = &Writes{Config: config, usage: t, touched: make(map[string]time.Time), handed: make(map[string]bool)}
	return t
}

// takenBack reports whether the kubelet has unprepared a claim whose container may still run after
// a forced deletion of its pod. An agent killed between the removal and its answer has still
// unprepared the claim.
func (t *Tracker) takenBack(c *kubelet.Container, claim types.UID) bool {
	_, recorded := t.Disk.FileContent(agents.RecordFile(claim))
	return !t.Kubelet.HasClaim(c, claim) || t.Kubelet.GaveUp(c, claim) && !recorded
}

// allUses returns the uses of containers that the kubelet still counts: a claim until Unprepare, a
// device of the device plugin API while the kubelet's records have the device, and, against claims
// by DRA, until the container has ended.
func (t *Tracker) allUses() (all []*use) {
	for _, c := range t.Kubelet.Containers() {
		for _, u := range usesOf(c) {
			if !u.classic && t.takenBack(c, u.claim) {
				continue
			}
			now := *u
			now.back = u.classic && len(t.Kubelet.HasDevices(c.Pod.UID)) == 0
			all = append(all, &now)
		}
	}
	return all
}

// usesOf returns the uses of a container.
func usesOf(c *kubelet.Container) []*use {
	uses, _ := c.Note.([]*use)
	return uses
}

// ReplaceCard records that another card with another UUID has replaced the card of a function.
func (t *Tracker) ReplaceCard(address string) {
	for _, c := range t.Kubelet.Containers() {
		for _, u := range usesOf(c) {
			u.replaced = u.replaced || u.address == address
		}
	}
}

// LeaveGroup records that a function has left its IOMMU group: the containers that have functions of
// the group no longer share a group with it.
func (t *Tracker) LeaveGroup(address string) {
	for _, c := range t.Kubelet.Containers() {
		for _, u := range usesOf(c) {
			if u.group = slices.DeleteFunc(slices.Clone(u.group), func(member string) bool { return member == address }); u.address == address {
				u.group = nil
			}
		}
	}
}
