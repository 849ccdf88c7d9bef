// Package sriovnet describes virtual functions and sub-functions of network adapters without an
// RDMA device: functions that a container uses through its network, and functions that are bound to
// vfio, uio or vDPA for programs in user space. It does not bind drivers or move network
// interfaces. Physical functions belong to the host unless the administrator pools them. If the
// administrator allows it, the package also describes virtual functions that are created on demand.
package sriovnet

import (
	"errors"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/network"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Family recognises virtual functions and sub-functions of network adapters.
var Family = &discovery.Family{
	Name: "sriovnet",
	Doc:  "SR-IOV virtual functions and sub-functions of network adapters, without RDMA",
	Match: []discovery.Match{
		{Bus: "pci", PCIClass: "02"},
		{Bus: "auxiliary", Name: subfunctions},
		{Bus: "vdpa"},                  // child devices of a function
		{Class: "net", Hardware: true}, // child devices of a function
	},
	Describe:    describe,
	CommonNodes: pci.VFIOControl(),
	Grant:       network.GrantEdits,
	Create:      pci.MakeVirtual,
	Remove:      pci.UnmakeVirtual,
	Parameters:  []discovery.Parameter{network.InterfaceName},
	Accept:      network.Accept,
	FileDirs:    []string{network.InfoDir},
}

// subfunctions matches names such as "mlx5_core.sf.4".
const subfunctions = "*.sf.*"

// vendors maps PCI vendor IDs to vendors.
var vendors = map[string]string{
	"1077": "qlogic",
	"10df": "emulex",
	"1425": "chelsio",
	"14e4": "broadcom",
	"15b3": "mellanox",
	"177d": "cavium",
	"1924": "solarflare",
	"19e5": "huawei",
	"19ee": "netronome",
	"1dd8": "pensando",
	"8086": "intel",
}

// virtualIDs maps PCI vendor IDs to the device IDs of virtual functions. In a virtual machine, no
// link leads to the physical function.
var virtualIDs = map[string]string{
	"15b3": "1002 1004 1012 1014 1016 1018 101a 101c 101e",
	"8086": "10ca 10ed 1515 1520 154c 1565 15a8 15c5 1889 37cd 57ad",
}

// plainVirtual lists the drivers of RDMA adapters whose virtual functions do not support RDMA:
// irdma binds devices of ice and i40e, but not of iavf (irdma_auxiliary_id_table in
// drivers/infiniband/hw/irdma/main.c of Linux 6.1 and 6.12).
var plainVirtual = []string{"i40e", "ice"}

// cxiDrivers lists the drivers of Slingshot adapters, whose functions belong to the family slingshot.
var cxiDrivers = []string{"cxi_core", "cxi_ss1"}

func isVirtual(id sysfs.PCIID) bool {
	return id.Device != "" && strings.Contains(virtualIDs[id.Vendor], id.Device)
}

// unit is an allocatable function: a PCI function or a sub-function.
type unit struct {
	sysfs.Device
	function   sysfs.Device
	interfaces []sysfs.Device // in the host's network namespace
	vdpa       []sysfs.Device
	carved     bool // the function has sub-functions
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	units, byPath := unitsOf(found)
	routes, routesErr := network.ReadRoutes(host)
	ports := make(map[string]network.Port)
	for _, u := range units {
		if u.carved || pci.IsIdleDriver(u.Driver()) || slices.Contains(cxiDrivers, u.Driver()) {
			continue
		}
		rdma := u.HasEntry("infiniband") // the function belongs to the rdma family
		if rdma && !slices.Contains(plainVirtual, u.Driver()) {
			continue
		}
		physical, err := u.isPhysical()
		if err != nil {
			problems = append(problems, discovery.Problem{Device: discovery.DeviceName(u.function), Err: err})
		}
		if physical && err == nil && len(host.VirtualFunctions) > 0 {
			virtual, err := u.uncreatedFunctions(host, routes, routesErr)
			problems = append(problems, discovery.Problems(discovery.DeviceName(u.function), err)...)
			devices = append(devices, virtual...)
		}
		if rdma || physical && (!host.Pools || err != nil || !u.isPoolable()) {
			continue
		}
		d, err := u.identifyUnit(host)
		if physical {
			d.PoolOnly = discovery.SRIOVPools
		}
		if len(u.interfaces) > 0 && routesErr != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: routesErr})
			continue
		}
		if routes.LeadThrough(host, u.interfaces) {
			continue
		}
		f := network.Function{Device: u.Device, PCI: u.function, Interfaces: u.interfaces, Routes: routes, RoutesErr: routesErr}
		if parent, ok := u.parent(); ok {
			if _, read := ports[parent.Path]; !read {
				ports[parent.Path] = network.ReadPort(host, parent, byPath[parent.Path].interfacesOf())
			}
			f.Port = ports[parent.Path]
			d.PartOf = &discovery.Silicon{Name: discovery.DeviceName(parent)}
		}
		if physical {
			f.Port = network.ReadPort(host, u.function, u.interfaces)
		}
		if err := errors.Join(err, u.addPort(&d, host, f)); err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		devices = append(devices, d)
	}
	return devices, problems
}

// unitsOf returns the functions and sub-functions with their child devices, as a list and by path.
func unitsOf(found []sysfs.Device) (units []*unit, byPath map[string]*unit) {
	byPath = make(map[string]*unit)
	for _, d := range found {
		function, ok := d.PCIFunction()
		if ok && (function.Path == d.Path || isSubfunction(d)) {
			byPath[d.Path] = &unit{Device: d, function: function}
			units = append(units, byPath[d.Path])
		}
	}
	for _, d := range found {
		u := byPath[ownerOf(d.Parent())]
		switch {
		case u == nil || byPath[d.Path] != nil:
		case path.Base(path.Dir(d.Path)) == "net":
			u.interfaces = append(u.interfaces, d)
		default:
			u.vdpa = append(u.vdpa, d)
		}
	}
	for _, u := range units {
		if function := byPath[u.function.Path]; function != nil && function != u {
			function.carved = true
		}
	}
	return units, byPath
}

// ownerOf returns the path of the function or sub-function that contains the device, or of the
// device itself, "" if there is none.
func ownerOf(d sysfs.Device) string {
	for ; strings.Contains(d.Path, "/"); d = d.Parent() {
		if sysfs.IsPCIAddress(d.Name()) || isSubfunction(d) {
			return d.Path
		}
	}
	return ""
}

func isSubfunction(d sysfs.Device) bool {
	matched, _ := path.Match(subfunctions, d.Name())
	return matched
}

// parent returns the physical function, which is not visible in a virtual machine.
func (u *unit) parent() (sysfs.Device, bool) {
	if u.Path != u.function.Path {
		return u.function, true
	}
	parent, ok := u.LinkTo("physfn")
	return parent, ok && sysfs.IsPCIAddress(parent.Name())
}

// isPhysical reports whether the unit belongs to the host: a physical function or a possible
// physical function. It returns an error if the IDs are unreadable.
func (u *unit) isPhysical() (bool, error) {
	if _, virtual := u.parent(); virtual {
		return false, nil
	}
	id, err := u.PCIID()
	if isVirtual(id) {
		return false, nil
	}
	if id.Vendor != "" && id.Device != "" {
		err = nil
	}
	return true, err
}

// isPoolable reports whether the SR-IOV plugin would use a physical function: a function with a
// kernel driver and without virtual functions. Functions under vfio belong to the vfio family.
func (u *unit) isPoolable() bool {
	divided, err := pci.HasVirtualFunctions(u.function)
	driver := u.Driver()
	return !divided && err == nil && !slices.ContainsFunc([]string{"vfio", "uio"}, func(part string) bool { return strings.Contains(driver, part) })
}

// uncreatedFunctions returns the virtual functions that could be created on the physical function.
func (u *unit) uncreatedFunctions(host *discovery.Host, routes network.Routes, routesErr error) ([]discovery.Device, error) {
	if !u.isPoolable() {
		return nil, nil
	}
	physical, err := u.identifyUnit(host)
	if err != nil {
		return nil, err
	}
	port := network.ReadPort(host, u.function, u.interfaces)
	own := network.Function{Device: u.Device, PCI: u.function, Interfaces: u.interfaces, Port: port, Routes: routes, RoutesErr: routesErr}
	if err := own.DescribeFunction(&physical, host); err != nil {
		return nil, err
	}
	return network.UncreatedFunctions(host, physical, port)
}

// identifyUnit describes the unit and its PCI function.
func (u *unit) identifyUnit(host *discovery.Host) (discovery.Device, error) {
	d, err := pci.DescribeFunction(host, u.function)
	vendor := d.Attributes.String("pciVendor")
	if id, _ := u.function.PCIID(); isVirtual(id) {
		d.Attributes.SetString("function", "virtual")
	}
	if u.Path != u.function.Path {
		d.Attributes.SetString("function", "partition")
		d.Attributes.SetString("parent", d.Name)
		d.Attributes.SetString("driver", u.Driver())
		d.Name, d.Source = d.Name+"-"+discovery.DeviceName(u.Device), u.Path
	}
	d.Attributes.SetString("kind", "nic")
	d.Attributes.SetString("vendor", vendors[vendor])
	return d, err
}

// interfacesOf returns the interfaces of a unit, none if the unit is nil.
func (u *unit) interfacesOf() []sysfs.Device {
	if u == nil {
		return nil
	}
	return u.interfaces
}

// addPort adds the use of the unit and its port.
func (u *unit) addPort(d *discovery.Device, host *discovery.Host, f network.Function) error {
	nodes, wanted, nodesErr := u.nodes(host)
	d.Edits.DeviceNodes = nodes
	switch {
	case discovery.IsVFIO(u.Driver()):
		d.Health = pci.VFIOHealth(host, u.Device, nodes)
	case wanted:
		d.Health = discovery.NodeHealth(host, nodes)
	}
	d.Health = f.Port.HealthOr(d.Health)
	f.VDPA = u.vdpaDevice()
	return errors.Join(nodesErr, f.DescribeFunction(d, host))
}

// nodes returns the nodes of the unit, and whether its driver provides nodes. Units of kernel
// network drivers have none: containers use them through the network.
func (u *unit) nodes(host *discovery.Host) (nodes []*specs.DeviceNode, wanted bool, err error) {
	switch driver := u.Driver(); {
	case discovery.IsVFIO(driver):
		nodes, err = pci.VFIONodes(host, u.Device)
		return inContainer(nodes), true, err
	case driver == "igb_uio" || driver == "uio_pci_generic":
		nodes, err = nodesOf(u.Children("uio"))
		return nodes, true, err
	}
	var errs []error
	for _, vdpa := range u.vdpa {
		if vdpa.Driver() == "vhost_vdpa" {
			more, err := nodesOf(vdpa.Children("."))
			nodes, wanted, errs = append(nodes, more...), true, append(errs, err)
		}
	}
	return nodes, wanted, errors.Join(errs...)
}

// inContainer renames the node of a function without an IOMMU to the form of other groups in the
// container, like the SR-IOV plugin.
func inContainer(nodes []*specs.DeviceNode) []*specs.DeviceNode {
	for _, node := range nodes {
		node.Path = strings.Replace(node.Path, "/noiommu-", "/", 1)
	}
	return nodes
}

// vdpaDevice returns the usable device of the unit on the vDPA bus, nil if there is none.
func (u *unit) vdpaDevice() *network.VDPA {
	for _, d := range u.vdpa {
		driver, made, dir := "", "", ""
		switch d.Driver() {
		case "vhost_vdpa":
			driver, made, dir = "vhost", "vhost-vdpa-", "/dev/"
		case "virtio_vdpa":
			driver, made, dir = "virtio", "virtio", "/sys/bus/virtio/devices/"
		default:
			continue
		}
		vdpa := &network.VDPA{Name: d.Name(), Driver: driver}
		if found := u.madeOf(d, made); len(found) == 1 {
			vdpa.Path = dir + found[0].Name()
		}
		return vdpa
	}
	return nil
}

// madeOf returns the devices that a driver of the vDPA bus created for a vDPA device of the unit,
// by the prefix of their names. vhost_vdpa creates its device below the vDPA device. virtio_vdpa
// creates the device below the DMA device, which is the function (virtio_vdpa_probe in
// drivers/virtio/virtio_vdpa.c). With several vDPA devices, the owner of such a device is unknown.
func (u *unit) madeOf(vdpa sysfs.Device, prefix string) []sysfs.Device {
	if found := vdpa.NumberedChildren(".", prefix); len(found) > 0 || vdpa.Driver() != "virtio_vdpa" {
		return found
	}
	if len(u.vdpa) > 1 {
		return nil
	}
	return u.NumberedChildren(".", prefix)
}

// nodesOf returns the nodes of the devices that have one: uio0, vhost-vdpa-0.
func nodesOf(devices []sysfs.Device) (nodes []*specs.DeviceNode, err error) {
	var errs []error
	for _, d := range devices {
		if !d.HasEntry("dev") {
			continue
		}
		node, err := discovery.Node(d, "/dev")
		nodes, errs = append(nodes, node), append(errs, err)
	}
	return nodes, errors.Join(errs...)
}
