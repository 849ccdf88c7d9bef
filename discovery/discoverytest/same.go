package discoverytest

import (
	"maps"
	"reflect"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// sameDevice reports whether two descriptions of a device are equal. Reflection would work, but
// takes most of the time of a test under the race detector. So sameDevice uses reflection only for
// fields that families rarely set.
func sameDevice(a, b *discovery.Device) bool {
	return a.Name == b.Name && a.Family == b.Family && a.Identity == b.Identity && a.Source == b.Source &&
		slices.Equal(a.Includes, b.Includes) &&
		maps.EqualFunc(a.Attributes, b.Attributes, sameAttribute) &&
		maps.EqualFunc(a.Capacity, b.Capacity, sameCapacity) &&
		maps.EqualFunc(a.Lists, b.Lists, sameList) && maps.Equal(a.Facts, b.Facts) &&
		slices.Equal(a.CommonNodes, b.CommonNodes) && sameEdits(&a.Edits, &b.Edits) && sameEdits(&a.SharedEdits, &b.SharedEdits) &&
		slices.Equal(a.Files, b.Files) &&
		a.Health == b.Health && slices.Equal(a.Readings, b.Readings) &&
		samePointer(a.PartOf, b.PartOf, sameSilicon) && maps.EqualFunc(a.Takes, b.Takes, sameQuantity) &&
		a.Shareable == b.Shareable && a.Interchangeable == b.Interchangeable && a.OptIn == b.OptIn && a.PoolOnly == b.PoolOnly && a.FromConfig == b.FromConfig &&
		sameSeldom(a.SRIOV, b.SRIOV, a.SRIOV == nil && b.SRIOV == nil) &&
		sameSeldom(a.Passthrough, b.Passthrough, a.Passthrough == nil && b.Passthrough == nil) &&
		sameSeldom(a.Creation, b.Creation, a.Creation == nil && b.Creation == nil) &&
		slices.EqualFunc(a.PluginOffers, b.PluginOffers, sameOffer)
}

// sameSeldom compares fields that are usually empty in both devices.
func sameSeldom[T any](a, b T, none bool) bool { return none || reflect.DeepEqual(a, b) }

func samePointer[T any](a, b *T, same func(a, b T) bool) bool {
	return a == b || a != nil && b != nil && same(*a, *b)
}

func equal[T comparable](a, b T) bool { return a == b }

func sameAttribute(a, b discovery.Attribute) bool {
	return samePointer(a.StringValue, b.StringValue, equal) &&
		samePointer(a.IntValue, b.IntValue, equal) &&
		samePointer(a.VersionValue, b.VersionValue, equal) &&
		samePointer(a.BoolValue, b.BoolValue, equal)
}

func sameList(a, b resourceapi.DeviceAttribute) bool {
	return sameAttribute(discovery.AttributeOf(a), discovery.AttributeOf(b)) &&
		slices.Equal(a.StringValues, b.StringValues) &&
		slices.Equal(a.IntValues, b.IntValues) &&
		slices.Equal(a.VersionValues, b.VersionValues) &&
		slices.Equal(a.BoolValues, b.BoolValues)
}

func sameCapacity(a, b resourceapi.DeviceCapacity) bool {
	return sameQuantity(a.Value, b.Value) && sameSeldom(a.RequestPolicy, b.RequestPolicy, a.RequestPolicy == nil && b.RequestPolicy == nil)
}

func sameQuantity(a, b resource.Quantity) bool { return a.Format == b.Format && a.Cmp(b) == 0 }

func sameOffer(a, b discovery.Offer) bool {
	return a.Resource == b.Resource && slices.Equal(a.IDs, b.IDs) && a.Unit == b.Unit && a.Optional == b.Optional && a.SRIOV == b.SRIOV &&
		a.Members == b.Members && a.Pool == b.Pool && a.NameAs == b.NameAs && a.Dialect == b.Dialect && a.Counts == b.Counts
}

func sameEdits(a, b *specs.ContainerEdits) bool {
	return slices.Equal(a.Env, b.Env) && slices.EqualFunc(a.DeviceNodes, b.DeviceNodes, sameNode) &&
		sameSeldom(a.NetDevices, b.NetDevices, len(a.NetDevices)+len(b.NetDevices) == 0) &&
		sameSeldom(a.Hooks, b.Hooks, len(a.Hooks)+len(b.Hooks) == 0) &&
		slices.EqualFunc(a.Mounts, b.Mounts, sameMount) &&
		sameSeldom(a.IntelRdt, b.IntelRdt, a.IntelRdt == nil && b.IntelRdt == nil) &&
		slices.Equal(a.AdditionalGIDs, b.AdditionalGIDs)
}

func sameNode(a, b *specs.DeviceNode) bool {
	return a.Path == b.Path && a.HostPath == b.HostPath && a.Type == b.Type && a.Major == b.Major && a.Minor == b.Minor &&
		a.Permissions == b.Permissions &&
		samePointer(a.FileMode, b.FileMode, equal) && samePointer(a.UID, b.UID, equal) && samePointer(a.GID, b.GID, equal)
}

func sameMount(a, b *specs.Mount) bool {
	return a.HostPath == b.HostPath && a.ContainerPath == b.ContainerPath && slices.Equal(a.Options, b.Options) && a.Type == b.Type
}

func sameSilicon(a, b discovery.Silicon) bool {
	return a.Name == b.Name && maps.EqualFunc(a.Counters, b.Counters, sameQuantity)
}
