// Package list computes the kubelet's lists of extended resources: the IDs, their health, and
// preferred combinations. The package is pure: its results depend only on the arguments.
package list

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/natural"
)

// Belief is what the kubelet may still assume about a resource.
type Belief struct {
	GoneSentAt time.Time // since when every stream has received all IDs marked as gone; zero: not yet
	IdleSince  time.Time // since when no Allocate is in flight; zero: one is
	ListedAt   time.Time // start of the last PodResources call in which the kubelet listed all its pods
}

// Input is the input of [Lists.Next].
type Input struct {
	Snapshot *rules.Snapshot
	Withheld map[string]string // by physical device: why no new consumer can have it
	View     *ledger.View      // the allocations on a host with a stock
	Host     exclusion.Stock   // the stock; nil has no devices
	Beliefs  map[string]Belief // by resource, for resources registered with the kubelet

	// CheckpointIDs are the IDs of containers in the kubelet's checkpoint, by resource. They are set
	// as long as the kubelet does not list its pods. The first list of a resource contains them.
	CheckpointIDs map[string][]string

	// PossibleHolders contains the devices that containers may have by those IDs, as long as the
	// ledger does not know the containers' allocations. New consumers cannot get these devices. Nil
	// means none.
	PossibleHolders *ledger.View

	Now time.Time

	// Grace is how long the kubelet may still allocate an ID after it received the ID as unhealthy.
	// Its Allocate looks up an ID once more after the plugin's answer, and does not expect a
	// missing ID (pkg/kubelet/cm/devicemanager/manager.go, allocateContainerResources, in 1.31 to
	// 1.37).
	Grace time.Duration
}

// Lists are the lists of all resources. They are never modified.
type Lists struct {
	lists      map[string]*List
	offers     *Offers
	lastInput  Input
	isComputed bool // there was an input
}

// List is the list of a resource for the kubelet and for Allocate. It is never modified.
type List struct {
	resource   string
	version    int
	marked     int            // version of the last ID marked as gone
	rows       map[string]row // by ID
	devices    []*pluginapi.Device
	allocation rules.Allocation
}

// row is one ID of a list.
type row struct {
	unit            *Unit  // nil for an ID of unknown devices
	unhealthyReason string // why the unit is unusable, or ""
	blockedReason   string // the consumer blocking the unit, or ""
	isGone          bool   // the ID is no longer offered
	isAllocated     bool   // a container has the ID
}

// Next returns the following lists, and a problem for each device without an offer. It returns the
// receiver if nothing has changed. The duration is proportional to the number of IDs.
//
// An ID no longer offered first becomes unhealthy. The ID leaves the list when no container has it
// and the kubelet can no longer allocate it; see [Belief].
//
// A resource neither offered nor registered with the kubelet has a list if containers have IDs of
// vanished devices. If the devices exist, the administrator no longer offers them, and another
// plugin may serve the resource.
func (before Lists) Next(in Input) (Lists, []discovery.Problem) {
	if before.isSettled(in) {
		return before, before.offers.Problems
	}
	next := Lists{lists: make(map[string]*List), offers: before.offers, lastInput: in, isComputed: true}
	if !before.isComputed || in.Snapshot != before.lastInput.Snapshot {
		next.offers = BuildOffers(in.Snapshot)
	}
	resources := maps.Clone(before.lists)
	if resources == nil {
		resources = make(map[string]*List)
	}
	for resource := range next.offers.Units {
		resources[resource] = before.lists[resource]
	}
	had := grantsOf(in.View)
	for resource, grants := range had {
		if resources[resource] == nil && hasVanished(grants, in.Host) {
			resources[resource] = nil
		}
	}
	for resource, l := range resources {
		following := l.next(resource, next.offers, had[resource], in)
		if _, told := in.Beliefs[resource]; told || len(following.rows) > 0 {
			next.lists[resource] = following
		}
	}
	return next, next.offers.Problems
}

// isSettled reports whether the input leads to the same lists.
func (before Lists) isSettled(in Input) bool {
	from := &before.lastInput
	if !before.isComputed || in.Snapshot != from.Snapshot || !in.View.SameAs(from.View) || in.PossibleHolders != from.PossibleHolders || !maps.Equal(in.Withheld, from.Withheld) {
		return false
	}
	for resource, l := range before.lists {
		if _, told := in.Beliefs[resource]; !told && len(l.rows) == 0 {
			return false
		}
		if l.canLeave(in.Beliefs[resource], in) {
			return false
		}
	}
	return true
}

// Resources returns the lists by resource.
func (before Lists) Resources() map[string]*List { return before.lists }

// mayLeave reports whether IDs marked as gone may leave the list, if no container has them.
func (b Belief) mayLeave(now time.Time, grace time.Duration) bool {
	if b.GoneSentAt.IsZero() || b.IdleSince.IsZero() {
		return false
	}
	last := b.GoneSentAt
	if b.IdleSince.After(last) {
		last = b.IdleSince
	}
	return now.Sub(last) >= grace && b.ListedAt.After(last)
}

// hasVanished reports whether a host has none of the devices of grants.
func hasVanished(grants map[string]*allocation.Grant, host exclusion.Stock) bool {
	for _, g := range grants {
		for _, name := range g.Devices {
			if host == nil {
				return true
			}
			if _, there := host.Device(name); there {
				return false
			}
		}
	}
	return true
}

// canLeave reports whether an ID can leave the list now.
func (l *List) canLeave(b Belief, in Input) bool {
	if l.marked == 0 || !b.mayLeave(in.Now, in.Grace) {
		return false
	}
	for _, r := range l.rows {
		if r.isGone && !r.isAllocated {
			return true
		}
	}
	return false
}

// grantsOf returns the grants of Chandler's resources, by resource and ID.
func grantsOf(v *ledger.View) map[string]map[string]*allocation.Grant {
	had := make(map[string]map[string]*allocation.Grant)
	for _, g := range v.OwnGrants() {
		if had[g.Resource] == nil {
			had[g.Resource] = make(map[string]*allocation.Grant)
		}
		had[g.Resource][g.ID] = g
	}
	return had
}

// next returns the list that follows l, which may be nil.
func (l *List) next(resource string, offers *Offers, had map[string]*allocation.Grant, in Input) *List {
	if l == nil {
		l = &List{rows: make(map[string]row)}
		for _, id := range in.CheckpointIDs[resource] {
			l.rows[id] = row{}
		}
	}
	mayLeave := in.Beliefs[resource].mayLeave(in.Now, in.Grace)
	following := &List{
		resource: resource, version: l.version + 1, marked: l.marked, rows: make(map[string]row, len(l.rows)),
		allocation: in.Snapshot.Allocation[resource],
	}
	either := had
	if in.PossibleHolders != nil {
		either = make(map[string]*allocation.Grant)
		maps.Copy(either, had)
		maps.Copy(either, grantsOf(in.PossibleHolders)[resource]) // allocations with unconfirmed consumers
	}
	taken := sharesOf(offers.Units[resource], either)
	for _, u := range offers.Units[resource] {
		following.addUnit(u, l, had, taken, in)
		following.blockDoubtful(u, either, in.PossibleHolders)
	}
	newly := false
	keep := func(id string, before row) {
		if _, listed := following.rows[id]; listed {
			return
		}
		newly = newly || !before.isGone
		following.rows[id] = row{unit: before.unit, unhealthyReason: "no longer offered", isGone: true, isAllocated: had[id] != nil}
	}
	for id, before := range l.rows {
		if had[id] != nil || !before.isGone || !mayLeave {
			keep(id, before)
		}
	}
	for id := range had {
		keep(id, l.rows[id])
	}
	following.sort(offers.Units[resource])
	if l.version > 0 && slices.EqualFunc(l.devices, following.devices, sameDevice) {
		// The units may nevertheless have new edits, and the reasons new texts.
		following.version, following.devices = l.version, l.devices
	}
	if newly {
		following.marked = following.version
	}
	return following
}

// addUnit adds the rows of a unit's IDs. An ID that a container has keeps its devices of the time
// of its allocation.
func (l *List) addUnit(u *Unit, before *List, had, taken map[string]*allocation.Grant, in Input) {
	sick, blocked := u.unusableReason(in.Withheld), ""
	if b := u.blockedBy(l.resource, in.View); b != nil {
		blocked = b.Error()
	}
	for _, id := range u.IDs {
		r := row{unit: u, unhealthyReason: sick, blockedReason: blocked, isAllocated: had[id] != nil}
		if why := standsFor(had[id], u); why != "" {
			r = row{unit: before.rows[id].unit, unhealthyReason: why, isAllocated: true}
		}
		if g := taken[id]; g != nil && r.blockedReason == "" {
			r.blockedReason = fmt.Sprintf("%s has it as %q", g.Owner(), g.ID)
		}
		l.rows[id] = r
	}
}

// blockDoubtful blocks the IDs of a unit if a container may have the unit's devices by other IDs.
// It leaves IDs of containers: the kubelet does not allocate them again, and restarts their
// container only if they are healthy.
func (l *List) blockDoubtful(u *Unit, had map[string]*allocation.Grant, perhaps *ledger.View) {
	if perhaps == nil {
		return
	}
	b := u.blockedBy(l.resource, perhaps)
	if b == nil {
		return
	}
	for _, id := range u.IDs {
		if r := l.rows[id]; r.blockedReason == "" && had[id] == nil {
			r.blockedReason = fmt.Sprintf("device %s may be in use by a container, according to the kubelet's checkpoint", b.Device)
			l.rows[id] = r
		}
	}
}

// sharesOf returns the blocked IDs of units with shares by other IDs: containers have shares of the
// same devices, with IDs in another plugin's dialect or no longer offered. Such a share blocks the
// ID with its number, or else the last free ID.
func sharesOf(units []*Unit, had map[string]*allocation.Grant) map[string]*allocation.Grant {
	shared := make(map[string]*Unit) // by the names of the unit's devices
	listed := make(map[string]bool)
	for _, u := range units {
		if len(u.IDs) > 1 {
			shared[strings.Join(u.DeviceNames(), " ")] = u
		}
		for _, id := range u.IDs {
			listed[id] = true
		}
	}
	others := make(map[*Unit][]string)
	for id, g := range had {
		if u := shared[strings.Join(g.Devices, " ")]; u != nil && !listed[id] && !g.Exclusive {
			others[u] = append(others[u], id)
		}
	}
	taken := make(map[string]*allocation.Grant)
	for u, ids := range others {
		byNumber := make(map[string]string, len(u.IDs))
		var free []string
		for _, id := range u.IDs {
			if had[id] == nil {
				byNumber[trailingDigits(id)], free = id, append(free, id)
			}
		}
		slices.SortFunc(ids, natural.CompareNames)
		var odd []*allocation.Grant
		for _, id := range ids {
			if own, there := byNumber[trailingDigits(id)]; there && taken[own] == nil {
				taken[own] = had[id]
			} else {
				odd = append(odd, had[id])
			}
		}
		for _, g := range odd {
			for len(free) > 0 && taken[free[len(free)-1]] != nil {
				free = free[:len(free)-1]
			}
			if len(free) > 0 {
				taken[free[len(free)-1]] = g
			}
		}
	}
	return taken
}

// trailingDigits returns the digits at the end of an ID.
func trailingDigits(id string) string { return id[len(strings.TrimRight(id, "0123456789")):] }

// blockedBy returns the consumer that blocks the unit, or nil. If the unit has several IDs, they
// are shares, and any number of containers can have them.
func (u *Unit) blockedBy(resource string, v *ledger.View) *exclusion.Blocked {
	want := u.Grant(resource, u.IDs[0], nil)
	own := ""
	if want.Exclusive {
		own = want.Key()
	}
	b := v.BlockedBy(discovery.ModeDevicePlugin, own, want.Holds())
	if b != nil && b.Starting != nil {
		return nil // the starting container may get this unit too, while Allocate refuses other containers
	}
	return b
}

// standsFor returns a text about a container whose ID stands for other devices than those of the
// unit, or "".
func standsFor(g *allocation.Grant, u *Unit) string {
	if g == nil || len(g.Devices) == 0 || slices.Equal(g.Devices, u.DeviceNames()) {
		return ""
	}
	return fmt.Sprintf("%s has it as %s", g.Owner(), strings.Join(g.Devices, ", "))
}

// sortedIDs returns the IDs of the rows in natural order. The IDs of offered units are already
// sorted, which makes the final sort fast.
func (l *List) sortedIDs(offered []*Unit) []string {
	ids := make([]string, 0, len(l.rows))
	for _, u := range slices.SortedFunc(slices.Values(offered), func(a, b *Unit) int { return natural.CompareNames(a.IDs[0], b.IDs[0]) }) {
		ids = append(ids, u.IDs...)
	}
	if len(ids) < len(l.rows) {
		listed := make(map[string]bool, len(ids))
		for _, id := range ids {
			listed[id] = true
		}
		for id := range l.rows {
			if !listed[id] {
				ids = append(ids, id)
			}
		}
	}
	slices.SortFunc(ids, natural.CompareNames)
	return ids
}

// sort computes the devices of the rows, in natural order of their IDs.
func (l *List) sort(offered []*Unit) {
	topology := make(map[*Unit]*pluginapi.TopologyInfo)
	l.devices = make([]*pluginapi.Device, 0, len(l.rows))
	for _, id := range l.sortedIDs(offered) {
		r := l.rows[id]
		d := &pluginapi.Device{ID: id, Health: pluginapi.Healthy}
		if r.refusalReason() != "" {
			d.Health = pluginapi.Unhealthy
		}
		if r.unit != nil {
			if _, made := topology[r.unit]; !made {
				topology[r.unit] = r.unit.topologyInfo()
			}
			d.Topology = topology[r.unit]
		}
		l.devices = append(l.devices, d)
	}
}

// topologyInfo returns the NUMA nodes of the unit. It returns nil if none is known or the
// administrator has excluded them.
func (u *Unit) topologyInfo() *pluginapi.TopologyInfo {
	excluded := func(d rules.Offered) bool { return d.SRIOV != nil && d.SRIOV.ExcludeTopology }
	if len(u.place.NUMA()) == 0 || slices.ContainsFunc(u.Devices, excluded) {
		return nil
	}
	t := &pluginapi.TopologyInfo{}
	for _, node := range u.place.NUMA() {
		t.Nodes = append(t.Nodes, &pluginapi.NUMANode{ID: node})
	}
	return t
}

// refusalReason returns why an ID cannot be allocated, or "".
func (r row) refusalReason() string { return cmp.Or(r.blockedReason, r.unhealthyReason) }

// Version returns the version of the list. It grows only when the devices for the kubelet change.
func (l *List) Version() int { return l.version }

// MarkedVersion returns the version of the last ID marked as gone.
func (l *List) MarkedVersion() int { return l.marked }

// Empty reports whether the list has no IDs.
func (l *List) Empty() bool { return len(l.rows) == 0 }

// Devices returns the devices for the kubelet. The caller must not modify them.
func (l *List) Devices() []*pluginapi.Device { return l.devices }

// Allocation returns how the resource is allocated.
func (l *List) Allocation() rules.Allocation { return l.allocation }

// Unit returns the unit of an ID, or nil if it is unknown.
func (l *List) Unit(id string) *Unit { return l.rows[id].unit }

// LookUp returns the units of IDs, without duplicates, in name order. It returns an error if an ID
// cannot be allocated.
func (l *List) LookUp(ids []string) ([]*Unit, error) {
	if l.allocation.One && len(ids) > 1 {
		return nil, fmt.Errorf("%s: %d requested; the configuration allows one for each container", l.resource, len(ids))
	}
	var units []*Unit
	var errs []error
	for _, id := range ids {
		r, listed := l.rows[id]
		switch {
		case !listed:
			errs = append(errs, fmt.Errorf("%s: device %q: unknown", l.resource, id))
		case r.refusalReason() != "":
			errs = append(errs, fmt.Errorf("%s: device %q: %s", l.resource, id, r.refusalReason()))
		default:
			units = append(units, r.unit)
		}
	}
	slices.SortFunc(units, byName)
	return slices.Compact(units), errors.Join(errs...)
}

// ConsumedAmounts returns the consumed amounts of shared devices. Each ID is one unit of the
// capacity of its device's sharing.
func (l *List) ConsumedAmounts(ids []string) discovery.Consumed {
	consumed := make(discovery.Consumed)
	for _, id := range ids {
		for _, d := range l.rows[id].unit.Devices {
			if s := d.Sharing; s != nil {
				consumed.Add(d.Name, map[resourceapi.QualifiedName]resource.Quantity{s.Capacity: s.Unit})
			}
		}
	}
	return consumed
}

func sameDevice(a, b *pluginapi.Device) bool {
	sameNode := func(a, b *pluginapi.NUMANode) bool { return a.ID == b.ID }
	return a.ID == b.ID && a.Health == b.Health &&
		slices.EqualFunc(a.GetTopology().GetNodes(), b.GetTopology().GetNodes(), sameNode)
}
