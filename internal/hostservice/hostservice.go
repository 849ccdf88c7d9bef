// Package hostservice lets the agent change and examine the host through another process, the host
// service: the agent has the API token and no privilege, and the service has privilege and no
// token. The package contains both ends of the protocol in package wire.
//
// The service decides nothing about devices. It executes a request if the request is one of a
// closed list, and checks each request itself:
//
//   - An attribute is one of [ListAttributes], and the administrator allows it by a flag of the service.
//   - A write names a PCI function by its address, and a driver by its name. The service composes
//     the path, which contains no link, and accepts only values of the attribute's form.
//   - The function is the one for which the agent has a lease: the inode of its directory in sysfs
//     is that of the request.
//   - The agent has the present session. An agent begins its session when it has the node's lock.
//     From then on, no write of an earlier agent begins, and the session begins only after the last
//     earlier write has ended. So the next agent never overlaps with a late write.
//
// The service runs the programs of its configuration, with arguments that no request contains. A
// program that prints facts has no lease and no session: its input is a sequence of empty lines, and
// it ends with the connection. A change of a partition is checked like a write. The code of the
// program checks the values and makes the arguments of them; see [PartitionProgram].
//
// The service configures devices of the families of its configuration. Such a request contains a
// device's name and the parameters of a claim, and is checked like a write. The family's code in the
// service finds the device below the function, and determines the change and the files for it; see
// [wire.Configuration].
//
// The service logs each write, each change of a partition or a device, and each refusal.
//
// A write that the kernel delays outlives the agent's wait for it. The agent keeps the lease until
// its request ends. This holds even if the service is killed: the kernel closes a process's sockets
// when the last thread has left (do_exit and exit_files in kernel/exit.c and fs/file.c, Linux
// 6.12), and a thread leaves only after the end of its write. For the same reason, the next service
// waits for the lock of its directory until the last write of a killed service has ended.
//
// A program that changes a partition may hang in the kernel, too, and outlive a killed service. So it
// inherits the connection of the request and the lock of the directory: the kernel closes both only
// when the program has ended. The kernel kills the program together with the service.
package hostservice

import (
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/hostservice/wire"
	"chandler.dev/internal/pattern"
)

// attribute is an attribute that a service can write.
type attribute struct {
	name string
	path string // of an attribute of drivers, below sys/bus/pci; "*" stands for the driver

	// isValid reports whether a value has the attribute's form. It is nil for attributes of drivers,
	// whose value is the address of a function.
	isValid func(value string) bool
}

var (
	partitionMode = pattern.Lazy(`^[A-Z]{3}$`)
	resetMethods  = pattern.Lazy(`^[a-z_]{1,32}( [a-z_]{1,32}){0,15}$`)
)

// attributes are all attributes that the agent writes.
var attributes = []attribute{
	{name: "bind", path: "drivers/*/bind"},
	{name: "current_compute_partition", isValid: func(value string) bool { return partitionMode().MatchString(value) }},
	{name: "driver_override", isValid: func(value string) bool { return value == "" || isDriver(value) }},
	{name: "drivers_probe", path: "drivers_probe"},
	{name: "reset", isValid: func(value string) bool { return value == "1" }},
	{name: "reset_method", isValid: func(value string) bool { return resetMethods().MatchString(value) }},
	{name: "sriov_numvfs", isValid: isCount},
	{name: "unbind", path: "drivers/*/unbind"},
}

// ListAttributes returns the names of all attributes that a service can write.
func ListAttributes() (names []string) {
	for _, a := range attributes {
		names = append(names, a.name)
	}
	return names
}

// isDriver reports whether a text can be the name of a kernel driver, and thus of one directory.
func isDriver(name string) bool {
	return name != "." && name != ".." && len(name) <= 128 && !strings.ContainsRune(name, '/') && isPlain(name)
}

// isPlain reports whether a text is not empty and consists of printable ASCII characters.
func isPlain(text string) bool {
	return text != "" && !strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' })
}

// isCount reports whether a text is a number of virtual functions in its shortest form.
func isCount(text string) bool {
	count, err := strconv.ParseUint(text, 10, 16)
	return err == nil && strconv.FormatUint(count, 10) == text
}

// resolve returns the path and the value of a write, or why the write is refused. It reads the host
// and changes nothing.
func resolve(host *discovery.Host, allowed []string, w *wire.Write) (name, value string, err error) {
	i := slices.IndexFunc(attributes, func(a attribute) bool { return a.name == w.Attribute })
	switch {
	case i < 0:
		return "", "", refuseRequest("attribute %q is not one that the host service writes", w.Attribute)
	case !slices.Contains(allowed, w.Attribute):
		return "", "", refuseRequest("attribute %s is not in --allow of the host service on this node", w.Attribute)
	}
	a := attributes[i]
	switch {
	case strings.Contains(a.path, "*") != (w.Driver != "") || w.Driver != "" && !isDriver(w.Driver):
		return "", "", refuseRequest("%q is not the driver of an attribute %s", w.Driver, a.name)
	case a.isValid == nil && w.Value != "" || a.isValid != nil && !a.isValid(w.Value):
		return "", "", refuseRequest("%q is not a value of attribute %s", w.Value, a.name)
	}
	function, err := findFunction(host, w.Lease, w.Function, w.Inode)
	if err != nil {
		return "", "", err
	}
	name, value = path.Join(function.Path, a.name), w.Value
	if a.isValid == nil {
		name, value = path.Join("sys/bus/pci", strings.Replace(a.path, "*", w.Driver, 1)), w.Function
	}
	if err := checkPath(host.FS, name); err != nil {
		return "", "", err
	}
	return name, value, nil
}

// findFunction returns the PCI function of a lease, or why the request is refused.
func findFunction(host *discovery.Host, lease, address string, inode uint64) (sysfs.Device, error) {
	switch {
	case len(lease) > 253 || !isPlain(lease):
		return sysfs.Device{}, refuseRequest("the request names no lease")
	case !sysfs.IsPCIAddress(address):
		return sysfs.Device{}, refuseRequest("%q is not the address of a PCI function", address)
	}
	function, _ := sysfs.At(host.FS, "sys/bus/pci/devices").LinkTo(address)
	switch key := discovery.FunctionKey(host, function.Path); {
	case function.Path == "" || key.Inode == 0:
		return function, &answer{status: statusGone, text: "function " + address + " is missing"}
	case path.Base(function.Path) != address || key.Inode != inode:
		return function, &answer{status: statusGone, text: "function " + address + " is not the one of the lease: the kernel has registered it again"}
	}
	return function, nil
}

// checkPath returns an error unless a path leads to a regular file of sysfs without links.
func checkPath(host fs.FS, name string) error {
	if !strings.HasPrefix(name, "sys/devices/") && !strings.HasPrefix(name, "sys/bus/pci/") {
		return refuseRequest("/%s is not an attribute of a PCI function or driver", name)
	}
	info, err := fs.Lstat(host, name)
	if err != nil {
		return &answer{status: statusGone, text: "/" + name + " is missing"}
	}
	for dir := path.Dir(name); err == nil && info.Mode().IsRegular() && dir != "sys"; dir = path.Dir(dir) {
		parent, lstatErr := fs.Lstat(host, dir)
		if lstatErr != nil || !parent.IsDir() {
			return refuseRequest("/%s is not a directory", dir)
		}
	}
	if !info.Mode().IsRegular() {
		return refuseRequest("/%s is not an attribute", name)
	}
	return nil
}
