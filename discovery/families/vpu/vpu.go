// Package vpu describes Intel vision processors: Myriad X on USB, as on HDDL cards, and Keem Bay
// and Thunder Bay on PCI. A service on the host controls the processors and reserves none of them
// for a client: a container gets the service's socket. So the devices of this family are the
// services. The Intel plugin has an ID for each processor; here the IDs are the number of clients
// of a service.
//
// The directory of the service's socket, /var/tmp, is outside of the directories that a family
// reads. Without a root for the directory, the devices are unhealthy and have no IDs.
package vpu

import (
	"fmt"
	"path"
	"slices"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family recognises Intel vision processors.
var Family = &discovery.Family{
	Name: "vpu",
	Doc:  "Intel vision processors behind the services of HDDL: Myriad X, Keem Bay, Thunder Bay",
	Match: []discovery.Match{
		{Bus: "usb"},
		{Bus: "pci", Vendor: "8086", Device: "6240"},
		{Bus: "pci", Vendor: "8086", Device: "4fc0"},
		{Bus: "pci", Vendor: "8086", Device: "4fc1"},
	},
	Describe: describe,
	Roots:    []string{"vpu"},
}

// kind is one kind of processor with the files of its service.
type kind struct {
	name      string // also the resource name below vpu.intel.com/, and the profile
	model     string
	id        string // prefix of the device plugin IDs
	functions int    // PCI functions of one processor
	node      string // in /dev
	socket    string
	others    []string // the service's other files
}

var (
	hddl = kind{"hddl", "Myriad X", "hddl_service-", 1, "ion", "hddl_service.sock",
		[]string{"hddl_service_ready.mutex", "hddl_service_alive.mutex"}}
	keemBay = kind{"kmb", "Keem Bay", "kmb-device-", 1, "xlnk", "hddlunite_service.sock",
		[]string{"hddlunite_service_alive.mutex", "hddlunite_service_ready.mutex", "hddlunite_service_start_exit.mutex"}}
	thunderBay = kind{"tbh", "Thunder Bay", "tbh-device-", 2, keemBay.node, keemBay.socket, keemBay.others}
)

// directory is the directory of the service's files in containers.
const directory = "/var/tmp"

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	myriads, problems := myriads(found)
	for _, group := range []struct {
		kind kind
		own  []sysfs.Device
	}{
		{hddl, myriads},
		{keemBay, functions(found, "6240")},
		{thunderBay, functions(found, "4fc0", "4fc1")},
	} {
		if len(group.own) == 0 {
			continue
		}
		d, err := group.kind.describe(host, group.own)
		devices, problems = append(devices, d), append(problems, discovery.Problems(d.Name, err)...)
	}
	return devices, problems
}

// myriads returns the USB devices that are a Myriad X, with or without loaded firmware.
func myriads(found []sysfs.Device) (own []sysfs.Device, problems []discovery.Problem) {
	for _, d := range found {
		attrs := d.Attrs()
		if vendor, _ := attrs.Text("idVendor"); vendor != "03e7" {
			continue // another vendor, or an unreadable vendor
		}
		product, _ := attrs.Text("idProduct")
		if product == "2485" || product == "f63b" {
			own = append(own, d)
		}
		problems = append(problems, discovery.Problems("usb-"+discovery.DeviceName(d), attrs.Err())...)
	}
	return own, problems
}

// functions returns the PCI functions with the given device IDs.
func functions(found []sysfs.Device, ids ...string) (own []sysfs.Device) {
	for _, d := range found {
		if id, _ := d.PCIID(); sysfs.IsPCIAddress(d.Name()) && slices.Contains(ids, id.Device) {
			own = append(own, d)
		}
	}
	return own
}

// describe returns the service of one kind of processor, with an ID for each processor.
func (k kind) describe(host *discovery.Host, functions []sysfs.Device) (discovery.Device, error) {
	d := discovery.Device{
		Name:       "vpu-" + k.name,
		Source:     functions[0].Path,
		Attributes: discovery.Attributes{},
		Shareable:  true,
	}
	for _, function := range functions[1:] {
		d.Includes = append(d.Includes, function.Path)
	}
	d.Attributes.SetString("kind", "npu")
	d.Attributes.SetString("vendor", "intel")
	d.Attributes.SetString("model", k.model)
	d.Attributes.SetString("profile", k.name)
	root := host.Roots["vpu"]
	if d.Health = k.serviceHealth(host, root, len(functions)); d.Health.Status == discovery.Unhealthy {
		return d, nil
	}
	node, err := discovery.Node(sysfs.At(host.FS, path.Join("sys/class/misc", k.node)), "/dev")
	d.Edits.DeviceNodes = []*specs.DeviceNode{node}
	d.Edits.Mounts = k.mounts(host, root)
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	offer := discovery.Offer{Resource: "vpu.intel.com/" + k.name, Dialect: discovery.Dialect{Stem: k.id}}
	for i := range len(functions) / k.functions {
		offer.IDs = append(offer.IDs, fmt.Sprint(k.id, i))
	}
	d.PluginOffers = []discovery.Offer{offer}
	return d, err
}

// serviceHealth reports whether containers can use the service.
func (k kind) serviceHealth(host *discovery.Host, root string, functions int) discovery.Health {
	health := discovery.Health{Status: discovery.Unhealthy}
	socket := path.Join(root, k.socket)
	switch {
	case root == "":
		health.Reason = "driverRoots.vpu, the directory of its service, is not configured"
		health.Setting = "set driverRoots.vpu to " + directory + ", and mount this directory into the pod of the agent"
	case !host.FileExists(socket):
		health.Reason = fmt.Sprintf("its service does not run: there is no %s", socket)
		health.Fix = "ls -l " + socket + "   # the service of HDDL creates this socket when it starts: start the service"
	case functions%k.functions != 0:
		health.Reason = fmt.Sprintf("%d PCI functions are no whole number of processors, which have %d each", functions, k.functions)
		health.Fix = "lspci -nn -d 8086:   # shows the functions that the kernel has found; if one of a card is missing, reseat the card"
	default:
		health.Status = discovery.Healthy
	}
	return health
}

// mounts returns mounts of the existing files of the service, the socket first.
func (k kind) mounts(host *discovery.Host, root string) []*specs.Mount {
	var mounts []*specs.Mount
	for _, name := range append([]string{k.socket}, k.others...) {
		if from := path.Join(root, name); host.FileExists(from) {
			mounts = append(mounts, &specs.Mount{HostPath: from, ContainerPath: path.Join(directory, name), Options: []string{"rw", "nosuid", "nodev", "bind"}})
		}
	}
	return mounts
}
