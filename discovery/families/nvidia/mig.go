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

// describeInstances returns the MIG instances of a GPU. The kernel lists existing instances: each
// compute instance below its GPU instance, with the minor number of its access node.
func (d *driver) describeInstances(gpu discovery.Device, info information, told facts.GPU) (instances []discovery.Device, problems []discovery.Problem) {
	if info.minor < 0 {
		return nil, nil
	}
	mig := d.capabilities(info)
	if _, err := fs.ReadDir(d.host.FS, mig.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, discovery.Problems(gpu.Name, fmt.Errorf("list MIG instances: %w", err))
	}
	gis := numberedChildren(mig, "gi")
	for _, gi := range gis {
		for _, ci := range numberedChildren(gi.dir, "ci") {
			instance, err := d.describeInstance(gpu, info, told, gi, ci)
			problems = append(problems, discovery.Problems(instance.Name, err)...)
			instances = append(instances, instance)
		}
	}
	if len(gis) > 0 && len(instances) == 0 {
		problems = append(problems, discovery.Problem{Device: gpu.Name, Err: errors.New("divided into MIG instances that nothing can compute in")})
	}
	return instances, problems
}

// capabilities returns the directory where the kernel lists the MIG instances of a GPU.
func (d *driver) capabilities(info information) sysfs.Device {
	return sysfs.At(d.host.FS, fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig", info.minor))
}

// describeInstance describes a compute instance in a GPU instance. Facts that NVML does not report
// are left out. If NVML is not queried at all, the instance's Identity is its place, as in NVIDIA
// drivers before release 470. If NVML is queried, the Identity stays empty until the UUID is known,
// so that the later UUID does not look like a swapped device.
func (d *driver) describeInstance(gpu discovery.Device, info information, told facts.GPU, gi, ci entry) (discovery.Device, error) {
	var known facts.Instance
	if i := slices.IndexFunc(told.Instances, func(i facts.Instance) bool { return i.GI == gi.number && i.CI == ci.number }); i >= 0 {
		known = told.Instances[i]
	}
	instance := gpu
	instance.Name = fmt.Sprintf("%s-gi-%d-ci-%d", gpu.Name, gi.number, ci.number)
	p := &parts{d: d, gpu: gpu, told: told}
	if name := p.nameOf(known); name != "" && (p.createdByAgent(known) || p.lacksPlacements()) {
		// A consumer of the instance has it under this name, even if the administrator no longer
		// allows partitioning or NVML no longer lists placements.
		instance.Name = name
	}
	instance.Identity = known.UUID
	if d.nvml == nil && info.uuid != "" {
		instance.Identity = fmt.Sprintf("MIG-%s/%d/%d", info.uuid, gi.number, ci.number)
	}
	instance.Attributes = maps.Clone(gpu.Attributes)
	delete(instance.Attributes, "uuid") // the UUID of the GPU
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
	instance.Health = worseOf(discovery.NodeHealth(d.host, instance.Edits.DeviceNodes), nvmlHealth(told, gi.number))
	instance.PluginOffers = d.instanceOffers(known, info, gi.number, ci.number)
	if p.createdByAgent(known) {
		instance.PluginOffers = d.requestedOffers(known.Profile, instance.Name)
	}
	return instance, err
}

// instanceOffers returns the extended resources of an instance.
//
// The first name is that of the strategy "mixed" of the NVIDIA device plugin, which has one name
// for each profile. The administrator may choose nvidia.com/gpu, the name of the strategy "single",
// and any name for an instance that uses only some compute slices of its GPU instance, for which
// the plugin has no name. The strategy "none", the plugin's default, has no offer here: a GPU with
// instances cannot compute as a whole. An instance without a known UUID is not offered, because its
// ID would change once NVML reports the UUID.
//
// Google's device plugin offers GPU instances as GPUs, by their numbers.
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
	offers := []discovery.Offer{{Resource: "nvidia.com/gpu", IDs: ids, Optional: true}}
	if compute, gpu, ok := known.Slices(); ok && compute == gpu {
		name := "nvidia.com/mig-" + plainProfile(known.Profile)
		offers = slices.Insert(offers, 0, discovery.Offer{Resource: name, IDs: ids})
	}
	return offers
}

// requestedOffers returns the extended resources of an instance that an agent creates or has
// created. The instance has such a resource only if the administrator configures the name.
// Otherwise an instance that was created for a claim would be offered here while the agent keeps
// it. The ID is the device name, because the UUID is unknown in advance and changes with a reboot.
func (d *driver) requestedOffers(profile, name string) []discovery.Offer {
	if d.installer {
		return nil
	}
	ids := []string{name}
	return []discovery.Offer{
		{Resource: "nvidia.com/mig-" + plainProfile(profile), IDs: ids, Optional: true},
		{Resource: "nvidia.com/gpu", IDs: ids, Optional: true},
	}
}

// capabilityNodes returns the nodes that give access to a GPU instance and to a compute instance in
// it.
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

// parseAccess returns the minor number in a line such as "DeviceFileMinor: 12".
func parseAccess(text string) (int64, error) {
	for line := range strings.Lines(text) {
		if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "DeviceFileMinor" {
			minor, err := strconv.ParseUint(strings.TrimSpace(value), 10, 20)
			if err != nil {
				return 0, fmt.Errorf("access: not a number: %.40q", strings.TrimSpace(line))
			}
			return int64(minor), nil
		}
	}
	return 0, errors.New("access: no DeviceFileMinor")
}

// entry is a numbered directory such as "gi7".
type entry struct {
	dir    sysfs.Device
	number int
}

// numberedChildren returns the subdirectories of dir that are named prefix and a number, in numeric
// order.
func numberedChildren(dir sysfs.Device, prefix string) []entry {
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
