package legacy

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// list is what a resource's plugin says to the kubelet, and what Allocate
// looks IDs up in. It is never modified.
type list struct {
	version int
	rows    map[string]row // by ID
	devices []*pluginapi.Device
}

// row is one ID of a list.
type row struct {
	unit *unit // nil for a held ID of which no more than that is known

	sick     string // why the unit cannot be used, "" if it can
	withheld string // who holds it through the other API, or by another ID or resource, "" if nobody does

	// gone is the version of the list in which the ID was first marked as no
	// longer offered, 0 while it is offered.
	gone int
}

// situation is what a list is computed from, beside the list before it.
type situation struct {
	units     []*unit // what is offered
	resource  string
	held      map[string]*holding // by ID: what containers hold of the resource
	taken     taken               // what they hold of all resources
	elsewhere map[string]string   // by silicon: who holds it through the other API

	// leave is the newest version such that IDs that were marked gone in it
	// may leave the list, if nothing holds them: the kubelet has been told so
	// long enough ago that it is not handing one out still. Its Allocate looks
	// an ID up once more after the plugin's answer and does not expect it to
	// be missing (pkg/kubelet/cm/devicemanager/manager.go,
	// allocateContainerResources).
	leave int
}

// everything lets all IDs leave that were ever marked gone.
const everything = math.MaxInt

// next returns the list that follows l, which may be nil. It returns l if
// nothing is to be said.
func (l *list) next(s situation) *list {
	if l == nil {
		l = &list{}
	}
	following := &list{version: l.version + 1, rows: make(map[string]row)}
	offered := make(map[string]bool)
	for _, u := range s.units {
		for _, id := range u.ids {
			offered[id] = true
			following.rows[id] = l.rows[id].offer(u, s.held[id])
		}
	}
	for id, before := range l.rows {
		if !offered[id] && (s.held[id] != nil || before.gone == 0 || before.gone > s.leave) {
			following.rows[id] = before.without(following.version)
		}
	}
	for id := range s.held {
		if _, listed := following.rows[id]; !listed {
			following.rows[id] = row{}.without(following.version)
		}
	}
	following.withhold(s)
	following.devices = make([]*pluginapi.Device, 0, len(following.rows))
	for _, id := range slices.SortedFunc(maps.Keys(following.rows), natural) {
		following.devices = append(following.devices, following.rows[id].device(id))
	}
	if l.version > 0 && slices.EqualFunc(l.devices, following.devices, sameDevice) {
		// The units may have new edits or the reasons new words all the same.
		following.version, following.devices = l.version, l.devices
		for id, r := range following.rows {
			r.gone = min(r.gone, l.version)
			following.rows[id] = r
		}
	}
	return following
}

// offer returns the row of an ID that stands for u. A held ID keeps standing
// for what it was handed out as.
func (r row) offer(u *unit, held *holding) row {
	if held != nil && len(held.Devices) > 0 && !slices.Equal(held.Devices, u.deviceNames()) {
		reason := fmt.Sprintf("%s has it as %s", held.who(), strings.Join(held.Devices, ", "))
		return row{unit: r.unit, sick: reason}
	}
	return row{unit: u, sick: u.sick()}
}

// without returns the row of an ID that is no longer offered.
func (r row) without(version int) row {
	r.sick, r.withheld = "no longer offered", ""
	if r.gone == 0 {
		r.gone = version
	}
	return r
}

// withhold marks the rows whose silicon is held through the other API, and
// those of a device that a container holds by another ID or resource.
func (l *list) withhold(s situation) {
	for id, r := range l.rows {
		if r.unit == nil || r.gone > 0 {
			continue
		}
		for _, silicon := range r.unit.silicon() {
			if holder, held := s.elsewhere[silicon]; held {
				r.withheld = fmt.Sprintf("%s is held by %s", silicon, holder)
			}
		}
		if s.held[id] == nil {
			r.withheld = cmp.Or(s.taken.from(s.resource, r.unit), r.withheld)
		}
		l.rows[id] = r
	}
}

// refusal says why an ID cannot be handed out, "" if it can.
func (r row) refusal() string {
	if r.withheld != "" {
		return r.withheld
	}
	return r.sick
}

// device returns what the kubelet is told of an ID.
func (r row) device(id string) *pluginapi.Device {
	d := &pluginapi.Device{ID: id, Health: pluginapi.Healthy}
	if r.refusal() != "" {
		d.Health = pluginapi.Unhealthy
	}
	if r.unit == nil {
		return d
	}
	if nodes := r.unit.numaNodes(); len(nodes) > 0 {
		d.Topology = &pluginapi.TopologyInfo{}
		for _, node := range nodes {
			d.Topology.Nodes = append(d.Topology.Nodes, &pluginapi.NUMANode{ID: node})
		}
	}
	return d
}

func sameDevice(a, b *pluginapi.Device) bool {
	sameNode := func(a, b *pluginapi.NUMANode) bool { return a.ID == b.ID }
	return a.ID == b.ID && a.Health == b.Health &&
		slices.EqualFunc(a.GetTopology().GetNodes(), b.GetTopology().GetNodes(), sameNode)
}
