package gather

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/doctor"
	"chandler.dev/internal/doctor/report"
)

// gatherHost reads the facts about the host from its files, except those about devices.
func gatherHost(ctx context.Context, o Options) (h doctor.HostFacts) {
	h.Functions = withPatience(ctx, "the PCI bus", func() ([]doctor.Function, error) { return pciFunctions(o.HostFS, o.Source == report.Recording) })
	modules := withPatience(ctx, "/sys/module", func() (map[string]bool, error) { return loadedModules(o.HostFS) })
	h.Modules = modules.Value
	h.Virtual = withPatience(ctx, "/proc/cpuinfo", func() (bool, error) { return supportsVirtualization(o.HostFS), nil }).Value
	if o.Source != "" { // this machine's files say nothing about the host
		return h
	}
	if !o.Simulated {
		h.Proc = doctor.KnownAnswer(o.HasProc)
	}
	h.SELinux = doctor.KnownAnswer(readSELinux(o))
	h.Space = withPatience(ctx, "the file system of the records", func() ([]doctor.Space, error) { return freeSpaces(o) })
	if _, err := os.Stat(o.StateDir); err == nil {
		h.State = withPatience(ctx, "the agent's directory", func() (string, error) { return unwritableReason(o.StateDir), nil })
	}
	return h
}

// pciFunctions returns the PCI functions of a host, or none if the host has no PCI bus. Every kernel
// has the directory of buses; only a recording without devices of a bus lacks the directory.
func pciFunctions(host fs.FS, recording bool) (found []doctor.Function, err error) {
	const bus = "sys/bus/pci/devices"
	entries, err := fs.ReadDir(host, bus)
	if errors.Is(err, fs.ErrNotExist) && !recording {
		if _, err := fs.Stat(host, "sys/bus"); err != nil {
			return nil, err
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		d := sysfs.At(host, path.Join(bus, entry.Name()))
		function := doctor.Function{Address: entry.Name(), Driver: d.Driver(), Group: d.Link("iommu_group"), Virtual: d.Link("physfn") != ""}
		if id, err := d.PCIID(); err == nil {
			function.Class, function.Vendor, function.Device = id.Class, id.Vendor, id.Device
		}
		if override, err := d.Text("driver_override"); err == nil && override != "(null)" {
			function.Override = override
		}
		found = append(found, function)
	}
	return found, nil
}

func loadedModules(host fs.FS) (map[string]bool, error) {
	entries, err := fs.ReadDir(host, "sys/module")
	if err != nil {
		return nil, err
	}
	loaded := make(map[string]bool)
	for _, entry := range entries {
		loaded[entry.Name()] = true
	}
	return loaded, nil
}

// supportsVirtualization reports whether the host's processors support virtual machines.
func supportsVirtualization(host fs.FS) bool {
	data, _ := fs.ReadFile(host, "proc/cpuinfo")
	for line := range strings.Lines(string(data)) {
		if strings.HasPrefix(line, "flags") {
			return strings.Contains(line, " vmx ") || strings.Contains(line, " svm ")
		}
	}
	return false
}

// readSELinux returns whether SELinux is enforcing, and the agent's context.
func readSELinux(o Options) (s doctor.SELinux) {
	data, _ := fs.ReadFile(o.HostFS, "sys/fs/selinux/enforce")
	s.Enforcing = strings.TrimSpace(string(data)) == "1"
	for _, p := range findAgents(o) {
		if data, err := os.ReadFile(filepath.Join(p.dir, "attr/current")); err == nil {
			s.Agent = strings.TrimRight(strings.TrimSpace(string(data)), "\x00")
		}
	}
	return s
}

// freeSpaces returns the free space of the file systems with records and CDI specs.
func freeSpaces(o Options) (found []doctor.Space, err error) {
	seen := make(map[unix.Fsid]bool)
	for _, dir := range []string{o.StateDir, o.CDIDir} {
		var stat unix.Statfs_t
		if err := unix.Statfs(dir, &stat); err != nil || seen[stat.Fsid] {
			continue // missing directories have error codes of their own
		}
		seen[stat.Fsid] = true
		size := uint64(stat.Bsize) //nolint:gosec // a block size is positive
		found = append(found, doctor.Space{Path: dir, Size: stat.Blocks * size, Free: stat.Bavail * size, Inodes: stat.Files, INFree: stat.Ffree})
	}
	return found, nil
}

// unwritableReason returns the reason why a directory is not writable, or "". It writes nothing.
func unwritableReason(dir string) string {
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return dir + " does not exist"
	case err != nil:
		return err.Error()
	case !info.IsDir():
		return dir + " is no directory"
	}
	// AT_EACCESS checks the effective user. For a read-only file system, the kernel returns EROFS.
	if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK, unix.AT_EACCESS); err != nil {
		return fmt.Sprintf("%s: %v", dir, err)
	}
	return ""
}
