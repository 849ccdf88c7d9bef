package scan

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// mergeFindings returns the next findings, completed with the parts of the last findings that are
// still true; see [RescanHost]. last may be nil.
func mergeFindings(host *discovery.Host, last, next *Findings) *Findings {
	if last == nil {
		return next
	}
	before, devices := last.byName(), next.byName()
	lastSnapshot, nextSnapshot := last.Snapshot(), next.Snapshot()
	causes := causesOf(nextSnapshot.Problems)
	for i := range lastSnapshot.Devices {
		old := &lastSnapshot.Devices[i]
		_, found := devices[old.Name]
		cause := causes[old.Name]
		if cause == nil && !found {
			cause = whyMissing(old, causes)
		}
		if cause == nil && !found && isIdle(host, old.Source) && !next.describesFunction(old) {
			devices[old.Name] = asIdle(*before[old.Name], sysfs.At(host.FS, old.Source).Driver())
			continue
		}
		if cause == nil || lacksFile(host, old.HomeDirectory()) || !found && old.PartOf == nil && hasParts(nextSnapshot.Devices, old.Name) {
			continue
		}
		devices[old.Name] = asUnread(*before[old.Name], cause)
		if _, beside := lastSnapshot.Lookup(old.Silicon()); !beside && old.PartOf != nil && causes[old.Silicon()] != nil {
			delete(devices, old.Silicon())
		}
	}
	for name, d := range devices {
		if kept := keepLink(host, before[name], d); kept != nil {
			devices[name] = kept
		}
	}
	merged := &Findings{devices: slices.Collect(maps.Values(devices)), problems: next.problems}
	merged.sort()
	return merged
}

// linkAttributes are not read if reading would wake the function; see [pci.DescribeFunction].
var linkAttributes = [...]resourceapi.QualifiedName{"linkSpeed", "linkWidth"}

// keepLink returns the device with the link attributes of its last description that are
// missing now. It returns nil unless it is the same device and its PCI function is suspended:
// below a suspended port, the registers read as ones on kernels before Linux 6.18.
func keepLink(host *discovery.Host, before, now *discovery.Device) *discovery.Device {
	if before == nil || before.Source != now.Source || before.Identity != now.Identity {
		return nil
	}
	var kept *discovery.Device
	for _, name := range linkAttributes {
		value, known := before.Attributes[name]
		if _, read := now.Attributes[name]; !known || read {
			continue
		}
		if kept == nil {
			address := now.Attributes.String("resource.kubernetes.io/pciBusID") // also of a class device or a partition
			if address == "" || !sysfs.At(host.FS, path.Join("sys/bus/pci/devices", address)).IsSuspended() {
				return nil
			}
			d := *now
			d.Attributes = maps.Clone(d.Attributes)
			kept = &d
		}
		kept.Attributes[name] = value
	}
	return kept
}

// byName returns the devices by their names.
func (f *Findings) byName() map[string]*discovery.Device {
	devices := make(map[string]*discovery.Device, len(f.devices))
	for _, d := range f.devices {
		devices[d.Name] = d
	}
	return devices
}

// lacksFile reports whether the host no longer has the file. Any other error of the check is no
// evidence.
func lacksFile(host *discovery.Host, name string) bool {
	_, err := fs.Stat(host.FS, name)
	return errors.Is(err, fs.ErrNotExist)
}

// isIdle reports whether a kernel device is a PCI function that exists and is [pci.IsIdleDriver].
func isIdle(host *discovery.Host, source string) bool {
	function := sysfs.At(host.FS, source)
	if !sysfs.IsPCIAddress(function.Name()) || !host.FileExists("/"+source) {
		return false
	}
	driver := function.Driver()
	return !function.HasDriver() || driver != "" && pci.IsIdleDriver(driver)
}

// asUnread returns the device with health Unknown and why as the reason.
func asUnread(d discovery.Device, why error) *discovery.Device {
	d.Health, d.Readings = discovery.Health{Status: discovery.Unknown, Reason: fmt.Sprintf("last description kept: %v", why)}, nil
	return &d
}

// asIdle returns the device without a driver, or with a driver that only blocks other drivers.
func asIdle(d discovery.Device, driver string) *discovery.Device {
	d.Attributes = maps.Clone(d.Attributes)
	delete(d.Attributes, "driver")
	d.Health, d.Readings, d.Creation = pci.UnboundHealth(), nil, nil
	if driver != "" {
		d.Attributes.SetString("driver", driver)
		d.Health.Reason = fmt.Sprintf("it is bound to %s, which permits no use of it", driver)
	}
	return &d
}

// describesFunction reports whether the findings describe a device's PCI function, or parts of the
// function. Other parts of the same physical device do not matter: virtual functions are bound and
// unbound individually, and so are the functions of an IOMMU group.
func (f *Findings) describesFunction(old *discovery.Device) bool {
	return slices.ContainsFunc(f.devices, func(d *discovery.Device) bool {
		return d.Source == old.Source || strings.HasPrefix(d.Source, old.Source+"/") || slices.Contains(d.Includes, old.Source) ||
			d.PartOf != nil && d.PartOf.Name == old.Name
	})
}

// anyList stands for all lists of devices.
const anyList = "/sys/"

// causesOf returns the first problem of each device that could not be read. The first problem with
// any list of devices is stored under [anyList].
func causesOf(problems []discovery.Problem) map[string]error {
	causes := make(map[string]error)
	for _, problem := range problems {
		if !problem.IsUnread() {
			continue
		}
		name := problem.Device
		if strings.HasPrefix(name, anyList) {
			name = anyList
		}
		if causes[name] == nil {
			causes[name] = problem.Err
		}
	}
	return causes
}

// whyMissing returns the error that may have prevented a scan from finding an existing device, nil
// if no such error is known.
func whyMissing(d *discovery.Device, causes map[string]error) error {
	return cmp.Or(causes[d.Silicon()], causes[d.Family], causes[anyList])
}

// hasParts reports whether the devices include parts of the named physical device.
func hasParts(devices []discovery.Device, silicon string) bool {
	return slices.ContainsFunc(devices, func(d discovery.Device) bool { return d.PartOf != nil && d.PartOf.Name == silicon })
}
