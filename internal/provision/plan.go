package provision

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// part is a part of the plan: the writes for one function.
type part struct {
	name   string // "0000:6b:00.0", or "0000:6b:00.0 virtfn3"
	writes []discovery.Write
}

// planner computes the plan. It reads the host and writes nothing.
type planner struct {
	host     *discovery.Host
	families []*discovery.Family
	uses     func() *uses // reads the uses on the first call
}

// planFunction returns the writes for a function and its virtual functions, the function first.
// Impossible or forbidden work is omitted, and described by the error.
func (p *planner) planFunction(f function) (parts []part, err error) {
	if f.err != nil {
		return nil, fmt.Errorf("%s: %w", f.Name(), f.err)
	}
	f.Device = sysfs.At(p.host.FS, f.Path) // read again, since a listed device caches its driver
	if f.rule.Driver != "" {
		writes, err := p.bindExisting(f.Device, f.Device, f.rule.Driver)
		if err != nil {
			return nil, fmt.Errorf("%s: bind to %s: %w", f.Name(), f.rule.Driver, err)
		}
		return nonEmptyParts(part{f.Name(), writes}), nil
	}
	settings, err := p.settingWrites(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.Name(), err)
	}
	if f.rule.VFs == nil {
		if err := p.checkSettable(f, settings); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name(), err)
		}
		return nonEmptyParts(part{f.Name(), settings}), nil
	}
	return p.planVirtual(f, settings)
}

func nonEmptyParts(p part) []part {
	if len(p.writes) == 0 {
		return nil
	}
	return []part{p}
}

// settingWrites returns the writes of the function's family for the desired settings.
func (p *planner) settingWrites(f function) ([]discovery.Write, error) {
	if f.rule.Settings == nil {
		return nil, nil
	}
	for _, family := range p.families {
		if family.Provision == nil {
			continue
		}
		writes, err := family.Provision(p.host, f.Device, f.rule.Settings)
		if !errors.Is(err, errors.ErrUnsupported) {
			return writes, err
		}
	}
	return nil, fmt.Errorf("bound to %s: has no such settings", orNone(f.Driver()))
}

func orNone(name string) string {
	if name == "" {
		return "no driver"
	}
	return name
}

// checkSettable returns an error if the settings would change a function in use, or would destroy
// virtual functions.
func (p *planner) checkSettable(f function, settings []discovery.Write) error {
	if len(settings) == 0 {
		return nil
	}
	if f.HasEntry("virtfn0") {
		return errors.New("has virtual functions, which could be lost; set their number in virtualFunctions")
	}
	return p.uses().useOf(f.Device, false)
}

// planVirtual plans the settings of a physical function and its virtual functions.
func (p *planner) planVirtual(f function, settings []discovery.Write) (parts []part, err error) {
	want := f.rule.VFs
	writes, fresh, err := p.create(f, settings)
	if err == nil && fresh && want.Driver != "" { // fail before creating functions that cannot be bound
		err = errors.Join(driverLoaded(p.host, want.Driver), checkUsable(p.host, f.Device, want.Driver))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.Name(), err)
	}
	parts = nonEmptyParts(part{f.Name(), writes})
	if want.Driver == "" {
		return parts, nil
	}
	var errs []error
	for i := range want.Count {
		link := f.Child(fmt.Sprintf("virtfn%d", i))
		writes, err := p.bindVirtual(f.Device, link, want.Driver, fresh)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s %s: bind to %s: %w", f.Name(), link.Name(), want.Driver, err))
			continue
		}
		parts = append(parts, nonEmptyParts(part{f.Name() + " " + link.Name(), writes})...)
	}
	return parts, errors.Join(errs...)
}

// create returns the writes for the settings and the number of virtual functions, and whether
// the virtual functions are new. It refuses to destroy a virtual function with a driver.
func (p *planner) create(f function, settings []discovery.Write) (writes []discovery.Write, fresh bool, err error) {
	attrs := f.Attrs()
	now, ok := attrs.Uint("sriov_numvfs")
	total, _ := attrs.Uint("sriov_totalvfs")
	if err := attrs.Err(); err != nil {
		return nil, false, err
	}
	want := uint64(f.rule.VFs.Count)
	switch {
	case !ok:
		return nil, false, errors.New("can have no virtual functions")
	case want > total:
		return nil, false, fmt.Errorf("%d virtual functions are wanted, and it can have %d", want, total)
	case now == want && len(settings) == 0:
		return nil, false, nil
	}
	if err := p.uses().useOf(f.Device, false); err != nil {
		return nil, false, err
	}
	file := f.Child("sriov_numvfs").Path
	// The kernel accepts a new number only if the old or the new number is 0.
	if now > 0 {
		if err := p.checkDestructible(f.Device); err != nil {
			return nil, false, err
		}
		writes = append(writes, discovery.Set(file, fmt.Sprint(now), "0"))
	}
	writes = append(writes, settings...)
	created := discovery.Set(file, "0", fmt.Sprint(want))
	return append(writes, p.withoutProbing(f, attrs, created)...), true, attrs.Err()
}

// withoutProbing returns the write that creates virtual functions. If the rule names a driver,
// additional writes disable the kernel's driver probing during the creation, and then restore
// the setting.
func (p *planner) withoutProbing(f function, attrs *sysfs.Attrs, created discovery.Write) []discovery.Write {
	autoprobe, _ := attrs.Text("sriov_drivers_autoprobe")
	if f.rule.VFs.Driver == "" || autoprobe != "1" {
		return []discovery.Write{created}
	}
	file := f.Child("sriov_drivers_autoprobe").Path
	again := discovery.Set(file, "0", "1")
	again.Always = true
	return []discovery.Write{discovery.Set(file, "1", "0"), created, again}
}

// checkDestructible returns an error if a virtual function of f has a driver or is in use.
func (p *planner) checkDestructible(f sysfs.Device) error {
	entries, err := fs.ReadDir(p.host.FS, f.Path)
	if err != nil {
		return fmt.Errorf("list virtual functions: %w", err)
	}
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), "virtfn") {
			continue
		}
		vf, ok := f.LinkTo(entry.Name())
		if !ok {
			return fmt.Errorf("%s: cannot be read", entry.Name())
		}
		if driver := vf.Driver(); driver != "" || vf.HasDriver() {
			return fmt.Errorf("virtual function %s would be destroyed, and is bound to %s; unbind it first", vf.Name(), orNone(driver))
		}
		if err := p.uses().useOf(vf, true); err != nil {
			return fmt.Errorf("virtual function %s would be destroyed: %w", vf.Name(), err)
		}
	}
	return nil
}

// bindVirtual returns the writes that bind a virtual function to a driver. link is the
// physical function's link to the virtual function. A fresh function does not exist yet.
func (p *planner) bindVirtual(physical, link sysfs.Device, driver string, fresh bool) ([]discovery.Write, error) {
	if fresh {
		return bind(link, discovery.Write{NameOf: link.Path}, "", "", driver), nil
	}
	vf, ok := physical.LinkTo(link.Name())
	if !ok {
		return nil, errors.New("it is missing")
	}
	return p.bindExisting(vf, link, driver)
}

// bindExisting returns the writes that bind a function to a driver. link is the path used for
// the writes: the function itself, or the physical function's link to it.
func (p *planner) bindExisting(function, link sysfs.Device, driver string) ([]discovery.Write, error) {
	now := function.Driver()
	if now == driver {
		return nil, nil
	}
	if now == "" && function.HasDriver() {
		return nil, errors.New("is bound to an unknown driver")
	}
	if err := errors.Join(driverLoaded(p.host, driver), checkUsable(p.host, function, driver)); err != nil {
		return nil, err
	}
	override, err := function.Text("driver_override")
	if err != nil {
		return nil, fmt.Errorf("attribute driver_override: %w", err)
	}
	if override == "(null)" { // how the kernel prints an unset override
		override = ""
	}
	if function.HasEntry("virtfn0") {
		return nil, errors.New("has virtual functions")
	}
	if err := p.uses().useOf(function, true); err != nil {
		return nil, err
	}
	return bind(link, discovery.Write{Value: function.Name()}, now, override, driver), nil
}

// checkUsable returns an error if a function without an IOMMU group is to be bound to a driver of
// vfio, because the driver would reject the function: vfio_group_find_or_alloc in
// drivers/vfio/group.c returns EINVAL, unless enable_unsafe_noiommu_mode is set.
//
// An unbound function may get its group when a driver is probed, because the kernel before
// Linux 6.15 configures an IOMMU described by firmware tables only then (pci_dma_configure in
// drivers/pci/pci-driver.c), such as virtio-iommu or an SMMU. The Intel and AMD drivers add
// all functions to groups when they start.
func checkUsable(host *discovery.Host, function sysfs.Device, driver string) error {
	if !strings.Contains(driver, "vfio") || function.Link("iommu_group") != "" {
		return nil
	}
	if unsafe, _ := host.ReadText("/sys/module/vfio/parameters/enable_unsafe_noiommu_mode"); unsafe == "Y" {
		return nil
	}
	iommus, _ := fs.ReadDir(host.FS, "sys/class/iommu")
	switch {
	case len(iommus) == 0:
		return errors.New("has no IOMMU group, because the host's IOMMU is off; switch the IOMMU on in the firmware and the kernel, " + withoutIOMMU)
	case function.HasDriver() || !slices.ContainsFunc(iommus, groupsLate):
		return errUnserved
	}
	return nil
}

// withoutIOMMU is the remedy for functions without an IOMMU.
const withoutIOMMU = "or set the parameter enable_unsafe_noiommu_mode of module vfio, which allows the function to access all memory of the host"

// errUnserved is the reason why vfio rejects a function although the host has an IOMMU.
var errUnserved = errors.New("has no IOMMU group, because no IOMMU of the host serves it; use a function that an IOMMU serves, " + withoutIOMMU)

// groupsLate reports whether an IOMMU may add a function to a group as late as the probe of a
// driver. Names like "dmar0" belong to Intel IOMMUs, and "ivhd0" to AMD IOMMUs.
func groupsLate(iommu fs.DirEntry) bool {
	return !strings.HasPrefix(iommu.Name(), "dmar") && !strings.HasPrefix(iommu.Name(), "ivhd")
}

// bind returns the writes that bind a function to a driver, after unbinding any current driver
// (Documentation/ABI/testing/sysfs-bus-pci).
func bind(link sysfs.Device, address discovery.Write, now, override, driver string) (writes []discovery.Write) {
	if override != driver {
		writes = append(writes, discovery.Set(link.Child("driver_override").Path, override, driver))
	}
	address.Shows = link.Child("driver").Path
	if now != "" {
		unbind := address
		unbind.Path, unbind.From = "sys/bus/pci/drivers/"+now+"/unbind", now
		writes = append(writes, unbind)
	}
	probe := address
	probe.Path, probe.To = "sys/bus/pci/drivers_probe", driver
	return append(writes, probe)
}
