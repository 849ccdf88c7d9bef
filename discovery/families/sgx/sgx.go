// Package sgx describes the two device nodes of Intel SGX: the one that makes
// enclaves and the one that lets them use the provisioning key. Any number of
// containers may have them. It divides no enclave memory, which the kernel gives
// to whoever asks for it, and covers no /dev/sgx_vepc of virtual machines.
package sgx

import (
	"strings"

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
	Labels:   []discovery.Labels{{Set: map[string]string{"intel.feature.node.kubernetes.io/sgx": "true"}}},
}

// count is how many containers of a node may have such a device under the
// classic API: the default of the plugin's --enclave-limit and --provision-limit.
const count = 110

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, misc := range found {
		d, err := discovery.SharedNode(host, misc, "/dev")
		d.Attributes.SetString("kind", "enclave")
		d.Attributes.SetString("vendor", "intel")
		// As Intel's plugin offers the device "sgx-enclave".
		stem := d.Name + "-"
		d.Classic = []discovery.Offer{{Resource: "sgx.intel.com/" + strings.TrimPrefix(d.Name, "sgx-"), IDs: discovery.CountedIDs(stem, count), Dialect: discovery.Dialect{Stem: stem}}}
		problems = append(problems, discovery.Problems(d.Name, err)...)
		devices = append(devices, d)
	}
	return devices, problems
}
