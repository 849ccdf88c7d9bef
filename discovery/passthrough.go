package discovery

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// Driver is the parameter of a claim or an extended resource to request a device under another kind
// of kernel driver. Its only value is [DriverVFIO]. The administrator's configuration, not the
// family, decides whether a device accepts it.
const Driver Parameter = "driver"

// DriverVFIO requests VFIO passthrough of a PCI function.
const DriverVFIO = "vfio"

// VFIODriver is the attribute with the vfio driver of a device's passthrough. A device without the
// attribute does not support VFIO passthrough.
const VFIODriver resourceapi.QualifiedName = "vfioDriver"

// PassthroughOption describes how a device can be bound to a vfio driver. Package scan sets it.
type PassthroughOption struct {
	Driver string `json:"driver"`

	// Others are the kernel's directories of the functions bound together with the device: the
	// functions of its IOMMU group with a driver, except bridges.
	Others []string `json:"others,omitempty"`

	// Only is set if the device can be allocated only with VFIO passthrough.
	Only bool `json:"only,omitempty"`

	// Why is the reason why passthrough is not possible nevertheless, or "".
	Why string `json:"why,omitempty"`
}

// acceptDriver returns an error if a device cannot be allocated under the requested kind of driver. A
// request with Driver accepts no other parameters: a family configures a device only under the
// device's own driver.
func acceptDriver(d *Device, parameters Parameters) error {
	as, asked := parameters[Driver]
	switch {
	case !asked && d.Passthrough != nil && d.Passthrough.Only:
		return fmt.Errorf("device %s can only be allocated with %s: %s", d.Name, Driver, DriverVFIO)
	case !asked:
		return nil
	case as != DriverVFIO:
		return fmt.Errorf("device %s: %s is %q; want %s", d.Name, Driver, as, DriverVFIO)
	case len(parameters) > 1:
		others := slices.DeleteFunc(slices.Sorted(maps.Keys(parameters)), func(p Parameter) bool { return p == Driver })
		return fmt.Errorf("device %s takes no %s under vfio", d.Name, others[0])
	case d.Passthrough == nil && IsVFIO(d.Attributes.String("driver")):
		return nil // the device is already under vfio
	case d.Passthrough == nil:
		return fmt.Errorf("device %s cannot be bound to vfio: the configuration does not allow passthrough for the device", d.Name)
	case d.Passthrough.Why != "":
		return fmt.Errorf("device %s cannot be bound to vfio: %s", d.Name, d.Passthrough.Why)
	}
	if _, shared := d.Capacity[Shares]; shared {
		return fmt.Errorf("device %s cannot be bound to vfio: it is shared", d.Name)
	}
	return nil
}

// IsVFIO reports whether a driver makes functions available to user space: vfio-pci, or a driver
// that extends vfio-pci for some functions, such as mlx5_vfio_pci (drivers/vfio/pci).
func IsVFIO(driver string) bool {
	return strings.HasSuffix(strings.ReplaceAll(driver, "_", "-"), "vfio-pci")
}
