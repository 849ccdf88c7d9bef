// Package rdma describes network adapters that can do RDMA, as the kernel's
// InfiniBand core shows them in /sys: InfiniBand, RoCE, iWARP and the like. It
// covers adapters that are PCI functions and the sub-functions of one. It gives
// a container the verbs devices and moves no network interface, which is a
// network plugin's task; what it gives works where the RDMA devices are shared
// between network namespaces.
package rdma

import (
	"errors"
	"path"
	"slices"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family is RDMA adapters.
var Family = &discovery.Family{
	Name:     "rdma",
	Doc:      "RDMA network adapters: InfiniBand, RoCE, iWARP, EFA",
	Match:    []discovery.Match{{Class: "infiniband"}},
	Describe: describe,
	Grant:    grant,
}

// vendors are the makers by their PCI vendor IDs.
var vendors = map[string]string{
	"1077": "qlogic",
	"1137": "cisco",
	"1425": "chelsio",
	"14e4": "broadcom",
	"15ad": "vmware",
	"15b3": "mellanox",
	"19e5": "huawei",
	"1d0f": "aws",
	"1dd8": "pensando",
	"1ded": "alibaba",
	"1fc1": "qlogic", // when it was PathScale
	"8086": "intel",
}

// classes begin the PCI classes of network and InfiniBand controllers. Others,
// such as an accelerator with network ports, are of other families.
var classes = []string{"02", "0c06"}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	cm, cmErr := connectionManager(host)
	carved := carved(found)
	var seen []string
	for _, verbs := range found {
		owner := ownerOf(verbs)
		function, ok := verbs.PCIFunction()
		if !ok || slices.Contains(seen, owner.Path) {
			continue
		}
		seen = append(seen, owner.Path)
		id, err := function.PCIID()
		if id.Class == "" && err != nil {
			problems = append(problems, discovery.Problem{Device: nameOf(owner, function), Err: err})
		}
		network := slices.ContainsFunc(classes, func(prefix string) bool { return strings.HasPrefix(id.Class, prefix) })
		// As with the SR-IOV plugin, an adapter that has virtual functions is not
		// given away under them, and neither is one that has sub-functions.
		if !network || owner.Exists("virtfn0") || carved[owner.Path] {
			continue
		}
		d, err := describeAdapter(host, owner, function, verbs, cm)
		if err := errors.Join(err, cmErr); err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		devices = append(devices, d)
	}
	return devices, problems
}

// ownerOf returns the device that has a device of class infiniband: a PCI
// function, or the auxiliary device of a sub-function below it, which is called
// "mlx5_core.sf.4".
func ownerOf(verbs sysfs.Device) sysfs.Device { return verbs.Parent().Parent() }

// carved returns the paths of PCI functions that have sub-functions.
func carved(found []sysfs.Device) map[string]bool {
	carved := make(map[string]bool)
	for _, verbs := range found {
		if function, ok := verbs.PCIFunction(); ok && function.Path != ownerOf(verbs).Path {
			carved[function.Path] = true
		}
	}
	return carved
}

// nameOf returns the name of the function, or of a sub-function of it.
func nameOf(owner, function sysfs.Device) string {
	if owner.Path == function.Path {
		return discovery.DeviceName(function)
	}
	return discovery.DeviceName(function) + "-" + discovery.DeviceName(owner)
}

func describeAdapter(host *discovery.Host, owner, function, verbs sysfs.Device, cm *specs.DeviceNode) (discovery.Device, error) {
	d, err := discovery.PCI(host, function)
	errs := []error{err}
	parent := d.Attributes.String("parent") // of a virtual function
	if owner.Path != function.Path {
		parent = d.Name
		d.Name, d.Source = nameOf(owner, function), owner.Path
		d.Attributes.SetString("function", "partition")
		d.Attributes.SetString("parent", parent)
	}
	if parent != "" {
		d.PartOf = &discovery.Whole{Name: parent}
	}
	d.Attributes.SetString("kind", "nic")
	d.Attributes.SetString("vendor", vendors[d.Attributes.String("pciVendor")])
	attrs := verbs.Attrs()
	model, _ := attrs.Text("hca_type")
	d.Attributes.SetString("model", model)
	firmware, _ := attrs.Text("fw_ver")
	d.Attributes.SetVersion("firmwareVersion", firmware)
	// That of a virtual function or sub-function is the administrator's choice.
	if guid, ok := attrs.Text("node_guid"); ok && parent == "" && strings.Trim(guid, "0:") != "" {
		d.Attributes.SetString("uuid", guid)
		d.Identity = d.Attributes.String("uuid")
	}
	layer, err := linkLayer(verbs)
	d.Attributes.SetString("linkLayer", layer)
	errs = append(errs, attrs.Err(), err)
	for _, class := range []string{"infiniband_verbs", "infiniband_mad"} {
		for _, child := range owner.Children(class) { // uverbs0, issm0, umad0
			node, err := nodeOf(child)
			d.Edits.DeviceNodes, errs = append(d.Edits.DeviceNodes, node), append(errs, err)
		}
	}
	if cm != nil {
		d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, cm)
	}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	if len(owner.Children("infiniband_verbs")) == 0 {
		d.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "the kernel has no verbs device for it"}
	}
	d.Offers = []discovery.Offer{{IDs: []string{owner.Name()}}}
	return d, errors.Join(errs...)
}

// linkLayer returns what the ports are connected to, "InfiniBand" or
// "Ethernet", if it is the same for all of them. The kernel has "Unspecified"
// for what is neither, and "Unknown" for what it cannot tell.
func linkLayer(verbs sysfs.Device) (string, error) {
	var layers []string
	var errs []error
	for _, port := range verbs.Children("ports") {
		attrs := port.Attrs()
		layer, _ := attrs.Text("link_layer")
		layers, errs = append(layers, layer), append(errs, attrs.Err())
	}
	layers = slices.Compact(layers)
	if len(layers) != 1 || layers[0] != "InfiniBand" && layers[0] != "Ethernet" {
		return "", errors.Join(errs...)
	}
	return layers[0], errors.Join(errs...)
}

// connectionManager returns the node of the RDMA connection manager, which all
// adapters share, nil where the kernel has none.
func connectionManager(host *discovery.Host) (*specs.DeviceNode, error) {
	cm := sysfs.At(host.FS, "sys/class/misc/rdma_cm")
	if !cm.Exists(".") {
		return nil, nil
	}
	return nodeOf(cm)
}

// nodeOf returns a node in /dev/infiniband, where libibverbs looks for it. The
// kernel names the directory since Linux 2.6.36; before, it left that to udev.
func nodeOf(d sysfs.Device) (*specs.DeviceNode, error) {
	const dir = "/dev/infiniband"
	node, err := discovery.Node(d, dir)
	node.Path = path.Join(dir, path.Base(node.Path))
	node.HostPath = node.Path
	return node, err
}

// grant names the adapters by their addresses, in the variable that the SR-IOV
// network device plugin has for a resource.
func grant(given []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
	prefix, name, ok := strings.Cut(grant.Resource, "/")
	if !ok {
		return specs.ContainerEdits{}
	}
	ids := make([]string, len(given))
	for i, d := range given {
		ids[i] = d.Attributes.String(deviceattribute.StandardDeviceAttributePCIBusID)
		if d.Attributes.String("function") == "partition" {
			ids[i] = path.Base(d.Source)
		}
	}
	variable := "PCIDEVICE_" + strings.ToUpper(strings.ReplaceAll(prefix+"_"+name, ".", "_"))
	return specs.ContainerEdits{Env: []string{variable + "=" + strings.Join(ids, ",")}}
}
