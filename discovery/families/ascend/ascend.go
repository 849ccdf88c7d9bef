// Package ascend describes Huawei Ascend NPUs as their driver, devdrv_device_driver, shows them in
// /sys. The driver's sources are public; the attributes are those of devdrv_sysfs.c, and the nodes
// are the same as in the Huawei device plugin. The package does not create virtual NPUs.
package ascend

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

const vendor = "19e5"

// Family recognises Huawei Ascend NPUs.
var Family = &discovery.Family{
	Name: "ascend",
	Doc:  "Huawei's Ascend NPUs",
	Match: []discovery.Match{
		{Bus: "pci", Vendor: vendor, Driver: "devdrv_device_driver"},
		{Bus: "pci", Vendor: vendor, PCIClass: "1200", Unbound: true},
	},
	CommonNodes: control,
	Describe:    describe,
	Grant:       grant,
}

// control lists the nodes that all NPUs need and that give access to none of them.
var control = []string{"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"}

// chips maps PCI device IDs to the NPU names of the Huawei plugin (devdrv_pci.h: CLOUD_V1_DEVICE,
// MINI_V2_DEVICE, …). The plugin uses Ascend910 for all later NPUs for training.
var chips = map[string]string{
	"d100": "Ascend310", "d105": "Ascend310B",
	"d500": "Ascend310P", "d501": "Ascend310P",
	"d801": "Ascend910", "d802": "Ascend910", "d803": "Ascend910", "d804": "Ascend910",
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, function := range found {
		// Virtual functions hide the physical function.
		divided, sriovErr := pci.HasVirtualFunctions(function)
		if divided {
			continue
		}
		d, err := describeNPU(host, function)
		problems = append(problems, discovery.Problems(d.Name, errors.Join(err, sriovErr))...)
		devices = append(devices, d)
	}
	return devices, problems
}

func describeNPU(host *discovery.Host, function sysfs.Device) (discovery.Device, error) {
	if function.Driver() == "" {
		return pci.DescribeUnbound(host, function, "npu", "huawei")
	}
	d, err := pci.DescribeFunction(host, function)
	d.Attributes.SetString("kind", "npu")
	d.Attributes.SetString("vendor", "huawei")
	model := chips[d.Attributes.String("pciDevice")]
	d.Attributes.SetString("model", model)
	attrs := function.Attrs()
	number, known := attrs.Uint("dev_id")
	chips, several := attrs.Uint("davinci_dev_num")
	switch {
	case several && chips > 1:
		err = errors.Join(err, fmt.Errorf("attribute davinci_dev_num: the function has %d NPUs, and the driver reports the number of only one", chips))
	case known && number < 1<<16:
		node := "/dev/davinci" + strconv.FormatUint(number, 10)
		d.Edits.DeviceNodes = []*specs.DeviceNode{{Path: node, HostPath: node, Permissions: "rw"}}
		d.PluginOffers = []discovery.Offer{offer(model, number)}
	case known:
		err = errors.Join(err, fmt.Errorf("attribute dev_id: not a device number: %d", number))
	}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	for _, path := range control {
		switch {
		case len(d.Edits.DeviceNodes) == 0:
		case host.FileExists(path):
			d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, &specs.DeviceNode{Path: path, HostPath: path, Permissions: "rw"})
		case d.Health.Status == discovery.Healthy:
			d.Health = discovery.MissingNodeHealth(path)
		}
	}
	return d, errors.Join(err, attrs.Err())
}

// offer returns the offer of the Huawei plugin for an NPU: huawei.com/Ascend910 with the ID
// Ascend910-3. For an unknown chip the administrator chooses the resource name.
func offer(model string, number uint64) discovery.Offer {
	if model == "" {
		return discovery.Offer{Resource: discovery.AnyName, IDs: []string{"davinci" + strconv.FormatUint(number, 10)}}
	}
	return discovery.Offer{Resource: "huawei.com/" + model, IDs: []string{model + "-" + strconv.FormatUint(number, 10)}}
}

// grant returns the host's numbers of the NPUs for the Huawei container runtime.
func grant(given []discovery.Device, _ discovery.Grant) specs.ContainerEdits {
	var numbers []string
	for _, d := range given {
		for _, node := range d.Edits.DeviceNodes {
			if number, is := strings.CutPrefix(node.Path, "/dev/davinci"); is && number != "_manager" {
				numbers = append(numbers, number)
			}
		}
	}
	if len(numbers) == 0 {
		return specs.ContainerEdits{}
	}
	return specs.ContainerEdits{Env: []string{"ASCEND_VISIBLE_DEVICES=" + strings.Join(numbers, ",")}}
}
