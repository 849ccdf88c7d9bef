package inuse

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"chandler.dev/discovery/sysfs"
)

// dependentUses returns the dependents of a function: other functions, devices created on top, and
// the kernel's own uses.
func (v *View) dependentUses(function sysfs.Device) (uses Uses) {
	r := &reader{FS: v.host.FS}
	add := func(object, how string) { uses = append(uses, Use{Object: object, How: how, BlocksUnbind: true}) }
	for _, entry := range r.listDir(function.Path) {
		switch {
		case entry.IsDir() && sysfs.IsPCIAddress(entry.Name()):
			add("function "+entry.Name(), "it is behind this one")
		case entry.Name() == "virtfn0":
			add("function "+function.Name(), "it has virtual functions; set sriov_numvfs to 0 first")
		case entry.IsDir() && strings.Contains(entry.Name(), ".sf."): // mlx5_core.sf.4 (drivers/net/ethernet/mellanox/mlx5/core/sf)
			add("sub-function "+entry.Name(), "it was created on this function; remove it with devlink first")
		}
	}
	for _, device := range mediatedDevices(r, function) {
		add("mediated device "+device.Name(), "it was created on this function; write 1 to its attribute remove first")
	}
	_ = fs.WalkDir(r, function.Path, func(name string, entry fs.DirEntry, _ error) error {
		if entry == nil || entry.IsDir() {
			return nil // r keeps the error
		}
		dir := path.Base(path.Dir(name))
		switch {
		case entry.Name() == "in_use" && path.Base(path.Dir(path.Dir(name))) == "dma": // in_use_show in drivers/dma/dmaengine.c
			if clients := r.text(name); clients != "0" && clients != "" {
				add("DMA channel "+dir, "the kernel uses it")
			}
		case entry.Name() == "console" && path.Base(path.Dir(path.Dir(name))) == "tty":
			if r.text(name) == "Y" {
				add("terminal "+dir, "it is a console of the kernel")
			}
		case entry.Name() == "mount_tag":
			if where := v.disks.tags[r.text(name)]; where != "" {
				add("file system "+r.text(name), "it is mounted on "+where)
			}
		}
		return nil
	})
	uses = append(uses, v.rdmaUses(r, function)...)
	if r.err != nil {
		uses = append(uses, Use{Object: "what hangs on it", ReadError: r.err, BlocksUnbind: true})
	}
	return uses
}

// rdmaUses returns the remote disks that the kernel may reach through the function's RDMA device.
// The kernel does not show which RDMA device a controller uses. If a remote disk is reached by TCP,
// the routes show the interface.
func (v *View) rdmaUses(r *reader, function sysfs.Device) (uses Uses) {
	if _, err := r.Stat(path.Join(function.Path, "infiniband")); err != nil {
		return nil
	}
	for _, file := range r.glob("sys/class/nvme/*/transport") {
		if r.text(file) == "rdma" {
			name := path.Base(path.Dir(file))
			uses = append(uses, Use{Object: "its RDMA device", ReadError: fmt.Errorf("NVMe controller %s is reached by RDMA, and the kernel does not report the device; disconnect it first", name)})
		}
	}
	for _, file := range r.glob("sys/kernel/config/nvmet/ports/*/addr_trtype") {
		if r.text(file) == "rdma" {
			uses = append(uses, Use{Object: "its RDMA device", ReadError: fmt.Errorf("port %s of the NVMe target is reached by RDMA, and the kernel does not report the device; remove it first", path.Base(path.Dir(file)))})
		}
	}
	for _, file := range r.glob("sys/class/iscsi_transport/iser/handle") {
		if _, err := r.Stat(file); err == nil && len(r.listDir("sys/class/iscsi_session")) > 0 {
			uses = append(uses, Use{Object: "its RDMA device", ReadError: errors.New("there are iSCSI sessions, some of them perhaps by RDMA (iSER); log out first")})
		}
	}
	return uses
}
