package vfio

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/pattern"
)

// isMediated reports whether a kernel device is a mediated device: a part of another device, such
// as a vGPU, created by writing a UUID to the driver
// (Documentation/driver-api/vfio-mediated-device.rst).
func isMediated(d sysfs.Device) bool { return !sysfs.IsPCIAddress(d.Name()) }

// describeMediated describes the mediated devices of a host. All mediated devices of a parent can
// be allocated together; the parent itself excludes them.
func describeMediated(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	siblings := make(map[string]int64) // by physical device
	for _, mdev := range found {
		siblings[siliconOf(mdev.Parent()).Path]++
	}
	for _, mdev := range found {
		d, err := describeMdev(host, mdev)
		if parent, ok := parentOf(mdev); ok {
			d.Attributes.SetString("parent", discovery.DeviceName(parent))
			silicon := siliconOf(parent)
			d.PartOf, d.Takes = partOf(silicon, siblings[silicon.Path])
		}
		problems = append(problems, discovery.Problems(d.Name, err)...)
		devices = append(devices, d)
	}
	return devices, problems
}

// parentOf returns the parent of a mediated device. The parent is unknown in a tree that was copied
// without links.
func parentOf(mdev sysfs.Device) (sysfs.Device, bool) {
	return mdev.Parent(), strings.HasPrefix(mdev.Path, "sys/devices/")
}

// siliconOf returns the physical device that the mediated devices of a parent belong to: the
// parent, or its physical function if the parent is a virtual function.
func siliconOf(parent sysfs.Device) sysfs.Device {
	if physical, ok := parent.LinkTo("physfn"); ok {
		return physical
	}
	return parent
}

// partOf returns the physical device of mediated devices, and the counters that one of them takes.
// A consumer of the whole physical device takes all counters.
func partOf(silicon sysfs.Device, siblings int64) (*discovery.Silicon, map[string]resource.Quantity) {
	all := map[string]resource.Quantity{"mediated": *resource.NewQuantity(siblings, resource.DecimalSI)}
	one := map[string]resource.Quantity{"mediated": resource.MustParse("1")}
	return &discovery.Silicon{Name: discovery.DeviceName(silicon), Counters: all}, one
}

func describeMdev(host *discovery.Host, mdev sysfs.Device) (discovery.Device, error) {
	d := discovery.Device{
		Name:       "mdev-" + discovery.DeviceName(mdev),
		Identity:   mdev.Name(),
		Source:     mdev.Path,
		Attributes: discovery.Attributes{},
	}
	d.Attributes.SetString("kind", "other") // the kind of all devices under vfio
	d.Attributes.SetString("function", "partition")
	d.Attributes.SetString("uuid", mdev.Name())
	d.Attributes.SetString("driver", mdev.Driver())
	profile, profileErr := profileOf(mdev)
	d.Attributes.SetString("profile", profile)
	nodes, nodesErr := pci.VFIONodes(host, mdev)
	d.Edits.DeviceNodes = nodes
	discovery.PermitMknod(d.Edits.DeviceNodes) // as in KubeVirt
	d.Health = pci.VFIOHealth(host, mdev, d.Edits.DeviceNodes)
	if mdev.Driver() == "" {
		d.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionDriverUnbound, Reason: "no driver is bound to it"}
	}
	if group := groupOf(mdev); len(nodes) > 0 && group != "" { // kernels without IOMMU groups create none
		number, _ := strconv.ParseInt(group, 10, 32)
		d.Attributes.SetInt("iommuGroup", number)
		d.PluginOffers = []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{group}}} // as in KubeVirt
	}
	if len(nodes) > 0 {
		d.PluginOffers = append(d.PluginOffers, nvidiaOffers(mdev, profile)...)
	}
	return d, errors.Join(profileErr, nodesErr, pci.SetPlace(d.Attributes, mdev))
}

// profileOf returns the driver's name of a mediated device's type, such as "GRID T4-1Q". If the
// type has no name, the type is returned: "i915-GVTg_V5_4".
func profileOf(mdev sysfs.Device) (string, error) {
	kind, ok := mdev.LinkTo("mdev_type")
	if !ok {
		return "", errors.New("mediated device: has no type")
	}
	attrs := kind.Attrs()
	name, named := attrs.Text("name")
	if err := attrs.Err(); err != nil {
		return "", fmt.Errorf("mediated device: type %s: %w", path.Base(kind.Path), err)
	}
	if !named {
		return kind.Name(), nil
	}
	return name, nil
}

// label matches the part of a resource name after the slash.
var label = pattern.Lazy(`^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$`)

// The PCI vendor ID of NVIDIA, and the domain of the resource names of its plugins.
const (
	nvidiaVendor = "10de"
	nvidiaDomain = "nvidia.com"
)

// nvidiaOffers returns the offer of the NVIDIA KubeVirt plugin for a vGPU, by the UUID. The offer
// requires that the administrator configures the name.
func nvidiaOffers(mdev sysfs.Device, profile string) []discovery.Offer {
	name := strings.ReplaceAll(profile, " ", "_")
	vendor, _ := mdev.Parent().Attrs().Hex("vendor", 4)
	if vendor != nvidiaVendor || !label().MatchString(name) {
		return nil
	}
	return []discovery.Offer{{Resource: nvidiaDomain + "/" + name, IDs: []string{mdev.Name()}, Optional: true}}
}

// split divides a list into PCI functions and mediated devices.
func split(found []sysfs.Device) (functions, mdevs []sysfs.Device) {
	functions = slices.DeleteFunc(slices.Clone(found), isMediated)
	mdevs = slices.DeleteFunc(slices.Clone(found), func(d sysfs.Device) bool { return !isMediated(d) })
	return functions, mdevs
}
