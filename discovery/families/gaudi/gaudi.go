// Package gaudi describes Habana accelerators, Goya and Gaudi, as the habanalabs driver of Linux
// 6.5 and later shows them in /sys. It has no facts that only Habana's library reports, such as
// memory and serial number, and offers no network ports.
//
// The Habana plugin uses the serial numbers as IDs, and in the variable HL_VISIBLE_DEVICES_UUID,
// which containers do not get here. The IDs of this package are PCI addresses. If a pod has a
// serial number as its ID, the device nodes in the kubelet's checkpoint identify the card.
package gaudi

import (
	"errors"
	"fmt"
	"path"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Family recognises Habana accelerators.
var Family = &discovery.Family{
	Name: "gaudi",
	Doc:  "Habana Goya and Intel Gaudi accelerators",
	Match: []discovery.Match{
		{Bus: "pci", Vendor: "1da3", Driver: "habanalabs"},
		{Bus: "pci", Vendor: "1da3", PCIClass: "1200", Unbound: true}, // all Habana devices of this class are accelerators
	},
	Describe:  describe,
	Grant:     grant,
	Variables: variables,
}

// variables tune the libraries of the Habana runtime and its bridge to PyTorch.
var variables = []string{
	"ENABLE_CONSOLE", "GRAPH_VISUALIZATION", "HABANA_PROFILE", "LOG_LEVEL_ALL",
	"PT_HPU_ENABLE_LAZY_COLLECTIVES", "PT_HPU_LAZY_MODE", "PT_HPU_MAX_COMPOUND_OP_SIZE",
}

// goya is the PCI device ID of Goya; all other IDs are Gaudis.
const goya = "0001"

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, function := range found {
		d, err := describeCard(host, function)
		if err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		devices = append(devices, d)
	}
	return devices, problems
}

func describeCard(host *discovery.Host, function sysfs.Device) (discovery.Device, error) {
	if function.Driver() == "" {
		return pci.DescribeUnbound(host, function, "npu", "habana")
	}
	d, err := pci.DescribeFunction(host, function)
	errs := []error{err}
	d.Attributes.SetString("kind", "npu")
	d.Attributes.SetString("vendor", "habana")
	if version, err := host.ReadText("/sys/module/habanalabs/version"); err == nil {
		d.Attributes.SetVersion("driverVersion", version)
	}
	// See Documentation/ABI/testing/sysfs-driver-habanalabs.
	attrs := function.Attrs()
	if model, ok := attrs.Text("device_type"); ok {
		d.Attributes.SetString("model", model)
	}
	if module, ok := attrs.Uint("module_id"); ok && module < 1<<16 {
		d.Attributes.SetInt("moduleID", int64(module))
	}
	status, _ := attrs.Text("status")
	errs = append(errs, attrs.Err())
	for _, minor := range function.Children("accel") { // one
		nodes, err := nodes(host, minor)
		d.Edits.DeviceNodes, errs = append(d.Edits.DeviceNodes, nodes...), append(errs, err)
	}
	switch d.Attributes.String("pciDevice") {
	case "": // unknown whether Goya or Gaudi
	case goya:
		d.PluginOffers = []discovery.Offer{{Resource: "habana.ai/goya", IDs: []string{function.Name()}}}
	default:
		d.PluginOffers = []discovery.Offer{{Resource: "habana.ai/gaudi", IDs: []string{function.Name()}}}
	}
	d.Health = health(function, status)
	if d.Health.Status == discovery.Healthy {
		d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	}
	return d, errors.Join(errs...)
}

// nodes returns the compute node and the control node. The kernel device of the control node is not
// below the PCI function. It is in the same class and has the same number.
func nodes(host *discovery.Host, minor sysfs.Device) ([]*specs.DeviceNode, error) {
	number, ok := number(minor.Name())
	if !ok {
		return nil, nil
	}
	control := sysfs.At(host.FS, fmt.Sprintf("sys/class/accel/accel_controlD%d", number))
	compute, computeErr := discovery.Node(minor, "/dev/accel")
	controlling, controlErr := discovery.Node(control, "/dev/accel")
	return []*specs.DeviceNode{compute, controlling}, errors.Join(computeErr, controlErr)
}

// number returns the number in a name such as "accel0".
func number(name string) (uint64, bool) {
	digits, ok := strings.CutPrefix(name, "accel")
	n, err := strconv.ParseUint(digits, 10, 16)
	return n, ok && err == nil
}

// health returns the health for the driver's status of a device, from the view of the next
// consumer. The driver resets the device after each consumer; a program that opens the device
// during a reset must retry.
func health(function sysfs.Device, status string) discovery.Health {
	switch status {
	case "", "Operational", "In reset after device release":
		return discovery.Health{Status: discovery.Healthy}
	}
	health := discovery.Health{Status: discovery.Unhealthy, Reason: fmt.Sprintf("the driver reports %.40q", status)}
	switch status {
	case "In reset":
		health.Resetting = true
	case "Disabled", "Needs reset": // the driver has given up, or its automatic reset is off (include/uapi/drm/habanalabs_accel.h)
		health.Fix = fmt.Sprintf("sudo hl-smi -r -i %s   # resets the device, after all processes on it have ended; if it remains disabled, reboot the node", function.Name())
	}
	return health
}

// grant lists the devices for the Habana container runtime and libraries, by the host's numbers
// and, unless all devices are allocated, by their places on the board.
func grant(given []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
	var numbers, paths, modules []string
	for _, d := range given {
		for _, node := range d.Edits.DeviceNodes {
			if n, ok := number(path.Base(node.Path)); ok {
				numbers = append(numbers, strconv.FormatUint(n, 10))
				paths = append(paths, node.Path)
			}
		}
		if module := d.Attributes["moduleID"].IntValue; module != nil {
			modules = append(modules, strconv.FormatInt(*module, 10))
		}
	}
	if len(numbers) == 0 {
		return specs.ContainerEdits{}
	}
	env := []string{
		"HABANA_VISIBLE_DEVICES=" + strings.Join(numbers, ","),
		"HL_VISIBLE_DEVICES=" + strings.Join(paths, ","),
	}
	if len(modules) == len(given) && !grant.All { // an incomplete list would hide devices
		env = append(env, "HABANA_VISIBLE_MODULES="+strings.Join(modules, ","))
	}
	return specs.ContainerEdits{Env: env}
}
