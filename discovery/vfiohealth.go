package discovery

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery/sysfs"
)

// VFIOHealth reads whether the kernel lets a process use a function, or a mediated
// device, by the nodes that [VFIO] returned of it. Besides the nodes it takes an
// IOMMU group in which no function is driven by the host, and interrupts that the
// function cannot forge.
func VFIOHealth(host *Host, function sysfs.Device, nodes []*specs.DeviceNode) Health {
	health := NodeHealth(host, nodes)
	reason := groupKept(host, function)
	if health.Status == Healthy && reason == "" {
		reason = interruptsUnsafe(host, function, nodes)
	}
	if reason != "" {
		return Health{Status: Unhealthy, Reason: reason}
	}
	return health
}

// IsVFIO reports whether a driver gives functions to user space: vfio-pci, or one
// that adds something to it for some functions, such as mlx5_vfio_pci
// (drivers/vfio/pci).
func IsVFIO(driver string) bool {
	return strings.HasSuffix(strings.ReplaceAll(driver, "_", "-"), "vfio-pci")
}

// harmless are the drivers, beside vfio's own, whose functions keep nobody from
// using a group through vfio: the kernel marks them driver_managed_dma. "" means
// that no driver is bound. pci-pf-stub is not marked.
var harmless = []string{"", "pci-stub", "pcieport"}

// groupKept returns which function of an IOMMU group keeps it from vfio, "" if
// none does. The kernel gives a group to user space only as long as it uses none
// of the group's functions itself (iommu_group_claim_dma_owner in
// drivers/iommu/iommu.c, and vfio_group_viable before Linux 5.19).
func groupKept(host *Host, function sysfs.Device) string {
	group := function.Link("iommu_group")
	if group == "" {
		return ""
	}
	for _, member := range groupMembers(host, group, function) {
		driver := member.Driver()
		if driver != function.Driver() && !IsVFIO(driver) && !slices.Contains(harmless, driver) {
			return fmt.Sprintf("IOMMU group %s is also that of %s, which is bound to %s", group, member.Name(), driver)
		}
	}
	return ""
}

// interruptsUnsafe returns why the kernel lets nobody use a function because the
// function could send any interrupt to the host, "" if that is not known. It is so
// where nothing remaps interrupts, as under virtio-iommu on x86 or with
// intremap=off, unless the administrator allows it (vfio_iommu_type1_attach_group
// in drivers/vfio/vfio_iommu_type1.c, and iommufd_device_bind in
// drivers/iommu/iommufd/device.c). A mediated device sends none.
func interruptsUnsafe(host *Host, function sysfs.Device, nodes []*specs.DeviceNode) string {
	if !sysfs.IsPCIAddress(function.Name()) || remapsInterrupts(host) {
		return ""
	}
	var modules []string // by which the function could be used
	for _, node := range nodes {
		switch {
		case strings.HasPrefix(path.Base(node.HostPath), "noiommu-"):
			return "" // which promises no protection at all
		case node.HostPath == "/dev/iommu", node.HostPath == "/dev/vfio/vfio" && !host.Exists("/sys/module/vfio_iommu_type1"):
			modules = append(modules, "iommufd") // which can stand in for /dev/vfio/vfio
		case node.HostPath == "/dev/vfio/vfio":
			modules = append(modules, "vfio_iommu_type1")
		}
	}
	for _, module := range modules {
		if allowed, _ := host.ReadText("/sys/module/" + module + "/parameters/allow_unsafe_interrupts"); allowed != "N" {
			return "" // it is allowed, or that cannot be told
		}
	}
	if len(modules) == 0 {
		return ""
	}
	return fmt.Sprintf("the kernel lets nobody use it: interrupts are not remapped, and the parameter allow_unsafe_interrupts of %s is off", modules[0])
}

// legacyInterrupts is how many interrupts of a PC are numbered as they always
// were.
const legacyInterrupts = 16

// remapsInterrupts reports whether interrupts are remapped, or it cannot be told.
// On x86 the chip of the legacy interrupts tells it: "IO-APIC", or "IR-IO-APIC" if
// they are (arch/x86/kernel/apic/io_apic.c). An IOMMU that remaps any remaps all.
func remapsInterrupts(host *Host) bool {
	for number := range legacyInterrupts {
		chip, _ := host.ReadText(fmt.Sprintf("/sys/kernel/irq/%d/chip_name", number))
		if strings.HasSuffix(chip, "IO-APIC") {
			return chip != "IO-APIC"
		}
	}
	return true
}
