package rebindtest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Physical is a function of a network adapter that can have virtual ones. Fields are set
// before the host is used.
type Physical struct {
	Address string
	Total   int   // how many virtual functions it can have
	Fewer   int   // its driver makes that many fewer than it is told
	Shift   int   // virtual functions come so many places later than sriov_offset says
	Makes   int   // on a host of [At], how many a write of sriov_numvfs is taken to ask for
	Refuses error // what a write of sriov_numvfs says, nil if it does what it should

	Hangs chan struct{} // a write of sriov_numvfs ends when it is closed

	OneGroup bool // all virtual functions are in one IOMMU group, as behind a bridge without ACS

	// RDMA has it be an adapter that mlx5_core drives, with an RDMA device. Each virtual function
	// gets its own that long after its interface, and the node of it one step later.
	RDMA time.Duration
}

// driver returns the driver of the physical function, that of virtual ones, and who made both.
func (p *Physical) driver() (physical, virtual, vendor, device, virtualDevice string) {
	if p.RDMA > 0 {
		return "mlx5_core", "mlx5_core", "15b3", "101d", "101e"
	}
	return "igb", "igbvf", "8086", "1521", "1520"
}

// step is how long the kernel takes for each virtual function: they come and go one by one.
const step = 10 * time.Millisecond

// AddPhysical makes a physical function under igb whose virtual ones igbvf takes, or one with RDMA.
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
		k.rdma(p.Address, 0)
		k.verbs(p.Address, 0)
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

// network makes a network function. A driver has it if it has a name.
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

// netInterface makes the interface of a function.
func (k *Kernel) netInterface(address, name, flags string) {
	k.File(Source(address)+"/net/"+name+"/type", "1\n")
	k.File(Source(address)+"/net/"+name+"/flags", flags+"\n")
	k.Link("sys/class/net/"+name, "../../"+strings.TrimPrefix(Source(address), "sys/")+"/net/"+name)
}

// rdma makes the RDMA device of a function, by its number.
func (k *Kernel) rdma(address string, number int) {
	name := fmt.Sprintf("infiniband/mlx5_%d", number)
	k.File(Source(address)+"/"+name+"/ports/1/link_layer", "Ethernet\n")
	k.Link("sys/class/"+name, "../../"+strings.TrimPrefix(Source(address), "sys/")+"/"+name)
}

// verbs makes what programs use the RDMA device by.
func (k *Kernel) verbs(address string, number int) {
	name := fmt.Sprintf("infiniband_verbs/uverbs%d", number)
	k.File(Source(address)+"/"+name+"/dev", fmt.Sprintf("231:%d\n", 192+number))
	k.File(Source(address)+"/"+name+"/uevent", fmt.Sprintf("MAJOR=231\nMINOR=%d\nDEVNAME=infiniband/uverbs%d\n", 192+number, number))
	k.Link("sys/class/"+name, "../../"+strings.TrimPrefix(Source(address), "sys/")+"/"+name)
	k.File(fmt.Sprintf("dev/infiniband/uverbs%d", number), fmt.Sprintf("c 231:%d", 192+number))
}

// removeRDMA removes the RDMA device of a function, if it has one.
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

// bindRDMA has virtual function number i have an RDMA device as long as its own driver has it.
func (k *Kernel) bindRDMA(p *Physical, i int) {
	time.Sleep(p.RDMA)
	for _, make := range []func(string, int){k.rdma, k.verbs} {
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

// Virtual returns how many virtual functions a physical one has.
func (k *Kernel) Virtual(physical string) int {
	links, _ := filepath.Glob(filepath.Join(k.Dir, Source(physical), "virtfn*"))
	return len(links)
}

// HangVirtual has each write of sriov_numvfs from now on end when a channel is closed.
func (k *Kernel) HangVirtual(physical string, until chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.physical[physical].Hangs = until
}

// SetVirtual makes virtual functions as an administrator does, where agents write by [Kernel.Write].
func (k *Kernel) SetVirtual(physical string, count int) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.setVirtual(k.physical[physical], strconv.Itoa(count))
}

// setVirtual is what the kernel does when sriov_numvfs is written. The caller holds the
// lock, which is free while the kernel is at work.
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
	has := k.Virtual(p.Address)
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
	if !k.nodes { // else it says so already, and may say by now what the next one has written
		k.File(Source(p.Address)+"/sriov_numvfs", value+"\n")
	}
	return nil
}

// numVFs returns what sriov_numvfs reads as: so many virtual functions were asked for.
func (k *Kernel) numVFs(physical string) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if p := k.physical[physical]; p != nil && k.Virtual(physical) > 0 {
		return strconv.Itoa(k.Virtual(physical) + p.Fewer)
	}
	return "0"
}

func (k *Kernel) wait() {
	k.mu.Unlock()
	time.Sleep(step)
	k.mu.Lock()
}

// addVirtual makes a virtual function. Its driver takes it a little later.
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
	_ = k.probe(address) // the kernel only logs that a driver refuses
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
