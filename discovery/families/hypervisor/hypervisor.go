// Package hypervisor describes what the kernel offers to virtual machine
// monitors: /dev/kvm, /dev/net/tun, the vhost devices and /dev/sev. It covers
// the nodes that any number of containers may have at once, and no hardware
// that is passed through to a guest.
package hypervisor

import (
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
}

// count is how many containers of a node may have such a device under the
// classic API: the default of KubeVirt's --max-devices.
const count = 1000

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, misc := range found {
		d, err := discovery.SharedNode(host, misc, nodeDir(misc))
		d.Attributes.SetString("kind", "hypervisor")
		// As KubeVirt's node agent offers it.
		d.Classic = []discovery.Offer{{Resource: "devices.kubevirt.io/" + misc.Name(), IDs: discovery.CountedIDs(misc.Name(), count), Dialect: discovery.Dialect{Stem: misc.Name()}}}
		problems = append(problems, discovery.Problems(d.Name, err)...)
		devices = append(devices, d)
	}
	return devices, problems
}

// nodeDir is where the node lies if the kernel does not say: struct miscdevice
// has a nodename for tun alone (drivers/net/tun.c).
func nodeDir(misc sysfs.Device) string {
	if misc.Name() == "tun" {
		return "/dev/net"
	}
	return "/dev"
}
