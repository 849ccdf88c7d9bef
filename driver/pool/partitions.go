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

// The compatibility groups of competing devices. A device consisting of a whole physical device is
// never in use together with a partition of the same physical device, whatever the counters allow.
// Partitions can be in use together as far as the counters reach. All devices of a counter set have
// a group, since a device without a group is incompatible with devices in a group.
const (
	wholeGroup = "whole"
	partsGroup = "parts"
)

// partitionType is the attribute by which a ResourcePoolStatusRequest counts competing devices.
// partitionTypeName is its fully qualified name.
const (
	partitionType     resourceapi.QualifiedName      = "partitionType"
	partitionTypeName resourceapi.FullyQualifiedName = discovery.Domain + "/partitionType"
)

// maxPartitionTypes is the maximum number of types in the status of a pool (PartitionSummary in
// k8s.io/api/resource/v1alpha3). A pool with more types would have no status.
const maxPartitionTypes = 32

// setGroups sets the compatibility groups of the competing devices.
func (b *builder) setGroups() {
	for name, device := range b.devices {
		if !consumesCounters(device) {
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
		b.devices[name] = device
	}
}

// setPartitionTypes sets the partition type of the competing devices and reports true, unless the
// limits leave no room for the type of a device. Devices of one type consume the same counters of
// the same set, since Kubernetes compares the count of a type with the rest of one set
// (consumesCountersKey in pkg/controller/resourcepoolstatusrequest/views.go). The type therefore
// begins with the name of the physical device: "pci-0000-19-00-0/1g.10gb".
func (b *builder) setPartitionTypes() bool {
	types := b.partitionTypes()
	distinct := make(map[string]string)
	for name, value := range types {
		device := b.devices[name]
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
		device := b.devices[name]
		device.Attributes = maps.Clone(device.Attributes)
		if device.Attributes == nil {
			device.Attributes = make(map[resourceapi.QualifiedName]resourceapi.DeviceAttribute)
		}
		device.Attributes[partitionType] = resourceapi.DeviceAttribute{StringValue: &value}
		b.devices[name] = device
	}
	return true
}

// hasRoom reports whether a device can have one more attribute.
func hasRoom(d resourceapi.Device) bool {
	values := 0
	for _, attribute := range d.Attributes {
		values += valuesOf(attribute)
	}
	return len(d.Attributes)+len(d.Capacity) < resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice &&
		values < resourceapi.ResourceSliceMaxAttributeValuesPerDevice
}

// withoutRelations returns a device without the changes of setGroups and setPartitionTypes.
func withoutRelations(device resourceapi.Device) resourceapi.Device {
	device.Attributes = maps.Clone(device.Attributes)
	delete(device.Attributes, partitionType)
	device.ConsumesCounters = slices.Clone(device.ConsumesCounters)
	for i := range device.ConsumesCounters {
		device.ConsumesCounters[i].CompatibilityGroups = nil
	}
	return device
}

// partitionTypes returns the type of each competing device, by device name. If devices with the
// same kind consume different counters, a hash of the consumed counters follows the kind.
func (b *builder) partitionTypes() map[string]string {
	types := make(map[string]string)
	costs := make(map[string]map[string]bool) // costs of the devices of a type
	for name, device := range b.devices {
		if !consumesCounters(device) {
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
			sum := sha256.Sum256([]byte(costOf(b.devices[name].ConsumesCounters)))
			types[name] = fmt.Sprintf("%s-%x", value, sum[:4])
		}
	}
	return types
}

// kindOfPart returns the usual name for the kind of a device with counters of a set.
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

// costOf returns a string for the consumed counters. Equal consumption gives equal strings.
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
