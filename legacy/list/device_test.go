package list

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/legacy/list/listtest"
)

const (
	gpuResource    = listtest.Resource
	otherResource  = listtest.OtherResource
	memoryResource = listtest.MemoryResource
)

var (
	testTime = listtest.Time
	gpu      = listtest.GPU
	sick     = listtest.Sick
	snapshot = listtest.Snapshot
	found    = listtest.Found
	inUnits  = listtest.InUnits
	units    = listtest.Units
	silicon  = listtest.Parts
)

// offer makes the device stand behind other IDs.
func offer(d rules.Offered, unit string, ids ...string) rules.Offered {
	d.Offers = []discovery.Offer{{Resource: gpuResource, IDs: ids, Unit: unit}}
	return d
}

// at puts the device on a NUMA node, PCIe root and fabric; -1 and "" are not
// known.
func at(d rules.Offered, numa int64, root, fabric string) rules.Offered {
	d.Attributes = discovery.Attributes{}
	if numa >= 0 {
		d.Attributes[deviceattribute.StandardDeviceAttributeNUMANode] = resourceapi.DeviceAttribute{IntValue: &numa}
	}
	d.Attributes.SetString(deviceattribute.StandardDeviceAttributePCIeRoot, root)
	d.Attributes.SetString("fabric", fabric)
	return d
}
