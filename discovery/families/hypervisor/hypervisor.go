// Package hypervisor describes the kernel devices for virtual machine monitors: /dev/kvm,
// /dev/net/tun, the vhost devices and /dev/sev. It covers nodes that any number of containers can
// share, and no hardware for passthrough to a guest.
package hypervisor

import (
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family recognises the kernel devices for virtual machine monitors.
var Family = &discovery.Family{
	Name: "hypervisor",
	Doc:  "what virtual machine monitors use: kvm, tun, vhost-net, vhost-vsock, sev",
	Match: []discovery.Match{
		{Class: "misc", Name: "kvm"},
		{Class: "misc", Name: "tun"},
		{Class: "misc", Name: "vhost-net"},
		{Class: "misc", Name: "vhost-vsock"},
		{Class: "misc", Name: "sev"},
	},
	Describe: describe,
	Always:   true, // for modules that are not loaded
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, misc := range found {
		d, err := discovery.SharedNode(host, misc, nodeDir(misc))
		problems = append(problems, discovery.Problems(d.Name, err)...)
		devices = append(devices, offered(d, misc.Name()))
	}
	for _, node := range loading {
		loaded := slices.ContainsFunc(found, func(misc sysfs.Device) bool { return misc.Name() == node.name })
		if !loaded && host.FileExists(node.path) {
			devices = append(devices, offered(node.describe(), node.name))
		}
	}
	return devices, problems
}

// offered adds the offer of KubeVirt's node agent.
func offered(d discovery.Device, name string) discovery.Device {
	d.Attributes.SetString("kind", "virtualization")
	d.PluginOffers = []discovery.Offer{{Resource: "devices.kubevirt.io/" + name, IDs: discovery.CountedIDs(name, discovery.AnyNumber), Dialect: discovery.Dialect{Stem: name}}}
	return d
}

// loading lists the nodes whose module the kernel loads on the first open, so containers can use
// them before the module is loaded. If the host has the module, systemd creates the node at boot,
// by the list of modules. The nodes have fixed numbers for this purpose (MODULE_ALIAS in
// drivers/net/tun.c, drivers/vhost/net.c and vsock.c; include/linux/miscdevice.h). /dev/kvm is not
// in the list, because its node would load a different module than the required one.
var loading = []node{
	{"tun", "/dev/net/tun", 200},
	{"vhost-net", "/dev/vhost-net", 238},
	{"vhost-vsock", "/dev/vhost-vsock", 241},
}

type node struct {
	name, path string
	minor      int64
}

// describe returns the device of a node before its module is loaded.
func (n node) describe() discovery.Device {
	const misc = 10 // the major number of miscellaneous devices
	d := discovery.Device{Name: n.name, Source: strings.TrimPrefix(n.path, "/"), Attributes: discovery.Attributes{}, Shareable: true, Health: discovery.Health{Status: discovery.Healthy}}
	d.Attributes.SetString("model", n.name)
	d.Edits.DeviceNodes = []*specs.DeviceNode{{Path: n.path, HostPath: n.path, Type: "c", Major: misc, Minor: n.minor, Permissions: "rw"}}
	return d
}

// nodeDir is the directory of the node if the kernel does not report it. Only tun sets nodename in
// struct miscdevice (drivers/net/tun.c).
func nodeDir(misc sysfs.Device) string {
	if misc.Name() == "tun" {
		return "/dev/net"
	}
	return "/dev"
}
