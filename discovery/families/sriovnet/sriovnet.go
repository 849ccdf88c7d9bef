// Package sriovnet describes virtual functions and sub-functions of network
// adapters that have no RDMA device: those that a container uses through its
// network, and those that were bound to vfio, uio or vDPA for programs in user
// space. It binds none, moves no network interface, and leaves physical functions to the
// host unless the administrator pools them. Where the administrator allows it, it
// describes virtual functions that are made when somebody gets one.
package sriovnet

import (
	"errors"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/network"
	"chandler.dev/discovery/sysfs"
)

// Family is virtual functions of network adapters.
var Family = &discovery.Family{
	Name: "sriovnet",
	Doc:  "SR-IOV virtual functions and sub-functions of network adapters, without RDMA",
	Match: []discovery.Match{
		{Bus: "pci", PCIClass: "02"},
		{Bus: "auxiliary", Name: subfunctions},
		{Bus: "vdpa"},  // what is made of a function
		{Class: "net"}, // likewise
	},
	Describe:    describe,
	CommonNodes: discovery.VFIOControl(),
	Grant:       network.Grant,
	Make:        discovery.MakeVirtual,
	Unmake:      discovery.UnmakeVirtual,
	Parameters:  []discovery.Parameter{network.InterfaceName},
	Accept:      network.Accept,
	FileDirs:    []string{network.InfoDir},
}

// subfunctions are called "mlx5_core.sf.4".
const subfunctions = "*.sf.*"

// vendors are the makers by their PCI vendor IDs.
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

// virtualIDs are the PCI device IDs that only virtual functions have, by the
// vendor's: a virtual machine does not see whose they are.
var virtualIDs = map[string]string{
	"15b3": "1002 1004 1012 1014 1016 1018 101a 101c 101e",
	"8086": "10ca 10ed 1515 1520 154c 1565 15a8 15c5 1889 37cd 57ad",
}

// plainVirtual are the drivers of adapters that can do RDMA, and whose virtual functions
// cannot: irdma takes what ice and i40e have, and nothing of iavf (irdma_auxiliary_id_table
// in drivers/infiniband/hw/irdma/main.c of Linux 6.1 and 6.12).
var plainVirtual = []string{"i40e", "ice"}

func isVirtual(id sysfs.PCIID) bool {
	return id.Device != "" && strings.Contains(virtualIDs[id.Vendor], id.Device)
}

// unit is what can be given away: a PCI function or a sub-function of one.
type unit struct {
	sysfs.Device
	function   sysfs.Device
	interfaces []sysfs.Device // in the host's network namespace
	vdpa       []sysfs.Device
	carved     bool // it has sub-functions
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	units, byPath := unitsOf(found)
	routes, routesErr := network.ReadRoutes(host)
	ports := make(map[string]network.Port)
	for _, u := range units {
		if u.carved || discovery.Idle(u.Driver()) {
			continue
		}
		rdma := u.Exists("infiniband") // then it is family rdma's
		if rdma && !slices.Contains(plainVirtual, u.Driver()) {
			continue
		}
		physical, err := u.physical()
		if err != nil {
			problems = append(problems, discovery.Problem{Device: discovery.DeviceName(u.function), Err: err})
		}
		if physical && err == nil && len(host.VirtualFunctions) > 0 {
			virtual, err := u.unmade(host, routes, routesErr)
			problems = append(problems, discovery.Problems(discovery.DeviceName(u.function), err)...)
			devices = append(devices, virtual...)
		}
		if rdma || physical && (!host.Pools || err != nil || !u.poolable()) {
			continue
		}
		d, err := u.identify(host)
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
		if err := errors.Join(err, u.describe(&d, host, f)); err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		devices = append(devices, d)
	}
	return devices, problems
}

// unitsOf returns the functions and sub-functions, with what the kernel made of
// them, and the same by their paths.
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

// ownerOf returns the path of the function or sub-function that the device is
// or sits on, "" if there is none.
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

// parent returns the physical function, which a virtual machine does not see.
func (u *unit) parent() (sysfs.Device, bool) {
	if u.Path != u.function.Path {
		return u.function, true
	}
	parent, ok := u.LinkTo("physfn")
	return parent, ok && sysfs.IsPCIAddress(parent.Name())
}

// physical reports whether the unit is left to the host: a physical function,
// or what may be one. The error is why it cannot be told.
func (u *unit) physical() (bool, error) {
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

// poolable reports whether the SR-IOV plugin would take a physical function: one that
// the kernel drives and that is not divided. Under vfio it is of family vfio.
func (u *unit) poolable() bool {
	divided, err := discovery.Divided(u.function)
	driver := u.Driver()
	return !divided && err == nil && !slices.ContainsFunc([]string{"vfio", "uio"}, func(part string) bool { return strings.Contains(driver, part) })
}

// unmade returns the virtual functions that the physical function could have.
func (u *unit) unmade(host *discovery.Host, routes network.Routes, routesErr error) ([]discovery.Device, error) {
	if !u.poolable() {
		return nil, nil
	}
	physical, err := u.identify(host)
	if err != nil {
		return nil, err
	}
	port := network.ReadPort(host, u.function, u.interfaces)
	own := network.Function{Device: u.Device, PCI: u.function, Interfaces: u.interfaces, Port: port, Routes: routes, RoutesErr: routesErr}
	if err := own.Describe(&physical, host); err != nil {
		return nil, err
	}
	return network.Unmade(host, physical, port)
}

// identify describes what the unit is, and of what.
func (u *unit) identify(host *discovery.Host) (discovery.Device, error) {
	d, err := discovery.PCI(host, u.function)
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

// interfacesOf returns the interfaces of a unit, none of one that is not known.
func (u *unit) interfacesOf() []sysfs.Device {
	if u == nil {
		return nil
	}
	return u.interfaces
}

// describe adds what the unit is for, and the port that it sends through.
func (u *unit) describe(d *discovery.Device, host *discovery.Host, f network.Function) error {
	nodes, wanted, nodesErr := u.nodes(host)
	d.Edits.DeviceNodes = nodes
	switch {
	case discovery.IsVFIO(u.Driver()):
		d.Health = discovery.VFIOHealth(host, u.Device, nodes)
	case wanted:
		d.Health = discovery.NodeHealth(host, nodes)
	}
	d.Health = f.Port.Health(d.Health)
	f.VDPA = u.vdpaDevice()
	return errors.Join(nodesErr, f.Describe(d, host))
}

// nodes returns the nodes of the unit, and whether its driver has any: what the
// kernel drives itself is used through the network.
func (u *unit) nodes(host *discovery.Host) (nodes []*specs.DeviceNode, wanted bool, err error) {
	switch driver := u.Driver(); {
	case discovery.IsVFIO(driver):
		nodes, err = discovery.VFIO(host, u.Device)
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

// inContainer gives the group of a function without an IOMMU the name in the
// container that other groups have, as the SR-IOV plugin does.
func inContainer(nodes []*specs.DeviceNode) []*specs.DeviceNode {
	for _, node := range nodes {
		node.Path = strings.Replace(node.Path, "/noiommu-", "/", 1)
	}
	return nodes
}

// vdpaDevice returns what the kernel made of the unit on the vDPA bus, nil if it
// is nothing that can be used.
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

// madeOf returns the devices that a driver of the vDPA bus made of one of the
// unit's, by what their names begin with. vhost_vdpa makes its device below that.
// virtio_vdpa makes it beside that, below whatever does its DMA, which is the
// function (virtio_vdpa_probe in drivers/virtio/virtio_vdpa.c), and nothing says
// which of several it is.
func (u *unit) madeOf(vdpa sysfs.Device, prefix string) []sysfs.Device {
	if found := vdpa.Numbered(".", prefix); len(found) > 0 || vdpa.Driver() != "virtio_vdpa" {
		return found
	}
	if len(u.vdpa) > 1 {
		return nil
	}
	return u.Numbered(".", prefix)
}

// nodesOf returns the nodes of those devices that have one: uio0, vhost-vdpa-0.
func nodesOf(devices []sysfs.Device) (nodes []*specs.DeviceNode, err error) {
	var errs []error
	for _, d := range devices {
		if !d.Exists("dev") {
			continue
		}
		node, err := discovery.Node(d, "/dev")
		nodes, errs = append(nodes, node), append(errs, err)
	}
	return nodes, errors.Join(errs...)
}
