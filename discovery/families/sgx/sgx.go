// Package sgx describes the two device nodes of Intel SGX: the node for creating enclaves and the
// node for using the provisioning key in enclaves. Any number of containers can share them. The
// package does not partition enclave memory, which the kernel gives to any process, and does not
// describe /dev/sgx_vepc of virtual machines.
package sgx

import (
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family recognises Intel SGX.
var Family = &discovery.Family{
	Name: "sgx",
	Doc:  "Intel SGX enclaves and provisioning",
	Match: []discovery.Match{
		{Class: "misc", Name: "sgx_enclave"},
		{Class: "misc", Name: "sgx_provision"},
	},
	Describe: describe,
	Labels:   []discovery.Labels{{Set: map[string]string{"intel.feature.node.kubernetes.io/sgx": "true"}}},
}

// count is the number of containers of a node that may have such a device in the device plugin API:
// the default of the plugin's --enclave-limit and --provision-limit.
const count = 110

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, misc := range found {
		d, err := discovery.SharedNode(host, misc, "/dev")
		d.Attributes.SetString("kind", "enclave")
		d.Attributes.SetString("vendor", "intel")
		// The same form as the device "sgx-enclave" in the Intel plugin.
		stem := d.Name + "-"
		d.PluginOffers = []discovery.Offer{{Resource: "sgx.intel.com/" + strings.TrimPrefix(d.Name, "sgx-"), IDs: discovery.CountedIDs(stem, count), Dialect: discovery.Dialect{Stem: stem}}}
		problems = append(problems, discovery.Problems(d.Name, err)...)
		devices = append(devices, d)
	}
	return devices, problems
}
