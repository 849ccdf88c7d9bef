package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/sysfs"
)

// divide returns the MIG instances of a GPU. The kernel lists those that exist,
// each compute instance below its GPU instance, with the minor of the node that
// opens it.
func (d *driver) divide(gpu discovery.Device, info information, told facts.GPU) (instances []discovery.Device, problems []discovery.Problem) {
	if info.minor < 0 {
		return nil, nil
	}
	mig := d.capabilities(info)
	if _, err := fs.ReadDir(d.host.FS, mig.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, discovery.Problems(gpu.Name, fmt.Errorf("list MIG instances: %w", err))
	}
	gis := numbered(mig, "gi")
	for _, gi := range gis {
		for _, ci := range numbered(gi.dir, "ci") {
			instance, err := d.instance(gpu, info, told, gi, ci)
			problems = append(problems, discovery.Problems(instance.Name, err)...)
			instances = append(instances, instance)
		}
	}
	if len(gis) > 0 && len(instances) == 0 {
		problems = append(problems, discovery.Problem{Device: gpu.Name, Err: errors.New("divided into MIG instances that nothing can compute in")})
	}
	return instances, problems
}

// capabilities returns the directory in which the kernel lists the MIG instances of a GPU.
func (d *driver) capabilities(info information) sysfs.Device {
	return sysfs.At(d.host.FS, fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig", info.minor))
}

// instance describes a compute instance in a GPU instance, without the facts that
// NVML does not know. Where NVML is not asked at all, the instance's Identity is
// its place, as with NVIDIA before release 470. Where NVML is asked, the instance
// has no Identity until its UUID is known, so that it is not taken for swapped then.
func (d *driver) instance(gpu discovery.Device, info information, told facts.GPU, gi, ci entry) (discovery.Device, error) {
	var known facts.Instance
	if i := slices.IndexFunc(told.Instances, func(i facts.Instance) bool { return i.GI == gi.number && i.CI == ci.number }); i >= 0 {
		known = told.Instances[i]
	}
	instance := gpu
	instance.Name = fmt.Sprintf("%s-gi-%d-ci-%d", gpu.Name, gi.number, ci.number)
	p := &parts{d: d, gpu: gpu, told: told}
	if name := p.nameOf(known); name != "" && (p.made(known) || p.unlisted()) {
		// Who has it has it by this name, also if the administrator wants none cut any more, or NVML
		// lists no places any more.
		instance.Name = name
	}
	instance.Identity = known.UUID
	if d.nvml == nil && info.uuid != "" {
		instance.Identity = fmt.Sprintf("MIG-%s/%d/%d", info.uuid, gi.number, ci.number)
	}
	instance.Attributes = maps.Clone(gpu.Attributes)
	delete(instance.Attributes, "uuid") // it is the GPU's
	instance.Attributes.SetString("uuid", known.UUID)
	instance.Attributes.SetString("profile", known.Profile)
	instance.Attributes.SetString("function", "partition")
	instance.Attributes.SetString("parent", gpu.Name)
	instance.Capacity = discovery.Capacity{}
	if known.MemoryBytes > 0 {
		instance.Capacity.Set("memory", known.MemoryBytes)
	}
	instance.Facts = instanceFacts(gpu.Facts, known)
	instance.PartOf = &discovery.Silicon{Name: gpu.Name}
	caps, err := d.capabilityNodes(gi.dir, ci.dir)
	instance.Edits.DeviceNodes = slices.Concat(gpu.Edits.DeviceNodes, caps)
	instance.Health = worse(discovery.NodeHealth(d.host, instance.Edits.DeviceNodes), toldHealth(told, gi.number))
	instance.Classic = d.instanceOffers(known, info, gi.number, ci.number)
	if p.made(known) {
		instance.Classic = d.requestedOffers(known.Profile, instance.Name)
	}
	return instance, err
}

// instanceOffers returns the classic names of an instance.
//
// The name is that of the strategy "mixed" of NVIDIA's plugin, which has one for
// each profile; "single", where an instance counts as a GPU, is for the
// administrator to choose, and so is any name for an instance that computes in
// only some slices of its GPU instance, for which the plugin has none. There is
// nothing of the strategy "none", the plugin's default: a GPU with instances
// that is handed out whole cannot compute. An instance whose UUID NVML does
// not know is not offered, since its ID would change once NVML does.
//
// Google's plugin offers GPU instances as GPUs, by their numbers.
func (d *driver) instanceOffers(known facts.Instance, info information, gi, ci int) []discovery.Offer {
	if d.installer {
		if ci != 0 {
			return nil
		}
		return installerOffers(fmt.Sprintf("nvidia%d/gi%d", info.minor, gi))
	}
	if known.UUID == "" {
		return nil
	}
	ids := []string{known.UUID}
	offers := []discovery.Offer{{Resource: "nvidia.com/gpu", IDs: ids, Named: true}}
	if compute, gpu, ok := known.Slices(); ok && compute == gpu {
		name := "nvidia.com/mig-" + plainProfile(known.Profile)
		offers = slices.Insert(offers, 0, discovery.Offer{Resource: name, IDs: ids})
	}
	return offers
}

// requestedOffers returns the classic names of an instance that an agent makes, or has made. It has
// one only where the administrator gives it: otherwise what was cut for a claim would be
// offered here while it is kept. Its ID is its name, since a UUID is not known beforehand, and
// another one after a reboot.
func (d *driver) requestedOffers(profile, name string) []discovery.Offer {
	if d.installer {
		return nil
	}
	ids := []string{name}
	return []discovery.Offer{
		{Resource: "nvidia.com/mig-" + plainProfile(profile), IDs: ids, Named: true},
		{Resource: "nvidia.com/gpu", IDs: ids, Named: true},
	}
}

// capabilityNodes returns the nodes that open a GPU instance and a compute
// instance in it.
func (d *driver) capabilityNodes(dirs ...sysfs.Device) ([]*specs.DeviceNode, error) {
	var nodes []*specs.DeviceNode
	var errs []error
	for _, dir := range dirs {
		text, err := dir.Text("access")
		if err == nil {
			var minor int64
			if minor, err = parseAccess(text); err == nil {
				nodes = append(nodes, d.node("nvidia-caps", fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor), minor))
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("MIG instance %s: %w", dir.Path, err))
		}
	}
	return nodes, errors.Join(errs...)
}

// parseAccess returns the minor of lines such as "DeviceFileMinor: 12".
func parseAccess(text string) (int64, error) {
	for line := range strings.Lines(text) {
		if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "DeviceFileMinor" {
			minor, err := strconv.ParseUint(strings.TrimSpace(value), 10, 20)
			if err != nil {
				return 0, fmt.Errorf("access: no number: %.40q", strings.TrimSpace(line))
			}
			return int64(minor), nil
		}
	}
	return 0, errors.New("access: no DeviceFileMinor")
}

// entry is a directory such as "gi7".
type entry struct {
	dir    sysfs.Device
	number int
}

// numbered returns the directories of dir that are called prefix and a number,
// in the order of their numbers.
func numbered(dir sysfs.Device, prefix string) []entry {
	var entries []entry
	for _, child := range dir.Children("") {
		digits, ok := strings.CutPrefix(child.Name(), prefix)
		if number, err := strconv.ParseUint(digits, 10, 16); ok && err == nil {
			entries = append(entries, entry{child, int(number)})
		}
	}
	slices.SortFunc(entries, func(a, b entry) int { return cmp.Compare(a.number, b.number) })
	return entries
}
