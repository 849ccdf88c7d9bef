// Package intelgpu describes Intel GPUs, integrated and discrete, and their SR-IOV virtual
// functions, as the i915 and xe drivers show them in /sys. It does not describe GPUs bound to
// another driver, such as a driver for virtual machines, and has no facts that only Level Zero
// reports: model, temperature, links between GPUs.
//
// The resource gpu.intel.com/monitoring, for all GPUs of a node regardless of their consumers, is
// not offered by default: the Intel plugin offers the resource only if configured, and in DRA a
// claim with admin access serves the purpose.
package intelgpu

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Family recognises Intel GPUs.
var Family = &discovery.Family{
	Name: "intelgpu",
	Doc:  "Intel GPUs, integrated and discrete, and their SR-IOV virtual functions",
	Match: []discovery.Match{
		{Bus: "pci", Vendor: "8086", PCIClass: "03", Driver: "i915"},
		{Bus: "pci", Vendor: "8086", PCIClass: "03", Driver: "xe"},
		{Bus: "pci", Vendor: "8086", PCIClass: "03", Unbound: true},
	},
	Describe:  describe,
	Variables: variables,
	Labels:    labels,
}

// variables tune the libraries of Level Zero, the compute runtime and VA-API.
var variables = []string{
	"LIBVA_DRIVER_NAME", "NEOReadDebugKeys", "ZES_ENABLE_SYSMAN", "ZE_ENABLE_PCI_ID_DEVICE_ORDER",
	"ZE_FLAT_DEVICE_HIERARCHY",
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	links, err := readLinks(host)
	if err != nil {
		problems = append(problems, discovery.Problem{Device: byPath, Err: err})
	}
	var gpus []used
	for _, function := range found {
		if !function.HasDriver() && !strings.HasSuffix(function.Name(), ".0") {
			// Old GPUs have a second display function for further monitors, to which the driver does not
			// bind (i915_pci_probe in drivers/gpu/drm/i915/i915_pci.c).
			continue
		}
		divided, sriovErr := pci.HasVirtualFunctions(function)
		if divided {
			continue // the virtual functions have the GPU's capabilities
		}
		d, err := describeGPU(host, function, links)
		if err = errors.Join(sriovErr, err, setCardLink(d.Attributes, function)); err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		devices = append(devices, d)
		if function.HasDriver() {
			gpus = append(gpus, used{function, d.Edits.DeviceNodes})
		}
	}
	monitors, monitorProblems := monitoring(host, gpus)
	return append(devices, monitors...), append(problems, monitorProblems...)
}

// setCardLink sets the link of a card with a switch, such as Arc. The GPU and the downstream port of
// the switch claim one lane of 2.5 GT/s, although both are in one chip. The link of the card is that
// of the upstream port. Without its values, the link is unknown. The output of lspci -vv for an Arc A750
// and an Arc B580 shows these values.
func setCardLink(a discovery.Attributes, function sysfs.Device) error {
	speed, width := a["linkSpeed"].IntValue, a["linkWidth"].IntValue
	if speed == nil || width == nil || *speed != 2500 || *width != 1 {
		return nil
	}
	delete(a, "linkSpeed")
	delete(a, "linkWidth")
	upstream := function.Parent().Parent()
	if !sysfs.IsPCIAddress(upstream.Name()) { // such as in a guest, whose hypervisor shows no switch
		return nil
	}
	return pci.SetLink(a, upstream)
}

func describeGPU(host *discovery.Host, function sysfs.Device, links []string) (discovery.Device, error) {
	if !function.HasDriver() {
		return pci.DescribeUnbound(host, function, "gpu", "intel")
	}
	d, err := pci.DescribeFunction(host, function)
	errs := []error{err}
	d.Attributes.SetString("kind", "gpu")
	d.Attributes.SetString("vendor", "intel")
	d.Attributes.SetString("model", models[d.Attributes.String("pciDevice")])
	d.Facts = facts(function)
	errs = append(errs, setTiles(&d, function.NumberedChildren("", "tile")))
	for _, card := range function.NumberedChildren("drm", "card") { // one
		errs = append(errs, setLocalMemory(&d, card))
		stem := card.Name() + "-"
		d.PluginOffers = []discovery.Offer{{
			Resource: "gpu.intel.com/" + d.Attributes.String("driver"),
			IDs:      []string{stem + "0"}, // the only share
			Dialect:  discovery.Dialect{Stem: stem},
		}}
	}
	nodes, err := discovery.DRMNodes(function)
	d.Edits.DeviceNodes, errs = nodes, append(errs, err)
	d.Edits.Mounts = mounts(function, links)
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	// The file exists while the firmware has failed and must be flashed
	// (drivers/gpu/drm/xe/xe_survivability_mode.c, whose documentation names fwupd). Only root can read it.
	if function.HasEntry("survivability_mode") {
		d.Health = discovery.Health{
			Status: discovery.Unhealthy, Reason: "in survivability mode: its firmware has failed and must be flashed",
			Fix: fmt.Sprintf("sudo cat /sys/bus/pci/devices/%s/survivability_mode   # shows the failure; then flash the firmware with a program such as fwupd", function.Name()),
		}
	}
	return d, errors.Join(errs...)
}

// setLocalMemory sets the memory of a discrete GPU from the attribute of the i915 driver in Intel's
// releases; the kernel's own i915 driver has no such attribute. For a discrete GPU a gt is a tile,
// while a gt of an integrated GPU may be its media engine.
func setLocalMemory(d *discovery.Device, card sysfs.Device) error {
	attrs := card.Attrs()
	size, ok := attrs.Uint("lmem_total_bytes")
	if !ok {
		return attrs.Err()
	}
	if err := setMemory(d, size); err != nil {
		return fmt.Errorf("attribute lmem_total_bytes: %w", err)
	}
	if size > 0 {
		if gts := card.NumberedChildren("gt", "gt"); len(gts) > 0 {
			d.Capacity.Set("tiles", int64(len(gts)))
		}
	}
	return nil
}

// setTiles sets the number of tiles, which only the xe driver reports, and the memory if all tiles
// report their size. The tiles of most kernels do not.
func setTiles(d *discovery.Device, tiles []sysfs.Device) error {
	if len(tiles) == 0 {
		return nil
	}
	d.Capacity.Set("tiles", int64(len(tiles)))
	var total uint64
	for _, tile := range tiles {
		attrs := tile.Attrs()
		size, ok := attrs.Uint("physical_vram_size_bytes")
		if err := attrs.Err(); err != nil {
			return fmt.Errorf("%s: %w", tile.Name(), err)
		}
		if !ok {
			return nil
		}
		if size > math.MaxInt64-total {
			return fmt.Errorf("%s: attribute physical_vram_size_bytes: no size of a memory: %d", tile.Name(), size)
		}
		total += size
	}
	return setMemory(d, total)
}

// setMemory sets the memory. A GPU without its own memory has the size 0.
func setMemory(d *discovery.Device, size uint64) error {
	if size > math.MaxInt64 {
		return fmt.Errorf("no size of a memory: %d", size)
	}
	if size > 0 {
		d.Capacity.Set("memory", int64(size))
	}
	return nil
}

// byPath is the directory of udev's links to GPU nodes by PCI address, such as
// "pci-0000:03:00.0-render". Media software searches this directory.
const byPath = "/dev/dri/by-path"

// readLinks returns the names of the links by path. A host may have none.
func readLinks(host *discovery.Host) ([]string, error) {
	entries, err := fs.ReadDir(host.FS, strings.TrimPrefix(byPath, "/"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list links to nodes: %w", err)
	}
	names := make([]string, len(entries))
	for i, entry := range entries {
		names[i] = entry.Name()
	}
	return names, nil
}

// mounts returns read-only mounts of the links to the nodes of a function, as in the Intel plugin's
// default configuration. In the container, the nodes themselves are at the paths of the links.
func mounts(function sysfs.Device, links []string) []*specs.Mount {
	var mounts []*specs.Mount
	for _, name := range links {
		if strings.HasPrefix(name, "pci-"+function.Name()+"-") {
			link := path.Join(byPath, name)
			mounts = append(mounts, &specs.Mount{HostPath: link, ContainerPath: link, Options: []string{"ro", "nosuid", "rbind", "rprivate"}})
		}
	}
	return mounts
}
