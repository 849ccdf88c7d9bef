package vfio

import (
	"errors"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// withoutPassthrough returns the functions with a vfio driver or the NVIDIA vGPU manager, and the
// other functions.
func withoutPassthrough(functions []sysfs.Device) (bound, others []sysfs.Device) {
	for _, function := range functions {
		if driver := function.Driver(); driver == manager || slices.Contains(drivers, driver) {
			bound = append(bound, function)
		} else {
			others = append(others, function)
		}
	}
	return bound, others
}

// describePassthrough describes functions that no other family describes and that the administrator
// allows for VFIO passthrough: a disk, or an adapter that the host may use. They are available only
// for passthrough.
func describePassthrough(host *discovery.Host, functions []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, function := range functions {
		id, err := function.PCIID()
		if err == nil && strings.HasPrefix(id.Class, "06") { // bridges
			continue
		}
		d, described := pci.DescribeFunction(host, function)
		d.Attributes.SetString("kind", "other")
		d.Attributes.SetString("pciClass", id.Class)
		driver, unsaid := pci.PassthroughDriver(host, d)
		if unsaid != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Setting: discovery.SettingPassthrough, Err: unsaid})
		}
		if driver == "" {
			continue
		}
		divided, sriovErr := pci.HasVirtualFunctions(function)
		if divided {
			continue // virtual functions hide the physical function
		}
		d.Passthrough = &discovery.PassthroughOption{Driver: driver, Only: true}
		if group := groupOf(function); group != "" {
			d.PluginOffers = append(offers(group, id, function), discovery.Offer{Resource: discovery.AnyName, IDs: []string{function.Name()}, SRIOV: true})
		}
		problems = append(problems, discovery.Problems(d.Name, errors.Join(err, described, sriovErr))...)
		devices = append(devices, d)
	}
	return devices, problems
}
