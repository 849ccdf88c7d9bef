package pci_test

import (
	"io/fs"
	"maps"
	"strings"
	"testing"
	"testing/fstest"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

func TestVFIOHealth(t *testing.T) {
	const (
		function = "sys/devices/pci0000:00/0000:00:02.0"
		sibling  = "sys/devices/pci0000:00/0000:00:02.1"
		mdev     = function + "/83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
		type1    = "sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts"
		iommufd  = "sys/module/iommufd/parameters/allow_unsafe_interrupts"
		// chip is the file with the chip name of an interrupt. plain is its content on x86
		// without interrupt remapping, and remaps with it.
		chip   = "sys/kernel/irq/1/chip_name"
		plain  = "IO-APIC"
		remaps = "IR-IO-APIC"
	)
	driver := func(name string) map[string]string {
		return map[string]string{sibling + "/driver": "-> ../../../bus/pci/drivers/" + name}
	}
	group, cdev, noiommu := []string{"/dev/vfio/7", "/dev/vfio/vfio"}, []string{"/dev/vfio/devices/vfio0", "/dev/iommu"}, []string{"/dev/vfio/noiommu-0", "/dev/vfio/vfio"}
	either := append(append([]string{}, group...), cdev...)
	for name, test := range map[string]struct {
		function string
		nodes    []string
		files    map[string]string
		want     string // part of the reason, "" if usable
	}{
		"usable":                     {function, group, nil, ""},
		"no node":                    {function, nil, nil, "no node for the device"},
		"a node is missing":          {function, []string{"/dev/vfio/8"}, nil, "missing"},
		"with vfio":                  {function, group, driver("vfio-pci"), ""},
		"with vfio of its maker":     {function, group, driver("mlx5_vfio_pci"), ""},
		"with a port":                {function, group, driver("pcieport"), ""},
		"with pci-stub":              {function, group, driver("pci-stub"), ""},
		"with pci-pf-stub":           {function, group, driver("pci-pf-stub"), "IOMMU group 7 also contains 0000:00:02.1, which is bound to pci-pf-stub"},
		"with the host's":            {function, group, driver("nvme"), "bound to nvme"},
		"by itself, with the host's": {function, cdev, driver("nvme"), "bound to nvme"},

		"interrupts are remapped":         {function, group, map[string]string{chip: remaps, type1: "N"}, ""},
		"interrupts are not remapped":     {function, group, map[string]string{chip: plain, type1: "N"}, "allow_unsafe_interrupts of vfio_iommu_type1 is off"},
		"unsafe ones are allowed":         {function, group, map[string]string{chip: plain, type1: "Y"}, ""},
		"whether is not known":            {function, group, map[string]string{chip: plain}, ""},
		"another chip":                    {function, group, map[string]string{chip: "GICv3", type1: "N"}, ""},
		"by itself":                       {function, cdev, map[string]string{chip: plain, type1: "Y", iommufd: "N"}, "of iommufd is off"},
		"by itself, allowed":              {function, cdev, map[string]string{chip: plain, type1: "N", iommufd: "Y"}, ""},
		"by either, one is allowed":       {function, either, map[string]string{chip: plain, type1: "N", iommufd: "Y"}, ""},
		"by either, neither is":           {function, either, map[string]string{chip: plain, type1: "N", iommufd: "N"}, "of vfio_iommu_type1 is off"},
		"iommufd for the group":           {function, group, map[string]string{chip: plain, iommufd: "N"}, "of iommufd is off"},
		"without an IOMMU":                {function, noiommu, map[string]string{chip: plain, type1: "N"}, ""},
		"a mediated device sends none":    {mdev, group, map[string]string{chip: plain, type1: "N"}, ""},
		"a mediated device without nodes": {mdev, nil, nil, "has no IOMMU group"},
	} {
		t.Run(name, func(t *testing.T) {
			files := map[string]string{
				function + "/iommu_group": "-> ../../../kernel/iommu_groups/7", function + "/driver": "-> ../../../bus/pci/drivers/vfio-pci", mdev + "/driver": "-> mtty",
				"sys/kernel/iommu_groups/7/devices/0000:00:02.0": "-> ../../../../devices/pci0000:00/0000:00:02.0",
				"sys/kernel/iommu_groups/7/devices/0000:00:02.1": "-> ../../../../devices/pci0000:00/0000:00:02.1",
			}
			maps.Copy(files, test.files)
			host := fstest.MapFS{sibling: {Mode: fs.ModeDir}}
			for _, node := range either {
				host[node[1:]] = &fstest.MapFile{}
			}
			host["dev/vfio/noiommu-0"] = &fstest.MapFile{}
			for file, content := range files {
				target, link := strings.CutPrefix(content, "-> ")
				host[file] = &fstest.MapFile{Data: []byte(target)}
				if link {
					host[file].Mode = fs.ModeSymlink
				}
			}
			var nodes []*specs.DeviceNode
			for _, node := range test.nodes {
				nodes = append(nodes, &specs.DeviceNode{Path: node, HostPath: node})
			}
			got := pci.VFIOHealth(&discovery.Host{FS: host}, sysfs.At(host, test.function), nodes)
			if usable := got.Status == discovery.Healthy; usable != (test.want == "") || !strings.Contains(got.Reason, test.want) {
				t.Errorf("%+v; want %q", got, test.want)
			}
			if inUse := strings.Contains(got.Reason, "bound to"); inUse != (got.OtherFunction == "0000:00:02.1") {
				t.Errorf("other function %q, and the reason: %s", got.OtherFunction, got.Reason)
			}
		})
	}
}
