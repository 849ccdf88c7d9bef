// Package tpu describes Google TPUs, version 2 to 7, by the kernel driver of older TPUs and by vfio
// for newer TPUs. It reads only the host's files, so it has no topology beyond the host: it does
// not set TPU_TOPOLOGY, TPU_HOST_BOUNDS, TPU_WORKER_ID or similar variables, and creates no
// directory for logs.
package tpu

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Family recognises Google TPUs. Network and storage functions have the same vendor, and the driver
// of older TPUs has a different name for each TPU.
var Family = &discovery.Family{
	Name:        "tpu",
	Doc:         "Google TPUs, v2 to 7x",
	Match:       []discovery.Match{{Bus: "pci", Vendor: "1ae0"}},
	Describe:    describe,
	CommonNodes: pci.VFIOControl(),
	Grant:       grant,
	Variables:   variables,
}

// variables tune libtpu.
var variables = []string{
	"LIBTPU_INIT_ARGS", "TPU_MIN_LOG_LEVEL", "TPU_PREMAPPED_BUFFER_SIZE", "TPU_STDERR_LOG_LEVEL",
}

// architectures maps PCI device IDs to TPUs.
var architectures = map[string]string{
	"0027": twoOrThree,
	"005e": "v4",
	"0062": "v5p",
	"0063": "v5e",
	"006f": "v6e",
	"0076": twin,
}

const (
	twoOrThree = "v2 or v3" // the subsystem ID decides
	twin       = "tpu7x"    // each chip has two functions
)

// subsystems maps subsystem IDs to the TPUs that share a device ID.
var subsystems = map[string]string{"004e": "v2", "004f": "v3"}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	chips, problems := chips(found)
	for _, functions := range chips {
		d, err := describeChip(host, functions)
		if err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		devices = append(devices, d)
	}
	return devices, problems
}

// chips returns the functions of each TPU with a usable driver: the TPU driver or vfio.
func chips(found []sysfs.Device) (chips [][]sysfs.Device, problems []discovery.Problem) {
	index := make(map[string]int) // by slot
	for _, function := range found {
		if function.Driver() != "vfio-pci" && len(function.Children("accel")) == 0 {
			continue
		}
		id, err := function.PCIID()
		if id.Device == "" && err != nil {
			problems = append(problems, discovery.Problem{Device: discovery.DeviceName(function), Err: err})
		}
		if architectures[id.Device] == "" {
			continue
		}
		if i, seen := index[slot(function)]; seen && architectures[id.Device] == twin {
			chips[i] = append(chips[i], function)
			continue
		}
		index[slot(function)] = len(chips)
		chips = append(chips, []sysfs.Device{function})
	}
	return chips, problems
}

// slot returns the address of a function without its function number.
func slot(function sysfs.Device) string {
	slot, _, _ := strings.Cut(function.Name(), ".")
	return slot
}

func describeChip(host *discovery.Host, functions []sysfs.Device) (discovery.Device, error) {
	first := functions[0]
	d, err := pci.DescribeFunction(host, first)
	errs := []error{err}
	d.Attributes.SetString("kind", "npu")
	d.Attributes.SetString("vendor", "google")
	architecture := architectures[d.Attributes.String("pciDevice")]
	if architecture == twoOrThree {
		attrs := first.Attrs()
		subsystem, _ := attrs.Hex("subsystem_device", 4)
		architecture = subsystems[subsystem]
		errs = append(errs, attrs.Err())
	}
	d.Attributes.SetString("architecture", architecture)
	setPlace(d.Attributes, first)
	for i, function := range functions {
		if i > 0 {
			d.Includes = append(d.Includes, function.Path)
		}
		nodes, err := nodesOf(host, function)
		errs = append(errs, err)
		for _, node := range nodes {
			same := func(other *specs.DeviceNode) bool { return other.Path == node.Path }
			if !slices.ContainsFunc(d.Edits.DeviceNodes, same) { // /dev/vfio/vfio occurs once
				d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, node)
			}
		}
	}
	discovery.PermitMknod(d.Edits.DeviceNodes) // as in Google's plugin
	d.Health = health(host, functions, d.Edits.DeviceNodes)
	if architecture == twin && len(functions) != 2 {
		other := otherFunction(first.Name())
		d.Health = discovery.Health{
			Status: discovery.Unhealthy, Reason: "one of the chip's two functions is not bound to vfio-pci",
			Fix:           fmt.Sprintf(`sudo sh -c "echo vfio-pci > /sys/bus/pci/devices/%s/driver_override; echo %s > /sys/bus/pci/drivers_probe"`, other, other),
			OtherFunction: other,
		}
	}
	if len(d.Edits.DeviceNodes) > 0 {
		d.PluginOffers = []discovery.Offer{{Resource: "google.com/tpu", IDs: []string{classicID(architecture, first)}}}
	}
	return d, errors.Join(errs...)
}

// setPlace sets the number of the chip on its host. The libraries derive the position in the mesh
// of the host's chips from the number. The driver of older TPUs includes the number in the name of
// the node; for newer TPUs the host has no such information.
func setPlace(a discovery.Attributes, function sysfs.Device) {
	for _, accel := range function.Children("accel") {
		digits, ok := strings.CutPrefix(accel.Name(), "accel")
		if number, err := strconv.ParseUint(digits, 10, 16); ok && err == nil {
			a.SetInt("moduleID", int64(number))
		}
	}
}

func nodesOf(host *discovery.Host, function sysfs.Device) ([]*specs.DeviceNode, error) {
	if function.Driver() == "vfio-pci" {
		return pci.VFIONodes(host, function)
	}
	node, err := discovery.Node(function.Children("accel")[0], "/dev")
	return []*specs.DeviceNode{node}, err
}

// health returns the health of the nodes of a chip's functions.
func health(host *discovery.Host, functions []sysfs.Device, nodes []*specs.DeviceNode) discovery.Health {
	for _, function := range functions {
		if function.Driver() != "vfio-pci" {
			continue
		}
		if health := pci.VFIOHealth(host, function, nodes); health.Status != discovery.Healthy {
			return health
		}
	}
	return discovery.NodeHealth(host, nodes)
}

// classicID returns the ID of a chip in Google's plugin: the name of the node, the IOMMU group, or
// the slot.
func classicID(architecture string, first sysfs.Device) string {
	switch {
	case architecture == twin:
		return slot(first)
	case first.Driver() == "vfio-pci":
		return first.Link("iommu_group")
	}
	return first.Children("accel")[0].Name()
}

// bounds maps numbers of chips to the layout of the chips on a host.
var bounds = map[int]string{1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}

// grant returns environment variables for the layout of the allocated chips, and for the NUMA nodes
// of TPU7x chips.
func grant(given []discovery.Device, _ discovery.Grant) specs.ContainerEdits {
	var edits specs.ContainerEdits
	if layout := bounds[len(given)]; layout != "" {
		edits.Env = append(edits.Env, "CHIPS_PER_HOST_BOUNDS="+layout, "TPU_CHIPS_PER_HOST_BOUNDS="+layout)
	}
	var nodes []string
	for _, d := range given {
		node := d.Attributes[deviceattribute.StandardDeviceAttributeNUMANode].IntValue
		if d.Attributes.String("architecture") != twin || node == nil {
			return edits
		}
		nodes = append(nodes, strconv.FormatInt(*node, 10))
	}
	if len(given) > 1 {
		slices.Sort(nodes)
		edits.Env = append(edits.Env, "WORKLOAD_NIC_PREFERRED_NUMA="+strings.Join(slices.Compact(nodes), ","))
	}
	return edits
}

// otherFunction returns the address of the other one of a chip's two functions.
func otherFunction(address string) string {
	if slot, first := strings.CutSuffix(address, ".0"); first {
		return slot + ".1"
	}
	return strings.TrimSuffix(address, ".1") + ".0"
}
