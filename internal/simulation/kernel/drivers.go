package kernel

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
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

// The kernel's drivers.
const (
	VFIO     = "vfio-pci"
	nvme     = "nvme"
	physical = "igb"
	virtual  = "igbvf"
)

// none is the content of driver_override without an override.
const none = "(null)"

// DriveFunctions creates functions and binds them to their drivers, as a boot does. The other files
// of the functions come from the host recording.
func (h *Host) DriveFunctions(functions ...Function) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.driven = functions
	h.bootHost()
}

// Reboot restarts the kernel: all bindings and virtual functions are lost, and writes in progress
// fail.
func (h *Host) Reboot() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.bootHost()
}

func (h *Host) bootHost() {
	h.boots++
	for _, pid := range slices.Sorted(maps.Keys(h.processes)) {
		h.exit(pid)
	}
	h.processes = make(map[int]*process)
	for _, f := range h.functions {
		h.removeAllVirtual(f)
		if f.physical == nil {
			h.bind(f, "")
		}
	}
	h.functions = make(map[string]*function)
	h.text("proc/1/comm", "systemd\n")
	h.text("proc/1/cgroup", "0::/init.scope\n")
	h.text("proc/1/mountinfo", "22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/root rw\n")
	if h.find("proc/1/net/route") == nil {
		h.text("proc/1/net/route", "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n")
	}
	h.put("proc/1/ns/pid", &node{mode: fs.ModeSymlink, target: "pid:[4026531836]"})
	h.put("proc/1/fd/0", &node{mode: fs.ModeSymlink, target: "socket:[1]"})
	if len(h.driven) == 0 {
		return
	}
	for _, name := range []string{VFIO, nvme, physical, virtual} {
		for _, attribute := range []string{"bind", "unbind"} {
			h.put("sys/bus/pci/drivers/"+name+"/"+attribute, &node{mode: 0o200})
		}
	}
	h.createDevice("sys/devices/virtual/misc/vfio", "vfio/vfio", 10, 196)
	h.put("sys/class/misc/vfio", &node{mode: fs.ModeSymlink, target: "../../devices/virtual/misc/vfio"})
	for _, f := range h.driven {
		if h.gone[f.Address] == nil {
			h.probeAnew(f)
		}
	}
}

// probeAnew adds a function and binds it to its driver. No driver binds while a function of the
// same IOMMU group is under vfio (iommu_device_use_default_domain in drivers/iommu/iommu.c, Linux
// 6.1 to 6.18).
func (h *Host) probeAnew(of Function) {
	f := &function{Function: of}
	h.functions[f.Address] = f
	h.setOverride(f, none)
	if slices.ContainsFunc(h.inGroup(f.Group), func(member string) bool { return h.functions[member].driver == VFIO }) {
		return
	}
	h.bind(f, f.Driver)
	for i := range f.Boot {
		h.bind(h.addVirtual(f, i), virtual)
	}
}

// text writes a file. An existing file stays the same node, so that open files see the change.
func (h *Host) text(name, text string) {
	if n := h.find(name); n != nil && n.mode.IsRegular() {
		n.data = []byte(text)
		return
	}
	h.put(name, &node{mode: 0o644, data: []byte(text)})
}

// createDevice creates the files and the node of a device.
func (h *Host) createDevice(dir, name string, major, minor uint32) {
	h.text(dir+"/dev", fmt.Sprintf("%d:%d\n", major, minor))
	h.text(dir+"/uevent", fmt.Sprintf("MAJOR=%d\nMINOR=%d\nDEVNAME=%s\n", major, minor, name))
	h.put("dev/"+name, &node{mode: fs.ModeDevice | fs.ModeCharDevice | 0o600, rdev: unix.Mkdev(major, minor)})
}

// dropPath removes a path with everything below.
func (h *Host) dropPath(name string) {
	if parent := h.find(path.Dir(name)); parent != nil {
		delete(parent.children, path.Base(name))
	}
}

func (h *Host) setOverride(f *function, driver string) {
	f.override = driver
	h.text(f.Source+"/driver_override", driver+"\n")
}

// nodeNumber returns a number that distinguishes the node or interface of a function from others.
func (f *function) nodeNumber() int {
	var bus, slot, number int
	_, _ = fmt.Sscanf(f.Address, "0000:%x:%x.%x", &bus, &slot, &number)
	return bus<<8 | slot<<3 | number
}

// nodeOf returns the path of the function's device node under nvme.
func (f *function) nodeOf() string { return fmt.Sprintf("dev/nvme%d", f.nodeNumber()) }

// bind binds a function to a driver, or to none for "", and updates the affected files.
func (h *Host) bind(f *function, driver string) {
	switch f.driver {
	case nvme:
		h.dropPath(f.Source + "/nvme")
		h.dropPath(f.nodeOf())
	case physical, virtual:
		h.dropPath(f.Source + "/net")
		h.dropPath(fmt.Sprintf("sys/class/net/eth%d", f.nodeNumber()))
	}
	f.driver = driver
	h.dropPath(f.Source + "/driver")
	if driver != "" {
		h.put(f.Source+"/driver", &node{mode: fs.ModeSymlink, target: strings.Repeat("../", strings.Count(f.Source, "/")) + "bus/pci/drivers/" + driver})
	}
	switch driver {
	case nvme:
		name := path.Base(f.nodeOf())
		h.createDevice(f.Source+"/nvme/"+name, name, 240, uint32(f.nodeNumber()))
	case physical, virtual:
		net := fmt.Sprintf("/net/eth%d", f.nodeNumber())
		h.text(f.Source+net+"/type", "1\n")
		h.text(f.Source+net+"/flags", map[string]string{physical: "0x1003\n", virtual: "0x1002\n"}[driver])
		h.put("sys/class"+net, &node{mode: fs.ModeSymlink, target: "../../" + strings.TrimPrefix(f.Source, "sys/") + net})
	}
	h.group(f.Group)
}

// group creates the node of an IOMMU group if vfio has a function of the group, and removes the
// node otherwise.
func (h *Host) group(number int) {
	for _, f := range h.functions {
		if f.Group == number && f.driver == VFIO {
			dir := fmt.Sprintf("sys/devices/virtual/vfio/%d", number)
			h.createDevice(dir, fmt.Sprintf("vfio/%d", number), 511, uint32(number))
			h.put(fmt.Sprintf("sys/class/vfio/%d", number), &node{mode: fs.ModeSymlink, target: fmt.Sprintf("../../devices/virtual/vfio/%d", number)})
			return
		}
	}
	for _, name := range []string{"sys/devices/virtual/vfio/%d", "sys/class/vfio/%d", "dev/vfio/%d"} {
		h.dropPath(fmt.Sprintf(name, number))
	}
}

// addVirtual creates a virtual function without a driver.
func (h *Host) addVirtual(of *function, i int) *function {
	devfn := 128 + 2*i
	bus, _, _ := strings.Cut(strings.TrimPrefix(of.Address, "0000:"), ":")
	address := fmt.Sprintf("0000:%s:%02x.%d", bus, devfn/8, devfn%8)
	f := &function{Function: Function{Address: address, Source: path.Join(path.Dir(of.Source), address), Driver: virtual, Group: of.Group + 1 + i}, physical: of}
	if of.OneGroup {
		f.Group = of.Group + 1
	}
	for name, text := range map[string]string{"class": "0x020000", "vendor": "0x8086", "device": "0x1520", "numa_node": "0"} {
		h.text(f.Source+"/"+name, text+"\n")
	}
	up := strings.Repeat("../", strings.Count(f.Source, "/"))
	h.put("sys/bus/pci/devices/"+address, &node{mode: fs.ModeSymlink, target: "../../../" + strings.TrimPrefix(f.Source, "sys/")})
	h.put(f.Source+"/iommu_group", &node{mode: fs.ModeSymlink, target: fmt.Sprintf("%skernel/iommu_groups/%d", up, f.Group)})
	h.put(fmt.Sprintf("sys/kernel/iommu_groups/%d/devices/%s", f.Group, address), &node{mode: fs.ModeSymlink, target: "../../../../" + strings.TrimPrefix(f.Source, "sys/")})
	h.put(f.Source+"/physfn", &node{mode: fs.ModeSymlink, target: "../" + of.Address})
	h.put(fmt.Sprintf("%s/virtfn%d", of.Source, i), &node{mode: fs.ModeSymlink, target: "../" + address})
	h.functions[address] = f
	of.virtual = append(of.virtual, f)
	h.setOverride(f, none)
	return f
}

// removeAllVirtual removes the virtual functions of a function.
func (h *Host) removeAllVirtual(of *function) {
	for len(of.virtual) > 0 {
		h.removeVirtual(of)
	}
}

// removeVirtual removes the last virtual function of a function.
func (h *Host) removeVirtual(of *function) {
	i := len(of.virtual) - 1
	f := of.virtual[i]
	of.virtual = of.virtual[:i]
	h.bind(f, "")
	delete(h.functions, f.Address)
	for _, name := range []string{"sys/bus/pci/devices/" + f.Address, f.Source, fmt.Sprintf("%s/virtfn%d", of.Source, i), fmt.Sprintf("sys/kernel/iommu_groups/%d/devices/%s", f.Group, f.Address)} {
		h.dropPath(name)
	}
	if len(h.inGroup(f.Group)) == 0 {
		h.dropPath(fmt.Sprintf("sys/kernel/iommu_groups/%d", f.Group))
	}
}

// Driver returns the driver of a function, and whether the function exists.
func (h *Host) Driver(address string) (driver string, found bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f := h.functions[address]
	if f == nil {
		return "", false
	}
	return f.driver, true
}

// inGroup returns the addresses of the functions of an IOMMU group, sorted.
func (h *Host) inGroup(number int) (addresses []string) {
	for _, address := range slices.Sorted(maps.Keys(h.functions)) {
		if h.functions[address].Group == number {
			addresses = append(addresses, address)
		}
	}
	return addresses
}

// Group returns the addresses of all functions in the IOMMU group of a function.
func (h *Host) Group(address string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f := h.functions[address]; f != nil {
		return h.inGroup(f.Group)
	}
	return nil
}

// FunctionsOf returns the addresses of the functions in the IOMMU group that one of the nodes
// belongs to.
func (h *Host) FunctionsOf(nodes []string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, name := range nodes {
		if number, err := strconv.Atoi(strings.TrimPrefix(name, "/dev/vfio/")); err == nil {
			return h.inGroup(number)
		}
	}
	return nil
}

// MoveGroup changes the IOMMU group of a vanished function. The function will return in the new
// group.
func (h *Host) MoveGroup(address string, group int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.driven = slices.Clone(h.driven)
	for i := range h.driven {
		if h.driven[i].Address == address {
			h.driven[i].Group = group
		}
	}
	for i, e := range h.gone[address] {
		if dir, is := strings.CutPrefix(e.path, "sys/kernel/iommu_groups/"); is {
			_, below, _ := strings.Cut(dir, "/")
			h.gone[address][i].path = fmt.Sprintf("sys/kernel/iommu_groups/%d/%s", group, below)
		}
		if path.Base(e.path) == "iommu_group" {
			e.node.target = path.Join(path.Dir(e.node.target), strconv.Itoa(group))
		}
	}
}

// HasOverride reports whether the driver_override of a function is set.
func (h *Host) HasOverride(address string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	f := h.functions[address]
	return f != nil && f.override != none
}

// VirtualFunctions returns the addresses of the virtual functions of a physical function.
func (h *Host) VirtualFunctions(address string) (virtual []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f := h.functions[address]; f != nil {
		for _, v := range f.virtual {
			virtual = append(virtual, v.Address)
		}
	}
	return virtual
}

// SetUp sets the interface of a virtual function up or down, and reports whether the function has
// one.
func (h *Host) SetUp(address string, up bool) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	f := h.functions[address]
	if f == nil || f.driver != virtual {
		return false
	}
	h.text(fmt.Sprintf("%s/net/eth%d/flags", f.Source, f.nodeNumber()), map[bool]string{true: "0x1003\n", false: "0x1002\n"}[up])
	return true
}

// Trouble describes which operations of drivers fail.
type Trouble struct {
	Refuses string // a driver that refuses all functions
	Fewer   bool   // one virtual function less is created than requested
	Full    bool   // no virtual functions can be created
	Resets  bool   // no function can be reset
}

// SetTrouble sets the operations of drivers that fail.
func (h *Host) SetTrouble(t Trouble) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.trouble = t
}

// HangWrites makes writes of attributes hang until ReleaseWrites.
func (h *Host) HangWrites() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stuck = make(chan struct{})
}

// ReleaseWrites lets hanging writes continue.
func (h *Host) ReleaseWrites() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stuck != nil {
		close(h.stuck)
		h.stuck = nil
	}
}

// Attribute is the parsed form of a write that affects a function.
type Attribute struct {
	Function string // the address of the function
	Name     string // "unbind"
	Driver   string // for bind and unbind
	Value    string
}

// ParseWrite parses a write to an attribute.
func ParseWrite(name, value string) Attribute {
	dir, attribute := path.Split(name)
	of := path.Base(dir)
	switch attribute {
	case "bind", "unbind":
		return Attribute{Function: value, Name: attribute, Driver: of, Value: value}
	case "drivers_probe":
		return Attribute{Function: value, Name: attribute, Value: value}
	}
	return Attribute{Function: of, Name: attribute, Value: value}
}

// Write writes an attribute as an unkillable process does: one write to a function at a time, each
// after the latency.
func (h *Host) Write(name, value string, latency time.Duration) error {
	a := ParseWrite(name, value)
	h.mu.Lock()
	defer h.mu.Unlock()
	f, boots := h.functions[a.Function], h.boots
	was := f
	if n := h.find(name); f == nil && n != nil && strings.HasPrefix(a.Name, "reset") { // the driver of this function never changes
		f = &function{Function: Function{Address: a.Function, Source: path.Dir(name)}}
	}
	switch {
	case f == nil && (a.Name == "bind" || a.Name == "unbind" || a.Name == "drivers_probe"):
		return syscall.ENODEV
	case f == nil:
		return syscall.ENOENT
	}
	there := func() bool { return h.functions[a.Function] == was && h.find(f.Source) != nil && h.boots == boots }
	for f.busy {
		h.pause(20 * time.Millisecond)
	}
	f.busy = true
	defer func() { f.busy = false }()
	h.pause(latency)
	if stuck := h.stuck; stuck != nil {
		h.mu.Unlock()
		<-stuck
		h.mu.Lock()
	}
	if !there() {
		return syscall.ENODEV
	}
	err := h.applyWrite(f, a, there)
	if h.Changed != nil {
		h.Changed()
	}
	return err
}

// awaitWriter waits until no write to the function is in progress, if the kernel shows the file
// under the device's lock (driver_override_show in drivers/pci/pci-sysfs.c, sriov_numvfs_show in
// drivers/pci/iov.c, Linux 6.1 to 6.18). The caller holds h.mu.
func (h *Host) awaitWriter(name string) {
	if base := path.Base(name); base != "driver_override" && base != "sriov_numvfs" {
		return
	}
	address, boots := path.Base(path.Dir(name)), h.boots
	for f := h.functions[address]; f != nil && f.busy && h.functions[address] == f && h.boots == boots; {
		h.pause(20 * time.Millisecond)
	}
}

// pause sleeps. The caller holds h.mu, which pause releases during the sleep.
func (h *Host) pause(d time.Duration) {
	h.mu.Unlock()
	time.Sleep(d)
	h.mu.Lock()
}

// applyWrite performs a write. there reports whether the function is still the same.
func (h *Host) applyWrite(f *function, a Attribute, there func() bool) error {
	switch a.Name {
	case "driver_override":
		if a.Value == "" {
			a.Value = none
		}
		h.setOverride(f, a.Value)
	case "unbind":
		if f.driver != a.Driver {
			return syscall.ENODEV
		}
		if !h.awaitClosed(f, there) {
			return syscall.ENODEV
		}
		h.bind(f, "")
	case "bind":
		if f.override != none && f.override != a.Driver || f.driver != "" {
			return syscall.ENODEV
		}
		return h.probeDriver(f, a.Driver)
	case "drivers_probe":
		driver := f.Driver
		if f.override != none {
			driver = f.override
		}
		if f.driver != "" {
			return nil
		}
		return h.probeDriver(f, driver)
	case "sriov_numvfs":
		return h.setVirtual(f, a.Value, there)
	case "reset":
		if h.trouble.Resets {
			return syscall.ENOTTY
		}
	case "reset_method":
		h.text(f.Source+"/reset_method", a.Value+"\n")
	default:
		return syscall.EINVAL
	}
	return nil
}

func (h *Host) probeDriver(f *function, driver string) error {
	if h.trouble.Refuses == driver {
		return syscall.EIO
	}
	h.bind(f, driver)
	return nil
}

// awaitClosed waits, as vfio does, until no process has the function open. It reports whether the
// function still exists.
func (h *Host) awaitClosed(f *function, there func() bool) bool {
	for there() && f.driver == VFIO && len(h.openSince(f)) > 0 {
		h.pause(100 * time.Millisecond)
	}
	return there()
}

// setVirtual creates or removes virtual functions one by one. Drivers bind to the new functions a
// little later.
func (h *Host) setVirtual(f *function, value string, there func() bool) error {
	const each = 30 * time.Millisecond
	count, err := strconv.Atoi(value)
	switch {
	case err != nil:
		return syscall.EINVAL
	case f.driver != physical:
		return syscall.ENOENT
	case count > f.Total:
		return syscall.ERANGE
	case count > 0 && len(f.virtual) > 0:
		return syscall.EBUSY
	case count > 0 && h.trouble.Full:
		return syscall.ENOMEM
	}
	if count > 1 && h.trouble.Fewer {
		count--
	}
	for i := range count {
		v := h.addVirtual(f, i)
		h.pause(each)
		if !there() {
			return syscall.ENODEV
		}
		_ = h.probeDriver(v, v.Driver) // the kernel only logs the error
		if h.Changed != nil {
			h.Changed()
		}
	}
	for count == 0 && len(f.virtual) > 0 {
		if !h.awaitClosed(f.virtual[len(f.virtual)-1], there) {
			return syscall.ENODEV
		}
		h.removeVirtual(f)
		h.pause(each)
		if !there() {
			return syscall.ENODEV
		}
	}
	return nil
}
