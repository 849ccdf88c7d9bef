// Package vfio describes PCI functions that are bound to vfio, for virtual machines
// and other programs in user space, and vGPUs, which are mediated devices or
// virtual functions. It gets the functions that no other family hands out. It binds
// and makes nothing itself.
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
	"chandler.dev/discovery/sysfs"
)

// Family is what is bound to vfio.
var Family = &discovery.Family{
	Name:        "vfio",
	Doc:         "PCI functions bound to vfio that no other family hands out, and vGPUs, mediated or virtual functions",
	Match:       matches(),
	Leftovers:   true,
	Describe:    describe,
	CommonNodes: discovery.VFIOControl(),
	Grant:       grant,
	FileDirs:    []string{network.InfoDir},
	Rebinds:     true,
}

// drivers are the kernel's vfio drivers for PCI functions: vfio-pci, which takes
// any function, and the drivers that add live migration or memory to it
// (drivers/vfio/pci).
var drivers = []string{
	"vfio-pci", "hisi_acc_vfio_pci", "mlx5_vfio_pci", "nvgrace_gpu_vfio_pci",
	"pds_vfio_pci", "qat_vfio_pci", "virtio_vfio_pci", "xe-vfio-pci",
}

func matches() []discovery.Match {
	var matches []discovery.Match
	for _, driver := range drivers {
		matches = append(matches, discovery.Match{Bus: "pci", Driver: driver})
	}
	return append(matches, discovery.Match{Bus: "pci", Driver: manager}, discovery.Match{Bus: "mdev"}, discovery.Match{Bus: "pci", Rebindable: true})
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	functions, mdevs := split(found)
	devices, problems = describeMediated(host, mdevs)
	functions, rebindable := withoutRebindable(functions)
	more, unread := describeRebindable(host, rebindable)
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
		// A physical function is not given away under its virtual ones.
		divided, sriovErr := discovery.Divided(function)
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

// groupOf returns the number of the function's IOMMU group, "" if it has none.
func groupOf(function sysfs.Device) string {
	id := function.Link("iommu_group")
	if _, err := strconv.ParseUint(id, 10, 32); err != nil {
		return ""
	}
	return id
}

// group is an IOMMU group. A process that opens it has all of its functions.
type group struct {
	id        string // "" of a function that is in none
	functions []sysfs.Device
	taken     bool  // another family hands out one of the functions
	err       error // what could not be read of its functions
}

// readGroup reads which functions a group has besides our own.
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
		case slices.Contains(drivers, driver) && err != nil: // nobody can tell whose it is
			g.err = errors.Join(g.err, fmt.Errorf("IOMMU group %s: function %s: %w", id, member.Name(), err))
		case slices.Contains(drivers, driver):
			g.taken = true
		}
		g.functions = append(g.functions, member)
	}
	return g
}

func (g *group) describe(host *discovery.Host, function sysfs.Device) (discovery.Device, error) {
	d, err := discovery.PCI(host, function)
	errs := []error{err, g.err}
	// A GPU under vfio is none to a container that wants to compute.
	d.Attributes.SetString("kind", "other")
	id, _ := function.PCIID()
	d.Attributes.SetString("pciClass", id.Class)
	profile, _ := vgpuOf(function) // which can be read, or it were not here
	d.Attributes.SetString("profile", profile)
	nodes, nodesErr := discovery.VFIO(host, function)
	d.Edits.DeviceNodes = nodes
	discovery.PermitMknod(d.Edits.DeviceNodes) // as KubeVirt does
	errs = append(errs, nodesErr)
	d.Health = discovery.VFIOHealth(host, function, d.Edits.DeviceNodes)
	if len(nodes) > 0 {
		d.Classic = offers(g.id, id, function)
		errs = append(errs, addPool(&d, host, function, id))
	}
	return d, errors.Join(errs...)
}

// addPool adds how the SR-IOV network device plugin offers the function, and what
// network plugins are told of it if it is one of a network adapter. Others the
// plugin calls accelerators.
func addPool(d *discovery.Device, host *discovery.Host, function sysfs.Device, id sysfs.PCIID) (err error) {
	offers := d.Classic
	d.Classic = []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{function.Name()}}}
	if strings.HasPrefix(id.Class, "02") {
		f := network.Function{Device: function, PCI: function, Port: network.ReadPort(host, function, nil)}
		err = f.Describe(d, host)
	}
	for i := range d.Classic {
		d.Classic[i].SRIOV = true
	}
	d.Classic = append(offers, d.Classic...)
	return err
}

// offers returns how plugins offer a function that the administrator names.
// KubeVirt offers it by its group, and NVIDIA's plugin, for names of its own
// domain, by its address.
func offers(group string, id sysfs.PCIID, function sysfs.Device) []discovery.Offer {
	offers := []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{group}}}
	if id.Vendor == nvidiaVendor && function.Driver() != manager { // which is KubeVirt's alone
		offers = append(offers, discovery.Offer{Resource: nvidiaDomain + "/" + discovery.AnyName, IDs: []string{function.Name()}})
	}
	return offers
}

// grant names functions that are in pools of the SR-IOV network device plugin as
// that plugin does, and others as KubeVirt does.
func grant(given []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
	pooled := func(d discovery.Device) bool { return d.SRIOV != nil }
	var edits specs.ContainerEdits
	if pool := slices.DeleteFunc(slices.Clone(given), func(d discovery.Device) bool { return !pooled(d) }); len(pool) > 0 {
		edits = network.Grant(pool, grant)
	}
	others := slices.DeleteFunc(slices.Clone(given), pooled)
	return discovery.Join(edits, grantKubeVirt(others, grant))
}

// grantKubeVirt names functions by their addresses and mediated devices by their
// UUIDs, in the variables that KubeVirt has for a resource.
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
