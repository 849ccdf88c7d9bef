// Package hypervisor describes what the kernel offers to virtual machine
// monitors: /dev/kvm, /dev/net/tun, the vhost devices and /dev/sev. It covers
// the nodes that any number of containers may have at once, and no hardware
// that is passed through to a guest.
package hypervisor

import (
	"fmt"

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
}

// count is how many containers of a node may have such a device under the
// classic API: the default of KubeVirt's --max-devices.
const count = 1000

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, misc := range found {
		d := discovery.Device{
			Name:       discovery.DeviceName(misc),
			Source:     misc.Path,
			Attributes: discovery.Attributes{},
			Shareable:  true,
			Offers:     []discovery.Offer{offer(misc.Name())},
		}
		d.Attributes.SetString("kind", "hypervisor")
		d.Attributes.SetString("model", misc.Name())
		node, err := discovery.Node(misc, nodeDir(misc))
		if err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		d.Edits.DeviceNodes = []*specs.DeviceNode{node}
		d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
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

// offer is what KubeVirt's node agent offers of the device.
func offer(name string) discovery.Offer {
	ids := make([]string, count)
	for i := range ids {
		ids[i] = fmt.Sprintf("%s%d", name, i)
	}
	return discovery.Offer{Resource: "devices.kubevirt.io/" + name, IDs: ids}
}
