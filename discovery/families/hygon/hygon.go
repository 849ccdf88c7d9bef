// Package hygon describes Hygon DCUs. Their driver, hycu or hydcu, is derived from amdgpu. The
// files in /sys are the files that Project-HAMi/dcu-vgpu-device-plugin reads, and the nodes are the
// same as in that plugin. The package does not partition DCUs (vDCU).
package hygon

import (
	"errors"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

const vendor = "1d94"

// Family recognises Hygon DCUs.
var Family = &discovery.Family{
	Name: "hygon",
	Doc:  "Hygon's DCUs",
	Match: []discovery.Match{
		{Bus: "pci", Vendor: vendor, Driver: "hycu"},
		{Bus: "pci", Vendor: vendor, Driver: "hydcu"},
	},
	CommonNodes: control,
	Describe:    describe,
}

// control lists the nodes that computing on any DCU requires. Alone, the nodes give access to no
// DCU.
var control = []string{"/dev/kfd", "/dev/mkfd"}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, function := range found {
		d, err := describeDCU(host, function)
		problems = append(problems, discovery.Problems(d.Name, err)...)
		devices = append(devices, d)
	}
	return devices, problems
}

func describeDCU(host *discovery.Host, function sysfs.Device) (discovery.Device, error) {
	d, err := pci.DescribeFunction(host, function)
	errs := []error{err}
	d.Attributes.SetString("kind", "gpu")
	d.Attributes.SetString("vendor", "hygon")
	if version, err := host.ReadText("/sys/module/" + function.Driver() + "/version"); err == nil {
		d.Attributes.SetVersion("driverVersion", version)
	}
	render := false
	for _, minor := range function.Children("drm") {
		if card := strings.HasPrefix(minor.Name(), "card"); !card && !strings.HasPrefix(minor.Name(), "renderD") || strings.Contains(minor.Name(), "-") {
			continue // a connector, or a control node of older kernels
		} else if !card {
			render = true
		}
		node, err := discovery.Node(minor, "/dev")
		d.Edits.DeviceNodes, errs = append(d.Edits.DeviceNodes, node), append(errs, err)
	}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	switch {
	case !render && d.Health.Status == discovery.Healthy:
		d.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionNodeMissing, Reason: "it has no render node"}
	case d.Health.Status == discovery.Healthy && !host.FileExists(control[0]):
		d.Health = discovery.MissingNodeHealth(control[0])
	}
	for _, path := range control {
		if host.FileExists(path) {
			d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, &specs.DeviceNode{Path: path, HostPath: path, Permissions: "rw"})
		}
	}
	// The ID is the same as in the ROCm plugin, which the Hygon plugin is derived from. The IDs of
	// the Hygon plugin are not public; if a pod has such an ID, its device nodes identify the DCU.
	d.PluginOffers = []discovery.Offer{{Resource: "hygon.com/dcu", IDs: []string{function.Name()}}}
	return d, errors.Join(errs...)
}
