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

// wholeMode is the mode of an unpartitioned GPU.
const wholeMode = "spx"

// division is a mode of a GPU with the number of equal partitions.
type division struct {
	mode  string // "cpx"
	parts int
}

// divisions returns the available modes of a GPU, ordered from the fewest partitions to the most,
// from available_compute_partition. CPX creates a partition for each compute die, but the text does
// not contain the number of dies. The kernel lists QPX with eight dies, TPX with six, and DPX with
// at least four (__aqua_vanjaram_update_supported_modes in
// drivers/gpu/drm/amd/amdgpu/aqua_vanjaram.c of Linux 6.15; in earlier versions
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

// parts describes a GPU that the administrator allows to be partitioned: the whole GPU, and the
// partitions of each mode, whether they exist or not. A mode partitions the whole GPU, so
// partitions of two modes never coexist. The name of a partition includes its mode, such as
// "pci-0000-05-00-0-cpx-3".
//
// If the administrator has set a mode other than SPX, the GPU remains in this mode.
type parts struct {
	*gpu
	all     discovery.Device // the GPU
	now     mode
	modes   []division
	allowed bool // missing partitions may be created
}

// onRequest returns the possible devices of a GPU. The result is nil if there are none beyond the
// existing devices: the administrator does not allow partitions, and no agent has partitioned the
// GPU. The error is the reason why the devices are unknown at present.
func (g *gpu) onDemand(all discovery.Device, now mode) (*parts, error) {
	allowed, allowedErr := discovery.IsSelected(g.host.Partitionings, all)
	if allowedErr != nil {
		g.problems = append(g.problems, discovery.Problem{Device: all.Name, Setting: discovery.SettingPartitions, Err: allowedErr})
	}
	var how map[string]string
	made := false
	if g.host.CreatedUnit != nil {
		how, made = g.host.CreatedUnit(all.Name)
	}
	if !allowed && !made || !g.function.HasEntry(availableModes) {
		return nil, nil
	}
	available, err := g.function.Text(availableModes)
	if err != nil {
		return nil, err
	}
	p := &parts{gpu: g, all: all, now: now, modes: divisions(available), allowed: allowed}
	at := p.division(now.compute)
	made = made && (at.parts == 0 || setByAgent(how, now.compute))
	switch {
	case now.profile == "" || at.parts == 0 && made:
		return nil, fmt.Errorf("how it is divided cannot be told: its mode is %q", now.compute)
	case p.division(wholeMode).parts == 0:
		return nil, nil // while its memory is partitioned, the GPU is never whole
	case !made && (now.compute != wholeMode || len(g.nodes) == 0):
		return nil, nil
	}
	if dies := firstNode(g.nodes).dies; dies > 0 && now.compute != "cpx" {
		p.modes = slices.DeleteFunc(p.modes, func(d division) bool { return d.mode == "cpx" && uint64(d.parts) != dies*uint64(at.parts) })
	}
	if len(p.modes) < 2 {
		return nil, nil
	}
	return p, nil
}

const availableModes = "available_compute_partition"

// division returns the mode with this name, or an empty division if the GPU has none.
func (p *parts) division(mode string) division {
	for _, d := range p.modes {
		if d.mode == mode {
			return d
		}
	}
	return division{}
}

// describe returns the GPU and all of its partitions.
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

// part describes an existing or a possible partition.
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
				return p.finishDevice(d, drm, p.nodes[at], err), true
			}
		}
	}
	return p.uncreatedPart(d, of), p.allowed
}

// uncreatedPart completes the description of a partition that does not exist. The partition has an
// equal share of the GPU. The driver later reports the same values, except for a few bytes.
func (p *parts) uncreatedPart(d discovery.Device, of division) discovery.Device {
	d.Creation = &discovery.Creation{
		Unit: p.all.Name,
		Of:   p.function.Path,
		How:  map[string]string{newMode: of.mode, oldMode: p.now.compute},
	}
	d.Capacity = discovery.Capacity{}
	if memory := p.all.Capacity["memory"].Value; memory.Value() > 0 {
		d.Capacity.Set("memory", memory.Value()/int64(of.parts))
	}
	if cores := firstNode(p.nodes).cores * int64(p.division(p.now.compute).parts); cores > 0 {
		d.Capacity.Set("cores", cores/int64(of.parts))
	}
	d.Facts = maps.Clone(d.Facts)
	d.Facts[isMissing] = "true"
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

// Keys of [discovery.Creation.How].
const (
	newMode = "mode" // the wanted mode
	oldMode = "from" // the earlier mode, which remains if the change fails
)

// unmade is the fact that marks a device as missing.
const isMissing = "unmade"

// counters returns counters that let the scheduler allocate the whole GPU or partitions of one
// mode, but never partitions of two modes. There is one counter for each partition of each mode
// except the last. The partition itself takes its whole counter. A partition of a mode with more
// partitions takes an equal share. So the counter has room for all partitions of such a mode, but
// not together with the partition that takes the whole counter.
func (p *parts) counters() map[string]resource.Quantity {
	counters := make(map[string]resource.Quantity)
	for _, d := range p.modes[:len(p.modes)-1] {
		for i := range d.parts {
			counters[counter(d, i)] = *resource.NewQuantity(p.most(), resource.DecimalSI)
		}
	}
	return counters
}

// takes returns the counters that a partition takes.
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

// most returns the highest possible number of partitions of the GPU.
func (p *parts) most() int64 { return int64(p.modes[len(p.modes)-1].parts) }

func counter(d division, i int) string { return fmt.Sprintf("%s-%d", d.mode, i) }
