package telemetry

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/component-base/metrics"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
)

// sharedKeys are the labels of shared capacity. The unit is a label, as in
// kube_node_status_capacity of kube-state-metrics: devices are shared by bytes of memory, by
// numbers of shares, or by cores.
var sharedKeys = []string{"node", "device", "capacity", "unit"}

var (
	sharedMetric = metrics.NewDesc("chandler_shared_capacity",
		"How much containers may have together of each shared device: of its memory (unit byte), or its shares or another capacity (unit integer).",
		sharedKeys, nil, metrics.ALPHA, "")
	sharedFreeMetric = metrics.NewDesc("chandler_shared_capacity_free",
		"Part of chandler_shared_capacity that is not allocated. Unhealthy devices are included.", sharedKeys, nil, metrics.ALPHA, "")
	sharedAllocatedMetric = metrics.NewDesc("chandler_shared_capacity_allocated",
		"How much of chandler_shared_capacity each pod or claim has. pod is empty for a claim of several pods, and while the kubelet has named none.",
		slices.Concat(sharedKeys, []string{"namespace", "pod", "claim", "request", "resource", "api"}), nil, metrics.ALPHA, "")
)

// use is the amount of a shared device's capacity that one consumer has.
type use struct {
	holder inventory.Holder // without a container, because the containers of a claim share its amount
	amount float64
}

// sharedUse is the capacity of a shared device, its consumers, and the free amount.
type sharedUse struct {
	device   string
	capacity resourceapi.QualifiedName
	all      float64
	uses     []use // in a fixed order
	free     float64
}

// unit returns the unit of the capacity.
func (s *sharedUse) unit() string {
	if s.capacity == "memory" {
		return "byte"
	}
	return "integer"
}

// sharedUses returns the use of each shared device, in the order of devices.
func sharedUses(devices []rules.Offered, view *ledger.View, said *kubeletapi.Listing) (all []sharedUse) {
	var held map[string]map[inventory.Holder]int64 // units by device
	for i := range devices {
		d := &devices[i]
		if d.Sharing == nil {
			continue
		}
		if held == nil {
			held = unitsHeld(devices, view, said)
		}
		unit := max(d.Sharing.Unit.Value(), 1)
		s := sharedUse{device: d.Name, capacity: d.Sharing.Capacity}
		total := wholeUnits(d)
		left := total
		for holder, units := range held[d.Name] {
			if units == wholeDevice {
				units = total
			}
			left -= units
			s.uses = append(s.uses, use{holder, float64(units) * float64(unit)})
		}
		slices.SortFunc(s.uses, func(a, b use) int {
			return cmp.Or(cmp.Compare(a.holder.Namespace, b.holder.Namespace), cmp.Compare(a.holder.Pod, b.holder.Pod),
				cmp.Compare(a.holder.Claim, b.holder.Claim), cmp.Compare(a.holder.Request, b.holder.Request), cmp.Compare(a.holder.Resource, b.holder.Resource))
		})
		if isExcluded(d, devices, held) {
			left = 0
		}
		s.all, s.free = float64(total)*float64(unit), float64(max(left, 0))*float64(unit)
		all = append(all, s)
	}
	return all
}

// wholeDevice stands for all units of a device.
const wholeDevice = -1

// wholeUnits returns the number of units of a shared device.
func wholeUnits(d *rules.Offered) int64 {
	if n := d.Shares(); n > 0 {
		return n
	}
	return d.Sharing.Default.Value() / max(d.Sharing.Unit.Value(), 1)
}

// isExcluded reports whether another device of the same physical device is allocated and rules out
// this device. Of two such devices one is the whole physical device.
func isExcluded(d *rules.Offered, devices []rules.Offered, held map[string]map[inventory.Holder]int64) bool {
	return slices.ContainsFunc(devices, func(other rules.Offered) bool {
		return other.Name != d.Name && other.Silicon() == d.Silicon() && (other.PartOf == nil || d.PartOf == nil) && len(held[other.Name]) > 0
	})
}

// unitsHeld returns the units of each device by consumer. A consumer with exclusive use, and each
// consumer of an unshared device, has wholeDevice. Claims with admin access consume nothing.
func unitsHeld(devices []rules.Offered, view *ledger.View, said *kubeletapi.Listing) map[string]map[inventory.Holder]int64 {
	sharing := make(map[string]*rules.Sharing)
	for i := range devices {
		sharing[devices[i].Name] = devices[i].Sharing
	}
	held := make(map[string]map[inventory.Holder]int64)
	add := func(device string, h inventory.Holder, units int64) {
		if held[device] == nil {
			held[device] = make(map[inventory.Holder]int64)
		}
		if units == wholeDevice || held[device][h] == wholeDevice {
			held[device][h] = wholeDevice
			return
		}
		held[device][h] += units
	}
	containers := containersByCDI(said)
	for _, c := range view.Claims() {
		for i := range c.Results {
			r := &c.Results[i]
			if r.Admin {
				continue
			}
			h := inventory.Holder{API: discovery.ModeDRA, Namespace: c.Namespace, Claim: cmp.Or(c.Name, string(c.UID)), Request: r.Request, Pod: cmp.Or(c.Pod, onlyPod(containers[cdi.ID(r.CDI)])), Resource: r.Resource}
			units := int64(wholeDevice)
			if s := sharing[r.Source]; s != nil {
				if taken, partly := r.Consumes[s.Capacity]; partly {
					unit := max(s.Unit.Value(), 1)
					units = (taken.Value() + unit - 1) / unit
				}
			}
			add(r.Source, h, units)
		}
	}
	for _, s := range view.SealedEntries() {
		for _, d := range s.Devices {
			add(d.Name, inventory.Holder{API: discovery.ModeDRA, Claim: string(s.UID)}, wholeDevice)
		}
	}
	for _, g := range view.Grants() {
		owner := g.Owner()
		h := inventory.Holder{API: discovery.ModeDevicePlugin, Namespace: owner.Namespace, Pod: owner.Name, Resource: g.Resource}
		units := int64(1)
		if g.Exclusive {
			units = wholeDevice
		}
		for _, device := range g.Devices {
			add(device, h, units)
		}
	}
	return held
}

// onlyPod returns the pod of the containers, "" without containers or if they belong to several
// pods.
func onlyPod(containers []container) (pod string) {
	for i, c := range containers {
		if i > 0 && c.pod != pod {
			return ""
		}
		pod = c.pod
	}
	return pod
}
