package kernel

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

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
	for _, pid := range slices.Sorted(maps.Keys(h.processes.byPID)) {
		h.processes.exit(pid)
	}
	h.processes.byPID = make(map[int]*process)
	for _, f := range h.bus.functions {
		h.bus.removeAllVirtual(f)
		if f.physical == nil {
			h.bus.bind(f, "")
		}
	}
	h.bus.functions = make(map[string]*function)
	h.files.text("proc/1/comm", "systemd\n")
	h.files.text("proc/1/cgroup", "0::/init.scope\n")
	h.files.text("proc/1/mountinfo", "22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/root rw\n")
	if h.files.find("proc/1/net/route") == nil {
		h.files.text("proc/1/net/route", "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n")
	}
	h.files.put("proc/1/ns/pid", &node{mode: fs.ModeSymlink, target: "pid:[4026531836]"})
	h.files.put("proc/1/fd/0", &node{mode: fs.ModeSymlink, target: "socket:[1]"})
	if len(h.driven) == 0 {
		return
	}
	for _, name := range []string{VFIO, nvme, physical, virtual} {
		for _, attribute := range []string{"bind", "unbind"} {
			h.files.put("sys/bus/pci/drivers/"+name+"/"+attribute, &node{mode: 0o200})
		}
	}
	h.files.createDevice("sys/devices/virtual/misc/vfio", "vfio/vfio", 10, 196)
	h.files.put("sys/class/misc/vfio", &node{mode: fs.ModeSymlink, target: "../../devices/virtual/misc/vfio"})
	for _, f := range h.driven {
		if h.gone[f.Address] == nil {
			h.bus.probeAnew(f)
		}
	}
}

// Driver returns the driver of a function, and whether the function exists.
func (h *Host) Driver(address string) (driver string, found bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f := h.bus.functions[address]
	if f == nil {
		return "", false
	}
	return f.driver, true
}

// Group returns the addresses of all functions in the IOMMU group of a function.
func (h *Host) Group(address string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f := h.bus.functions[address]; f != nil {
		return h.bus.inGroup(f.Group)
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
			return h.bus.inGroup(number)
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
	f := h.bus.functions[address]
	return f != nil && f.override != none
}

// VirtualFunctions returns the addresses of the virtual functions of a physical function.
func (h *Host) VirtualFunctions(address string) (virtual []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f := h.bus.functions[address]; f != nil {
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
	f := h.bus.functions[address]
	if f == nil || f.driver != virtual {
		return false
	}
	h.files.text(fmt.Sprintf("%s/net/eth%d/flags", f.Source, f.nodeNumber()), map[bool]string{true: "0x1003\n", false: "0x1002\n"}[up])
	return true
}

// SetTrouble sets the operations of drivers that fail.
func (h *Host) SetTrouble(t Trouble) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.bus.trouble = t
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
	f, boots := h.bus.functions[a.Function], h.boots
	was := f
	if n := h.files.find(name); f == nil && n != nil && strings.HasPrefix(a.Name, "reset") { // the driver of this function never changes
		f = &function{Function: Function{Address: a.Function, Source: path.Dir(name)}}
	}
	switch {
	case f == nil && (a.Name == "bind" || a.Name == "unbind" || a.Name == "drivers_probe"):
		return syscall.ENODEV
	case f == nil:
		return syscall.ENOENT
	}
	there := func() bool {
		return h.bus.functions[a.Function] == was && h.files.find(f.Source) != nil && h.boots == boots
	}
	for f.busy {
		sleepUnlocked(&h.mu, 20*time.Millisecond)
	}
	f.busy = true
	defer func() { f.busy = false }()
	sleepUnlocked(&h.mu, latency)
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
	for f := h.bus.functions[address]; f != nil && f.busy && h.bus.functions[address] == f && h.boots == boots; {
		sleepUnlocked(&h.mu, 20*time.Millisecond)
	}
}

// sleepUnlocked sleeps. The caller holds the mutex, which sleepUnlocked releases during the sleep.
func sleepUnlocked(mu sync.Locker, d time.Duration) {
	mu.Unlock()
	time.Sleep(d)
	mu.Lock()
}

// applyWrite performs a write. there reports whether the function is still the same.
func (h *Host) applyWrite(f *function, a Attribute, there func() bool) error {
	switch a.Name {
	case "driver_override":
		if a.Value == "" {
			a.Value = none
		}
		h.bus.setOverride(f, a.Value)
	case "unbind":
		if f.driver != a.Driver {
			return syscall.ENODEV
		}
		if !h.awaitClosed(f, there) {
			return syscall.ENODEV
		}
		h.bus.bind(f, "")
	case "bind":
		if f.override != none && f.override != a.Driver || f.driver != "" {
			return syscall.ENODEV
		}
		return h.bus.probeDriver(f, a.Driver)
	case "drivers_probe":
		driver := f.Driver
		if f.override != none {
			driver = f.override
		}
		if f.driver != "" {
			return nil
		}
		return h.bus.probeDriver(f, driver)
	case "sriov_numvfs":
		return h.setVirtual(f, a.Value, there)
	case "reset":
		if h.bus.trouble.Resets {
			return syscall.ENOTTY
		}
	case "reset_method":
		h.files.text(f.Source+"/reset_method", a.Value+"\n")
	default:
		return syscall.EINVAL
	}
	return nil
}

// awaitClosed waits, as vfio does, until no process has the function open. It reports whether the
// function still exists.
func (h *Host) awaitClosed(f *function, there func() bool) bool {
	for there() && f.driver == VFIO && len(h.processes.openSince(f)) > 0 {
		sleepUnlocked(&h.mu, 100*time.Millisecond)
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
	case count > 0 && h.bus.trouble.Full:
		return syscall.ENOMEM
	}
	if count > 1 && h.bus.trouble.Fewer {
		count--
	}
	for i := range count {
		v := h.bus.addVirtual(f, i)
		sleepUnlocked(&h.mu, each)
		if !there() {
			return syscall.ENODEV
		}
		_ = h.bus.probeDriver(v, v.Driver) // the kernel only logs the error
		if h.Changed != nil {
			h.Changed()
		}
	}
	for count == 0 && len(f.virtual) > 0 {
		if !h.awaitClosed(f.virtual[len(f.virtual)-1], there) {
			return syscall.ENODEV
		}
		h.bus.removeVirtual(f)
		sleepUnlocked(&h.mu, each)
		if !there() {
			return syscall.ENODEV
		}
	}
	return nil
}
