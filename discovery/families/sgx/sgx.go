// Package sgx describes the two device nodes of Intel SGX: the one that makes
// enclaves and the one that lets them use the provisioning key. Any number of
// containers may have them. It divides no enclave memory, which the kernel gives
// to whoever asks for it, and covers no /dev/sgx_vepc of virtual machines.
package sgx

import (
	"fmt"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family is Intel SGX.
var Family = &discovery.Family{
	Name: "sgx",
	Doc:  "Intel SGX enclaves and provisioning",
	Match: []discovery.Match{
		{Class: "misc", Name: "sgx_enclave"},
		{Class: "misc", Name: "sgx_provision"},
	},
	Describe: describe,
}

// count is how many containers of a node may have such a device under the
// classic API: the default of the plugin's --enclave-limit and --provision-limit.
const count = 110

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, misc := range found {
		d := discovery.Device{
			Name:       discovery.DeviceName(misc),
			Source:     misc.Path,
			Attributes: discovery.Attributes{},
			Shareable:  true,
		}
		d.Attributes.SetString("kind", "enclave")
		d.Attributes.SetString("vendor", "intel")
		d.Attributes.SetString("model", misc.Name())
		d.Offers = []discovery.Offer{offer(d.Name)}
		node, err := discovery.Node(misc, "/dev")
		if err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		d.Edits.DeviceNodes = []*specs.DeviceNode{node}
		d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
		devices = append(devices, d)
	}
	return devices, problems
}

// offer is what Intel's plugin offers of the device "sgx-enclave".
func offer(name string) discovery.Offer {
	ids := make([]string, count)
	for i := range ids {
		ids[i] = fmt.Sprintf("%s-%d", name, i)
	}
	return discovery.Offer{Resource: "sgx.intel.com/" + strings.TrimPrefix(name, "sgx-"), IDs: ids}
}
