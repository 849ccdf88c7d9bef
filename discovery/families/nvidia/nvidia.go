// Package nvidia describes NVIDIA GPUs and their MIG instances as the kernel
// driver shows them in /sys and /proc. It needs no NVIDIA library, and so says
// nothing of what only NVML knows: memory, architecture, MIG profiles, NVLink.
// GPUs bound to another driver, such as one for a virtual machine, are not its
// own, nor are the virtual functions of vGPU.
package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family is NVIDIA's GPUs.
var Family = &discovery.Family{
	Name: "nvidia",
	Doc:  "NVIDIA GPUs and their MIG instances",
	Match: []discovery.Match{
		{Bus: "pci", Vendor: "10de", PCIClass: "03", Driver: "nvidia"},
		{Bus: "pci", Vendor: "10de", PCIClass: "03", Unbound: true},
	},
	Describe: describe,
	Grant:    grant,
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	driver, problems := readDriver(host)
	for _, function := range found {
		if function.Exists("physfn") {
			continue
		}
		described, trouble := driver.describe(function)
		devices = append(devices, described...)
		problems = append(problems, trouble...)
	}
	return devices, problems
}

// describe returns the GPU as one device, its MIG instances instead if it has
// any, or nothing if the driver was told to leave it alone.
func (d *driver) describe(function sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	if !function.Bound() {
		gpu, err := discovery.Unbound(d.host, function, "gpu", "nvidia")
		return []discovery.Device{gpu}, discovery.Problems(gpu.Name, err)
	}
	gpu, err := discovery.PCI(d.host, function)
	gpu.Attributes.SetString("kind", "gpu")
	gpu.Attributes.SetString("vendor", "nvidia")
	gpu.Attributes.SetVersion("driverVersion", d.version)
	gpu.Edits.Mounts = d.mounts
	text, infoErr := d.host.ReadText("/proc/driver/nvidia/gpus/" + function.Name() + "/information")
	if infoErr != nil && !errors.Is(infoErr, fs.ErrNotExist) {
		// The GPU may be divided into instances, and must not be taken for a whole.
		return nil, discovery.Problems(gpu.Name, infoErr)
	}
	info := parseInformation(text)
	if info.excluded {
		return nil, nil
	}
	if infoErr == nil && info.minor < 0 {
		infoErr = errors.New("information: no device minor")
	}
	gpu.Attributes.SetString("model", info.model)
	gpu.Attributes.SetString("uuid", info.uuid)
	gpu.Identity = info.uuid
	if info.minor >= 0 {
		gpu.Edits.DeviceNodes = d.nodes(info.minor)
		devices, problems = d.instances(gpu, info)
	}
	if len(devices) == 0 && len(problems) == 0 {
		if infoErr == nil {
			gpu.Health = discovery.NodeHealth(d.host, gpu.Edits.DeviceNodes)
		}
		if info.uuid != "" {
			gpu.Offers = []discovery.Offer{{Resource: "nvidia.com/gpu", IDs: []string{info.uuid}}}
		}
		devices = []discovery.Device{gpu}
	}
	if err := errors.Join(err, infoErr, d.rootErr); err != nil {
		for _, device := range devices {
			problems = append(problems, discovery.Problem{Device: device.Name, Err: err})
		}
	}
	return devices, problems
}

// information is what /proc/driver/nvidia/gpus/ADDRESS/information says.
type information struct {
	model    string
	uuid     string // "" until the GPU has been initialised for the first time
	minor    int64  // -1 if it is not told
	excluded bool
}

// parseInformation parses lines such as "Device Minor: 	 0".
func parseInformation(text string) information {
	info := information{minor: -1}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(name) {
		case "Model":
			info.model = value
		case "GPU UUID":
			// "GPU-????????-????-…" while it is not known.
			if strings.HasPrefix(value, "GPU-") && !strings.Contains(value, "?") {
				info.uuid = value
			}
		case "Device Minor":
			// 195:255 is nvidiactl and 195:254 is nvidia-modeset.
			if minor, err := strconv.ParseUint(value, 10, 8); err == nil && minor < 254 {
				info.minor = int64(minor)
			}
		case "GPU Excluded":
			info.excluded = value == "Yes"
		}
	}
	return info
}

// instances returns the MIG instances of a GPU. The kernel lists those that
// exist, each compute instance below its GPU instance, with the minor of the
// node that opens it.
//
// An instance is named and identified by its place. "MIG-GPU-…/1/0" is what
// NVIDIA called it before release 470; its UUID is known to NVML alone.
func (d *driver) instances(gpu discovery.Device, info information) (instances []discovery.Device, problems []discovery.Problem) {
	mig := sysfs.At(d.host.FS, fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig", info.minor))
	gis := numbered(mig, "gi")
	for _, gi := range gis {
		for _, ci := range numbered(gi.dir, "ci") {
			instance := gpu
			instance.Name = fmt.Sprintf("%s-gi-%d-ci-%d", gpu.Name, gi.number, ci.number)
			instance.Identity = ""
			if info.uuid != "" {
				instance.Identity = fmt.Sprintf("MIG-%s/%d/%d", info.uuid, gi.number, ci.number)
			}
			instance.Attributes = make(discovery.Attributes, len(gpu.Attributes))
			for name, value := range gpu.Attributes {
				if name != "uuid" { // it is the GPU's
					instance.Attributes[name] = value
				}
			}
			instance.Attributes.SetString("function", "partition")
			instance.Attributes.SetString("parent", gpu.Name)
			instance.PartOf = &discovery.Whole{Name: gpu.Name}
			caps, err := d.capabilityNodes(gi.dir, ci.dir)
			instance.Edits.DeviceNodes = slices.Concat(gpu.Edits.DeviceNodes, caps)
			instance.Health = discovery.NodeHealth(d.host, instance.Edits.DeviceNodes)
			if err != nil {
				problems = append(problems, discovery.Problem{Device: instance.Name, Err: err})
			}
			instances = append(instances, instance)
		}
	}
	if len(gis) > 0 && len(instances) == 0 {
		problems = append(problems, discovery.Problem{Device: gpu.Name, Err: errors.New("divided into MIG instances that nothing can compute in")})
	}
	return instances, problems
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

// grant names the devices to NVIDIA's container runtime, where it is the one
// that brings the driver's libraries. Where we mount them it is to do nothing,
// and neither where a device has no name yet: images of NVIDIA's ask for all.
func grant(given []discovery.Device, _ discovery.Grant) specs.ContainerEdits {
	var names []string
	for _, d := range given {
		if len(d.Edits.Mounts) > 0 {
			names = nil
			break
		}
		if d.Identity != "" && !slices.Contains(names, d.Identity) {
			names = append(names, d.Identity)
		}
	}
	return specs.ContainerEdits{Env: []string{"NVIDIA_VISIBLE_DEVICES=" + cmp.Or(strings.Join(names, ","), "void")}}
}
