package rebind

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
)

// kernel is a host whose attributes do what those of a kernel do, at its worst where a
// test says so.
type kernel struct {
	t   *testing.T
	dir string

	mu       sync.Mutex
	writes   []string
	budget   int                      // writes until the agent is killed, -1 for any number
	refuses  map[string]error         // by driver, what a probe of it says
	hangs    map[string]chan struct{} // by driver, an unbind ends when it is closed
	defaults map[string]string        // by function, the driver that takes it by its identity
}

const (
	first = "0000:03:00.0"
	other = "0000:03:00.1" // in the group of the first
)

func newKernel(t *testing.T) *kernel {
	k := &kernel{t: t, dir: t.TempDir(), budget: -1, refuses: make(map[string]error), hangs: make(map[string]chan struct{}), defaults: make(map[string]string)}
	k.file("sys/devices/virtual/misc/vfio/uevent", "MAJOR=10\nMINOR=196\nDEVNAME=vfio/vfio\n")
	k.file("sys/devices/virtual/misc/vfio/dev", "10:196\n")
	k.link("sys/class/misc/vfio", "../../devices/virtual/misc/vfio")
	k.file("dev/vfio/vfio", "")
	for _, driver := range []string{"nvme", "vfio-pci", "e1000e"} {
		k.file(driverDir(driver)+"/bind", "")
		k.file(driverDir(driver)+"/unbind", "")
	}
	k.file("sys/bus/pci/drivers_probe", "")
	k.add(first, "nvme")
	k.add(other, "nvme")
	return k
}

func source(address string) string { return "sys/devices/pci0000:00/0000:00:03.0/" + address }

// add makes a function that a driver has, in IOMMU group 3.
func (k *kernel) add(address, driver string) {
	k.file(source(address)+"/driver_override", "(null)\n")
	k.file(source(address)+"/class", "0x010802\n")
	k.link("sys/bus/pci/devices/"+address, "../../../"+strings.TrimPrefix(source(address), "sys/"))
	k.link(source(address)+"/iommu_group", "../../../../kernel/iommu_groups/3")
	k.link("sys/kernel/iommu_groups/3/devices/"+address, "../../../../"+strings.TrimPrefix(source(address), "sys/"))
	k.defaults[address] = driver
	k.setDriver(address, driver)
}

func (k *kernel) file(name, text string) {
	k.t.Helper()
	name = filepath.Join(k.dir, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		k.t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kernel) link(name, target string) {
	k.t.Helper()
	name = filepath.Join(k.dir, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		k.t.Fatal(err)
	}
	if err := os.Symlink(target, name); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kernel) driver(address string) string {
	target, _ := os.Readlink(filepath.Join(k.dir, source(address), "driver"))
	return strings.TrimPrefix(path.Base(target), ".")
}

func (k *kernel) override(address string) string {
	data, _ := os.ReadFile(filepath.Join(k.dir, source(address), "driver_override"))
	return strings.TrimSpace(string(data))
}

// setDriver binds a function, and makes the group's node as long as vfio has a function of it.
func (k *kernel) setDriver(address, driver string) {
	name := filepath.Join(k.dir, source(address), "driver")
	_ = os.Remove(name)
	if driver != "" {
		k.link(source(address)+"/driver", "../../../../bus/pci/drivers/"+driver)
	}
	node := "sys/devices/virtual/vfio/3"
	if k.driver(first) == "vfio-pci" || k.driver(other) == "vfio-pci" {
		k.file(node+"/uevent", "MAJOR=511\nMINOR=3\nDEVNAME=vfio/3\n")
		k.file(node+"/dev", "511:3\n")
		k.file("dev/vfio/3", "")
		if _, err := os.Lstat(filepath.Join(k.dir, "sys/class/vfio/3")); err != nil {
			k.link("sys/class/vfio/3", "../../devices/virtual/vfio/3")
		}
		return
	}
	for _, gone := range []string{"sys/class/vfio/3", node, "dev/vfio/3"} {
		_ = os.RemoveAll(filepath.Join(k.dir, gone))
	}
}

// probe has a driver look at a function, which is as its override or its identity says.
func (k *kernel) probe(address string) error {
	if k.driver(address) != "" {
		return nil
	}
	driver := k.defaults[address]
	if override := k.override(address); override != "" && override != "(null)" {
		driver = override
	}
	if err := k.refuses[driver]; err != nil {
		return err
	}
	k.setDriver(address, driver)
	return nil
}

var errKilled = fmt.Errorf("the agent was killed")

// write is what the agent writes attributes with.
func (k *kernel) write(name, value string) error {
	k.mu.Lock()
	if k.budget == 0 {
		k.mu.Unlock()
		return errKilled
	}
	k.budget--
	k.writes = append(k.writes, name+" "+value)
	if driver, unbind := strings.CutSuffix(strings.TrimPrefix(name, "sys/bus/pci/drivers/"), "/unbind"); unbind && k.hangs[driver] != nil {
		hangs := k.hangs[driver]
		k.mu.Unlock()
		<-hangs
		k.mu.Lock()
	}
	defer k.mu.Unlock()
	dir, attribute := path.Split(name)
	driver := path.Base(dir)
	switch attribute {
	case "driver_override":
		if value == "" {
			value = "(null)"
		}
		k.file(name, value+"\n")
	case "unbind":
		if k.driver(value) != driver {
			return syscall.ENODEV
		}
		k.setDriver(value, "")
	case "bind":
		if override := k.override(value); override != "(null)" && override != driver || k.driver(value) != "" {
			return syscall.ENODEV
		}
		if err := k.refuses[driver]; err != nil {
			return err
		}
		k.setDriver(value, driver)
	case "drivers_probe":
		return k.probe(value)
	default:
		return syscall.EINVAL
	}
	return nil
}

// reboot is what a boot makes of the host.
func (k *kernel) reboot() {
	for address, driver := range k.defaults {
		k.file(source(address)+"/driver_override", "(null)\n")
		k.setDriver(address, driver)
	}
}

func (k *kernel) host() *discovery.Host {
	k.t.Helper()
	fsys, err := hostfs.Open(k.dir)
	if err != nil {
		k.t.Fatal(err)
	}
	return &discovery.Host{FS: fsys}
}
