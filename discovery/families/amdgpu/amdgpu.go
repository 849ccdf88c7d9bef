// Package amdgpu describes AMD GPUs and their compute partitions, as the amdgpu driver shows them
// in /sys: as PCI functions, as amdgpu_xcp platform devices, and in the KFD topology. It does not
// describe GPUs bound to another driver, such as a driver for virtual machines.
package amdgpu

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/pattern"
)

// Family recognises AMD GPUs.
var Family = &discovery.Family{
	Name: "amdgpu",
	Doc:  "AMD Radeon and Instinct GPUs and their compute partitions",
	Match: []discovery.Match{
		{Bus: "pci", Vendor: "1002", PCIClass: "03", Driver: "amdgpu"}, // display controllers: Radeon, MI50 to MI250
		{Bus: "pci", Vendor: "1002", PCIClass: "12", Driver: "amdgpu"}, // processing accelerators: MI300 and later
		{Bus: "pci", Vendor: "1002", PCIClass: "03", Unbound: true},
		{Bus: "pci", Vendor: "1002", PCIClass: "12", Unbound: true},
		{Bus: "platform", Name: "amdgpu_xcp_*"},
		{Bus: "platform", Name: "amdgpu_xcp.*"}, // in AMD's own packages of the driver (ROCm/k8s-device-plugin#157)
	},
	Describe:    describe,
	CommonNodes: []string{"/dev/kfd"},
	Variables:   variables,
	Labels:      labels,
	Create:      makePart,
	Remove:      unmakePart,
}

// variables tune the libraries of the ROCm runtimes, HIP and ROCR, and of RCCL.
var variables = []string{
	"AMD_LOG_LEVEL", "AMD_SERIALIZE_COPY", "AMD_SERIALIZE_KERNEL", "GPU_MAX_HW_QUEUES",
	"HIP_FORCE_DEV_KERNARG", "HIP_HOST_COHERENT", "HIP_LAUNCH_BLOCKING", "HSA_CU_MASK", "HSA_ENABLE_PEER_SDMA",
	"HSA_ENABLE_SDMA", "HSA_NO_SCRATCH_RECLAIM", "HSA_SCRATCH_SINGLE_LIMIT", "HSA_XNACK", "NCCL_DEBUG",
}

func describe(host *discovery.Host, found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
	var functions, xcps []sysfs.Device
	for _, d := range found {
		if sysfs.IsPCIAddress(d.Name()) {
			functions = append(functions, d)
		} else {
			xcps = append(xcps, d)
		}
	}
	kfd := readKFD(host, functions)
	var devices []discovery.Device
	problems := kfd.problems
	for _, function := range functions {
		if !function.HasDriver() {
			if id, _ := function.PCIID(); radeon().MatchString(id.Device) {
				continue
			}
			d, err := pci.DescribeUnbound(host, function, "gpu", "amd")
			devices, problems = append(devices, d), append(problems, discovery.Problems(d.Name, err)...)
			continue
		}
		gpu := &gpu{host: host, kfd: kfd, function: function, nodes: kfd.of[function.Name()]}
		devices = append(devices, gpu.describe(xcps)...)
		problems = append(problems, gpu.problems...)
	}
	return devices, problems
}

// radeon matches the device IDs of display controllers that amdgpu matches by class and then
// refuses because they predate the driver: up to Northern Islands, and the ES1000 of many servers.
// The IDs are those of amdgpu_unsupported_pciidlist in drivers/gpu/drm/amd/amdgpu/amdgpu_drv.c, as
// ranges without any ID of amdgpu's own list.
var radeon = pattern.Lazy(`^([345]...|67[0-7].|68[4589a-f].|7[12]..|783[45]|79[1-6].|9[4-79]..|980.)$`)

// gpu is one PCI function while it is being described.
type gpu struct {
	host     *discovery.Host
	kfd      *kfd
	function sysfs.Device
	nodes    []kfdNode // one for each compute partition, by partition index
	problems []discovery.Problem
}

// mode is the partition mode of a GPU.
type mode struct {
	compute string // "spx", "cpx", …; "" if the GPU does not support partitions
	profile string // including the memory partitions, such as "cpx_nps4"; "" if unknown
}

// describe returns the GPU as one device, or its partitions if there are any.
//
// A GPU is named after its PCI address. Each partition, including the first, is named after the
// address and its index, so a partition never has the name of the whole GPU. The meaning of an
// index depends on the mode, so a partition's Identity includes the mode.
func (g *gpu) describe(xcps []sysfs.Device) []discovery.Device {
	whole, mode, err := g.whole()
	parts, partsErr := g.onDemand(whole, mode)
	switch {
	case partsErr != nil:
		// A consumer may have a partition under a name that depends on the unknown mode.
		g.problems = append(g.problems, discovery.Problem{Device: whole.Name, Err: errors.Join(partsErr, err)})
		return nil
	case parts != nil:
		return parts.describe(xcps, err)
	}
	if len(g.nodes) < 2 && (mode.compute == "" || mode.compute == "spx") {
		whole.Attributes.SetString("profile", mode.profile)
		whole.SetNames("linkedTo", g.kfd.linkedTo(firstNode(g.nodes)))
		return []discovery.Device{g.finishDevice(whole, g.function, firstNode(g.nodes), err)}
	}
	nodes := g.nodes
	if len(nodes) == 0 {
		g.problems = append(g.problems, discovery.Problem{Device: whole.Name, Err: fmt.Errorf("partitioned as %s, and the KFD topology does not list the partitions", mode.compute)})
		nodes = make([]kfdNode, 1) // the first partition is the function itself
	}
	var partitions []discovery.Device
	for _, node := range nodes {
		d := partition(whole, mode, node)
		drm, found := g.drmOf(node, xcps)
		if !found {
			g.problems = append(g.problems, discovery.Problem{Device: d.Name, Err: fmt.Errorf("no amdgpu_xcp device has the render node renderD%d", node.renderMinor)})
			continue
		}
		partitions = append(partitions, g.finishDevice(d, drm, node, err))
	}
	return partitions
}

// whole describes the properties that the GPU and its partitions have in common.
func (g *gpu) whole() (discovery.Device, mode, error) {
	d, err := pci.DescribeFunction(g.host, g.function)
	d.Attributes.SetString("kind", "gpu")
	d.Attributes.SetString("vendor", "amd")
	d.Facts = make(map[string]string)
	if version, err := g.host.ReadText("/sys/module/amdgpu/version"); err == nil {
		d.Attributes.SetVersion("driverVersion", version)
		d.Facts["release"] = version
	}
	attrs := g.function.Attrs()
	for _, file := range []struct {
		attribute resourceapi.QualifiedName
		name      string
	}{{"model", "product_name"}, {"serial", "serial_number"}, {"uuid", "unique_id"}} {
		text, _ := attrs.Text(file.name)
		d.Attributes.SetString(file.attribute, text)
	}
	revision, _ := attrs.Hex("revision", 2)
	if d.Attributes.String("model") == "" {
		d.Attributes.SetString("model", models[d.Attributes.String("pciDevice")+" "+revision])
	}
	setMemory(&d, func() (uint64, bool) { return attrs.Uint("mem_info_vram_total") })
	firstNode(g.nodes).setShared(d.Attributes)
	g.setFacts(d.Facts, d.Attributes.String("architecture"))
	// While the UUID is unreadable, the serial number must not replace it. Otherwise the GPU would
	// look like another GPU once the UUID is readable.
	if uuid := d.Attributes.String("uuid"); uuid != "" || attrs.Err() == nil {
		d.Identity = cmp.Or(uuid, d.Attributes.String("serial"))
	}
	mode, modeErr := g.mode()
	return d, mode, errors.Join(err, attrs.Err(), modeErr)
}

// mode reads the partition mode of the GPU. A GPU without these files has no partitions.
func (g *gpu) mode() (mode, error) {
	attrs := g.function.Attrs()
	compute, _ := attrs.Text("current_compute_partition")
	memory, _ := attrs.Text("current_memory_partition")
	m := mode{compute: strings.ToLower(compute)}
	if attrs.Err() == nil {
		m.profile = strings.ToLower(strings.Trim(compute+"_"+memory, "_"))
	}
	return m, attrs.Err()
}

// partition returns the description of a partition, except for the properties of its kernel device.
func partition(whole discovery.Device, mode mode, node kfdNode) discovery.Device {
	d := whole
	d.Name = fmt.Sprintf("%s-xcp-%d", whole.Name, node.index)
	d.Attributes = maps.Clone(whole.Attributes)
	d.Capacity = discovery.Capacity{} // the GPU's memory is not the partition's
	d.Attributes.SetString("function", "partition")
	d.Attributes.SetString("parent", whole.Name)
	d.Attributes.SetString("profile", mode.profile)
	d.Attributes.SetInt("partitionIndex", int64(node.index))
	d.PartOf = &discovery.Silicon{Name: whole.Name}
	if d.Identity != "" {
		d.Identity += "/" + mode.profile
	}
	if mode.profile == "" {
		d.Identity = ""
	}
	return d
}

// drmOf returns the kernel device with the DRM nodes of a partition. The first partition uses the
// nodes of the PCI function, each other partition the nodes of an amdgpu_xcp device. More
// amdgpu_xcp devices may exist than partitions are in use; the unused devices have no KFD node.
func (g *gpu) drmOf(node kfdNode, xcps []sysfs.Device) (sysfs.Device, bool) {
	if node.index == 0 {
		return g.function, true
	}
	i := slices.IndexFunc(xcps, func(xcp sysfs.Device) bool {
		return xcp.HasEntry(fmt.Sprintf("drm/renderD%d", node.renderMinor))
	})
	if i < 0 {
		return sysfs.Device{}, false
	}
	return xcps[i], true
}

// finishDevice adds the properties that differ between a GPU and its partitions: cores, memory,
// nodes, health, offer. err is the error of the description so far.
func (g *gpu) finishDevice(d discovery.Device, drm sysfs.Device, node kfdNode, err error) discovery.Device {
	d.Source = drm.Path
	errs := []error{err}
	if node.cores > 0 {
		d.Capacity.Set("cores", node.cores)
	}
	if node.simds > 0 {
		d.Facts = maps.Clone(d.Facts)
		d.Facts["simds"] = strconv.FormatUint(node.simds, 10)
	}
	if _, known := d.Capacity["memory"]; !known {
		setMemory(&d, func() (uint64, bool) {
			size, err := node.memory()
			errs = append(errs, err)
			return size, err == nil
		})
	}
	nodes, nodesErr := discovery.DRMNodes(drm)
	d.Health = discovery.NodeHealth(g.host, nodes)
	// A GPU that KFD does not list can render but not compute, and amd.com/gpu is for computing. If
	// KFD could read only part of the topology, this GPU may be in the unreadable part.
	if g.kfd.node != nil && (len(g.nodes) > 0 || g.kfd.partial) {
		nodes = append([]*specs.DeviceNode{g.kfd.node}, nodes...)
		d.PluginOffers = offers(d, drm)
		if d.Health.Status == discovery.Healthy {
			d.Health = discovery.NodeHealth(g.host, nodes)
		}
	}
	d.Edits.DeviceNodes = nodes
	if err := errors.Join(append(errs, nodesErr)...); err != nil {
		g.problems = append(g.problems, discovery.Problem{Device: d.Name, Err: err})
	}
	return d
}

// offers returns the extended resources: by default amd.com/gpu, and, if the administrator
// configures the name, the name of the partition mode, such as "amd.com/cpx_nps4", as in the
// plugin's naming strategy "mixed".
func offers(d discovery.Device, drm sysfs.Device) []discovery.Offer {
	ids := []string{drm.Name()}
	offers := []discovery.Offer{{Resource: "amd.com/gpu", IDs: ids}}
	profile := d.Attributes.String("profile")
	if compute, memory, both := strings.Cut(profile, "_"); both && isPlain(compute) && isPlain(memory) {
		offers = append(offers, discovery.Offer{Resource: "amd.com/" + profile, IDs: ids, Optional: true})
	}
	return offers
}

// isPlain reports whether a part of a profile is valid in a resource name.
func isPlain(text string) bool {
	return text != "" && strings.Trim(text, "abcdefghijklmnopqrstuvwxyz0123456789") == ""
}

// setMemory sets the memory capacity if the size is known and fits into an int64.
func setMemory(d *discovery.Device, read func() (uint64, bool)) {
	if size, ok := read(); ok && size > 0 && size <= math.MaxInt64 {
		d.Capacity.Set("memory", int64(size))
	}
}

// firstNode returns the first KFD node of a GPU, or an empty node.
func firstNode(nodes []kfdNode) kfdNode {
	if len(nodes) == 0 {
		return kfdNode{}
	}
	return nodes[0]
}
