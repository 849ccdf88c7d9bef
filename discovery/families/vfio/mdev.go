package vfio

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// mediated reports whether a kernel device is a mediated one: a part of another
// device, such as a vGPU, made by writing its UUID to the driver
// (Documentation/driver-api/vfio-mediated-device.rst).
func mediated(d sysfs.Device) bool { return !sysfs.IsPCIAddress(d.Name()) }

// describeMediated describes the mediated devices of a host. All of one parent
// can be given out together, and the parent itself only without them.
func describeMediated(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	siblings := make(map[string]int64) // by their silicon
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

// parentOf returns the device that a mediated device is a part of. The parent is
// not known in a tree that was copied without links.
func parentOf(mdev sysfs.Device) (sysfs.Device, bool) {
	return mdev.Parent(), strings.HasPrefix(mdev.Path, "sys/devices/")
}

// siliconOf returns the device whose silicon the mediated devices of a parent are
// parts of: the parent, or its physical function if the parent is a virtual one.
func siliconOf(parent sysfs.Device) sysfs.Device {
	if physical, ok := parent.LinkTo("physfn"); ok {
		return physical
	}
	return parent
}

// partOf returns the silicon that mediated devices compete for, and what one of
// them takes. They compete with whoever is to have all of it.
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
	d.Attributes.SetString("kind", "other") // as of all that is under vfio
	d.Attributes.SetString("function", "partition")
	d.Attributes.SetString("uuid", mdev.Name())
	d.Attributes.SetString("driver", mdev.Driver())
	profile, profileErr := profileOf(mdev)
	d.Attributes.SetString("profile", profile)
	nodes, nodesErr := discovery.VFIO(host, mdev)
	d.Edits.DeviceNodes = nodes
	discovery.PermitMknod(d.Edits.DeviceNodes) // as KubeVirt does
	d.Health = discovery.VFIOHealth(host, mdev, d.Edits.DeviceNodes)
	if mdev.Driver() == "" {
		d.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionDriverUnbound, Reason: "no driver is bound to it"}
	}
	if group := groupOf(mdev); len(nodes) > 0 && group != "" { // kernels without groups make none
		number, _ := strconv.ParseInt(group, 10, 32)
		d.Attributes.SetInt("iommuGroup", number)
		d.Classic = []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{group}}} // as KubeVirt has it
	}
	if len(nodes) > 0 {
		d.Classic = append(d.Classic, nvidia(mdev, profile)...)
	}
	return d, errors.Join(profileErr, nodesErr, discovery.SetPlace(d.Attributes, mdev))
}

// profileOf returns the name that its driver gives a mediated device's type, such
// as "GRID T4-1Q". A type without a name is returned itself: "i915-GVTg_V5_4".
func profileOf(mdev sysfs.Device) (string, error) {
	kind, ok := mdev.LinkTo("mdev_type")
	if !ok {
		return "", errors.New("mediated device: of no type")
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

// label matches what may follow the slash of a resource's name.
var label = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$`)

// NVIDIA's PCI vendor ID, and the domain of its plugins' names.
const (
	nvidiaVendor = "10de"
	nvidiaDomain = "nvidia.com"
)

// nvidia returns what NVIDIA's plugin for KubeVirt offers of a vGPU, by its
// UUID. It is offered where the administrator names it so.
func nvidia(mdev sysfs.Device, profile string) []discovery.Offer {
	name := strings.ReplaceAll(profile, " ", "_")
	vendor, _ := mdev.Parent().Attrs().Hex("vendor", 4)
	if vendor != nvidiaVendor || !label.MatchString(name) {
		return nil
	}
	return []discovery.Offer{{Resource: nvidiaDomain + "/" + name, IDs: []string{mdev.Name()}, Named: true}}
}

// split returns the PCI functions and the mediated devices of a list.
func split(found []sysfs.Device) (functions, mdevs []sysfs.Device) {
	functions = slices.DeleteFunc(slices.Clone(found), mediated)
	mdevs = slices.DeleteFunc(slices.Clone(found), func(d sysfs.Device) bool { return !mediated(d) })
	return functions, mdevs
}
