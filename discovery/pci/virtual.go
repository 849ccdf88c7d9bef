package pci

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
	"syscall"

	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Keys of [discovery.Creation.How]: the wanted number of virtual functions, and the number that the
// kernel created. The latter is missing until the write has ended, and remains missing if the agent
// is killed meanwhile.
const (
	virtualCount = "virtualFunctions"
	virtualCame  = "came"
)

// UncreatedFunctions returns the virtual functions that a physical function could get, with the
// attributes that [DescribeFunction] describes for any PCI function, if the administrator allows
// on-demand creation. The physical function is as its family describes it. There are no results if
// it has virtual functions already: the kernel changes their number only from 0. Their device ID is
// in the capability of the physical function. Their addresses follow from the capability too, but a
// device may choose other addresses for another number of virtual functions, and then the described
// ones do not appear (SR-IOV 3.3.9, 3.3.10).
//
// The driver and its interfaces are not known in advance, nor is the IOMMU group.
func UncreatedFunctions(host *discovery.Host, physical discovery.Device) (virtual []discovery.Device, err error) {
	most, err := discovery.FirstSelected(host.VirtualFunctions, physical)
	if most == nil {
		return nil, err
	}
	function := sysfs.At(host.FS, physical.Source)
	if divided, err := HasVirtualFunctions(function); divided || err != nil {
		return nil, err
	}
	attrs := function.Attrs()
	total, can := attrs.Uint("sriov_totalvfs")
	offset, hasOffset := attrs.Uint("sriov_offset")
	stride, hasStride := attrs.Uint("sriov_stride")
	id, hasID := virtualID(attrs)
	if err := attrs.Err(); err != nil {
		return nil, fmt.Errorf("virtual functions of %s: %w", function.Name(), err)
	}
	if !can || total == 0 || !hasOffset || !hasStride || !hasID {
		return nil, nil
	}
	count := min(int(min(total, 1<<16)), cmp.Or(*most, 1<<16))
	making := discovery.Creation{Unit: discovery.DeviceName(function), Of: function.Path, How: map[string]string{virtualCount: strconv.Itoa(count)}}
	for i := range count {
		address, ok := virtualAddress(function.Name(), offset, stride, uint64(i))
		if !ok {
			return nil, fmt.Errorf("virtual functions of %s: there is no place for number %d at offset %d, stride %d", function.Name(), i, offset, stride)
		}
		virtual = append(virtual, uncreatedFunction(host, physical, address, id, making))
	}
	return virtual, nil
}

// virtualID returns the PCI device ID of future virtual functions. The kernel writes the ID without
// leading zeros (sriov_vf_device_show in drivers/pci/iov.c).
func virtualID(attrs *sysfs.Attrs) (string, bool) {
	text, ok := attrs.RequiredText("sriov_vf_device")
	number, err := strconv.ParseUint(text, 16, 16)
	return fmt.Sprintf("%04x", number), ok && err == nil
}

// virtualAddress returns the address of virtual function number i, from the offset of the first
// virtual function and the stride between them (pci_iov_virtfn_bus and pci_iov_virtfn_devfn in
// drivers/pci/iov.c).
func virtualAddress(physical string, offset, stride, i uint64) (string, bool) {
	var domain, bus, slot, function uint64
	if _, err := fmt.Sscanf(physical, "%x:%x:%x.%x", &domain, &bus, &slot, &function); err != nil {
		return "", false
	}
	if offset == 0 || stride == 0 && i > 0 || offset > 1<<16 || stride > 1<<16 {
		return "", false
	}
	at := bus<<8 + slot<<3 + function + offset + stride*i
	address := fmt.Sprintf("%04x:%02x:%02x.%x", domain, at>>8, at>>3&0x1f, at&7)
	return address, at < 1<<16 && sysfs.IsPCIAddress(address)
}

// uncreatedFunction returns the description of a missing virtual function. The kernel will create
// its directory beside the physical function's, on any bus (pci_iov_add_virtfn in
// drivers/pci/iov.c).
func uncreatedFunction(h *discovery.Host, physical discovery.Device, address, id string, making discovery.Creation) discovery.Device {
	function := sysfs.At(h.FS, path.Join(path.Dir(physical.Source), address))
	d := discovery.Device{
		Name: discovery.DeviceName(function), Source: function.Path, Attributes: discovery.Attributes{}, Capacity: discovery.Capacity{},
		PartOf: &discovery.Silicon{Name: making.Unit}, Creation: &making,
	}
	d.Attributes.SetString("pciVendor", physical.Attributes.String("pciVendor"))
	d.Attributes.SetString("pciDevice", id)
	d.Attributes.SetString("function", "virtual")
	d.Attributes.SetString("parent", making.Unit)
	d.Attributes.SetString(deviceattribute.StandardDeviceAttributePCIBusID, address)
	d.Attributes.SetString(deviceattribute.StandardDeviceAttributePCIeRoot, function.PCIRoot())
	if node, known := physical.Attributes[deviceattribute.StandardDeviceAttributeNUMANode]; known {
		d.Attributes[deviceattribute.StandardDeviceAttributeNUMANode] = node
	}
	return d
}

// virtualOf returns the virtual functions of a physical function, by their links. It does not read
// the attribute sriov_numvfs, for the same reason as [HasVirtualFunctions].
func virtualOf(host *discovery.Host, physical sysfs.Device) (functions []sysfs.Device, err error) {
	entries, err := fs.ReadDir(host.FS, physical.Path)
	if err != nil {
		return nil, fmt.Errorf("list the virtual functions of %s: %w", physical.Name(), err)
	}
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), "virtfn") {
			continue
		}
		function, ok := physical.LinkTo(entry.Name())
		if !ok {
			return nil, fmt.Errorf("%s of %s cannot be looked at", entry.Name(), physical.Name())
		}
		functions = append(functions, function)
	}
	return functions, nil
}

// MakeVirtual is the [discovery.Family.Create] of families that describe virtual functions from
// [UncreatedFunctions]. One write creates all virtual functions of a physical function.
func MakeVirtual(host *discovery.Host, tools discovery.Tools, m discovery.Creation) (discovery.Work, error) {
	physical, count := sysfs.At(host.FS, m.Of), m.How[virtualCount]
	functions, err := virtualOf(host, physical)
	if err != nil {
		return nil, err
	}
	if has := len(functions); has > 0 {
		if strconv.Itoa(has) != count {
			return nil, fmt.Errorf("%s has %d virtual functions already, and not %s", physical.Name(), has, count)
		}
		return nil, nil
	}
	if IsIdleDriver(physical.Driver()) {
		return nil, fmt.Errorf("no driver of %s makes virtual functions", physical.Name())
	}
	if probe, err := physical.Text("sriov_drivers_autoprobe"); err == nil && probe == "0" {
		return nil, fmt.Errorf("sriov_drivers_autoprobe of %s is 0, so that no driver would take its virtual functions", physical.Name())
	}
	if err := tools.CheckBusy(true, physical); err != nil {
		return nil, fmt.Errorf("physical function %w", err)
	}
	return func(context.Context) error {
		if err := writeVirtual(tools, physical, count); err != nil {
			return err
		}
		functions, err := virtualOf(host, physical)
		if err != nil {
			return err
		}
		has := strconv.Itoa(len(functions))
		if has != count {
			err = fmt.Errorf("%s was to have %s virtual functions and has %s; the kernel's log may say why", physical.Name(), count, has)
		}
		return errors.Join(err, tools.AmendRecord(m.Unit, map[string]string{virtualCame: has}))
	}, nil
}

// createdByAgent reports whether an agent created the present virtual functions. If the agent was
// killed before it recorded the number, there may be fewer than it wanted.
func createdByAgent(has int, m discovery.Creation) bool {
	if came := m.How[virtualCame]; came != "" {
		return strconv.Itoa(has) == came
	}
	count, err := strconv.Atoi(m.How[virtualCount])
	return err == nil && has > 0 && has <= count
}

// UnmakeVirtual is the [discovery.Family.Remove] of the same families. If the number of virtual
// functions has changed since, another program changed it, and the physical function remains
// unchanged.
func UnmakeVirtual(host *discovery.Host, tools discovery.Tools, m discovery.Creation) (discovery.Work, error) {
	physical := sysfs.At(host.FS, m.Of)
	functions, err := virtualOf(host, physical)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !createdByAgent(len(functions), m) {
		return nil, nil
	}
	if len(functions) == 0 {
		return nil, nil
	}
	if err := tools.CheckBusy(false, functions...); err != nil {
		return nil, fmt.Errorf("virtual function %w", err)
	}
	return func(context.Context) error { return writeVirtual(tools, physical, "0") }, nil
}

func writeVirtual(tools discovery.Tools, physical sysfs.Device, count string) error {
	if err := tools.Write(physical.Child("sriov_numvfs").Path, count); err != nil {
		return fmt.Errorf("%w%s", err, ExplainVirtual(count, err))
	}
	return nil
}

// ExplainVirtual returns the known cause and the remedy for a kernel error from a write of
// sriov_numvfs, in parentheses, or "" (sriov_numvfs_store in drivers/pci/iov.c of Linux 6.1 to
// 6.18, and its callees).
func ExplainVirtual(count string, err error) string {
	switch {
	case errors.Is(err, syscall.EBUSY) && count != "0":
		return " (the function has virtual functions already, which another program created meanwhile, or its driver is busy)"
	case errors.Is(err, syscall.EBUSY), errors.Is(err, syscall.EPERM):
		return " (a virtual machine or a container may still have one of them)"
	case errors.Is(err, syscall.ERANGE):
		return " (the driver lets the function have fewer; sriov_totalvfs says how many)"
	case errors.Is(err, syscall.ENOENT):
		return " (no driver is bound to the function, or it is one that makes no virtual functions, such as vfio-pci without enable_sriov)"
	case errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.ENOSPC):
		return " (the firmware left no room for their memory or bus numbers; switch SR-IOV on in the firmware, or boot with pci=realloc,assign-busses)"
	}
	return ""
}
