package list

import (
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/legacy/list/listtest"
)

// offer returns the device with other IDs.
func offer(d rules.Offered, unit string, ids ...string) rules.Offered {
	d.Offers = []discovery.Offer{{Resource: listtest.Resource, IDs: ids, Unit: unit}}
	return d
}

// at returns the device on a NUMA node, PCIe root and fabric. -1 and "" mean unknown.
func at(d rules.Offered, numa int64, root, fabric string) rules.Offered {
	d.Attributes = discovery.Attributes{}
	if numa >= 0 {
		d.Attributes[deviceattribute.StandardDeviceAttributeNUMANode] = discovery.Attribute{IntValue: &numa}
	}
	d.Attributes.SetString(deviceattribute.StandardDeviceAttributePCIeRoot, root)
	d.Attributes.SetString("fabric", fabric)
	return d
}
