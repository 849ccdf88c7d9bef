package pool

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
)

// The compatibility groups of devices that compete. A device that is all of its
// silicon and those that are parts of it are never in use together, whatever is
// left of the counters; parts are, as far as the counters go. Of one counter set
// all have a group, since one without is compatible with none that has one.
const (
	wholeGroup = "whole"
	partsGroup = "parts"
)

// partitionType is the attribute by which requests for a pool's status count
// devices that compete, and partitionTypeName what it is called in full.
const (
	partitionType     resourceapi.QualifiedName      = "partitionType"
	partitionTypeName resourceapi.FullyQualifiedName = discovery.Domain + "/partitionType"
)

// maxPartitionTypes is how many types the status of a pool has room for
// (PartitionSummary in k8s.io/api/resource/v1alpha3). Of a pool with more there
// would be no status.
const maxPartitionTypes = 32

// group says of the devices that compete which exclude each other.
func (c content) group() {
	for name, device := range c.devices {
		if !consumes(device) {
			continue
		}
		device.ConsumesCounters = slices.Clone(device.ConsumesCounters)
		for i := range device.ConsumesCounters {
			group := partsGroup
			if consumed := &device.ConsumesCounters[i]; consumed.CounterSet == name {
				group = wholeGroup
			}
			device.ConsumesCounters[i].CompatibilityGroups = []string{group}
		}
		c.devices[name] = device
	}
}

// classify sets the partition type of the devices that compete, and reports
// whether it could be said of all of them. Devices of one type take the same of
// the same counter set, since the count of a type is compared with what is left
// of one (consumesCountersKey in pkg/controller/resourcepoolstatusrequest/
// views.go), so that the type begins with the silicon's name:
// "pci-0000-19-00-0/1g.10gb".
func (c content) classify() bool {
	types := c.partitionTypes()
	distinct := make(map[string]string)
	for name, value := range types {
		device := c.devices[name]
		cost := costOf(device.ConsumesCounters)
		if other, found := distinct[value]; found && other != cost {
			return false
		}
		distinct[value] = cost
		if !hasRoom(device) || len(value) > resourceapi.DeviceAttributeMaxValueLength {
			return false
		}
	}
	if len(types) == 0 || len(distinct) > maxPartitionTypes {
		return false
	}
	for name, value := range types {
		device := c.devices[name]
		device.Attributes = maps.Clone(device.Attributes)
		if device.Attributes == nil {
			device.Attributes = make(discovery.Attributes)
		}
		device.Attributes[partitionType] = resourceapi.DeviceAttribute{StringValue: &value}
		c.devices[name] = device
	}
	return true
}

// hasRoom reports whether a device may have one more attribute.
func hasRoom(d resourceapi.Device) bool {
	values := 0
	for _, attribute := range d.Attributes {
		values += valuesOf(attribute)
	}
	return len(d.Attributes)+len(d.Capacity) < resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice &&
		values < resourceapi.ResourceSliceMaxAttributeValuesPerDevice
}

// unrelated returns a device as it was before group and classify.
func unrelated(device resourceapi.Device) resourceapi.Device {
	device.Attributes = maps.Clone(device.Attributes)
	delete(device.Attributes, partitionType)
	device.ConsumesCounters = slices.Clone(device.ConsumesCounters)
	for i := range device.ConsumesCounters {
		device.ConsumesCounters[i].CompatibilityGroups = nil
	}
	return device
}

// partitionTypes returns the type of each device that competes, by its name.
// Devices that are called alike and do not take the same have a number besides
// that goes by what they take.
func (c content) partitionTypes() map[string]string {
	types := make(map[string]string)
	costs := make(map[string]map[string]bool) // of the devices that are called alike
	for name, device := range c.devices {
		if !consumes(device) {
			continue
		}
		set := device.ConsumesCounters[0].CounterSet
		value := set + "/" + kindOfPart(device, set)
		if costs[value] == nil {
			costs[value] = make(map[string]bool)
		}
		types[name] = value
		costs[value][costOf(device.ConsumesCounters)] = true
	}
	for name, value := range types {
		if len(costs[value]) > 1 {
			sum := sha256.Sum256([]byte(costOf(c.devices[name].ConsumesCounters)))
			types[name] = fmt.Sprintf("%s-%x", value, sum[:4])
		}
	}
	return types
}

// kindOfPart returns what people call a device that takes of a counter set.
func kindOfPart(device resourceapi.Device, set string) string {
	if device.Name == set {
		return "whole"
	}
	for _, name := range []resourceapi.QualifiedName{"profile", "function"} {
		if value := device.Attributes[name].StringValue; value != nil {
			return *value
		}
	}
	return "part"
}

// costOf returns what is taken of counters, the same for the same.
func costOf(consumptions []resourceapi.DeviceCounterConsumption) string {
	var words []string
	for _, consumed := range consumptions {
		for counter, taken := range consumed.Counters {
			words = append(words, fmt.Sprintf("%s/%s=%s", consumed.CounterSet, counter, taken.Value.String()))
		}
	}
	slices.Sort(words)
	return strings.Join(words, ",")
}
