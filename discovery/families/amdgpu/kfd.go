package amdgpu

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

// kfd holds the topology of the kernel's compute driver
// (drivers/gpu/drm/amd/amdkfd/kfd_topology.c).
type kfd struct {
	node     *specs.DeviceNode    // /dev/kfd, nil if the kernel has no KFD
	of       map[string][]kfdNode // by PCI address; the nodes of one GPU by partition index
	at       map[string]string    // node number to PCI address, "" if the node is not a GPU
	partial  bool                 // a part of the topology is unreadable
	problems []discovery.Problem
}

// kfdNode is a GPU, or one compute partition of a GPU.
type kfdNode struct {
	device      sysfs.Device // the directory of the node
	index       int          // of the partition
	renderMinor uint64
	cores       int64 // compute units
	simds       uint64
	dies        uint64 // compute dies, 0 with older drivers
	gfx         uint64
	hive        uint64 // identifies the GPUs that XGMI links connect, 0 if there are none
	uniqueID    uint64
	links       []string // the numbers of the nodes with a direct XGMI link
}

// readKFD reads the topology nodes of the given functions. An error names the node. If a process's
// device cgroup lacks the render node, the kernel refuses access to the topology node; the GPU
// itself is not affected.
func readKFD(host *discovery.Host, functions []sysfs.Device) *kfd {
	k := &kfd{of: make(map[string][]kfdNode), at: make(map[string]string)}
	class, err := sysfs.ClassDevices(host.FS, "kfd")
	if len(class) == 0 || !class[0].HasEntry(".") {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			k.problems = append(k.problems, discovery.Problem{Device: "kfd", Err: err})
		}
		return k
	}
	if k.node, err = discovery.Node(class[0], "/dev"); err != nil {
		k.problems = append(k.problems, discovery.Problem{Device: "kfd", Err: err})
	}
	known := make(map[string]bool)
	for _, function := range functions {
		known[function.Name()] = true
	}
	for _, dir := range class[0].Children("topology/nodes") {
		properties, err := readProperties(dir)
		if err != nil {
			k.partial = true
			k.problems = append(k.problems, discovery.Problem{Device: "kfd-node-" + dir.Name(), Err: err})
			continue
		}
		address, index := locateNode(properties, known)
		k.at[dir.Name()] = cmp.Or(address, unlocatedAddress(properties))
		if properties["simd_count"] > 0 && address != "" {
			node := newKFDNode(dir, index, properties)
			if node.links, err = readLinks(dir); err != nil {
				k.problems = append(k.problems, discovery.Problem{Device: "kfd-node-" + dir.Name(), Err: err})
			}
			k.of[address] = append(k.of[address], node)
		}
	}
	for _, nodes := range k.of {
		slices.SortStableFunc(nodes, func(a, b kfdNode) int { return cmp.Compare(a.index, b.index) })
	}
	return k
}

func newKFDNode(dir sysfs.Device, index int, properties map[string]uint64) kfdNode {
	n := kfdNode{
		device:      dir,
		index:       index,
		renderMinor: properties["drm_render_minor"],
		gfx:         properties["gfx_target_version"],
		hive:        properties["hive_id"],
		uniqueID:    properties["unique_id"],
		simds:       properties["simd_count"],
		dies:        properties["num_xcc"],
	}
	if each := properties["simd_per_cu"]; each > 0 {
		n.cores = int64(properties["simd_count"] / each)
	}
	return n
}

// readLinks returns the numbers of the nodes at the other ends of a node's direct XGMI links. The
// kernel gives such a link a weight of 15 for each hop (kfd_fill_gpu_xgmi_link_to_gpu in
// kfd_crat.c); type 11 is CRAT_IOLINK_TYPE_XGMI. After an error no links are returned, because a
// partial list would look complete.
func readLinks(dir sysfs.Device) ([]string, error) {
	var links []string
	for _, link := range dir.Children("io_links") {
		properties, err := readProperties(link)
		if err != nil {
			return nil, fmt.Errorf("link %s: %w", link.Name(), err)
		}
		if properties["type"] == 11 && properties["weight"] <= 15 {
			links = append(links, strconv.FormatUint(properties["node_to"], 10))
		}
	}
	return links, nil
}

// linkedTo returns the names of the devices with XGMI links to a GPU, including devices that this
// family does not describe. If one name is unknown, linkedTo returns none.
func (k *kfd) linkedTo(n kfdNode) []string {
	var names []string
	for _, link := range n.links {
		address, known := k.at[link]
		if !known {
			return nil
		}
		if address != "" {
			names = append(names, "pci-"+strings.NewReplacer(":", "-", ".", "-").Replace(address))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// locateNode returns the known PCI function of a node, and the partition index. The kernel writes
// the index to bits 31 to 28 of location_id. AMD's own releases of the driver, which are older,
// write the index to the function's bits.
func locateNode(properties map[string]uint64, known map[string]bool) (address string, index int) {
	location := properties["location_id"]
	device := fmt.Sprintf("%04x:%02x:%02x.", properties["domain"], location>>8&0xff, location>>3&0x1f)
	function := location & 7
	if address := device + strconv.FormatUint(function, 10); known[address] {
		return address, int(location >> 28 & 0xf)
	}
	if address := device + "0"; known[address] {
		return address, int(function)
	}
	return "", 0
}

// unlocatedAddress returns the PCI address in the properties of a node whose function is not
// described. It returns "" if the node is not a GPU.
func unlocatedAddress(properties map[string]uint64) string {
	if properties["simd_count"] == 0 {
		return ""
	}
	location := properties["location_id"]
	return fmt.Sprintf("%04x:%02x:%02x.%d", properties["domain"], location>>8&0xff, location>>3&0x1f, location&7)
}

// setShared sets the attributes that all partitions of a GPU have in common. A value that /sys has
// for the PCI function takes precedence.
func (n kfdNode) setShared(a discovery.Attributes) {
	if n.gfx > 0 {
		// 90402 is gfx942, 90010 is gfx90a.
		a.SetString("architecture", fmt.Sprintf("gfx%d%x%x", n.gfx/10000, n.gfx/100%100, n.gfx%100))
	}
	if n.hive != 0 {
		a.SetString("fabric", fmt.Sprintf("xgmi-%016x", n.hive))
	}
	if n.uniqueID != 0 && a.String("uuid") == "" {
		a.SetString("uuid", fmt.Sprintf("%016x", n.uniqueID)) // the same form as unique_id of the function
	}
}

// memory returns the size in bytes of the GPU memory that the node may use.
func (n kfdNode) memory() (uint64, error) {
	if n.device.Path == "" {
		return 0, nil // not in the topology
	}
	var size uint64
	for _, bank := range n.device.Children("mem_banks") {
		properties, err := readProperties(bank)
		if err != nil {
			return 0, fmt.Errorf("KFD node %s: memory bank %s: %w", n.device.Name(), bank.Name(), err)
		}
		// 1 and 2 are the frame buffer, public and private (enum in kfd_crat.h); 0 is host memory.
		if heap := properties["heap_type"]; heap == 1 || heap == 2 {
			size += properties["size_in_bytes"]
		}
	}
	return size, nil
}

// readProperties reads the file "properties" of a topology directory.
func readProperties(dir sysfs.Device) (map[string]uint64, error) {
	text, err := dir.Text("properties")
	if err != nil {
		return nil, err
	}
	return parseProperties(text)
}

// parseProperties parses lines such as "simd_count 416".
func parseProperties(text string) (map[string]uint64, error) {
	properties := make(map[string]uint64)
	for line := range strings.Lines(text) {
		name, digits, _ := strings.Cut(strings.TrimSpace(line), " ")
		value, err := strconv.ParseUint(digits, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("properties: not a name and a number: %.40q", strings.TrimSpace(line))
		}
		properties[name] = value
	}
	if len(properties) == 0 {
		return nil, errors.New("properties: empty")
	}
	return properties, nil
}
