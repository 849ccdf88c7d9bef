package passthroughtest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Physical is a function of a network adapter with SR-IOV. Exported fields must be set before the
// host is used.
type Physical struct {
	Address string
	Total   int   // maximum number of virtual functions
	Fewer   int   // the driver creates this many fewer than requested
	Shift   int   // virtual functions appear this many places after sriov_offset
	Makes   int   // on a host of [At], the assumed request of a write to sriov_numvfs
	Refuses error // the error of a write to sriov_numvfs, nil for success

	Hangs chan struct{} // a write to sriov_numvfs blocks until it is closed

	OneGroup bool // all virtual functions are in one IOMMU group, as behind a bridge without ACS

	// RDMA, if not 0, makes the function an adapter with mlx5_core and an RDMA device. The RDMA
	// device of each virtual function appears this long after its interface, and its node one step
	// later.
	RDMA time.Duration
}

// driver returns the drivers of the physical and the virtual functions, the vendor ID, and both
// device IDs.
func (p *Physical) driver() (physical, virtual, vendor, device, virtualDevice string) {
	if p.RDMA > 0 {
		return "mlx5_core", "mlx5_core", "15b3", "101d", "101e"
	}
	return "igb", "igbvf", "8086", "1521", "1520"
}

// step is the kernel's time for each virtual function, which come and go one by one.
const step = 10 * time.Millisecond

// AddPhysical adds a physical function with the driver igb and igbvf for its virtual functions, or
// mlx5_core with RDMA.
func (k *Kernel) AddPhysical(p *Physical) {
	k.mu.Lock()
	defer k.mu.Unlock()
	physical, virtual, vendor, device, virtualDevice := p.driver()
	for _, driver := range []string{physical, virtual} {
		k.File(driverDir(driver)+"/bind", "")
		k.File(driverDir(driver)+"/unbind", "")
	}
	k.network(p.Address, vendor, device, physical, "10")
	k.netInterface(p.Address, "eth0", "0x1003") // up
	if p.RDMA > 0 {
		k.addRDMA(p.Address, 0)
		k.addVerbs(p.Address, 0)
	}
	for name, text := range map[string]string{
		"sriov_totalvfs": strconv.Itoa(p.Total), "sriov_numvfs": "0", "sriov_offset": "128", "sriov_stride": "2",
		"sriov_vf_device": virtualDevice, "sriov_drivers_autoprobe": "1",
	} {
		k.File(Source(p.Address)+"/"+name, text+"\n")
	}
	if k.physical == nil {
		k.physical = make(map[string]*Physical)
	}
	k.physical[p.Address] = p
}

// network adds a network function. The driver may be "".
func (k *Kernel) network(address, vendor, device, driver, group string) {
	for name, text := range map[string]string{"driver_override": "(null)", "class": "0x020000", "vendor": "0x" + vendor, "device": "0x" + device, "numa_node": "0"} {
		k.File(Source(address)+"/"+name, text+"\n")
	}
	k.Link("sys/bus/pci/devices/"+address, "../../../"+strings.TrimPrefix(Source(address), "sys/"))
	k.Link(Source(address)+"/iommu_group", "../../../../kernel/iommu_groups/"+group)
	k.Link("sys/kernel/iommu_groups/"+group+"/devices/"+address, "../../../../"+strings.TrimPrefix(Source(address), "sys/"))
	k.functions[address] = function{driver, group}
	if driver != "" {
		k.setDriver(address, driver)
	}
}

// netInterface adds the interface of a function.
func (k *Kernel) netInterface(address, name, flags string) {
	k.File(Source(address)+"/net/"+name+"/type", "1\n")
	k.File(Source(address)+"/net/"+name+"/flags", flags+"\n")
	k.Link("sys/class/net/"+name, "../../"+strings.TrimPrefix(Source(address), "sys/")+"/net/"+name)
}

// addRDMA adds the RDMA device of a function, by its number.
func (k *Kernel) addRDMA(address string, number int) {
	name := fmt.Sprintf("infiniband/mlx5_%d", number)
	k.File(Source(address)+"/"+name+"/ports/1/link_layer", "Ethernet\n")
	k.Link("sys/class/"+name, "../../"+strings.TrimPrefix(Source(address), "sys/")+"/"+name)
}

// addVerbs adds the node of an RDMA device for programs.
func (k *Kernel) addVerbs(address string, number int) {
	name := fmt.Sprintf("infiniband_verbs/uverbs%d", number)
	k.File(Source(address)+"/"+name+"/dev", fmt.Sprintf("231:%d\n", 192+number))
	k.File(Source(address)+"/"+name+"/uevent", fmt.Sprintf("MAJOR=231\nMINOR=%d\nDEVNAME=infiniband/uverbs%d\n", 192+number, number))
	k.Link("sys/class/"+name, "../../"+strings.TrimPrefix(Source(address), "sys/")+"/"+name)
	k.File(fmt.Sprintf("dev/infiniband/uverbs%d", number), fmt.Sprintf("c 231:%d", 192+number))
}

// removeRDMA removes the RDMA device of a function, if there is one.
func (k *Kernel) removeRDMA(address string, number int) {
	for _, name := range []string{
		fmt.Sprintf("sys/class/infiniband/mlx5_%d", number), fmt.Sprintf("sys/class/infiniband_verbs/uverbs%d", number), fmt.Sprintf("dev/infiniband/uverbs%d", number),
		Source(address) + "/infiniband", Source(address) + "/infiniband_verbs",
	} {
		if err := os.RemoveAll(filepath.Join(k.Dir, name)); err != nil {
			k.t.Error(err)
		}
	}
}

// bindRDMA adds the RDMA device of virtual function number i while the function's own driver is
// bound.
func (k *Kernel) bindRDMA(p *Physical, i int) {
	time.Sleep(p.RDMA)
	for _, make := range []func(string, int){k.addRDMA, k.addVerbs} {
		k.mu.Lock()
		if address := VirtualAddress(i); k.Driver(address) == "mlx5_core" {
			make(address, i+1)
		}
		k.mu.Unlock()
		time.Sleep(step)
	}
}

// VirtualAddress returns the address of a virtual function of 0000:03:00.0.
func VirtualAddress(i int) string { return fmt.Sprintf("0000:03:%02x.%d", 16+2*i/8, 2*i%8) }

// VirtualCount returns the number of virtual functions of a physical function.
func (k *Kernel) VirtualCount(physical string) int {
	links, _ := filepath.Glob(filepath.Join(k.Dir, Source(physical), "virtfn*"))
	return len(links)
}

// HangVirtual makes each later write of sriov_numvfs block until a channel is closed.
func (k *Kernel) HangVirtual(physical string, until chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.physical[physical].Hangs = until
}

// SetVirtual creates virtual functions as an administrator does, on hosts with [Kernel.Write].
func (k *Kernel) SetVirtual(physical string, count int) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.setVirtual(k.physical[physical], strconv.Itoa(count))
}

// setVirtual has the effects of a write to sriov_numvfs. The caller holds the lock, which is free
// while the kernel is at work.
func (k *Kernel) setVirtual(p *Physical, value string) error {
	if hangs := p.Hangs; hangs != nil {
		k.mu.Unlock()
		<-hangs
		k.mu.Lock()
	}
	if p.Refuses != nil {
		return p.Refuses
	}
	count, err := strconv.Atoi(value)
	has := k.VirtualCount(p.Address)
	switch {
	case err != nil:
		return syscall.EINVAL
	case count > p.Total:
		return syscall.ERANGE
	case count == has:
		return nil
	case count > 0 && has > 0:
		return syscall.EBUSY
	}
	for i := range count - p.Fewer {
		k.addVirtual(p, i)
	}
	if count == 0 {
		for i := range has {
			k.removeVirtual(p, i)
		}
	}
	if !k.nodes { // with nodes, the file already has the value, perhaps that of the next write
		k.File(Source(p.Address)+"/sriov_numvfs", value+"\n")
	}
	return nil
}

// numVFs returns the value of sriov_numvfs: the requested number of virtual functions.
func (k *Kernel) numVFs(physical string) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if p := k.physical[physical]; p != nil && k.VirtualCount(physical) > 0 {
		return strconv.Itoa(k.VirtualCount(physical) + p.Fewer)
	}
	return "0"
}

func (k *Kernel) wait() {
	k.mu.Unlock()
	time.Sleep(step)
	k.mu.Lock()
}

// addVirtual adds a virtual function, and its driver a little later.
func (k *Kernel) addVirtual(p *Physical, i int) {
	address := VirtualAddress(i + p.Shift)
	_, driver, vendor, _, device := p.driver()
	group := strconv.Itoa(20 + i)
	if p.OneGroup {
		group = "20"
	}
	k.network(address, vendor, device, "", group)
	k.Link(Source(address)+"/physfn", "../"+p.Address)
	k.Link(Source(p.Address)+fmt.Sprintf("/virtfn%d", i), "../"+address)
	k.functions[address] = function{driver, group}
	k.wait()
	_ = k.probeFunction(address) // the kernel only logs the error of a driver
	if k.Driver(address) != "" {
		k.netInterface(address, fmt.Sprintf("vf%d", i), "0x1002")
		if p.RDMA > 0 {
			go k.bindRDMA(p, i)
		}
	}
	k.wait()
}

func (k *Kernel) removeVirtual(p *Physical, i int) {
	address := VirtualAddress(i + p.Shift)
	k.setDriver(address, "")
	if p.RDMA > 0 {
		k.removeRDMA(address, i+1)
	}
	for _, name := range []string{
		"sys/bus/pci/devices/" + address, Source(p.Address) + fmt.Sprintf("/virtfn%d", i),
		fmt.Sprintf("sys/class/net/vf%d", i), "sys/kernel/iommu_groups/" + k.functions[address].group,
	} {
		if err := os.RemoveAll(filepath.Join(k.Dir, name)); err != nil {
			k.t.Error(err)
		}
	}
	k.removeSource(address)
	delete(k.functions, address)
	k.wait()
}
