// Package rdma describes RDMA network adapters as the kernel's InfiniBand core shows them in /sys:
// InfiniBand, RoCE, iWARP and others. It covers adapters that are PCI functions, and their
// sub-functions. A container gets the verbs devices, and the network interface if the claim
// requests the interface. If the administrator allows it, the package also describes virtual
// functions that are created on demand. The verbs devices work if RDMA devices are shared between
// network namespaces; otherwise a network plugin must move the devices (rdma-cni).
package rdma

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/network"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Family recognises RDMA adapters.
var Family = &discovery.Family{
	Name: "rdma",
	Doc:  "RDMA network adapters: InfiniBand, RoCE, iWARP, EFA",
	Match: []discovery.Match{
		{Class: "infiniband"},
		{Bus: "pci", Vendor: "15b3", PCIClass: "02", Unbound: true}, // all Mellanox adapters support RDMA
	},
	Describe:    describe,
	CommonNodes: []string{"/dev/infiniband/rdma_cm"},
	Grant:       network.GrantEdits,
	Create:      pci.MakeVirtual,
	Remove:      pci.UnmakeVirtual,
	Parameters:  []discovery.Parameter{network.InterfaceName},
	Accept:      network.Accept,
	FileDirs:    []string{network.InfoDir},
	Variables:   variables,
}

// variables select the libfabric provider, and tune the UCX libraries and the NCCL transport for
// InfiniBand and RoCE.
var variables = []string{
	"FI_PROVIDER", "NCCL_IB_GID_INDEX", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_RETRY_CNT", "NCCL_IB_SL", "NCCL_IB_TC",
	"NCCL_IB_TIMEOUT", "UCX_IB_GID_INDEX", "UCX_IB_SL", "UCX_IB_TRAFFIC_CLASS", "UCX_LOG_LEVEL", "UCX_TLS",
}

// vendors maps PCI vendor IDs to vendors.
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
	"434e": "cornelis",
	"1fc1": "qlogic", // formerly PathScale
	"8086": "intel",
}

// virtualRDMA lists the drivers of physical functions whose virtual functions support RDMA and are
// created by writing sriov_numvfs: the drivers below mlx5_ib, bnxt_re and hns-roce-hw-v2
// (drivers/infiniband/hw in Linux 6.1 to 6.18). mlx4_core creates virtual functions only when the
// module is loaded.
var virtualRDMA = []string{"bnxt_en", "hns3", "mlx5_core"}

// classes lists prefixes of the PCI classes of network and InfiniBand controllers. Other devices,
// such as an accelerator with network ports, belong to other families.
var classes = []string{"02", "0c06"}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	cm, cmErr := connectionManager(host)
	core := core{cm: cm, ports: make(map[string]network.Port)}
	core.namespaces, core.namespacesErr = namespaces(host)
	core.routes, core.routesErr = network.ReadRoutes(host)
	found, unbound := split(found)
	for _, function := range unbound {
		d, err := pci.DescribeUnbound(host, function, "nic", vendors["15b3"])
		problems = append(problems, discovery.Problems(d.Name, err)...)
		devices = append(devices, d)
	}
	carved := withSubFunctions(found)
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
		if !slices.ContainsFunc(classes, func(prefix string) bool { return strings.HasPrefix(id.Class, prefix) }) {
			continue
		}
		d, err := core.describe(host, owner, function, verbs)
		// As in the SR-IOV plugin, an adapter with virtual functions or sub-functions is not
		// offered together with them. In the shared RDMA plugin, such an adapter may be in pools,
		// which do not affect the functions.
		divided, sriovErr := pci.HasVirtualFunctions(owner)
		var virtual []discovery.Device
		if err == nil && sriovErr == nil && !carved[owner.Path] {
			virtual, err = core.uncreatedFunctions(host, owner, d)
		}
		devices = append(devices, virtual...)
		if divided || sriovErr != nil || carved[owner.Path] {
			d.Name, d.PoolOnly = d.Name+"-pool", discovery.SharedPools
		}
		if err := errors.Join(err, sriovErr, cmErr, core.namespacesErr); err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		devices = append(devices, d)
	}
	return devices, problems
}

// split returns the devices of class infiniband, and the PCI functions.
func split(found []sysfs.Device) (verbs, functions []sysfs.Device) {
	for _, d := range found {
		if sysfs.IsPCIAddress(d.Name()) {
			functions = append(functions, d)
		} else {
			verbs = append(verbs, d)
		}
	}
	return verbs, functions
}

// ownerOf returns the device above a device of class infiniband: a PCI function, or the auxiliary
// device of a sub-function, such as "mlx5_core.sf.4".
func ownerOf(verbs sysfs.Device) sysfs.Device { return verbs.Parent().Parent() }

// withSubFunctions returns the paths of PCI functions with sub-functions.
func withSubFunctions(found []sysfs.Device) map[string]bool {
	carved := make(map[string]bool)
	for _, verbs := range found {
		if function, ok := verbs.PCIFunction(); ok && function.Path != ownerOf(verbs).Path {
			carved[function.Path] = true
		}
	}
	return carved
}

// nameOf returns the device name of the function, or of the sub-function.
func nameOf(owner, function sysfs.Device) string {
	if owner.Path == function.Path {
		return discovery.DeviceName(function)
	}
	return discovery.DeviceName(function) + "-" + discovery.DeviceName(owner)
}

// core holds the facts that all adapters of a host have in common.
type core struct {
	cm            *specs.DeviceNode // of the connection manager, nil if the kernel has none
	namespaces    string
	namespacesErr error
	routes        network.Routes
	routesErr     error                   // affects only the movement of interfaces
	ports         map[string]network.Port // of physical functions, by path
}

func (c *core) describe(host *discovery.Host, owner, function, verbs sysfs.Device) (discovery.Device, error) {
	d, err := pci.DescribeFunction(host, function)
	errs := []error{err}
	parent := d.Attributes.String("parent") // set for a virtual function
	if owner.Path != function.Path {
		parent = d.Name
		d.Name, d.Source = nameOf(owner, function), owner.Path
		d.Attributes.SetString("function", "partition")
		d.Attributes.SetString("parent", parent)
	}
	if parent != "" {
		d.PartOf = &discovery.Silicon{Name: parent}
	}
	d.Attributes.SetString("kind", "nic")
	d.Attributes.SetString("vendor", vendors[d.Attributes.String("pciVendor")])
	attrs := verbs.Attrs()
	model, _ := attrs.Text("hca_type")
	d.Attributes.SetString("model", model)
	firmware, _ := attrs.Text("fw_ver")
	d.Attributes.SetVersion("firmwareVersion", firmware)
	// For a virtual function or sub-function, the administrator chooses the GUID.
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
	if owner.Driver() == "hfi1" {
		node, err := hfi1Node(host, verbs)
		if errs = append(errs, err); node != nil {
			d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, node)
		}
	}
	if c.cm != nil {
		d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, c.cm)
	}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	if len(owner.Children("infiniband_verbs")) == 0 {
		d.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionNodeMissing, Reason: "the kernel has no verbs device for it"}
	}
	c.describeNames(&d, owner, verbs)
	errs = append(errs, c.describeFunction(&d, host, owner, function))
	return d, errors.Join(errs...)
}

// describeNames adds the names of the adapter's RDMA devices.
func (c *core) describeNames(d *discovery.Device, owner, verbs sysfs.Device) {
	var names []string
	for _, device := range owner.Children("infiniband") {
		names = append(names, device.Name())
	}
	d.SetNames("rdmaDevice", names)
	d.Attributes.SetString("rdmaNamespaces", c.namespaces)
	// The partition key of the first port. An Ethernet adapter has only the default partition
	// (Documentation/ABI/stable/sysfs-class-infiniband).
	if key, err := verbs.Text("ports/1/pkeys/0"); err == nil && partitionKey.MatchString(key) {
		d.Attributes.SetString("pKey", key)
	}
}

var partitionKey = regexp.MustCompile(`^0x[0-9a-f]{4}$`)

// describeFunction adds the properties of the network function, and the health of the port that the
// function uses.
func (c *core) describeFunction(d *discovery.Device, host *discovery.Host, owner, function sysfs.Device) error {
	f := network.Function{Device: owner, PCI: function, Interfaces: owner.Children("net"), Routes: c.routes, RoutesErr: c.routesErr}
	physical := pci.PhysicalFunction(function)
	if _, read := c.ports[physical.Path]; !read {
		c.ports[physical.Path] = network.ReadPort(host, physical, physical.Children("net"))
	}
	f.Port = c.ports[physical.Path]
	err := f.DescribeFunction(d, host)
	d.Health = f.Port.HealthOr(d.Health)
	return err
}

// uncreatedFunctions returns the virtual functions that could be created on a physical function.
// Their RDMA device appears after the interface.
func (c *core) uncreatedFunctions(host *discovery.Host, owner sysfs.Device, physical discovery.Device) ([]discovery.Device, error) {
	if len(host.VirtualFunctions) == 0 || physical.PartOf != nil || !slices.Contains(virtualRDMA, owner.Driver()) {
		return nil, nil
	}
	devices, err := network.UncreatedFunctions(host, physical, c.ports[owner.Path])
	for i := range devices {
		devices[i].Attributes.SetString("rdmaNamespaces", c.namespaces)
	}
	return devices, err
}

// namespaces returns the RDMA mode of network namespaces: "shared" means that all namespaces have
// all RDMA devices, "exclusive" that each device belongs to one namespace, and "" that the mode is
// unknown (drivers/infiniband/core/device.c, netns_mode).
func namespaces(host *discovery.Host) (string, error) {
	attrs := sysfs.At(host.FS, "sys/module/ib_core/parameters").Attrs()
	mode, _ := attrs.Text("netns_mode")
	if err := attrs.Err(); err != nil {
		return "", fmt.Errorf("RDMA and network namespaces: %w", err)
	}
	return map[string]string{"Y": "shared", "N": "exclusive"}[mode], nil
}

// linkLayer returns the link layer of the ports, "InfiniBand" or "Ethernet", if all ports agree,
// and otherwise "". The kernel's other values are "Unspecified" and "Unknown".
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

// connectionManager returns the node of the RDMA connection manager, which all adapters share, nil
// if the kernel has none.
func connectionManager(host *discovery.Host) (*specs.DeviceNode, error) {
	cm := sysfs.At(host.FS, "sys/class/misc/rdma_cm")
	if !cm.HasEntry(".") {
		return nil, nil
	}
	return nodeOf(cm)
}

// hfi1Node returns the node of an Omni-Path adapter for PSM2 and OPX, such as /dev/hfi1_0. The kernel
// gives it the first name of the RDMA device, without a link between the two (hfi1_cdev_init in
// drivers/infiniband/hw/hfi1/device.c, Linux 4.4 to 6.18). If the RDMA device was renamed, its node is
// the only one without an RDMA device of its name. If there are several such nodes, hfi1Node returns
// nil, and containers get the verbs devices only.
func hfi1Node(host *discovery.Host, verbs sysfs.Device) (*specs.DeviceNode, error) {
	nodes, err := sysfs.ClassDevices(host.FS, "hfi1_user")
	if err != nil {
		return nil, err
	}
	of := func(name string) bool { return sysfs.At(host.FS, "sys/class/infiniband/"+name).HasEntry(".") }
	i := slices.IndexFunc(nodes, func(node sysfs.Device) bool { return node.Name() == verbs.Name() })
	if i < 0 {
		nodes = slices.DeleteFunc(nodes, func(node sysfs.Device) bool { return of(node.Name()) })
		i = 0
		if len(nodes) != 1 {
			return nil, nil
		}
	}
	node, err := discovery.Node(nodes[i], "/dev")
	discovery.PermitMknod([]*specs.DeviceNode{node})
	return node, err
}

// nodeOf returns a node in /dev/infiniband, where libibverbs looks for nodes. The kernel has named
// the directory since Linux 2.6.36; before, udev did.
func nodeOf(d sysfs.Device) (*specs.DeviceNode, error) {
	const dir = "/dev/infiniband"
	node, err := discovery.Node(d, dir)
	node.Path = path.Join(dir, path.Base(node.Path))
	node.HostPath = node.Path
	discovery.PermitMknod([]*specs.DeviceNode{node}) // as in the shared RDMA plugin
	return node, err
}
