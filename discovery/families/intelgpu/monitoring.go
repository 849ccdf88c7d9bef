package intelgpu

import (
	"errors"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// used is a described GPU with a bound driver.
type used struct {
	function sysfs.Device
	nodes    []*specs.DeviceNode
}

// monitoring returns devices for monitors: one device of all GPUs of the host, and one for each
// driver. The Intel plugin offers such resources if configured, in addition to the GPUs and
// regardless of their consumers. The devices are not of kind GPU, and exist only if the
// administrator configures them. In DRA, a claim with admin access for all GPUs serves the purpose.
func monitoring(host *discovery.Host, gpus []used) (devices []discovery.Device, problems []discovery.Problem) {
	for _, driver := range []string{"", "i915", "xe"} {
		var of []used
		for _, gpu := range gpus {
			if driver == "" || gpu.function.Driver() == driver {
				of = append(of, gpu)
			}
		}
		d, err := monitor(host, of, driver)
		if len(d.Edits.DeviceNodes) == 0 {
			continue // no GPU to monitor
		}
		devices, problems = append(devices, d), append(problems, discovery.Problems(d.Name, err)...)
	}
	return devices, problems
}

// monitor returns one device of all the given GPUs. A missing node is left out, so a broken GPU
// does not prevent the monitoring of the others.
func monitor(host *discovery.Host, gpus []used, driver string) (discovery.Device, error) {
	profile := strings.TrimPrefix(driver+"-monitoring", "-")
	d := discovery.Device{
		Name:       "intelgpu-" + profile,
		Attributes: discovery.Attributes{},
		Shareable:  true,
		OptIn:      true,
		PluginOffers: []discovery.Offer{{
			Resource: "gpu.intel.com/" + strings.ReplaceAll(profile, "-", "_"),
			IDs:      []string{"all"},
		}},
	}
	d.Attributes.SetString("kind", "other")
	d.Attributes.SetString("vendor", "intel")
	d.Attributes.SetString("profile", profile)
	var errs []error
	for _, gpu := range gpus {
		mei, err := meiNodes(gpu.function)
		errs = append(errs, err)
		d.Includes = append(d.Includes, gpu.function.Path)
		for _, node := range slices.Concat(gpu.nodes, mei) {
			if host.FileExists(node.HostPath) {
				d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, node)
			}
		}
	}
	if len(d.Includes) > 0 {
		d.Source, d.Includes = d.Includes[0], d.Includes[1:]
	}
	return d, errors.Join(errs...)
}

// meiNodes returns the nodes of the management engine interfaces of a discrete GPU, which give
// access to its firmware. The nodes are below auxiliary devices such as "i915.mei-gscfi.768"
// (drivers/misc/mei/gsc-me.c).
func meiNodes(function sysfs.Device) (nodes []*specs.DeviceNode, err error) {
	var errs []error
	for _, auxiliary := range function.Children("") {
		if !strings.Contains(auxiliary.Name(), ".mei-") {
			continue
		}
		for _, mei := range auxiliary.Children("mei") {
			node, err := discovery.Node(mei, "/dev")
			nodes, errs = append(nodes, node), append(errs, err)
		}
	}
	return nodes, errors.Join(errs...)
}
