package discovery

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery/sysfs"
)

// Driver is the parameter by which a claim, or a classic resource, asks for a device
// under another kind of kernel driver than its own. Its one value is [DriverVFIO].
// Whether a device takes it is the administrator's to say, and not its family's.
const Driver Parameter = "driver"

// DriverVFIO asks for a PCI function as a vfio driver hands it out.
const DriverVFIO = "vfio"

// VFIODriver is the attribute that says which vfio driver a device is given to for
// those who ask for it so. A device without it cannot be had so.
const VFIODriver resourceapi.QualifiedName = "vfioDriver"

// Rebinding is which devices the administrator lets be given to a vfio driver for those
// who ask for it.
type Rebinding struct {
	Expression string // as the administrator wrote it
	Selects    func(Device) (bool, error)
	Driver     string // "vfio-pci"
}

// SameRebinding reports whether two entries say the same.
func SameRebinding(a, b Rebinding) bool { return a.Expression == b.Expression && a.Driver == b.Driver }

// Rebindable says how a device can be given to a vfio driver. It is set by [Scan].
type Rebindable struct {
	Driver string `json:"driver"`

	// Others are the kernel's directories of the functions that go with it: those of
	// its IOMMU group that have a driver, but for bridges.
	Others []string `json:"others,omitempty"`

	// Only says that nobody can have the device otherwise.
	Only bool `json:"only,omitempty"`

	// Why says why it cannot be, nevertheless, "" if it can.
	Why string `json:"why,omitempty"`
}

// Rebinds returns the vfio driver that the administrator lets a device be given to, ""
// if there is none. The error is of expressions that cannot be evaluated for it.
func (h *Host) Rebinds(d Device) (driver string, err error) {
	var errs []error
	for _, rebinding := range h.Rebind {
		selected, err := rebinding.Selects(d)
		if err != nil {
			errs = append(errs, err)
		}
		if selected {
			return rebinding.Driver, nil
		}
	}
	return "", errors.Join(errs...)
}

// setRebindable says of devices which are PCI functions how they can be given to a vfio
// driver, where the administrator lets them be.
func setRebindable(host *Host, devices []Device) (problems []Problem) {
	if len(host.Rebind) == 0 {
		return nil
	}
	for i := range devices {
		d := &devices[i]
		function := sysfs.At(host.FS, d.Source)
		if !sysfs.IsPCIAddress(function.Name()) || d.Name != DeviceName(function) || d.Open || IsVFIO(function.Driver()) {
			continue
		}
		driver, err := host.Rebinds(*d)
		if err != nil {
			problems = append(problems, Problem{"rebinding", fmt.Errorf("device %s: %w", d.Name, err)})
		}
		if driver == "" {
			continue
		}
		r := &Rebindable{Driver: driver, Only: d.Rebind != nil && d.Rebind.Only}
		if d.Making == nil { // else its group is not known yet
			r.Others, r.Why = GroupOthers(host, function)
		}
		d.Rebind = r
	}
	return problems
}

// GroupOthers returns the other functions of an IOMMU group that go with a function, and
// why the function cannot be given to vfio.
func GroupOthers(host *Host, function sysfs.Device) (others []string, why string) {
	group := function.Link("iommu_group")
	if group == "" {
		return nil, "it is in no IOMMU group; vfio needs an IOMMU"
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

// joinRebindable decides which devices can be given to vfio with all that goes with
// them: an IOMMU group goes as a whole or not at all. Those that can have the attribute
// [VFIODriver].
func (s *Snapshot) joinRebindable() {
	if !slices.ContainsFunc(s.Devices, func(d Device) bool { return d.Rebind != nil }) {
		return
	}
	allowed := make(map[string]bool) // kernel's directories
	for i := range s.Devices {
		d := &s.Devices[i]
		allowed[d.Source] = allowed[d.Source] || d.Rebind != nil || IsVFIO(d.Attributes.String("driver"))
	}
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.Rebind == nil {
			continue
		}
		r := *d.Rebind
		d.Rebind = &r
		if other := slices.IndexFunc(r.Others, func(path string) bool { return !allowed[path] }); other >= 0 && r.Why == "" {
			r.Why = fmt.Sprintf("its IOMMU group is also that of %s, which the configuration does not let be rebound", path.Base(r.Others[other]))
		}
		if r.Why != "" && r.Only && d.Health.Status == Healthy {
			d.Health = Health{Status: Unhealthy, Reason: "it can only be had as vfio, and cannot be: " + r.Why}
		}
		if r.Why == "" && len(d.Attributes)+len(d.Capacity) < resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
			d.Attributes = maps.Clone(d.Attributes)
			d.Attributes.SetString(VFIODriver, r.Driver)
		}
	}
}

// acceptDriver reports why a device cannot be given as a kind of driver has it. It takes
// no other parameter besides: what a family does for a device it does with its own driver.
func acceptDriver(d *Device, parameters Parameters) error {
	as, asked := parameters[Driver]
	switch {
	case !asked && d.Rebind != nil && d.Rebind.Only:
		return fmt.Errorf("device %s can only be had with %s: %s", d.Name, Driver, DriverVFIO)
	case !asked:
		return nil
	case as != DriverVFIO:
		return fmt.Errorf("device %s: %s is %q; want %s", d.Name, Driver, as, DriverVFIO)
	case len(parameters) > 1:
		others := slices.DeleteFunc(slices.Sorted(maps.Keys(parameters)), func(p Parameter) bool { return p == Driver })
		return fmt.Errorf("device %s takes no %s under vfio", d.Name, others[0])
	case d.Rebind == nil && IsVFIO(d.Attributes.String("driver")):
		return nil // as it is
	case d.Rebind == nil:
		return fmt.Errorf("device %s cannot be had as vfio: the configuration does not let it be rebound", d.Name)
	case d.Rebind.Why != "":
		return fmt.Errorf("device %s cannot be had as vfio: %s", d.Name, d.Rebind.Why)
	}
	if _, shared := d.Capacity[Shares]; shared {
		return fmt.Errorf("device %s cannot be had as vfio: it is shared", d.Name)
	}
	return nil
}

// Rebound returns a device as it is under a vfio driver, with the edits by which a
// container uses it. All else stays, so that whoever chose the device by what it is
// still finds it. An error says what could not be read.
func Rebound(host *Host, d Device) (Device, error) {
	nodes, err := VFIO(host, sysfs.At(host.FS, d.Source))
	PermitMknod(nodes) // as KubeVirt does
	d.Edits, d.SharedEdits = specs.ContainerEdits{DeviceNodes: nodes}, specs.ContainerEdits{}
	d.CommonNodes = slices.Concat(d.CommonNodes, VFIOControl())
	d.Health = VFIOHealth(host, sysfs.At(host.FS, d.Source), nodes)
	if d.Health.Status == Healthy && err != nil {
		d.Health = Health{Status: Unknown, Reason: err.Error()}
	}
	return d, err
}
