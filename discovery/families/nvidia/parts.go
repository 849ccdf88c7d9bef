package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
)

// parts describes a GPU in MIG mode that the administrator allows to be partitioned: the existing
// instances and all instances that could be created beside them. The memory slices of an instance
// are counters, so the scheduler packs instances and allocates no slice twice.
//
// An instance at a placement that NVML lists is named after the placement, whether the instance
// exists or not, and regardless of its creator. An instance in a GPU instance with several compute
// instances is named after its numbers, as on other GPUs, and blocks its placement for all others.
type parts struct {
	d    *driver
	gpu  discovery.Device
	info information
	told facts.GPU

	counters map[string]resource.Quantity
}

var errNotListed = errors.New("the configuration allows MIG instances on demand, and NVML does not list their possible placements: chandler-host must run as root, with a driver that lists them")

var errNoPlacements = errors.New("the configuration allows MIG instances on demand, and the placements of the existing instances are unknown: chandler-host must run")

// partitions returns the devices of a GPU that may be partitioned.
func (d *driver) partitions(gpu discovery.Device, info information, told facts.GPU) ([]discovery.Device, []discovery.Problem) {
	p := &parts{d: d, gpu: gpu, info: info, told: told}
	existing, problems := p.existingInstances()
	free := p.possibleInstances()
	p.count()
	silicon := &discovery.Silicon{Name: gpu.Name, Counters: p.counters}
	var devices []discovery.Device
	for i := range existing {
		part := &existing[i]
		part.device.PartOf = silicon
		if part.profile != nil {
			part.device.Takes = p.takes(part.profile, part.at)
		}
		devices = append(devices, part.device)
	}
	for _, part := range free {
		part.device.PartOf, part.device.Takes = silicon, p.takes(part.profile, part.at)
		if p.leftBeside(existing, part.at).SufficesFor(part.device.Takes) {
			devices = append(devices, part.device)
		}
	}
	return devices, problems
}

// leftBeside returns the remaining counters after all existing instances, except those that make
// room for an instance at the placement.
func (p *parts) leftBeside(existing []part, at facts.Placement) discovery.Budget[string] {
	left := discovery.NewBudget(p.counters)
	for i := range existing {
		if !existing[i].at.Overlaps(at) {
			left.TakeAmounts(existing[i].device.Takes)
		}
	}
	for _, empty := range p.told.Empty {
		i := slices.IndexFunc(p.told.Profiles, func(of facts.Profile) bool { return of.Name == empty.Profile })
		if i >= 0 && !empty.Overlaps(at) {
			left.TakeAmounts(p.takes(&p.told.Profiles[i], empty.Placement))
		}
	}
	return left
}

// part is a device with its profile and placement. A device without a profile takes no counters.
type part struct {
	device  discovery.Device
	profile *facts.Profile
	at      facts.Placement
}

// existingInstances describes the existing instances. Instances that NVML has not reported yet are
// left out.
func (p *parts) existingInstances() (all []part, problems []discovery.Problem) {
	mig := p.d.capabilities(p.info)
	for _, gi := range numberedChildren(mig, "gi") {
		for _, ci := range numberedChildren(gi.dir, "ci") {
			i := slices.IndexFunc(p.told.Instances, func(i facts.Instance) bool { return i.GI == gi.number && i.CI == ci.number })
			if i < 0 {
				continue
			}
			known := p.told.Instances[i]
			device, err := p.d.describeInstance(p.gpu, p.info, p.told, gi, ci)
			one := part{device: device}
			if p.fillsGPUInstance(known) {
				one.profile, one.at = p.profile(known), *known.Placement
				one.device.Name = p.name(one.profile.Name, one.at)
				one.device.Capacity = discovery.Capacity{}
				setPart(&one.device, one.profile)
			}
			problems = append(problems, discovery.Problems(one.device.Name, err)...)
			all = append(all, one)
		}
	}
	return all, problems
}

// profile returns the profile of an instance, nil if NVML does not list the profile at the
// instance's placement.
func (p *parts) profile(instance facts.Instance) *facts.Profile {
	if instance.Placement == nil {
		return nil
	}
	for i := range p.told.Profiles {
		if profile := &p.told.Profiles[i]; profile.Name == instance.Profile && slices.Contains(profile.Placements, *instance.Placement) {
			return profile
		}
	}
	return nil
}

// possibleInstances describes the instances that could be created beside the existing ones. An
// instance of the agent blocks nothing: the agent removes the instance first when it creates
// another one in its place. No consumer has the removed instance then, because both take the same
// slices. A GPU instance without compute instances blocks its placement, unless an agent left it
// unfinished; then an instance of the same profile and placement may use it.
func (p *parts) possibleInstances() (all []part) {
	for _, instance := range p.told.Instances {
		if instance.Placement == nil {
			return nil // the instance may lie anywhere
		}
	}
	for i := range p.told.Profiles {
		profile := &p.told.Profiles[i]
		for _, at := range profile.Placements {
			taken := slices.ContainsFunc(p.told.Instances, func(i facts.Instance) bool {
				there := i.Profile == profile.Name && *i.Placement == at
				return i.Placement.Overlaps(at) && (there || !p.createdByAgent(i))
			})
			half := slices.ContainsFunc(p.told.Empty, func(e facts.Empty) bool {
				return e.Overlaps(at) && (e.Profile != profile.Name || e.Placement != at || !p.isHalfCreated(e))
			})
			if !taken && !half {
				all = append(all, part{p.make(profile, at), profile, at})
			}
		}
	}
	return all
}

// createdByAgent reports whether an agent created an instance.
func (p *parts) createdByAgent(instance facts.Instance) bool {
	name := p.nameOf(instance)
	if name == "" {
		return false
	}
	how, made := madeBefore(p.d.host, name)
	return made && sameInstance(how, instance)
}

// isHalfCreated reports whether an agent began to create a GPU instance that has no compute
// instance.
func (p *parts) isHalfCreated(empty facts.Empty) bool {
	how, made := madeBefore(p.d.host, p.name(empty.Profile, empty.Placement))
	return made && isIncomplete(how)
}

// lacksPlacements reports whether the GPU may be partitioned although NVML lists no placements for
// it.
func (p *parts) lacksPlacements() bool {
	allowed, _ := discovery.IsSelected(p.d.host.Partitionings, p.gpu)
	return allowed && len(p.told.Profiles) == 0
}

// nameOf returns the name of an instance by its placement. The name is "" if the instance shares
// its GPU instance, or if its placement is unknown or not listed. If NVML lists no placements at
// all, NVML may have listed some earlier, and a consumer may have the instance under that name.
func (p *parts) nameOf(instance facts.Instance) string {
	compute, gpu, ok := instance.Slices()
	switch {
	case p.fillsGPUInstance(instance):
	case len(p.told.Profiles) > 0 || instance.Placement == nil || !ok || compute != gpu || p.sharesGPUInstance(instance):
		return ""
	}
	return p.name(instance.Profile, *instance.Placement)
}

// name returns the name of an instance at a placement.
func (p *parts) name(profile string, at facts.Placement) string {
	return fmt.Sprintf("%s%s%s-at-%d", p.gpu.Name, midName, labelOf(profile), at.Start)
}

// midName separates the GPU's name from the profile's name.
const midName = "-mig-"

// labelOf returns a profile in the form of device names: "1g-10gb-me" for "1g.10gb+me", and
// "1g-10gb-no-me" for "1g.10gb-me".
func labelOf(profile string) string {
	return strings.NewReplacer(".", "-", "+", "-", "-", "-no-").Replace(profile)
}

// make describes an instance that does not exist yet.
func (p *parts) make(profile *facts.Profile, at facts.Placement) discovery.Device {
	device := p.gpu
	device.Name, device.Identity = p.name(profile.Name, at), ""
	device.Attributes = maps.Clone(p.gpu.Attributes)
	delete(device.Attributes, "uuid")
	device.Attributes.SetString("profile", profile.Name)
	device.Attributes.SetString("function", "partition")
	device.Attributes.SetString("parent", p.gpu.Name)
	device.Capacity, device.PluginOffers = discovery.Capacity{}, p.d.requestedOffers(profile.Name, device.Name)
	setPart(&device, profile)
	device.Facts = maps.Clone(p.gpu.Facts)
	device.Facts["migCapable"] = "true"
	delete(device.Facts, index)
	device.Health = worseOf(discovery.NodeHealth(p.d.host, p.gpu.Edits.DeviceNodes), nvmlHealth(p.told, noInstance))
	device.Edits.DeviceNodes = nil
	device.Creation = &discovery.Creation{
		Unit: device.Name,
		Of:   p.gpu.Source,
		How:  map[string]string{"gpu": p.told.Address, "place": placeName(profile, at)},
	}
	return device
}

// noInstance is used in place of the number of a GPU instance that does not exist yet.
const noInstance = -2

// setPart sets the properties that existing and possible instances have in common.
func setPart(d *discovery.Device, profile *facts.Profile) {
	if profile.MemoryBytes > 0 {
		d.Capacity.Set("memory", profile.MemoryBytes)
	}
}

const (
	memorySlice   = "memory-slice-%d"
	computeSlices = "compute-slices"
)

// count sets the counters of a GPU: everything that NVML lists, without the GPU instances that hold
// several compute instances or have no listed profile, which cannot be allocated in another form.
func (p *parts) count() {
	total := make(map[string]int64)
	for i := range p.told.Profiles {
		profile := &p.told.Profiles[i]
		for _, at := range profile.Placements {
			for slice := at.Start; slice < at.Start+at.Size; slice++ {
				total[fmt.Sprintf(memorySlice, slice)] = 1
			}
		}
		for name, of := range quantities(profile) {
			total[name] = max(total[name], of*int64(profile.Max))
		}
		if isLimited(profile) {
			total[labelOf(profile.Name)] = int64(profile.Max)
		}
	}
	seen := make(map[int]bool)
	for _, instance := range p.told.Instances {
		if instance.Placement == nil || seen[instance.GI] || p.fillsGPUInstance(instance) {
			continue
		}
		seen[instance.GI] = true
		for slice := instance.Placement.Start; slice < instance.Placement.Start+instance.Placement.Size; slice++ {
			delete(total, fmt.Sprintf(memorySlice, slice))
		}
		_, divided, _ := strings.Cut(instance.Profile, "c.")
		i := slices.IndexFunc(p.told.Profiles, func(p facts.Profile) bool { return p.Name == cmp.Or(divided, instance.Profile) })
		if i < 0 {
			continue
		}
		for name, of := range quantities(&p.told.Profiles[i]) {
			total[name] = max(0, total[name]-of)
		}
		if isLimited(&p.told.Profiles[i]) {
			total[labelOf(p.told.Profiles[i].Name)]--
		}
	}
	p.counters = make(map[string]resource.Quantity, len(total))
	for name, value := range total {
		if value > 0 {
			p.counters[name] = *resource.NewQuantity(value, resource.DecimalSI)
		}
	}
}

// fillsGPUInstance reports whether an instance fills its GPU instance and has a profile that NVML
// lists at its placement.
func (p *parts) fillsGPUInstance(instance facts.Instance) bool {
	return !p.sharesGPUInstance(instance) && p.profile(instance) != nil
}

// sharesGPUInstance reports whether the GPU instance has another compute instance.
func (p *parts) sharesGPUInstance(instance facts.Instance) bool {
	return slices.ContainsFunc(p.told.Instances, func(i facts.Instance) bool { return i.GI == instance.GI && i.CI != instance.CI })
}

// quantities returns the counters of a profile other than memory.
func quantities(p *facts.Profile) map[string]int64 {
	return map[string]int64{
		computeSlices:  int64(p.Slices),
		"copy-engines": int64(p.Engines.Copy),
		"decoders":     int64(p.Engines.Decoder),
		"encoders":     int64(p.Engines.Encoder),
		"jpeg-engines": int64(p.Engines.JPEG),
		"ofa-engines":  int64(p.Engines.OFA),
	}
}

// isLimited reports whether the GPU allows fewer instances of a profile than memory has room for.
// For example, a GPU may have one instance of a profile with the media engines. Such a profile has
// a counter of its own.
func isLimited(p *facts.Profile) bool {
	placements := slices.SortedFunc(slices.Values(p.Placements), func(a, b facts.Placement) int { return cmp.Compare(a.Start+a.Size, b.Start+b.Size) })
	room, end := 0, 0
	for _, at := range placements {
		if at.Start >= end {
			room, end = room+1, at.Start+at.Size
		}
	}
	return p.Max < room
}

// takes returns the counters that an instance takes.
func (p *parts) takes(profile *facts.Profile, at facts.Placement) map[string]resource.Quantity {
	takes := make(map[string]resource.Quantity)
	set := func(name string, value int64) {
		if value > 0 {
			takes[name] = *resource.NewQuantity(value, resource.DecimalSI)
		}
	}
	for slice := at.Start; slice < at.Start+at.Size; slice++ {
		set(fmt.Sprintf(memorySlice, slice), 1)
	}
	for name, value := range quantities(profile) {
		set(name, value)
	}
	if isLimited(profile) {
		set(labelOf(profile.Name), 1)
	}
	return takes
}
