// Package migration describes the move of a node's devices between DRA and the device plugin API, as a table or
// as data. It reads nothing.
package migration

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/pattern"
	"chandler.dev/internal/terminal"
)

// A Move describes the move of a node's devices.
type Move struct {
	Node      string      `json:"node"`
	Devices   []Device    `json:"devices"`
	Resources []*Resource `json:"resources"`
	Notes     []string    `json:"notes"`

	Plan bool `json:"-"` // the move is planned; otherwise the last one is described
}

// A Device is a device with the pods that it waits for.
type Device struct {
	placement.Step
	WaitsFor []string `json:"waitsFor,omitempty"`
}

// A Resource is an extended resource name of the device plugin API, with device counts.
type Resource struct {
	Name         string `json:"name"`
	Moves        int    `json:"moves"`        // move to another API at once
	Waits        int    `json:"waits"`        // wait for pods to end
	DRA          int    `json:"dra"`          // DRA will offer these
	DevicePlugin int    `json:"devicePlugin"` // the device plugin will offer these, and no claim has them

	// CountedTwice is the number of devices that pods have by DRA although they requested them by
	// limits, while the device plugin offers other devices of the name. The scheduler also counts
	// these pods against the device plugin's devices.
	CountedTwice int `json:"countedTwice"`
}

// AddSteps adds the devices.
func (m *Move) AddSteps(steps []placement.Step, entries []allocation.Entry, pods map[types.NamespacedName][]string) {
	names := make(map[string]*Resource)
	m.Devices, m.Resources = make([]Device, 0, len(steps)), []*Resource{}
	for _, step := range steps {
		d := Device{Step: step}
		for _, owner := range step.Owners {
			d.WaitsFor = append(d.WaitsFor, ownerText(owner, pods))
		}
		m.Devices = append(m.Devices, d)
		for _, name := range step.Resources {
			if names[name] == nil {
				names[name] = &Resource{Name: name}
				m.Resources = append(m.Resources, names[name])
			}
			names[name].count(step, entries)
		}
	}
	for _, n := range m.Resources {
		if n.DevicePlugin == 0 {
			n.CountedTwice = 0 // if the node has no device plugin devices of the name, only DRA counts
		}
	}
	m.addNotes()
}

func ownerText(owner allocation.Owner, pods map[types.NamespacedName][]string) string {
	if owner.API == discovery.ModeDevicePlugin {
		return "pod " + owner.String()
	}
	if by := pods[types.NamespacedName{Namespace: owner.Namespace, Name: owner.Name}]; len(by) > 0 {
		return fmt.Sprintf("pod %s, %s", strings.Join(by, " and "), owner)
	}
	return owner.String()
}

// limitRequest matches the request names of the claim that the scheduler creates for a pod with
// limits (pkg/scheduler/framework/plugins/dynamicresources/extendeddynamicresources.go,
// createRequestsAndMappings, in 1.35 to 1.37).
var limitRequest = pattern.Lazy(`^container-\d+-request-\d+$`)

func (n *Resource) count(step placement.Step, entries []allocation.Entry) {
	switch step.Fate {
	case placement.Moves:
		n.Moves++
	case placement.Waits:
		n.Waits++
	}
	switch {
	case step.Fate == placement.Excluded:
	case step.To == discovery.ModeDRA:
		n.DRA++
	case step.Fate != placement.Waits:
		n.DevicePlugin++
	}
	for _, e := range entries {
		claim, ok := e.(*allocation.Claim)
		if !ok {
			continue
		}
		for _, r := range claim.Results {
			if r.Source == step.Device && limitRequest().MatchString(r.Request) {
				n.CountedTwice++
			}
		}
	}
}

// addNotes adds the consequences of the move for the scheduler and for pods. The scheduler's rules
// are in pkg/scheduler/framework/plugins/noderesources/fit.go, fitsRequest and
// shouldDelegateResourceToDRA, read in 1.35 to 1.37.
func (m *Move) addNotes() {
	m.Notes = []string{}
	say := func(format string, args ...any) { m.Notes = append(m.Notes, fmt.Sprintf(format, args...)) }
	for _, n := range m.Resources {
		switch {
		case n.CountedTwice > 0:
			say("%s: pods that requested it by limits have %d by DRA. The scheduler counts them against the %d that the device plugin offers, too, so that %d more fit until these pods end.",
				n.Name, n.CountedTwice, n.DevicePlugin, max(0, n.DevicePlugin-n.CountedTwice))
		case n.DRA > 0 && n.DevicePlugin > 0:
			say("%s: the device plugin keeps %d of them. While one of these is healthy, pods that request the name by limits get no device by DRA on this node, and the %d devices of DRA are for claims only.", n.Name, n.DevicePlugin, n.DRA)
		case n.DRA > 0 && n.Moves+n.Waits > 0:
			say("%s: the device plugin no longer offers any on the node, so nothing is counted twice: pods that request the name by limits use DRA, if a DeviceClass has it as extendedResourceName.", n.Name)
		}
	}
	to := func(mode discovery.Mode) bool {
		return slices.ContainsFunc(m.Devices, func(d Device) bool {
			return d.To == mode && (d.Fate == placement.Moves || d.Fate == placement.Waits)
		})
	}
	if to(discovery.ModeDRA) {
		say("New pods lose: hints for the Topology Manager, which does not support DRA; topology-aware allocation by GetPreferredAllocation (the scheduler takes the first free devices); their device IDs in PodResources, where the devices are under dynamicResources, by claim and CDI name.")
		say("New pods gain: claims with selectors and constraints, the devices' health in the claim's status, eviction by taints, files with the devices' attributes.")
	}
	if to(discovery.ModeDevicePlugin) {
		say("New pods lose: claims (a pod that names one waits for another node), constraints, the devices' health in the claim's status, eviction by taints, files with the devices' attributes.")
		say("New pods gain: hints for the Topology Manager, topology-aware allocation by GetPreferredAllocation, their device IDs in PodResources.")
	}
}

// Print prints a table of the devices, the counts by fate, and the notes.
func (m *Move) Print(out io.Writer) error {
	state, words := "STATE", standing
	if m.Plan {
		state, words = "ACTION", planned
	}
	table := terminal.Table{Columns: []terminal.Column{{Title: "DEVICE"}, {Title: "RESOURCE"}, {Title: "FROM"}, {Title: "TO"}, {Title: state}, {Title: "BLOCKED-BY"}}}
	count := make(map[placement.Fate]int)
	for _, d := range m.Devices {
		count[d.Fate]++
		reason := strings.Join(d.WaitsFor, "; ")
		if d.Fate == placement.Waits && reason == "" {
			reason = d.Reason
		}
		var row []terminal.Cell
		for _, text := range []string{d.Device, strings.Join(d.Resources, ","), string(d.From), string(d.To), string(d.Fate), reason} {
			row = append(row, terminal.TextCell(cmp.Or(text, "-")))
		}
		table.AddRow(row...)
	}
	var b strings.Builder
	if err := table.Print(&b, terminal.Style{Width: terminal.Unlimited}); err != nil {
		return err
	}
	fmt.Fprintf(&b, "\n%s: ", inventory.CountNoun(len(m.Devices), "device"))
	var counts []string
	for _, fate := range []placement.Fate{placement.Stays, placement.Moves, placement.Changes, placement.Excluded, placement.Waits} {
		if count[fate] > 0 {
			one := min(count[fate], 2) - 1
			counts = append(counts, fmt.Sprintf("%d %s", count[fate], words[fate][one]))
		}
	}
	fmt.Fprintln(&b, cmp.Or(strings.Join(counts, ", "), "nothing to do"))
	for _, note := range m.Notes {
		fmt.Fprintf(&b, "\n- %s", note)
	}
	if len(m.Notes) > 0 {
		fmt.Fprintln(&b)
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// Words for the fate of one device, and of several, in a plan and in a status.
var (
	planned = map[placement.Fate][2]string{
		placement.Stays:    {"stays", "stay"},
		placement.Moves:    {"moves at once", "move at once"},
		placement.Changes:  {"changes at once", "change at once"},
		placement.Excluded: {"is excluded at once", "are excluded at once"},
		placement.Waits:    {"waits", "wait"},
	}
	standing = map[placement.Fate][2]string{
		placement.Stays:    {"is where it is to be", "are where they are to be"},
		placement.Moves:    {"moves next", "move next"},
		placement.Changes:  {"changes next", "change next"},
		placement.Excluded: {"is excluded next", "are excluded next"},
		placement.Waits:    {"waits", "wait"},
	}
)
