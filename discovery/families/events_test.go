package families_test

import (
	"context"
	"fmt"
	"hash/fnv"
	"io/fs"
	"math/rand/v2"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
)

// TestEventsSuffice changes host recordings at random as a kernel would, sends the kernel's events,
// and checks that a watch which reads only the families that an event concerns always has the
// result of a full scan.
func TestEventsSuffice(t *testing.T) {
	hosts, err := filepath.Glob("*/testdata/*.host")
	if err != nil || len(hosts) == 0 {
		t.Fatalf("no recorded hosts: %v", err)
	}
	steps, every := 12, 1
	if discoverytest.IsBrief() {
		steps, every = 8, 8
	}
	for i, file := range hosts {
		if i%every != 0 {
			continue
		}
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			host := discoverytest.ReadHost(t, file)
			hash := fnv.New64a()
			_, _ = hash.Write([]byte(file))
			k := newKernel(host.FS.(*discoverytest.Tree), rand.New(rand.NewPCG(hash.Sum64(), 1)))
			synctest.Test(t, func(t *testing.T) { k.compare(t, host, steps) })
		})
	}
}

// compare changes a host under two watches, of which one scans everything after each change.
func (k *kernel) compare(t *testing.T, host *discovery.Host, steps int) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	watch := func(hears bool) (chan scan.Changes, *atomic.Pointer[discovery.Snapshot]) {
		events, last := make(chan scan.Changes, 1), new(atomic.Pointer[discovery.Snapshot])
		seen := *host
		seen.FS = &k.now
		w := scan.Watch{Host: &seen, Families: families.All, Events: events, EventsArrive: func() bool { return hears }}
		go w.Run(ctx, func(s *discovery.Snapshot) { last.Store(s) })
		return events, last
	}
	events, followed := watch(true)
	everything, complete := watch(false)
	history := []string{"the host as it was recorded"}
	for range steps {
		// The reported state of an unreadable device depends on the number of scans.
		time.Sleep(2*30*time.Second + time.Second)
		synctest.Wait()
		if want, got := complete.Load(), followed.Load(); !discovery.SameSnapshots(want, got) {
			t.Fatalf("after these steps, a scan of everything finds\n%s\nand a watch that follows events\n%s\n%s", text(want), text(got), strings.Join(history, "\n"))
		}
		step, changes := k.step()
		history = append(history, fmt.Sprintf("%s: %+v", step, changes))
		scan.Changes{Everything: true}.Send(everything)
		if changes.Everything || len(changes.Uevents) > 0 {
			changes.Send(events)
		} // a change without events is seen at the interval
	}
}

func text(s *discovery.Snapshot) string {
	var lines []string
	for _, d := range s.Devices {
		lines = append(lines, fmt.Sprintf("  %s %s %s %+v %v %v", d.Name, d.Family, d.Attributes.String("driver"), d.Health, d.PartOf, d.Includes))
	}
	for _, p := range s.Problems {
		lines = append(lines, "  problem "+p.Error())
	}
	return strings.Join(lines, "\n")
}

// kernel changes a host recording. It is the file system of the watches.
type kernel struct {
	*rand.Rand

	recorded *discoverytest.Tree
	now      discoverytest.ChangingTree
	devices  []kernelDevice
	links    map[string]string // targets of all links, by name
	modules  []string

	gone    map[string]bool   // directories of devices and modules
	unbound map[string]bool   // PCI functions
	passed  map[string]bool   // functions under vfio-pci instead
	group   map[string]string // the function's new IOMMU group number
	renamed map[string]bool   // directories of network interfaces
	changed map[string]string // contents of files
	missing map[string]bool   // nodes
}

// kernelDevice is a device of a class or a bus.
type kernelDevice struct{ path, subsystem, node string }

func newKernel(recorded *discoverytest.Tree, random *rand.Rand) *kernel {
	k := &kernel{
		Rand: random, recorded: recorded, links: make(map[string]string), gone: make(map[string]bool), unbound: make(map[string]bool), passed: make(map[string]bool),
		group: make(map[string]string), renamed: make(map[string]bool), changed: make(map[string]string), missing: make(map[string]bool),
	}
	k.now.Store(recorded)
	for _, name := range recorded.Files() {
		target, err := recorded.ReadLink(name)
		if err != nil {
			continue
		}
		if !path.IsAbs(target) {
			target = path.Join("/", path.Dir(name), target)
		}
		k.links[name] = strings.TrimPrefix(path.Clean(target), "/")
		subsystem := ""
		if elements := strings.Split(name, "/"); len(elements) == 4 && strings.HasPrefix(name, "sys/class/") {
			subsystem = elements[2]
		} else if len(elements) == 5 && strings.HasPrefix(name, "sys/bus/") && elements[3] == "devices" {
			subsystem = elements[2]
		}
		device := sysfs.At(recorded, k.links[name])
		if subsystem != "" && device.HasEntry(".") && strings.HasPrefix(device.Path, "sys/devices/") {
			node := device.Uevent()["DEVNAME"]
			if node != "" {
				node = path.Join("dev", node)
			}
			k.devices = append(k.devices, kernelDevice{device.Path, subsystem, node})
		}
	}
	slices.SortFunc(k.devices, func(a, b kernelDevice) int { return strings.Compare(a.path, b.path) })
	entries, _ := recorded.ReadDir("sys/module")
	for _, entry := range entries {
		k.modules = append(k.modules, path.Join("sys/module", entry.Name()))
	}
	return k
}

func isBelow(name, dir string) bool { return name == dir || strings.HasPrefix(name, dir+"/") }

// function returns the PCI function of a device, "" if there is none.
func (d kernelDevice) function() string {
	function, _ := sysfs.At(nil, d.path).PCIFunction()
	return function.Path
}

// step changes the host, and returns the events of the change.
func (k *kernel) step() (what string, changes scan.Changes) {
	defer func() {
		k.now.Store(k.tree())
		if len(changes.Uevents) > 0 && k.IntN(8) == 0 {
			what, changes = what+", events are lost", scan.Changes{Everything: true}
		}
	}()
	if len(k.devices) == 0 {
		return "nothing", scan.Changes{}
	}
	d := k.devices[k.IntN(len(k.devices))]
	function := d.function()
	isFunction := d.path == function && d.subsystem == "pci"
	switch n := k.IntN(10); {
	case k.absent(d.path) || k.renamed[d.path] || n == 0:
		return k.restore(d.path)
	case n == 1 && len(k.modules) > 0:
		module := k.modules[k.IntN(len(k.modules))]
		k.gone[module] = !k.gone[module]
		return "a module comes or goes", scan.Changes{Uevents: []scan.Uevent{{Path: module, Subsystem: "module"}}}
	case n == 2 && d.node != "":
		k.missing[d.node] = !k.missing[d.node]
		return "node " + d.node + " comes or goes", scan.Changes{}
	case n <= 3:
		return k.changeFile(d.path), scan.Changes{}
	case n == 4 && isFunction:
		return k.regroup(d)
	case d.subsystem == "net":
		k.renamed[d.path] = true
		return "a network interface is renamed", scan.Changes{Uevents: []scan.Uevent{{Path: d.path + "x", OldPath: d.path, Subsystem: "net"}}}
	case n <= 6 && isFunction:
		uevents := k.events(d.path, false)
		k.unbound[d.path] = true
		what := "a function is unbound"
		if k.passed[d.path] = n == 6; n == 6 {
			what = "a function is given to vfio-pci"
			group := path.Join(vfioDir, path.Base(k.links[d.path+"/iommu_group"]))
			uevents = append(uevents, scan.Uevent{Path: group, Subsystem: "vfio", Node: path.Join("dev/vfio", path.Base(group))})
		}
		return what, scan.Changes{Uevents: append(uevents, scan.Uevent{Path: d.path, Subsystem: "pci"})}
	}
	uevents := k.events(d.path, true)
	k.gone[d.path] = true
	return "a device is removed", scan.Changes{Uevents: uevents}
}

const vfioDir = "sys/devices/virtual/vfio"

// absent reports whether a device is missing or has lost its driver.
func (k *kernel) absent(dir string) bool {
	for gone, is := range k.gone {
		if is && isBelow(dir, gone) {
			return true
		}
	}
	for function, is := range k.unbound {
		if is && isBelow(dir, function) {
			return true
		}
	}
	return false
}

// restore restores the recorded state of a device, and of the devices above and below it.
func (k *kernel) restore(dir string) (string, scan.Changes) {
	function := cmpOr(kernelDevice{path: dir}.function(), dir)
	var uevents []scan.Uevent
	if k.passed[function] {
		group := path.Base(k.links[function+"/iommu_group"])
		uevents = append(uevents, scan.Uevent{Path: path.Join(vfioDir, group), Subsystem: "vfio", Node: path.Join("dev/vfio", group)})
	}
	related := func(other string) bool { return isBelow(other, function) || isBelow(function, other) }
	for _, set := range []map[string]bool{k.gone, k.unbound, k.passed} {
		for name, is := range set {
			if is && related(name) && !strings.HasPrefix(name, "sys/module/") {
				set[name] = false
				uevents = append(uevents, k.events(name, true)...)
			}
		}
	}
	for name, is := range k.renamed {
		if is && related(name) {
			k.renamed[name] = false
			uevents = append(uevents, scan.Uevent{Path: name, OldPath: name + "x", Subsystem: "net"})
		}
	}
	if len(uevents) == 0 {
		uevents = k.events(dir, true) // as events of udevadm trigger
	}
	return "devices come back", scan.Changes{Uevents: uevents}
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// events returns an event for each device below a directory, and with own for the device of the
// directory itself.
func (k *kernel) events(dir string, own bool) (uevents []scan.Uevent) {
	for _, d := range slices.Backward(k.devices) {
		if isBelow(d.path, dir) && (own || d.path != dir) {
			uevents = append(uevents, scan.Uevent{Path: d.path, Subsystem: d.subsystem, Node: d.node})
		}
	}
	return uevents
}

// told lists the attributes whose changes the kernel reports, or that never change.
var told = []string{"vendor", "device", "class", "modalias", "subsystem_vendor", "subsystem_device", "revision", "numa_node", "max_link_speed", "max_link_width", "acpi_index", "label", "uevent", "dev", "sriov_totalvfs", "idVendor", "idProduct"}

// changeFile changes an attribute without an event.
func (k *kernel) changeFile(dir string) string {
	files := slices.DeleteFunc(k.recorded.Files(), func(name string) bool {
		return !isBelow(name, dir) || k.links[name] != "" || slices.Contains(told, path.Base(name))
	})
	if len(files) == 0 {
		return "nothing"
	}
	name := files[k.IntN(len(files))]
	if _, changed := k.changed[name]; changed {
		delete(k.changed, name)
		return name + " is as before"
	}
	k.changed[name] = fmt.Sprint(k.IntN(100), "\n")
	return name + " changes"
}

// regroup moves a function into the IOMMU group of another one, which the kernel does when it finds
// the function again.
func (k *kernel) regroup(d kernelDevice) (string, scan.Changes) {
	groups := []string{"4711"}
	for name, target := range k.links {
		if path.Base(name) == "iommu_group" {
			groups = append(groups, path.Base(target))
		}
	}
	slices.Sort(groups)
	uevents := k.events(d.path, true)
	k.group[d.path] = groups[k.IntN(len(groups))]
	return "a function is in another group", scan.Changes{Uevents: uevents}
}

// tree returns the present host.
func (k *kernel) tree() *discoverytest.Tree {
	t := k.recorded
	for name, content := range k.changed {
		t = t.WithFile(name, []byte(content))
	}
	for function, group := range k.group {
		address := path.Base(function)
		for name := range k.links {
			if strings.HasPrefix(name, "sys/kernel/iommu_groups/") && path.Base(name) == address {
				t = t.WithoutFile(name)
			}
		}
		t = t.WithLink(function+"/iommu_group", "/sys/kernel/iommu_groups/"+group)
		t = t.WithLink(path.Join("sys/kernel/iommu_groups", group, "devices", address), "/"+function)
	}
	for dir, is := range k.renamed {
		if is {
			t = k.move(t, dir, dir+"x")
		}
	}
	for function, is := range k.unbound {
		if !is {
			continue
		}
		for _, d := range k.devices {
			if isBelow(d.path, function) && d.path != function && d.function() == function {
				t = k.without(t, d)
			}
		}
		t = t.WithoutFile(function + "/driver")
		if k.passed[function] {
			group := path.Base(k.links[function+"/iommu_group"])
			t = t.WithLink(function+"/driver", "/sys/bus/pci/drivers/vfio-pci")
			t = t.WithFile(path.Join(vfioDir, group, "uevent"), []byte("DEVNAME=vfio/"+group+"\n"))
			t = t.WithFile(path.Join(vfioDir, group, "dev"), []byte("511:7\n"))
			t = t.WithLink("sys/class/vfio/"+group, "/"+path.Join(vfioDir, group))
			t = t.WithFile("dev/vfio/"+group, nil)
		}
	}
	for dir, is := range k.gone {
		if !is {
			continue
		}
		for _, d := range k.devices {
			if isBelow(d.path, dir) {
				t = k.without(t, d)
			}
		}
		t = k.withoutLinks(t.WithoutFile(dir), dir)
	}
	for node, is := range k.missing {
		if is {
			t = t.WithoutFile(node)
		}
	}
	return t
}

// without returns the tree without a device and its node. The class directory above the device is
// removed too if it is empty.
func (k *kernel) without(t *discoverytest.Tree, d kernelDevice) *discoverytest.Tree {
	t = k.withoutLinks(t.WithoutFile(d.path), d.path)
	if d.node != "" {
		t = t.WithoutFile(d.node)
	}
	if dir := path.Dir(d.path); path.Base(dir) == d.subsystem {
		if entries, err := t.ReadDir(dir); err == nil && len(entries) == 0 {
			t = t.WithoutFile(dir)
		}
	}
	return t
}

// withoutLinks returns the tree without links to anything in a directory.
func (k *kernel) withoutLinks(t *discoverytest.Tree, dir string) *discoverytest.Tree {
	for name, target := range k.links {
		if isBelow(target, dir) && !strings.HasPrefix(name, "dev/") {
			t = t.WithoutFile(name)
		}
	}
	return t
}

// move renames a device's directory.
func (k *kernel) move(t *discoverytest.Tree, from, to string) *discoverytest.Tree {
	moved := t.WithoutFile(from)
	for _, name := range t.Files() {
		if !isBelow(name, from) {
			continue
		}
		if target, ok := k.links[name]; ok {
			moved = moved.WithLink(to+name[len(from):], "/"+target)
		} else if data, err := fs.ReadFile(t, name); err == nil {
			moved = moved.WithFile(to+name[len(from):], data)
		}
	}
	moved = k.withoutLinks(moved, from)
	return moved.WithLink("sys/class/net/"+path.Base(to), "/"+to)
}
