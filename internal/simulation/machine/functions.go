package machine

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/simulation/kernel"
)

// Allowed holds the changes of functions that the machine's administrator allows.
type Allowed struct {
	Rebind  []string // addresses of the functions allowed under vfio
	Creates string   // the physical function that may get virtual functions, "" for none
}

// VirtualFunctions is the number of virtual functions on demand.
const VirtualFunctions = 3

// functionMachine returns a machine with disks and network adapters whose drivers change: one disk
// that the agents must not change, one disk alone in its IOMMU group, two disks in one group, an
// adapter without virtual functions, and an adapter with two virtual functions from the boot on.
func functionMachine(rebinds, makes, oneGroup bool) *Machine {
	m := &Machine{Name: fmt.Sprintf("disks and adapters, passthrough %v, on demand %v, virtual functions in one group %v", rebinds, makes, oneGroup), Resets: true}
	disk := func(address string, group int) { m.add(address, kernel.Function{Driver: "nvme", Group: group}) }
	disk("0000:01:00.0", 1)
	disk("0000:02:00.0", 2)
	disk("0000:04:00.0", 4)
	disk("0000:04:00.1", 4)
	m.add("0000:03:00.0", kernel.Function{Driver: "igb", Group: 10, Total: 7, OneGroup: oneGroup})
	m.add("0000:05:00.0", kernel.Function{Driver: "igb", Group: 20, Total: 7, Boot: 2})
	if rebinds {
		m.Allowed.Rebind = []string{"0000:02:00.0", "0000:04:00.0", "0000:04:00.1", "0000:03:10.0", "0000:03:10.2", "0000:03:10.4"}
		m.Cards = append(m.Cards, Card{Address: "0000:02:00.0"}) // a single function of a multi-function card does not vanish
	}
	if makes {
		m.Allowed.Creates = "0000:03:00.0"
	}
	m.Cards = append(m.Cards, Card{Address: "0000:03:00.0"})
	m.Text = append(m.Text, "-- end --\n"...)
	return m
}

// add adds a function to the host recording, without its driver.
func (m *Machine) add(address string, f kernel.Function) {
	bus := strings.Split(address, ":")[1]
	f.Address, f.Source = address, fmt.Sprintf("sys/devices/pci0000:00/0000:00:%s.0/%s", bus, address)
	attributes := []string{"vendor 0x144d", "device 0xa80a", "class 0x010802", "numa_node 0", "reset ", "reset_method flr bus"}
	if f.Driver != "nvme" {
		attributes = []string{
			"vendor 0x8086", "device 0x1521", "class 0x020000", "numa_node 0", "sriov_totalvfs 7", "sriov_numvfs 0", "sriov_offset 128",
			"sriov_stride 2", "sriov_vf_device 1520", "sriov_drivers_autoprobe 1",
		}
	}
	var b strings.Builder
	writeFunction(&b, f.Source, address, attributes...)
	fmt.Fprintf(&b, "-- %s/iommu_group -> ../../../../kernel/iommu_groups/%d --\n", f.Source, f.Group)
	fmt.Fprintf(&b, "-- sys/kernel/iommu_groups/%d/devices/%s -> ../../../../%s --\n", f.Group, address, strings.TrimPrefix(f.Source, "sys/"))
	m.Text = append(m.Text, b.String()...)
	m.Functions = append(m.Functions, f)
}

// Host returns a machine's host with the settings that the administrator allows.
func (m *Machine) Host(h *kernel.Host) *discovery.Host {
	host := &discovery.Host{FS: h}
	if len(m.Allowed.Rebind) > 0 {
		host.Passthroughs = []discovery.Selection[string]{{Expression: "some", Value: kernel.VFIO, Selects: func(d discovery.Device) (bool, error) {
			return slices.ContainsFunc(m.Allowed.Rebind, func(address string) bool { return d.Name == DeviceName(address) }), nil
		}}}
	}
	if m.Allowed.Creates != "" {
		host.VirtualFunctions = []discovery.Selection[int]{{Expression: "one", Value: VirtualFunctions, Selects: func(d discovery.Device) (bool, error) {
			return d.Name == DeviceName(m.Allowed.Creates), nil
		}}}
	}
	return host
}

// resources returns the extended resources of devices that have none themselves: disks under vfio,
// virtual functions with their own driver, interchangeable devices.
func (m *Machine) resources() ([]rules.Resource, error) {
	if len(m.Functions) == 0 || m.Joins {
		channels, err := rules.Compile(`device.attributes["chandler.dev"].?channel.hasValue()`)
		return []rules.Resource{{Selector: channels, Name: "example.com/channel"}}, err
	}
	disks, err := rules.Compile(`device.attributes["chandler.dev"].?pciClass.orValue("") == "010802"`)
	if err != nil {
		return nil, err
	}
	adapters, err := rules.Compile(`device.attributes["chandler.dev"].kind == "nic"`)
	return []rules.Resource{
		{Selector: disks, Name: "example.com/disk", Want: discovery.Parameters{discovery.Driver: discovery.DriverVFIO}},
		{Selector: adapters, Name: "example.com/adapter"},
	}, err
}

// DeviceName returns the name of the device of a PCI function.
func DeviceName(address string) string { return discovery.DeviceName(sysfs.At(nil, address)) }

// AddressIn returns the last PCI address in a path, "" if there is none.
func AddressIn(source string) string {
	found := address.FindAllString(source, -1)
	if len(found) == 0 {
		return ""
	}
	return found[len(found)-1]
}

// FunctionAddress returns the PCI address of a device, "" on a machine without functions.
func (m *Machine) FunctionAddress(device string) string {
	if len(m.Functions) == 0 {
		return ""
	}
	d := m.Devices[device]
	return AddressIn(d.Source)
}

// VirtualAddresses returns the addresses of the virtual functions on demand.
func (a Allowed) VirtualAddresses() (addresses []string) {
	for i := range VirtualFunctions {
		addresses = append(addresses, fmt.Sprintf("%s10.%d", strings.TrimSuffix(a.Creates, "00.0"), 2*i))
	}
	return addresses
}

// Movable is the disk that may move to the slot of another IOMMU group.
const Movable = "0000:02:00.0"

// IsMovable reports whether the scheduler has allocated the movable disk.
func IsMovable(r resourceapi.DeviceRequestAllocationResult) bool {
	return r.Device == DeviceName(Movable)
}
