package discovery

import (
	"io/fs"
	"path"
	"syscall"

	"chandler.dev/discovery/sysfs"
)

// DeviceKey identifies a physical device within one boot. The kernel may give the names and numbers
// of a device to another device, for example when a driver is loaded again or a card is replaced.
// Zero fields are unknown.
type DeviceKey struct {
	Function string `json:"function,omitempty"` // address of the PCI function of the device
	ID       string `json:"id,omitempty"`       // vendor, device, subsystem vendor and subsystem device, in hexadecimal
	Identity string `json:"identity,omitempty"` // UUID or serial number

	// Inode is the inode number of the function's directory in sysfs. The kernel makes a new
	// directory when it registers the function again (pci_device_add in drivers/pci/probe.c and
	// kernfs_create_dir_ns in fs/kernfs/dir.c, Linux 6.12).
	Inode uint64 `json:"inode,omitempty"`
}

// KeyOf returns the key of a device, with the fields that the host has at present.
func KeyOf(host *Host, d *Device) DeviceKey {
	key := DeviceKey{Identity: d.Identity}
	function, ok := sysfs.At(host.FS, d.Source).PCIFunction()
	if !ok {
		return key
	}
	key.Function = function.Name()
	for _, attribute := range []string{"vendor", "device", "subsystem_vendor", "subsystem_device"} {
		if text, err := function.Text(attribute); err == nil {
			key.ID += text + " "
		}
	}
	key.Inode = FunctionKey(host, function.Path).Inode
	return key
}

// FunctionKey returns the key of a PCI function, by its directory: the address and the inode. It
// reads no attribute, so no driver delays it. Within one boot the two suffice, since the kernel
// reuses no inode number of sysfs (kernfs_id_ino in include/linux/kernfs.h, Linux 6.12: the number
// has a generation). A reset, and a change of the driver, leave the directory as it is.
func FunctionKey(host *Host, dir string) DeviceKey {
	key := DeviceKey{Function: path.Base(dir)}
	if info, err := fs.Stat(host.FS, dir); err == nil {
		if stat, ok := info.Sys().(*syscall.Stat_t); ok {
			key.Inode = stat.Ino
		}
	}
	return key
}

// MayEqual reports whether two keys may be of one device, because all fields known in both are
// equal.
func (k DeviceKey) MayEqual(other DeviceKey) bool {
	agree := func(a, b string) bool { return a == "" || b == "" || a == b }
	return agree(k.Function, other.Function) && agree(k.ID, other.ID) && agree(k.Identity, other.Identity) &&
		(k.Inode == 0 || other.Inode == 0 || k.Inode == other.Inode)
}
