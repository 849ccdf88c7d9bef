// Package passthroughtest simulates a host whose PCI functions change their drivers, for tests.
package passthroughtest

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
)

// Kernel is a host whose attributes behave like those of a kernel, with failures at the choice of a
// test. Exported fields must be set before the host is used.
type Kernel struct {
	Dir     string                     // the root of the host
	Budget  int                        // writes until the agent is killed, -1 for any number; see [Kernel.Kill]
	Refuses map[string]error           // by driver, the error of a probe; by "reset_method", the error of a write
	Hangs   map[string]chan struct{}   // by driver, an unbind blocks until it is closed; by "reset", a reset
	Resets  func(address string) error // returns the error of a function's reset; may change the host; optional
	Writes  []string                   // all writes so far

	t         testing.TB
	nodes     bool // files below dev are device nodes instead of texts
	mu        sync.Mutex
	functions map[string]function  // by address
	physical  map[string]*Physical // by address
	removed   int                  // number of removed directories of functions
}

// function is the fixed properties of a function.
type function struct {
	driver string // the driver for its device ID
	group  string // its IOMMU group
}

// ErrKilled is the error of a write when the agent's budget is spent.
var ErrKilled = errors.New("the agent was killed")

// New returns a host without functions, with the drivers nvme, e1000e and vfio-pci.
func New(t testing.TB) *Kernel { return layHost(t, t.TempDir(), false) }

// layHost creates the files of a host in a directory.
func layHost(t testing.TB, dir string, nodes bool) *Kernel {
	k := &Kernel{t: t, Dir: dir, nodes: nodes, Budget: -1, Refuses: make(map[string]error), Hangs: make(map[string]chan struct{}), functions: make(map[string]function)}
	k.File("sys/devices/virtual/misc/vfio/uevent", "MAJOR=10\nMINOR=196\nDEVNAME=vfio/vfio\n")
	k.File("sys/devices/virtual/misc/vfio/dev", "10:196\n")
	k.Link("sys/class/misc/vfio", "../../devices/virtual/misc/vfio")
	k.File("dev/vfio/vfio", "c 10:196")
	k.File("dev/null", "c 1:3")
	for _, driver := range []string{"nvme", "vfio-pci", "e1000e"} {
		k.File(driverDir(driver)+"/bind", "")
		k.File(driverDir(driver)+"/unbind", "")
	}
	k.File("sys/bus/pci/drivers_probe", "")
	k.File("sys/class/block/x/dev", "8:200\n")
	k.File("sys/class/net/x/flags", "0x1003\n")
	k.File("proc/1/mountinfo", "22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/root rw\n")
	k.File("proc/1/net/route", "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n")
	k.Link("proc/1/ns/pid", "pid:[4026531836]")
	k.OpenNode("1", "init", "/dev/null")
	return k
}

func driverDir(driver string) string { return "sys/bus/pci/drivers/" + driver }

// Source returns the directory of a function, as of fs.FS.
func Source(address string) string { return "sys/devices/pci0000:00/0000:00:03.0/" + address }

// Add adds a disk with a driver.
func (k *Kernel) Add(address, driver, group string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, text := range map[string]string{"driver_override": "(null)", "class": "0x010802", "vendor": "0x144d", "device": "0xa80a", "numa_node": "0", "reset": "", "reset_method": "flr bus"} {
		k.File(Source(address)+"/"+name, text+"\n")
	}
	k.Link("sys/bus/pci/devices/"+address, "../../../"+strings.TrimPrefix(Source(address), "sys/"))
	k.Link(Source(address)+"/iommu_group", "../../../../kernel/iommu_groups/"+group)
	k.Link("sys/kernel/iommu_groups/"+group+"/devices/"+address, "../../../../"+strings.TrimPrefix(Source(address), "sys/"))
	k.functions[address] = function{driver, group}
	k.setDriver(address, driver)
}

// ReturnFunction adds a removed function again, with its own driver, and in another group.
func (k *Kernel) ReturnFunction(address, driver, group string) {
	k.mu.Lock()
	before := k.functions[address].group
	k.setDriver(address, "")
	for _, gone := range []string{"sys/bus/pci/devices/" + address, "sys/kernel/iommu_groups/" + before + "/devices/" + address} {
		if err := os.RemoveAll(filepath.Join(k.Dir, gone)); err != nil {
			k.t.Error(err)
		}
	}
	k.removeSource(address)
	k.mu.Unlock()
	k.Add(address, driver, group)
}

// removeSource removes the directory of a function from the host. It moves the directory, so that
// its inode number is not used again, as in sysfs.
func (k *Kernel) removeSource(address string) {
	k.removed++
	err := os.MkdirAll(filepath.Join(k.Dir, "removed"), 0o755)
	if err == nil {
		err = os.Rename(filepath.Join(k.Dir, Source(address)), filepath.Join(k.Dir, "removed", strconv.Itoa(k.removed)))
	}
	if err != nil {
		k.t.Error(err)
	}
}

// File writes a file of the host. A file in dev describes a device node, such as "c 10:196".
func (k *Kernel) File(name, text string) {
	k.t.Helper()
	name = filepath.Join(k.Dir, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		k.t.Fatal(err)
	}
	write := func() error { return os.WriteFile(name, []byte(text), 0o644) }
	if k.nodes && strings.HasPrefix(name, filepath.Join(k.Dir, "dev")+"/") {
		write = func() error { return makeNode(name, text) }
	}
	if err := write(); err != nil {
		k.t.Fatal(err)
	}
}

// Link creates a symbolic link of the host.
func (k *Kernel) Link(name, target string) {
	k.t.Helper()
	name = filepath.Join(k.Dir, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		k.t.Fatal(err)
	}
	if err := os.Symlink(target, name); err != nil {
		k.t.Fatal(err)
	}
}

// OpenNode adds a process with an open node.
func (k *Kernel) OpenNode(process, comm, node string) {
	k.t.Helper()
	k.File("proc/"+process+"/comm", comm+"\n")
	k.Link("proc/"+process+"/fd/3", node)
}

// EndProcess ends a process.
func (k *Kernel) EndProcess(process string) {
	k.t.Helper()
	if err := os.RemoveAll(filepath.Join(k.Dir, "proc", process)); err != nil {
		k.t.Fatal(err)
	}
}

// Driver returns the driver of a function, "" if there is none.
func (k *Kernel) Driver(address string) string {
	target, _ := os.Readlink(filepath.Join(k.Dir, Source(address), "driver"))
	return strings.TrimPrefix(path.Base(target), ".")
}

// DriverOverride returns the driver_override of a function.
func (k *Kernel) DriverOverride(address string) string {
	data, _ := os.ReadFile(filepath.Join(k.Dir, Source(address), "driver_override"))
	return strings.TrimSpace(string(data))
}

// ListWrites returns the writes so far.
func (k *Kernel) ListWrites() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.Writes)
}

// Kill sets the number of writes until the agent is killed, -1 for any number.
func (k *Kernel) Kill(after int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.Budget = after
}

// RefuseProbes sets the error of a driver's probes, nil for success.
func (k *Kernel) RefuseProbes(driver string, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.Refuses[driver] = err
}

// SetDriver binds a function as an administrator does.
func (k *Kernel) SetDriver(address, driver string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.setDriver(address, driver)
}

// setDriver binds a function. The node of its group exists as long as vfio has a function of the
// group.
func (k *Kernel) setDriver(address, driver string) {
	_ = os.Remove(filepath.Join(k.Dir, Source(address), "driver"))
	if driver != "" {
		k.Link(Source(address)+"/driver", "../../../../bus/pci/drivers/"+driver)
	}
	group, vfio := k.functions[address].group, false
	for other, f := range k.functions {
		vfio = vfio || f.group == group && k.Driver(other) == "vfio-pci"
	}
	node := "sys/devices/virtual/vfio/" + group
	if vfio {
		k.File(node+"/uevent", "MAJOR=511\nMINOR="+group+"\nDEVNAME=vfio/"+group+"\n")
		k.File(node+"/dev", "511:"+group+"\n")
		k.File("dev/vfio/"+group, "c 511:"+group)
		if _, err := os.Lstat(filepath.Join(k.Dir, "sys/class/vfio", group)); err != nil {
			k.Link("sys/class/vfio/"+group, "../../devices/virtual/vfio/"+group)
		}
		return
	}
	for _, gone := range []string{"sys/class/vfio/" + group, node, "dev/vfio/" + group} {
		_ = os.RemoveAll(filepath.Join(k.Dir, gone))
	}
}

// probeFunction binds a function to the driver that its override or its device ID selects.
func (k *Kernel) probeFunction(address string) error {
	if k.Driver(address) != "" {
		return nil
	}
	driver := k.functions[address].driver
	if override := k.DriverOverride(address); override != "" && override != "(null)" {
		driver = override
	}
	if err := k.Refuses[driver]; err != nil {
		return err
	}
	k.setDriver(address, driver)
	return nil
}

// Write writes an attribute in the agent's place.
func (k *Kernel) Write(name, value string) error {
	k.mu.Lock()
	if k.Budget == 0 {
		k.mu.Unlock()
		return ErrKilled
	}
	k.Budget--
	k.Writes = append(k.Writes, name+" "+value)
	if driver, unbind := strings.CutSuffix(strings.TrimPrefix(name, "sys/bus/pci/drivers/"), "/unbind"); unbind && k.Hangs[driver] != nil {
		hangs := k.Hangs[driver]
		k.mu.Unlock()
		<-hangs
		k.mu.Lock()
	}
	defer k.mu.Unlock()
	dir, attribute := path.Split(name)
	driver := path.Base(dir)
	switch attribute {
	case "sriov_numvfs":
		return k.setVirtual(k.physical[path.Base(dir)], value)
	case "driver_override":
		if value == "" {
			value = "(null)"
		}
		k.File(name, value+"\n")
	case "unbind":
		if k.Driver(value) != driver {
			return syscall.ENODEV
		}
		k.setDriver(value, "")
	case "bind":
		if override := k.DriverOverride(value); override != "(null)" && override != driver || k.Driver(value) != "" {
			return syscall.ENODEV
		}
		if err := k.Refuses[driver]; err != nil {
			return err
		}
		k.setDriver(value, driver)
	case "drivers_probe":
		return k.probeFunction(value)
	case "reset_method":
		if err := k.Refuses[attribute]; err != nil {
			return err
		}
		k.File(name, value+"\n")
	case "reset":
		hangs := k.Hangs["reset"]
		k.mu.Unlock()
		if hangs != nil {
			<-hangs
		}
		k.mu.Lock()
		if k.Resets != nil {
			return k.Resets(path.Base(dir))
		}
	default:
		return syscall.EINVAL
	}
	return nil
}

// Reboot has the effects of a reboot on the host.
func (k *Kernel) Reboot() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.physical {
		for i := range k.VirtualCount(p.Address) {
			k.removeVirtual(p, i)
		}
		k.File(Source(p.Address)+"/sriov_numvfs", "0\n")
	}
	for _, address := range slices.Sorted(maps.Keys(k.functions)) {
		k.File(Source(address)+"/driver_override", "(null)\n")
		k.setDriver(address, k.functions[address].driver)
	}
}

// FS returns the host's files.
func (k *Kernel) FS() fs.FS {
	k.t.Helper()
	fsys, err := Open(k.Dir)
	if err != nil {
		k.t.Fatal(err)
	}
	return fsys
}

// Open returns the files of a host of [New] by its directory, for other processes.
func Open(dir string) (fs.FS, error) {
	fsys, err := hostfs.Open(dir)
	return host{fsys}, err
}

// Host returns the host for discovery.
func (k *Kernel) Host() *discovery.Host {
	k.t.Helper()
	return &discovery.Host{FS: k.FS()}
}
