// Package hypervisor describes what the kernel offers to virtual machine
// monitors: /dev/kvm, /dev/net/tun, the vhost devices and /dev/sev. It covers
// the nodes that any number of containers may have at once, and no hardware
// that is passed through to a guest.
package hypervisor

import (
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family is the hypervisor devices.
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
	Always:   true, // for what is not loaded
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, misc := range found {
		d, err := discovery.SharedNode(host, misc, nodeDir(misc))
		problems = append(problems, discovery.Problems(d.Name, err)...)
		devices = append(devices, offered(d, misc.Name()))
	}
	for _, node := range loading {
		loaded := slices.ContainsFunc(found, func(misc sysfs.Device) bool { return misc.Name() == node.name })
		if !loaded && host.Exists(node.path) {
			devices = append(devices, offered(node.describe(), node.name))
		}
	}
	return devices, problems
}

// offered adds how KubeVirt's node agent offers a device.
func offered(d discovery.Device, name string) discovery.Device {
	d.Attributes.SetString("kind", "hypervisor")
	d.Classic = []discovery.Offer{{Resource: "devices.kubevirt.io/" + name, IDs: discovery.CountedIDs(name, discovery.AnyNumber), Dialect: discovery.Dialect{Stem: name}}}
	return d
}

// loading are the nodes whose module the kernel loads when somebody opens them, so
// that containers can use them before it is loaded. Such a node is in /dev from the
// start of a host that has the module: systemd makes it, by the list of modules.
// They have fixed numbers for that (MODULE_ALIAS in drivers/net/tun.c,
// drivers/vhost/net.c and vsock.c; include/linux/miscdevice.h). The module of /dev/kvm
// is another than what its node would load.
var loading = []node{
	{"tun", "/dev/net/tun", 200},
	{"vhost-net", "/dev/vhost-net", 238},
	{"vhost-vsock", "/dev/vhost-vsock", 241},
}

type node struct {
	name, path string
	minor      int64
}

// describe returns the device that the node will be.
func (n node) describe() discovery.Device {
	const misc = 10 // the major number of such devices
	d := discovery.Device{Name: n.name, Source: strings.TrimPrefix(n.path, "/"), Attributes: discovery.Attributes{}, Open: true, Health: discovery.Health{Status: discovery.Healthy}}
	d.Attributes.SetString("model", n.name)
	d.Edits.DeviceNodes = []*specs.DeviceNode{{Path: n.path, HostPath: n.path, Type: "c", Major: misc, Minor: n.minor, Permissions: "rw"}}
	return d
}

// nodeDir is where the node lies if the kernel does not say: struct miscdevice
// has a nodename for tun alone (drivers/net/tun.c).
func nodeDir(misc sysfs.Device) string {
	if misc.Name() == "tun" {
		return "/dev/net"
	}
	return "/dev"
}
