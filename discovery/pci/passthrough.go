package pci

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// PassthroughDriver returns the vfio driver allowed for a device, or "". The error joins the errors
// of expressions that cannot be evaluated for the device.
func PassthroughDriver(host *discovery.Host, d discovery.Device) (string, error) {
	driver, err := discovery.FirstSelected(host.Passthroughs, d)
	if driver == nil {
		return "", err
	}
	return *driver, nil
}

// SetPassthrough sets Rebind of the PCI functions with allowed VFIO passthrough.
func SetPassthrough(host *discovery.Host, devices []discovery.Device) (problems []discovery.Problem) {
	if len(host.Passthroughs) == 0 {
		return nil
	}
	for i := range devices {
		d := &devices[i]
		function := sysfs.At(host.FS, d.Source)
		if !sysfs.IsPCIAddress(function.Name()) || d.Name != discovery.DeviceName(function) || d.Shareable || discovery.IsVFIO(function.Driver()) {
			continue
		}
		driver, err := PassthroughDriver(host, *d)
		if err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Setting: discovery.SettingPassthrough, Err: err})
		}
		if driver == "" {
			continue
		}
		r := &discovery.PassthroughOption{Driver: driver, Only: d.Passthrough != nil && d.Passthrough.Only}
		if d.Creation == nil { // otherwise the device does not exist yet, and neither does its group
			r.Others, r.Why = GroupOthers(host, function)
		}
		d.Passthrough = r
	}
	return problems
}

// GroupOthers returns the other functions of an IOMMU group to bind together with a function, and the
// reason why the function cannot be bound to vfio, or "".
func GroupOthers(host *discovery.Host, function sysfs.Device) (others []string, why string) {
	group := function.Link("iommu_group")
	if group == "" {
		return nil, "it has no IOMMU group; vfio needs an IOMMU"
	}
	dir := path.Join("sys/kernel/iommu_groups", group, "devices")
	entries, err := fs.ReadDir(host.FS, dir)
	if err != nil {
		return nil, fmt.Sprintf("the functions of IOMMU group %s cannot be listed: %v", group, err)
	}
	for _, entry := range entries {
		member, ok := sysfs.At(host.FS, dir).LinkTo(entry.Name())
		if !ok {
			return nil, fmt.Sprintf("%s of IOMMU group %s cannot be looked at", entry.Name(), group)
		}
		if member.Path == function.Path || slices.Contains(harmless, member.Driver()) {
			continue
		}
		others = append(others, member.Path)
	}
	return others, ""
}

// JoinPassthrough decides which devices can be bound to vfio together with all functions of their
// IOMMU group: a group is bound as a whole or not at all. Such devices get the attribute
// [discovery.VFIODriver].
func JoinPassthrough(devices []discovery.Device) {
	if !slices.ContainsFunc(devices, func(d discovery.Device) bool { return d.Passthrough != nil }) {
		return
	}
	allowed := make(map[string]bool) // by the kernel's directory
	for i := range devices {
		d := &devices[i]
		allowed[d.Source] = allowed[d.Source] || d.Passthrough != nil || discovery.IsVFIO(d.Attributes.String("driver"))
	}
	for i := range devices {
		d := &devices[i]
		if d.Passthrough == nil {
			continue
		}
		r := *d.Passthrough
		d.Passthrough = &r
		if other := slices.IndexFunc(r.Others, func(path string) bool { return !allowed[path] }); other >= 0 && r.Why == "" {
			r.Why = fmt.Sprintf("its IOMMU group also contains %s, for which the configuration does not allow passthrough", path.Base(r.Others[other]))
		}
		if r.Why != "" && r.Only && d.Health.Status == discovery.Healthy {
			d.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "it can only be used through vfio, which is not possible: " + r.Why}
		}
		if r.Why == "" && len(d.Attributes)+len(d.Capacity) < resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
			d.Attributes = maps.Clone(d.Attributes)
			d.Attributes.SetString(discovery.VFIODriver, r.Driver)
		}
	}
}

// DescribePassthrough returns the description of a device under a vfio driver, with the edits for a
// container. All other fields stay, so that the scheduler's selection of the device still matches.
// The error joins the read errors.
func DescribePassthrough(host *discovery.Host, d discovery.Device) (discovery.Device, error) {
	nodes, err := VFIONodes(host, sysfs.At(host.FS, d.Source))
	discovery.PermitMknod(nodes) // as KubeVirt does
	d.Edits, d.SharedEdits = specs.ContainerEdits{DeviceNodes: nodes}, specs.ContainerEdits{}
	d.CommonNodes = slices.Concat(d.CommonNodes, VFIOControl())
	d.Health = VFIOHealth(host, sysfs.At(host.FS, d.Source), nodes)
	if d.Health.Status == discovery.Healthy && err != nil {
		d.Health = discovery.Health{Status: discovery.Unknown, Reason: discovery.ErrorText(err)}
	}
	return d, err
}
