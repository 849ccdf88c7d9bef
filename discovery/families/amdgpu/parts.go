package amdgpu

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// wholeMode is the mode of a GPU that is not divided, as names have it.
const wholeMode = "spx"

// division is a mode of a GPU: into how many equal parts it divides all of it.
type division struct {
	mode  string // "cpx"
	parts int
}

// divisions returns the modes that a GPU can be switched to, from that of the fewest parts
// to that of the most, by available_compute_partition. CPX makes a part of each compute die,
// and the text does not say how many there are. The kernel lists QPX where there are eight, TPX
// where there are six, and DPX where there are at least four (__aqua_vanjaram_update_supported_modes in drivers/gpu/drm/amd/amdgpu/aqua_vanjaram.c of
// Linux 6.15; before that,
// amdgpu_gfx_get_available_compute_partition in amdgpu_gfx.c).
func divisions(available string) (all []division) {
	modes := strings.FieldsFunc(strings.ToLower(available), func(r rune) bool { return r == ',' || r == ' ' })
	dies := 2
	for _, known := range []division{{wholeMode, 1}, {"dpx", 2}, {"tpx", 3}, {"qpx", 4}} {
		if !slices.Contains(modes, known.mode) {
			continue
		}
		if known.parts > 1 {
			dies = 2 * known.parts
		}
		all = append(all, known)
	}
	if slices.Contains(modes, "cpx") {
		all = append(all, division{"cpx", dies})
	}
	return all
}

// parts describes a GPU that the administrator lets be divided: all of it, and the parts of
// each of its modes, whether they are there or could be. A mode divides all of the GPU, so
// there are never parts of two modes. A part has its mode in its name, such as
// "pci-0000-05-00-0-cpx-3".
//
// A GPU whose mode the administrator has set to another than SPX is left as it is.
type parts struct {
	*gpu
	all     discovery.Device // the GPU
	now     mode
	modes   []division
	allowed bool // what is not there may be made
}

// onRequest returns what could be had of a GPU, nil if nothing could that is not there: the
// administrator does not let it be divided, and no agent has divided it. The error is why
// this cannot be told for now.
func (g *gpu) onRequest(all discovery.Device, now mode) (*parts, error) {
	allowed, allowedErr := g.host.Partitions(all)
	if allowedErr != nil {
		g.problems = append(g.problems, discovery.Problem{Device: all.Name, Err: allowedErr})
	}
	var how map[string]string
	made := false
	if g.host.Made != nil {
		how, made = g.host.Made(all.Name)
	}
	if !allowed && !made || !g.function.Exists(availableModes) {
		return nil, nil
	}
	available, err := g.function.Text(availableModes)
	if err != nil {
		return nil, err
	}
	p := &parts{gpu: g, all: all, now: now, modes: divisions(available), allowed: allowed}
	at := p.division(now.compute)
	made = made && (at.parts == 0 || ours(how, now.compute))
	switch {
	case now.profile == "" || at.parts == 0 && made:
		return nil, fmt.Errorf("how it is divided cannot be told: its mode is %q", now.compute)
	case p.division(wholeMode).parts == 0:
		return nil, nil // it is never whole while its memory is divided
	case !made && (now.compute != wholeMode || len(g.nodes) == 0):
		return nil, nil
	}
	if dies := first(g.nodes).dies; dies > 0 && now.compute != "cpx" {
		p.modes = slices.DeleteFunc(p.modes, func(d division) bool { return d.mode == "cpx" && uint64(d.parts) != dies*uint64(at.parts) })
	}
	if len(p.modes) < 2 {
		return nil, nil
	}
	return p, nil
}

const availableModes = "available_compute_partition"

// division returns a mode of that name, nothing if the GPU has none.
func (p *parts) division(mode string) division {
	for _, d := range p.modes {
		if d.mode == mode {
			return d
		}
	}
	return division{}
}

// describe returns the GPU and all of its parts.
func (p *parts) describe(xcps []sysfs.Device, err error) []discovery.Device {
	silicon := &discovery.Silicon{Name: p.all.Name, Counters: p.counters()}
	var devices []discovery.Device
	for _, d := range p.modes {
		for i := range d.parts {
			if part, ok := p.part(d, i, xcps, err); ok {
				part.PartOf, part.Takes = silicon, p.takes(d, i)
				devices = append(devices, part)
			}
		}
	}
	return devices
}

// part describes a part that is there, or could be.
func (p *parts) part(of division, i int, xcps []sysfs.Device, err error) (discovery.Device, bool) {
	_, memory, _ := strings.Cut(p.now.profile, "_")
	profile := mode{of.mode, strings.Trim(of.mode+"_"+memory, "_")}
	d := p.all
	if of.mode == wholeMode {
		d.Attributes, d.Capacity = maps.Clone(p.all.Attributes), maps.Clone(p.all.Capacity)
		d.Attributes.SetString("profile", profile.profile)
	} else {
		d = partition(p.all, profile, kfdNode{index: i})
		d.Name = fmt.Sprintf("%s-%s-%d", p.all.Name, of.mode, i)
	}
	if of.mode == p.now.compute {
		at := slices.IndexFunc(p.nodes, func(n kfdNode) bool { return n.index == i })
		if at >= 0 {
			if drm, found := p.drmOf(p.nodes[at], xcps); found {
				d.SetNames("linkedTo", p.kfd.linkedTo(p.nodes[at]))
				return p.finish(d, drm, p.nodes[at], err), true
			}
		}
	}
	return p.unmade(d, of), p.allowed
}

// unmade completes the description of a part that is not there. It has an equal share of the
// GPU, as the driver will tell of it, but for some bytes.
func (p *parts) unmade(d discovery.Device, of division) discovery.Device {
	d.Making = &discovery.Making{
		Unit: p.all.Name,
		Of:   p.function.Path,
		How:  map[string]string{newMode: of.mode, oldMode: p.now.compute},
	}
	d.Capacity = discovery.Capacity{}
	if memory := p.all.Capacity["memory"].Value; memory.Value() > 0 {
		d.Capacity.Set("memory", memory.Value()/int64(of.parts))
	}
	if cores := first(p.nodes).cores * int64(p.division(p.now.compute).parts); cores > 0 {
		d.Capacity.Set("cores", cores/int64(of.parts))
	}
	d.Facts = maps.Clone(d.Facts)
	d.Facts[unmade] = "true"
	nodes, err := discovery.DRMNodes(p.function)
	if err == nil && p.kfd.node != nil {
		nodes = append(nodes, p.kfd.node)
	}
	d.Health = discovery.NodeHealth(p.host, nodes)
	if of.mode == p.now.compute && d.Health.Status == discovery.Healthy {
		d.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "KFD does not list it, and the GPU is in its mode"}
	}
	return d
}

// Words of [discovery.Making.How].
const (
	newMode = "mode" // which the GPU is to have
	oldMode = "from" // which it had, and has if it could not be changed
)

// unmade is the fact that a device is not there.
const unmade = "unmade"

// counters returns counters by which the scheduler gives the GPU, or parts of one mode, but never
// parts of two modes. There is one for each part of each mode but the last. The part takes
// all of its counter. A part of a mode of more parts takes an equal share of it, so there is
// room for all of these, and for none beside the one that takes all.
func (p *parts) counters() map[string]resource.Quantity {
	counters := make(map[string]resource.Quantity)
	for _, d := range p.modes[:len(p.modes)-1] {
		for i := range d.parts {
			counters[counter(d, i)] = *resource.NewQuantity(p.most(), resource.DecimalSI)
		}
	}
	return counters
}

// takes returns what a part takes of the counters.
func (p *parts) takes(of division, i int) map[string]resource.Quantity {
	takes := make(map[string]resource.Quantity)
	for _, d := range p.modes[:len(p.modes)-1] {
		for j := range d.parts {
			switch {
			case d == of && i == j:
				takes[counter(d, j)] = *resource.NewQuantity(p.most(), resource.DecimalSI)
			case d.parts < of.parts:
				takes[counter(d, j)] = *resource.NewQuantity(p.most()/int64(of.parts), resource.DecimalSI)
			}
		}
	}
	return takes
}

// most returns how many parts the GPU can be divided into at most.
func (p *parts) most() int64 { return int64(p.modes[len(p.modes)-1].parts) }

func counter(d division, i int) string { return fmt.Sprintf("%s-%d", d.mode, i) }
