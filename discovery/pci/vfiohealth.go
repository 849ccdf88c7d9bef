package pci

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// VFIOHealth reports whether the kernel allows a process to use a function or a mediated device by
// the nodes from [VFIONodes]. Apart from the nodes, the use requires an IOMMU group without
// functions driven by the host, and protection against forged interrupts.
func VFIOHealth(host *discovery.Host, function sysfs.Device, nodes []*specs.DeviceNode) discovery.Health {
	health := discovery.NodeHealth(host, nodes)
	if member, used := groupUse(host, function); used {
		group := function.Link("iommu_group")
		return discovery.Health{
			Status: discovery.Unhealthy,
			Reason: fmt.Sprintf("IOMMU group %s also contains %s, which is bound to %s", group, member.Name(), member.Driver()),
			Fix: fmt.Sprintf("ls /sys/kernel/iommu_groups/%s/devices   # if the host uses %s, do not unbind it, but move one of the two to another slot; otherwise, bind it to vfio-pci",
				group, member.Name()),
			OtherFunction: member.Name(),
		}
	}
	if health.Status == discovery.Healthy {
		if reason := interruptsUnsafe(host, function, nodes); reason != "" {
			return discovery.Health{Status: discovery.Unhealthy, Reason: reason}
		}
	}
	if len(nodes) == 0 {
		health.Reason = withoutVFIONode(function).Error()
	}
	return health
}

// harmless are the drivers, in addition to those of vfio, that do not block the use of their IOMMU
// group through vfio: the kernel marks them driver_managed_dma. "" means that no driver is bound.
// pci-pf-stub is not marked.
var harmless = []string{"", "pci-stub", "pcieport"}

// groupUse returns the function that prevents the use of an IOMMU group through vfio, if there is
// one. The kernel makes a group available to user space only while the kernel uses none of the
// group's functions itself (iommu_group_claim_dma_owner in drivers/iommu/iommu.c, and
// vfio_group_viable before Linux 5.19).
func groupUse(host *discovery.Host, function sysfs.Device) (member sysfs.Device, used bool) {
	group := function.Link("iommu_group")
	if group == "" {
		return member, false
	}
	for _, member := range groupMembers(host, group, function) {
		driver := member.Driver()
		if driver != function.Driver() && !discovery.IsVFIO(driver) && !slices.Contains(harmless, driver) {
			return member, true
		}
	}
	return member, false
}

// interruptsUnsafe returns the reason why the kernel refuses the use of a function that could send
// any interrupt to the host. The result is "" if the kernel allows the use or the answer is not
// known. The kernel refuses the use without interrupt remapping, as under virtio-iommu on x86 or
// with intremap=off, unless the administrator allows it (vfio_iommu_type1_attach_group in
// drivers/vfio/vfio_iommu_type1.c, and iommufd_device_bind in drivers/iommu/iommufd/device.c). A
// mediated device sends no interrupts to the host.
func interruptsUnsafe(host *discovery.Host, function sysfs.Device, nodes []*specs.DeviceNode) string {
	if !sysfs.IsPCIAddress(function.Name()) || remapsInterrupts(host) {
		return ""
	}
	var modules []string // modules through which the function could be used
	for _, node := range nodes {
		switch {
		case strings.HasPrefix(path.Base(node.HostPath), "noiommu-"):
			return "" // no protection is promised in this mode
		case node.HostPath == "/dev/iommu", node.HostPath == "/dev/vfio/vfio" && !host.FileExists("/sys/module/vfio_iommu_type1"):
			modules = append(modules, "iommufd") // iommufd can replace /dev/vfio/vfio
		case node.HostPath == "/dev/vfio/vfio":
			modules = append(modules, "vfio_iommu_type1")
		}
	}
	for _, module := range modules {
		if allowed, _ := host.ReadText("/sys/module/" + module + "/parameters/allow_unsafe_interrupts"); allowed != "N" {
			return "" // allowed, or unreadable
		}
	}
	if len(modules) == 0 {
		return ""
	}
	return fmt.Sprintf("the kernel permits no use of it: interrupts are not remapped, and the parameter allow_unsafe_interrupts of %s is off", modules[0])
}

// legacyInterrupts is the number of legacy interrupts of a PC.
const legacyInterrupts = 16

// remapsInterrupts reports whether the host remaps interrupts or the answer is not known. On x86
// the chip name of the legacy interrupts shows the answer: "IO-APIC", or "IR-IO-APIC" with
// remapping (arch/x86/kernel/apic/io_apic.c). If any IOMMU remaps interrupts, all IOMMUs do.
func remapsInterrupts(host *discovery.Host) bool {
	for number := range legacyInterrupts {
		chip, _ := host.ReadText(fmt.Sprintf("/sys/kernel/irq/%d/chip_name", number))
		if strings.HasSuffix(chip, "IO-APIC") {
			return chip != "IO-APIC"
		}
	}
	return true
}
