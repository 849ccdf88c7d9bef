// Package amdgpu describes AMD GPUs and their compute partitions, as the amdgpu
// driver shows them in /sys: as PCI functions, as amdgpu_xcp platform devices, and
// in the KFD topology. It covers no GPU that is bound to another driver, such as
// one for a virtual machine.
package amdgpu

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family is AMD's GPUs.
var Family = &discovery.Family{
	Name: "amdgpu",
	Doc:  "AMD Radeon and Instinct GPUs and their compute partitions",
	Match: []discovery.Match{
		{Bus: "pci", Vendor: "1002", PCIClass: "03", Driver: "amdgpu"}, // displays: Radeon, MI50 to MI250
		{Bus: "pci", Vendor: "1002", PCIClass: "12", Driver: "amdgpu"}, // processing accelerators: MI300 and later
		{Bus: "pci", Vendor: "1002", PCIClass: "03", Unbound: true},
		{Bus: "pci", Vendor: "1002", PCIClass: "12", Unbound: true},
		{Bus: "platform", Name: "amdgpu_xcp_*"},
		{Bus: "platform", Name: "amdgpu_xcp.*"}, // of AMD's own packages of the driver (ROCm/k8s-device-plugin#157)
	},
	Describe:    describe,
	CommonNodes: []string{"/dev/kfd"},
	Variables:   variables,
	Labels:      labels,
	Make:        makePart,
	Unmake:      unmakePart,
}

// variables tune the libraries of ROCm's runtimes, HIP and ROCR, and of RCCL.
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
		if !function.Bound() {
			if id, _ := function.PCIID(); radeon.MatchString(id.Device) {
				continue
			}
			d, err := discovery.Unbound(host, function, "gpu", "amd")
			devices, problems = append(devices, d), append(problems, discovery.Problems(d.Name, err)...)
			continue
		}
		gpu := &gpu{host: host, kfd: kfd, function: function, nodes: kfd.of[function.Name()]}
		devices = append(devices, gpu.describe(xcps)...)
		problems = append(problems, gpu.problems...)
	}
	return devices, problems
}

// radeon matches the device IDs of display controllers that amdgpu matches by
// their class and then refuses, since they are older than it: up to Northern
// Islands, and the ES1000 of many servers. They are what
// amdgpu_unsupported_pciidlist in drivers/gpu/drm/amd/amdgpu/amdgpu_drv.c lists,
// as ranges that hold no ID of amdgpu's own list.
var radeon = regexp.MustCompile(`^([345]...|67[0-7].|68[4589a-f].|7[12]..|783[45]|79[1-6].|9[4-79]..|980.)$`)

// gpu is one PCI function while it is being described.
type gpu struct {
	host     *discovery.Host
	kfd      *kfd
	function sysfs.Device
	nodes    []kfdNode // one for each compute partition, in their order
	problems []discovery.Problem
}

// mode is how a GPU is partitioned.
type mode struct {
	compute string // "spx", "cpx", …; "" where the GPU knows no partitions
	profile string // with the memory's partitions, "cpx_nps4"; "" if not known
}

// describe returns the GPU as one device, or its partitions if it has any.
//
// A GPU is named by its PCI address, and each of its partitions, the first one
// too, by that and its index: what is allocated as the whole is never mistaken
// for a part of it. The meaning of an index depends on the mode, so a
// partition's Identity includes the mode.
func (g *gpu) describe(xcps []sysfs.Device) []discovery.Device {
	whole, mode, err := g.whole()
	parts, partsErr := g.onRequest(whole, mode)
	switch {
	case partsErr != nil:
		// Somebody may have a part by a name that is known once the mode is.
		g.problems = append(g.problems, discovery.Problem{Device: whole.Name, Err: errors.Join(partsErr, err)})
		return nil
	case parts != nil:
		return parts.describe(xcps, err)
	}
	if len(g.nodes) < 2 && (mode.compute == "" || mode.compute == "spx") {
		whole.Attributes.SetString("profile", mode.profile)
		whole.SetNames("linkedTo", g.kfd.linkedTo(first(g.nodes)))
		return []discovery.Device{g.finish(whole, g.function, first(g.nodes), err)}
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
		partitions = append(partitions, g.finish(d, drm, node, err))
	}
	return partitions
}

// whole describes the GPU as far as its partitions do not differ from it.
func (g *gpu) whole() (discovery.Device, mode, error) {
	d, err := discovery.PCI(g.host, g.function)
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
	first(g.nodes).setShared(d.Attributes)
	g.setFacts(d.Facts, d.Attributes.String("architecture"))
	// While the UUID cannot be read, the serial number must not stand in for it:
	// the GPU would be taken for another once it can be.
	if uuid := d.Attributes.String("uuid"); uuid != "" || attrs.Err() == nil {
		d.Identity = cmp.Or(uuid, d.Attributes.String("serial"))
	}
	mode, modeErr := g.mode()
	return d, mode, errors.Join(err, attrs.Err(), modeErr)
}

// mode reads how the GPU is partitioned. A GPU without these files cannot be.
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

// partition returns what is known of a partition without its device.
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

// drmOf returns the kernel device that has the DRM nodes of a partition. The first
// partition has those of the PCI function, each other one those of an amdgpu_xcp
// device. There may be more amdgpu_xcp devices than partitions in use: the others
// have no KFD node.
func (g *gpu) drmOf(node kfdNode, xcps []sysfs.Device) (sysfs.Device, bool) {
	if node.index == 0 {
		return g.function, true
	}
	i := slices.IndexFunc(xcps, func(xcp sysfs.Device) bool {
		return xcp.Exists(fmt.Sprintf("drm/renderD%d", node.renderMinor))
	})
	if i < 0 {
		return sysfs.Device{}, false
	}
	return xcps[i], true
}

// finish adds what differs between a GPU and its partitions: cores, memory,
// nodes, health, offer. err is what was wrong so far.
func (g *gpu) finish(d discovery.Device, drm sysfs.Device, node kfdNode, err error) discovery.Device {
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
	// A GPU that KFD does not list can render and not compute, which is what
	// amd.com/gpu promises. Where a part of the topology cannot be read, this
	// GPU may be in it.
	if g.kfd.node != nil && (len(g.nodes) > 0 || g.kfd.partial) {
		nodes = append([]*specs.DeviceNode{g.kfd.node}, nodes...)
		d.Classic = offers(d, drm)
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

// offers returns the classic names: by default the one for all GPUs, and where
// the administrator chooses it, as with the plugin's naming strategy "mixed",
// that of how the GPU is partitioned, such as "amd.com/cpx_nps4".
func offers(d discovery.Device, drm sysfs.Device) []discovery.Offer {
	ids := []string{drm.Name()}
	offers := []discovery.Offer{{Resource: "amd.com/gpu", IDs: ids}}
	profile := d.Attributes.String("profile")
	if compute, memory, both := strings.Cut(profile, "_"); both && plain(compute) && plain(memory) {
		offers = append(offers, discovery.Offer{Resource: "amd.com/" + profile, IDs: ids, Named: true})
	}
	return offers
}

// plain reports whether a part of a profile can be part of a resource's name.
func plain(text string) bool {
	return text != "" && strings.Trim(text, "abcdefghijklmnopqrstuvwxyz0123456789") == ""
}

// setMemory sets the memory if it is known and can be said.
func setMemory(d *discovery.Device, read func() (uint64, bool)) {
	if size, ok := read(); ok && size > 0 && size <= math.MaxInt64 {
		d.Capacity.Set("memory", int64(size))
	}
}

// first returns the first KFD node of a GPU, or one that says nothing.
func first(nodes []kfdNode) kfdNode {
	if len(nodes) == 0 {
		return kfdNode{}
	}
	return nodes[0]
}
