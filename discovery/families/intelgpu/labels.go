package intelgpu

import (
	"slices"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// labels are the labels of the Node Feature Discovery rules in the repository of the Intel device
// plugins (deployments/nfd/overlays/node-feature-rules).
//
// The rules count all functions of a class under the ID of the first function. Here each ID has its
// own count.
var labels = []discovery.Labels{
	{
		Where: map[string]string{"kind": "gpu", "driver": "!"},
		Set: map[string]string{
			"intel.feature.node.kubernetes.io/gpu":                "true",
			"gpu.intel.com/device-id.{class}-{pciDevice}.present": "true",
			"gpu.intel.com/device-id.{class}-{pciDevice}.count":   "{silicon}",
			"gpu.intel.com/family":                                "{series}",
		},
	},
	{
		Main: "product",
		Set:  map[string]string{"gpu.intel.com/product": "{product}", "gpu.intel.com/device.count": "{silicon}"},
	},
}

// products maps PCI device IDs to the GPU names in the rules.
var products = map[string]string{"0bda": "Max_1100", "0bd5": "Max_1550", "56c0": "Flex_170", "56c1": "Flex_140"}

// series maps the GPU families in the rules to PCI device IDs.
var series = map[string][]string{
	"Max_Series":  {"0bd0", "0bd5", "0bd6", "0bd7", "0bd9", "0bda", "0bdb"},
	"Flex_Series": {"56c0", "56c1"},
	"A_Series": {
		"5690", "5691", "5692", "5693", "5694", "5695", "5696", "5697", "56a0", "56a1", "56a2", "56a3",
		"56a4", "56a5", "56a6", "56b0", "56b1", "56b2", "56b3", "56ba", "56bb", "56bc", "56bd",
	},
}

// facts returns the facts that only labels use.
func facts(function sysfs.Device) map[string]string {
	id, err := function.PCIID()
	if err != nil {
		return nil
	}
	known := map[string]string{"class": id.Class[:4]}
	if product, ok := products[id.Device]; ok {
		known["product"] = product
	}
	for name, ids := range series {
		if slices.Contains(ids, id.Device) {
			known["series"] = name
		}
	}
	return known
}
