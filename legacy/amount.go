package legacy

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// amount is what a container asks for of a resource whose IDs count a
// capacity: so many units, which must be of one device.
type amount struct {
	unit *unit
	ids  int
}

// amountOf returns the amount that IDs are, and nothing where they stand for
// devices. It is an error if no one device is to give all of it: the kubelet
// counts what is free on all devices together.
func amountOf(ids []string, units []*unit, l *list) (*amount, error) {
	if !slices.ContainsFunc(units, func(u *unit) bool { return u.counts != "" }) {
		return nil, nil
	}
	if len(units) > 1 {
		var parts []string
		for _, u := range units {
			n := 0
			for _, id := range ids {
				if l.rows[id].unit == u {
					n++
				}
			}
			parts = append(parts, fmt.Sprintf("%d of %s", n, u.name))
		}
		return nil, fmt.Errorf("%d units of %s asked for, and no one device has that much left; it would be %s",
			len(ids), units[0].counts, strings.Join(parts, " and "))
	}
	return &amount{units[0], len(ids)}, nil
}

// edits says to the container how much it has, in the variables of Aliyun's
// GPU sharing: of aliyun.com/gpu-mem they are ALIYUN_COM_GPU_MEM_IDX, the place
// of the device among those of the resource; _CONTAINER, the units of this
// container; _POD, the units of all containers of the call; and _DEV, the units
// of the device. It may be nil.
func (a *amount) edits(resource string, pod int, l *list) specs.ContainerEdits {
	if a == nil {
		return specs.ContainerEdits{}
	}
	var env []string
	for _, variable := range []struct {
		name  string
		value int
	}{
		{"IDX", slices.Index(l.units(), a.unit)},
		{"POD", pod},
		{"CONTAINER", a.ids},
		{"DEV", len(a.unit.ids)},
	} {
		env = append(env, discovery.Variable(resource)+"_"+variable.name+"="+strconv.Itoa(variable.value))
	}
	return specs.ContainerEdits{Env: env}
}

// units returns the units that the list offers, each once, in name order.
func (l *list) units() []*unit {
	var units []*unit
	for _, r := range l.rows {
		if r.unit != nil && r.gone == 0 {
			units = append(units, r.unit)
		}
	}
	slices.SortFunc(units, byName)
	return slices.Compact(units)
}

// counts returns the capacity that the IDs of the places count, "" if they
// stand for devices.
func (n *neighbourhood) counts() resourceapi.QualifiedName {
	for _, p := range n.places {
		if p.unit != nil && p.unit.counts != "" {
			return p.unit.counts
		}
	}
	return ""
}

// amount returns size IDs of one place: of that which include is of, else of
// the one that has the least left of those that have enough, so that large
// amounts stay together elsewhere. It reports false if no place has enough.
func (n *neighbourhood) amount(include []string, size int) ([]string, bool) {
	var best *place
	for _, p := range n.places {
		all := !slices.ContainsFunc(include, func(id string) bool { return !slices.Contains(p.free, id) })
		if all && len(p.free) >= size && (best == nil || len(p.free) < len(best.free)) {
			best = p
		}
	}
	if best == nil {
		return nil, false
	}
	ids := slices.Clone(include)
	for _, id := range best.free {
		if len(ids) < size && !slices.Contains(include, id) {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, natural)
	return ids, true
}
