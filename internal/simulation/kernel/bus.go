package kernel

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"syscall"
)

// Function is a PCI function whose driver may change.
type Function struct {
	Address string
	Source  string // the directory of the function
	Driver  string // the driver that matches its IDs: nvme, igb or igbvf
	Group   int    // its IOMMU group

	// For a physical function, Total is the maximum number of virtual functions, and Boot the
	// number at boot. OneGroup puts all virtual functions into one IOMMU group, as under a bridge
	// without ACS.
	Total, Boot int
	OneGroup    bool
}

// function is the present state of a Function.
type function struct {
	Function

	physical *function // of a virtual function
	driver   string
	override string
	virtual  []*function
	busy     bool // a write to the function is in progress
}

// nodeNumber returns a number that distinguishes the node or interface of a function from others.
func (f *function) nodeNumber() int {
	var bus, slot, number int
	_, _ = fmt.Sscanf(f.Address, "0000:%x:%x.%x", &bus, &slot, &number)
	return bus<<8 | slot<<3 | number
}

// nodeOf returns the path of the function's device node under nvme.
func (f *function) nodeOf() string { return fmt.Sprintf("dev/nvme%d", f.nodeNumber()) }

// The kernel's drivers.
const (
	VFIO     = "vfio-pci"
	nvme     = "nvme"
	physical = "igb"
	virtual  = "igbvf"
)

// none is the content of driver_override without an override.
const none = "(null)"

// Trouble describes which operations of drivers fail.
type Trouble struct {
	Refuses string // a driver that refuses all functions
	Fewer   bool   // one virtual function less is created than requested
	Full    bool   // no virtual functions can be created
	Resets  bool   // no function can be reset
}

// bus holds the PCI functions whose drivers may change, and keeps their files up to date.
type bus struct {
	files     *tree
	functions map[string]*function // the present functions, by address
	trouble   Trouble
}

// probeAnew adds a function and binds it to its driver. No driver binds while a function of the
// same IOMMU group is under vfio (iommu_device_use_default_domain in drivers/iommu/iommu.c, Linux
// 6.1 to 6.18).
func (b *bus) probeAnew(of Function) {
	f := &function{Function: of}
	b.functions[f.Address] = f
	b.setOverride(f, none)
	if slices.ContainsFunc(b.inGroup(f.Group), func(member string) bool { return b.functions[member].driver == VFIO }) {
		return
	}
	b.bind(f, f.Driver)
	for i := range f.Boot {
		b.bind(b.addVirtual(f, i), virtual)
	}
}

func (b *bus) setOverride(f *function, driver string) {
	f.override = driver
	b.files.text(f.Source+"/driver_override", driver+"\n")
}

// bind binds a function to a driver, or to none for "", and updates the affected files.
func (b *bus) bind(f *function, driver string) {
	switch f.driver {
	case nvme:
		b.files.dropPath(f.Source + "/nvme")
		b.files.dropPath(f.nodeOf())
	case physical, virtual:
		b.files.dropPath(f.Source + "/net")
		b.files.dropPath(fmt.Sprintf("sys/class/net/eth%d", f.nodeNumber()))
	}
	f.driver = driver
	b.files.dropPath(f.Source + "/driver")
	if driver != "" {
		b.files.put(f.Source+"/driver", &node{mode: fs.ModeSymlink, target: strings.Repeat("../", strings.Count(f.Source, "/")) + "bus/pci/drivers/" + driver})
	}
	switch driver {
	case nvme:
		name := path.Base(f.nodeOf())
		b.files.createDevice(f.Source+"/nvme/"+name, name, 240, uint32(f.nodeNumber()))
	case physical, virtual:
		net := fmt.Sprintf("/net/eth%d", f.nodeNumber())
		b.files.text(f.Source+net+"/type", "1\n")
		b.files.text(f.Source+net+"/flags", map[string]string{physical: "0x1003\n", virtual: "0x1002\n"}[driver])
		b.files.put("sys/class"+net, &node{mode: fs.ModeSymlink, target: "../../" + strings.TrimPrefix(f.Source, "sys/") + net})
	}
	b.group(f.Group)
}

// group creates the node of an IOMMU group if vfio has a function of the group, and removes the
// node otherwise.
func (b *bus) group(number int) {
	for _, f := range b.functions {
		if f.Group == number && f.driver == VFIO {
			dir := fmt.Sprintf("sys/devices/virtual/vfio/%d", number)
			b.files.createDevice(dir, fmt.Sprintf("vfio/%d", number), 511, uint32(number))
			b.files.put(fmt.Sprintf("sys/class/vfio/%d", number), &node{mode: fs.ModeSymlink, target: fmt.Sprintf("../../devices/virtual/vfio/%d", number)})
			return
		}
	}
	for _, name := range []string{"sys/devices/virtual/vfio/%d", "sys/class/vfio/%d", "dev/vfio/%d"} {
		b.files.dropPath(fmt.Sprintf(name, number))
	}
}

// addVirtual creates a virtual function without a driver.
func (b *bus) addVirtual(of *function, i int) *function {
	devfn := 128 + 2*i
	bus, _, _ := strings.Cut(strings.TrimPrefix(of.Address, "0000:"), ":")
	address := fmt.Sprintf("0000:%s:%02x.%d", bus, devfn/8, devfn%8)
	f := &function{Function: Function{Address: address, Source: path.Join(path.Dir(of.Source), address), Driver: virtual, Group: of.Group + 1 + i}, physical: of}
	if of.OneGroup {
		f.Group = of.Group + 1
	}
	for name, text := range map[string]string{"class": "0x020000", "vendor": "0x8086", "device": "0x1520", "numa_node": "0"} {
		b.files.text(f.Source+"/"+name, text+"\n")
	}
	up := strings.Repeat("../", strings.Count(f.Source, "/"))
	b.files.put("sys/bus/pci/devices/"+address, &node{mode: fs.ModeSymlink, target: "../../../" + strings.TrimPrefix(f.Source, "sys/")})
	b.files.put(f.Source+"/iommu_group", &node{mode: fs.ModeSymlink, target: fmt.Sprintf("%skernel/iommu_groups/%d", up, f.Group)})
	b.files.put(fmt.Sprintf("sys/kernel/iommu_groups/%d/devices/%s", f.Group, address), &node{mode: fs.ModeSymlink, target: "../../../../" + strings.TrimPrefix(f.Source, "sys/")})
	b.files.put(f.Source+"/physfn", &node{mode: fs.ModeSymlink, target: "../" + of.Address})
	b.files.put(fmt.Sprintf("%s/virtfn%d", of.Source, i), &node{mode: fs.ModeSymlink, target: "../" + address})
	b.functions[address] = f
	of.virtual = append(of.virtual, f)
	b.setOverride(f, none)
	return f
}

// removeAllVirtual removes the virtual functions of a function.
func (b *bus) removeAllVirtual(of *function) {
	for len(of.virtual) > 0 {
		b.removeVirtual(of)
	}
}

// removeVirtual removes the last virtual function of a function.
func (b *bus) removeVirtual(of *function) {
	i := len(of.virtual) - 1
	f := of.virtual[i]
	of.virtual = of.virtual[:i]
	b.bind(f, "")
	delete(b.functions, f.Address)
	for _, name := range []string{"sys/bus/pci/devices/" + f.Address, f.Source, fmt.Sprintf("%s/virtfn%d", of.Source, i), fmt.Sprintf("sys/kernel/iommu_groups/%d/devices/%s", f.Group, f.Address)} {
		b.files.dropPath(name)
	}
	if len(b.inGroup(f.Group)) == 0 {
		b.files.dropPath(fmt.Sprintf("sys/kernel/iommu_groups/%d", f.Group))
	}
}

// inGroup returns the addresses of the functions of an IOMMU group, sorted.
func (b *bus) inGroup(number int) (addresses []string) {
	for _, address := range slices.Sorted(maps.Keys(b.functions)) {
		if b.functions[address].Group == number {
			addresses = append(addresses, address)
		}
	}
	return addresses
}

func (b *bus) probeDriver(f *function, driver string) error {
	if b.trouble.Refuses == driver {
		return syscall.EIO
	}
	b.bind(f, driver)
	return nil
}
