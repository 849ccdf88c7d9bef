// Package vfio describes PCI functions that are bound to vfio, for virtual machines and other
// programs in user space, and vGPUs, which are mediated devices or virtual functions. It describes
// functions that no other family describes. It does not bind drivers or create devices.
package vfio

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/network"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Family recognises devices under vfio.
var Family = &discovery.Family{
	Name:              "vfio",
	Doc:               "PCI functions bound to vfio that no other family offers, and vGPUs, as mediated devices or virtual functions",
	Match:             matches(),
	Leftovers:         true,
	Describe:          describe,
	CommonNodes:       pci.VFIOControl(),
	Grant:             grant,
	FileDirs:          []string{network.InfoDir},
	AllowsPassthrough: true,
}

// drivers lists the kernel's vfio drivers for PCI functions: vfio-pci, which takes any function,
// and drivers that add live migration or memory (drivers/vfio/pci).
var drivers = []string{
	"vfio-pci", "hisi_acc_vfio_pci", "mlx5_vfio_pci", "nvgrace_gpu_vfio_pci",
	"pds_vfio_pci", "qat_vfio_pci", "virtio_vfio_pci", "xe-vfio-pci",
}

func matches() []discovery.Match {
	var matches []discovery.Match
	for _, driver := range drivers {
		matches = append(matches, discovery.Match{Bus: "pci", Driver: driver})
	}
	return append(matches, discovery.Match{Bus: "pci", Driver: manager}, discovery.Match{Bus: "mdev"}, discovery.Match{Bus: "pci", Passthrough: true})
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	functions, mdevs := split(found)
	devices, problems = describeMediated(host, mdevs)
	functions, rebindable := withoutPassthrough(functions)
	more, unread := describePassthrough(host, rebindable)
	devices, problems = append(devices, more...), append(problems, unread...)
	functions, unread = withoutOthers(functions)
	problems = append(problems, unread...)
	ours := make(map[string][]sysfs.Device) // by IOMMU group
	for _, function := range functions {
		id := groupOf(function)
		ours[id] = append(ours[id], function)
	}
	groups := make(map[string]*group)
	for _, function := range functions {
		// A physical function with virtual functions is not a device.
		divided, sriovErr := pci.HasVirtualFunctions(function)
		if divided {
			continue
		}
		id := groupOf(function)
		g := groups[id]
		switch {
		case id == "":
			g = &group{functions: []sysfs.Device{function}}
		case g == nil:
			g = readGroup(host, id, ours[id])
			groups[id] = g
		}
		if g.taken {
			continue
		}
		d, err := g.describe(host, function)
		if err = errors.Join(err, sriovErr); err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		devices = append(devices, d)
	}
	return devices, problems
}

// groupOf returns the number of the function's IOMMU group, "" if there is none.
func groupOf(function sysfs.Device) string {
	id := function.Link("iommu_group")
	if _, err := strconv.ParseUint(id, 10, 32); err != nil {
		return ""
	}
	return id
}

// group is an IOMMU group. A process that opens the group can access all of its functions.
type group struct {
	id        string // "" for a function without a group
	functions []sysfs.Device
	taken     bool  // another family describes one of the functions
	err       error // the errors from reading its functions
}

// readGroup reads the functions of a group, in addition to the family's own functions.
func readGroup(host *discovery.Host, id string, ours []sysfs.Device) *group {
	g := &group{id: id, functions: ours}
	dir := path.Join("sys/kernel/iommu_groups", id, "devices")
	entries, err := fs.ReadDir(host.FS, dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		g.err = fmt.Errorf("IOMMU group %s: list devices: %w", id, err)
	}
	for _, entry := range entries {
		member, ok := sysfs.At(host.FS, dir).LinkTo(entry.Name())
		if !ok || slices.ContainsFunc(ours, func(own sysfs.Device) bool { return own.Path == member.Path }) {
			continue
		}
		_, err := member.PCIID()
		switch driver := member.Driver(); {
		case slices.Contains(drivers, driver) && err != nil: // the owner of the function is unknown
			g.err = errors.Join(g.err, fmt.Errorf("IOMMU group %s: function %s: %w", id, member.Name(), err))
		case slices.Contains(drivers, driver):
			g.taken = true
		}
		g.functions = append(g.functions, member)
	}
	return g
}

func (g *group) describe(host *discovery.Host, function sysfs.Device) (discovery.Device, error) {
	d, err := pci.DescribeFunction(host, function)
	errs := []error{err, g.err}
	// A GPU under vfio is not a GPU to a container that computes.
	d.Attributes.SetString("kind", "other")
	id, _ := function.PCIID()
	d.Attributes.SetString("pciClass", id.Class)
	profile, _ := vgpuOf(function) // withoutOthers has read the attribute without an error
	d.Attributes.SetString("profile", profile)
	nodes, nodesErr := pci.VFIONodes(host, function)
	d.Edits.DeviceNodes = nodes
	discovery.PermitMknod(d.Edits.DeviceNodes) // as in KubeVirt
	errs = append(errs, nodesErr)
	d.Health = pci.VFIOHealth(host, function, d.Edits.DeviceNodes)
	if len(nodes) > 0 {
		d.PluginOffers = offers(g.id, id, function)
		errs = append(errs, addPool(&d, host, function, id))
	}
	return d, errors.Join(errs...)
}

// addPool adds the offer of the SR-IOV network device plugin, and the port information for network
// plugins if the function is a network adapter. The plugin calls other functions accelerators.
func addPool(d *discovery.Device, host *discovery.Host, function sysfs.Device, id sysfs.PCIID) (err error) {
	offers := d.PluginOffers
	d.PluginOffers = []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{function.Name()}}}
	if strings.HasPrefix(id.Class, "02") {
		f := network.Function{Device: function, PCI: function, Port: network.ReadPort(host, function, nil)}
		err = f.DescribeFunction(d, host)
	}
	for i := range d.PluginOffers {
		d.PluginOffers[i].SRIOV = true
	}
	d.PluginOffers = append(offers, d.PluginOffers...)
	return err
}

// offers returns the offers of plugins for a function that the administrator names. KubeVirt uses
// the IOMMU group as the ID. The NVIDIA plugin uses the address, for names in its own domain.
func offers(group string, id sysfs.PCIID, function sysfs.Device) []discovery.Offer {
	offers := []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{group}}}
	if id.Vendor == nvidiaVendor && function.Driver() != manager { // functions of the vGPU manager belong to KubeVirt alone
		offers = append(offers, discovery.Offer{Resource: nvidiaDomain + "/" + discovery.AnyName, IDs: []string{function.Name()}})
	}
	return offers
}

// grant returns the environment variables of the SR-IOV network device plugin for functions in its
// pools, and the variables of KubeVirt for other functions.
func grant(given []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
	pooled := func(d discovery.Device) bool { return d.SRIOV != nil }
	var edits specs.ContainerEdits
	if pool := slices.DeleteFunc(slices.Clone(given), func(d discovery.Device) bool { return !pooled(d) }); len(pool) > 0 {
		edits = network.GrantEdits(pool, grant)
	}
	others := slices.DeleteFunc(slices.Clone(given), pooled)
	return discovery.Join(edits, grantKubeVirt(others, grant))
}

// grantKubeVirt lists addresses of functions and UUIDs of mediated devices, in the environment
// variables that KubeVirt uses for a resource.
func grantKubeVirt(given []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
	if grant.API == discovery.ModeDRA {
		return specs.ContainerEdits{}
	}
	var addresses, uuids []string
	for _, d := range given {
		if uuid := d.Attributes.String("uuid"); uuid != "" {
			uuids = append(uuids, uuid)
		} else {
			addresses = append(addresses, d.Attributes.String(deviceattribute.StandardDeviceAttributePCIBusID))
		}
	}
	name := discovery.ResourceVariable(grant.Resource)
	var edits specs.ContainerEdits
	if len(addresses) > 0 {
		edits.Env = append(edits.Env, "PCI_RESOURCE_"+name+"="+strings.Join(addresses, ","))
	}
	if len(uuids) > 0 {
		edits.Env = append(edits.Env, "MDEV_PCI_RESOURCE_"+name+"="+strings.Join(uuids, ","))
	}
	return edits
}
