package provision_test

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing/fstest"
)

// kernel is a host whose attributes behave like the kernel's on writes, as far as the tests
// need them: PCI drivers and SR-IOV (drivers/pci), QAT services (drivers/crypto/intel/qat) and
// idxd queues (drivers/dma/idxd).
type kernel struct {
	fstest.MapFS

	writes  []string
	refuses map[string]error // errors of writes, by path
	rejects map[string]bool  // drivers that bind to no function
	broken  map[string]bool  // unreadable paths
}

// host is the readable part of a kernel, without the Glob method of MapFS.
type host struct {
	files

	broken map[string]bool
}

type files interface {
	fs.ReadLinkFS
	fs.ReadDirFS
	fs.StatFS
}

func (h host) check(op, name string) error {
	if h.broken[name] {
		return &fs.PathError{Op: op, Path: name, Err: syscall.EIO}
	}
	return nil
}

func (h host) Open(name string) (fs.File, error) {
	if err := h.check("open", name); err != nil {
		return nil, err
	}
	return h.files.Open(name)
}

func (h host) ReadDir(name string) ([]fs.DirEntry, error) {
	if err := h.check("open", name); err != nil {
		return nil, err
	}
	return h.files.ReadDir(name)
}

func (h host) ReadLink(name string) (string, error) {
	if err := h.check("readlink", name); err != nil {
		return "", err
	}
	return h.files.ReadLink(name)
}

const pciRoot = "sys/devices/pci0000:00/"

// newKernel returns a host with one process and the given drivers loaded.
func newKernel(drivers ...string) *kernel {
	k := &kernel{MapFS: fstest.MapFS{}, refuses: make(map[string]error), rejects: make(map[string]bool), broken: make(map[string]bool)}
	k.file("sys/bus/pci/drivers_probe", "")
	for _, driver := range drivers {
		k.file("sys/bus/pci/drivers/"+driver+"/unbind", "")
	}
	k.file("proc/1/comm", "init")
	k.link("proc/1/fd/0", "/dev/null")
	k.file("proc/1/mountinfo", "22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/root rw")
	k.file("proc/1/net/route", "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT")
	return k
}

func (k *kernel) file(name, text string) { k.MapFS[name] = &fstest.MapFile{Data: []byte(text + "\n")} }

func (k *kernel) link(name, target string) {
	k.MapFS[name] = &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink | 0o777}
}

// links sets the number of subdirectories in a directory's link count.
func (k *kernel) links(name string, below int) {
	stat := &syscall.Stat_t{}
	for range 2 + below { // the type of Nlink differs by architecture
		stat.Nlink++
	}
	k.MapFS[name] = &fstest.MapFile{Mode: fs.ModeDir | 0o755, Sys: stat}
}

func (k *kernel) text(name string) string {
	file := k.MapFS[k.resolve(name)]
	if file == nil {
		return ""
	}
	return strings.TrimSpace(string(file.Data))
}

// function adds a PCI function with attributes, and returns its directory.
func (k *kernel) function(address, id, class, driver string, attributes map[string]string) string {
	dir := pciRoot + address
	vendor, device, _ := strings.Cut(id, ":")
	k.file(dir+"/vendor", "0x"+vendor)
	k.file(dir+"/device", "0x"+device)
	k.file(dir+"/class", "0x"+class)
	k.file(dir+"/driver_override", "(null)")
	k.link(dir+"/iommu_group", "../../../kernel/iommu_groups/"+strconv.Itoa(len(k.MapFS)))
	k.link("sys/bus/pci/devices/"+address, "../../../../"+dir)
	if driver != "" {
		k.link(dir+"/driver", "../../../bus/pci/drivers/"+driver)
	}
	for name, value := range attributes {
		k.file(dir+"/"+name, value)
	}
	return dir
}

// sriov returns the attributes of a physical function without virtual functions.
func sriov(total int) map[string]string {
	return map[string]string{"sriov_numvfs": "0", "sriov_totalvfs": strconv.Itoa(total), "sriov_drivers_autoprobe": "1"}
}

// netdev adds a network interface of a function.
func (k *kernel) netdev(dir, name, flags string) {
	k.file(dir+"/net/"+name+"/flags", flags)
	k.link("sys/class/net/"+name, "../../../"+dir+"/net/"+name)
}

// disk adds a disk with a partition.
func (k *kernel) disk(dir, name, numbers string) {
	k.file(dir+"/block/"+name+"/dev", "8:0")
	k.file(dir+"/block/"+name+"/"+name+"1/dev", numbers)
	k.link("sys/class/block/"+name, "../../../"+dir+"/block/"+name)
	k.link("sys/class/block/"+name+"1", "../../../"+dir+"/block/"+name+"/"+name+"1")
}

// loop adds a loop device backed by a file.
func (k *kernel) loop(name, file string) {
	k.file("sys/devices/virtual/block/"+name+"/loop/backing_file", file)
	k.link("sys/class/block/"+name, "../../devices/virtual/block/"+name)
	k.link("dev/disk/by-uuid/1", "../../nvme0n11")
}

// alias adds a link to a link to the partition's node.
func (k *kernel) alias() {
	k.link("dev/alias", "mapper/x")
	k.link("dev/mapper/x", "../nvme0n11")
}

// resolve follows the links in a path.
func (k *kernel) resolve(name string) string {
	resolved := ""
	for element := range strings.SplitSeq(name, "/") {
		resolved = path.Join(resolved, element)
		for k.MapFS[resolved] != nil && k.MapFS[resolved].Mode&fs.ModeSymlink != 0 {
			resolved = path.Join(path.Dir(resolved), string(k.MapFS[resolved].Data))
		}
	}
	return resolved
}

// write emulates a write to an attribute.
func (k *kernel) write(name, value string) error {
	file := k.resolve(name)
	k.writes = append(k.writes, name+"="+value)
	dir, attribute := path.Dir(file), path.Base(file)
	switch {
	case k.refuses[file] != nil:
		return k.refuses[file]
	case strings.HasPrefix(file, "sys/bus/dsa/drivers/"):
		return k.writeDSA(path.Base(dir), attribute, value)
	case k.MapFS[file] == nil:
		return syscall.ENOENT
	case file == "sys/bus/pci/drivers_probe":
		return k.probe(value)
	case attribute == "unbind":
		return k.unbind(path.Base(dir), value)
	case attribute == "sriov_numvfs":
		return k.setVFs(dir, value)
	case strings.HasSuffix(file, "/qat/state"):
		if k.text(file) == value {
			return syscall.EINVAL
		}
	case strings.HasSuffix(file, "/qat/cfg_services"):
		if k.text(dir+"/state") != "down" {
			return syscall.EINVAL
		}
	case strings.Contains(dir, "/dsa0"):
		return k.writeQueue(dir, attribute, value)
	}
	k.file(file, value)
	return nil
}

func (k *kernel) probe(address string) error {
	dir := k.resolve("sys/bus/pci/devices/" + address)
	driver := k.text(dir + "/driver_override")
	if driver == "(null)" {
		driver = ""
	}
	if k.MapFS["sys/bus/pci/drivers/"+driver+"/unbind"] != nil && !k.rejects[driver] {
		k.link(dir+"/driver", "../../../bus/pci/drivers/"+driver)
	}
	return nil // whether or not a driver was found
}

func (k *kernel) unbind(driver, address string) error {
	dir := k.resolve("sys/bus/pci/devices/" + address)
	bound := k.MapFS[dir+"/driver"]
	if bound == nil || path.Base(string(bound.Data)) != driver {
		return syscall.ENODEV
	}
	delete(k.MapFS, dir+"/driver")
	// The interfaces disappear with the driver.
	maps.DeleteFunc(k.MapFS, func(name string, _ *fstest.MapFile) bool { return strings.HasPrefix(name, dir+"/net/") })
	return nil
}

func (k *kernel) setVFs(dir, value string) error {
	now, _ := strconv.Atoi(k.text(dir + "/sriov_numvfs"))
	want, _ := strconv.Atoi(value)
	if now > 0 && want > 0 {
		return syscall.EBUSY
	}
	k.file(dir+"/sriov_numvfs", value)
	physical := path.Base(dir)
	for i := range max(now, want) {
		address := fmt.Sprintf("%s%02x.%d", physical[:8], 1+i/8, i%8)
		link := fmt.Sprintf("%s/virtfn%d", dir, i)
		if want == 0 {
			maps.DeleteFunc(k.MapFS, func(name string, _ *fstest.MapFile) bool { return strings.HasPrefix(name, pciRoot+address+"/") })
			delete(k.MapFS, "sys/bus/pci/devices/"+address)
			delete(k.MapFS, link)
			continue
		}
		driver := ""
		if k.text(dir+"/sriov_drivers_autoprobe") == "1" {
			driver = "vfdriver"
		}
		vf := k.function(address, "8086:4941", "0b4000", driver, nil)
		k.link(vf+"/physfn", "../"+physical)
		k.link(link, "../"+address)
	}
	return nil
}

// dsa adds a DSA with four queues and engines, in its state after boot.
func (k *kernel) dsa(address string) string {
	dir := k.function(address, "8086:0b25", "088000", "idxd", nil) + "/dsa0"
	for name, value := range map[string]string{
		"state": "disabled", "configurable": "1", "pasid_enabled": "1",
		"max_groups": "4", "max_engines": "4", "max_work_queues": "4", "max_work_queues_size": "128",
	} {
		k.file(dir+"/"+name, value)
	}
	k.link("sys/bus/dsa/devices/dsa0", "../../../../"+dir)
	for _, driver := range []string{"idxd", "user"} {
		k.file("sys/bus/dsa/drivers/"+driver+"/bind", "")
	}
	for i := range 4 {
		k.link(fmt.Sprintf("sys/bus/dsa/devices/wq0.%d", i), fmt.Sprintf("../../../../%s/wq0.%d", dir, i))
	}
	k.resetDSA(dir)
	return dir
}

func (k *kernel) resetDSA(dir string) {
	for i := range 4 {
		k.file(fmt.Sprintf("%s/engine0.%d/group_id", dir, i), "-1")
		for name, value := range map[string]string{
			"state": "disabled", "group_id": "-1", "mode": "shared", "type": "none", "name": "", "size": "0",
			"priority": "0", "threshold": "0", "clients": "0", "driver_name": "",
		} {
			k.file(fmt.Sprintf("%s/wq0.%d/%s", dir, i, name), value)
		}
	}
}

// writeDSA binds or unbinds a device or a queue.
func (k *kernel) writeDSA(driver, attribute, name string) error {
	dir := k.resolve("sys/bus/dsa/devices/" + name)
	if attribute == "unbind" {
		k.file(dir+"/state", "disabled")
		if driver == "idxd" {
			k.resetDSA(dir)
		}
		return nil
	}
	if driver == "user" {
		shared := k.text(dir+"/mode") == "shared"
		if k.text(path.Dir(dir)+"/state") != "enabled" || k.text(dir+"/name") == "" || k.text(dir+"/group_id") == "-1" ||
			k.text(dir+"/type") != "user" || k.text(dir+"/driver_name") != "user" || shared && k.text(dir+"/threshold") == "0" {
			return syscall.ENXIO
		}
	}
	k.file(dir+"/state", "enabled")
	return nil
}

func (k *kernel) writeQueue(dir, attribute, value string) error {
	unit := dir[:strings.LastIndex(dir, "/dsa0")+len("/dsa0")]
	size, _ := strconv.Atoi(value)
	switch {
	case k.text(dir+"/state") == "enabled" || k.text(unit+"/state") == "enabled":
		return syscall.EPERM
	case attribute == "type":
		k.file(dir+"/name", "")
	case attribute == "mode" && value == "dedicated":
		k.file(dir+"/threshold", "0")
	case attribute == "threshold" && k.text(dir+"/mode") != "shared":
		return syscall.EINVAL
	case attribute == "size":
		for i := range 4 {
			if other := fmt.Sprintf("%s/wq0.%d", unit, i); other != dir {
				more, _ := strconv.Atoi(k.text(other + "/size"))
				size += more
			}
		}
		if size > 128 {
			return syscall.EINVAL
		}
	}
	k.file(dir+"/"+attribute, value)
	return nil
}

// state returns the visible state of the host as text.
func (k *kernel) state() string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(k.MapFS)) {
		if path.Base(name) == "iommu_group" { // the number depends on the time of creation
			continue
		}
		fmt.Fprintf(&b, "%s %q\n", name, k.MapFS[name].Data)
	}
	return b.String()
}
