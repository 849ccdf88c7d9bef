package pci_test

import (
	"errors"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

func TestVFIO(t *testing.T) {
	const function = "sys/devices/pci0000:00/0000:00:02.0"
	node := func(path string, major, minor int64) *specs.DeviceNode {
		n := &specs.DeviceNode{Path: path, HostPath: path, Major: major, Minor: minor, Permissions: "rw"}
		if major > 0 {
			n.Type = "c"
		}
		return n
	}
	for name, test := range map[string]struct {
		group string // target of the link, "" for none
		files map[string]string
		want  []*specs.DeviceNode
		err   string
	}{
		"by the group": { // kernels of Debian
			"../../../kernel/iommu_groups/42",
			map[string]string{
				"sys/class/vfio/42/dev":                    "243:3",
				"sys/class/vfio/42/uevent":                 "DEVNAME=vfio/42",
				"sys/class/misc/vfio/dev":                  "10:196",
				"sys/class/misc/vfio/uevent":               "DEVNAME=vfio/vfio",
				"sys/class/misc/iommu/dev":                 "10:125",
				"sys/kernel/iommu_groups/142":              "not ours",
				function + "/vfio-dev/vfio0/uevent":        "",
				function + "/vfio-dev/vfio0/power/control": "auto",
			},
			[]*specs.DeviceNode{node("/dev/vfio/42", 243, 3), node("/dev/vfio/vfio", 10, 196)}, "",
		},
		"by itself": {
			"../../../kernel/iommu_groups/42",
			map[string]string{
				"sys/class/misc/vfio/dev":         "10:196", // for groups; the host has none
				"sys/class/misc/iommu/dev":        "10:125",
				function + "/vfio-dev/vfio0/dev":  "510:0",
				function + "/vfio-dev/nodev/size": "1",
			},
			[]*specs.DeviceNode{node("/dev/vfio/devices/vfio0", 510, 0), node("/dev/iommu", 10, 125)}, "",
		},
		"by either": {
			"../../../kernel/iommu_groups/42",
			map[string]string{
				"sys/class/vfio/42/dev":          "243:3",
				"sys/class/misc/vfio/dev":        "10:196",
				"sys/class/misc/iommu/dev":       "10:125",
				function + "/vfio-dev/vfio0/dev": "510:0",
			},
			[]*specs.DeviceNode{
				node("/dev/vfio/42", 243, 3), node("/dev/vfio/vfio", 10, 196), node("/dev/vfio/devices/vfio0", 510, 0), node("/dev/iommu", 10, 125),
			}, "",
		},
		"by the group, through iommufd": {
			"../../../kernel/iommu_groups/42",
			map[string]string{"sys/class/vfio/42/dev": "243:3", "sys/class/misc/iommu/dev": "10:125"},
			[]*specs.DeviceNode{node("/dev/vfio/42", 243, 3), node("/dev/iommu", 10, 125)}, "",
		},
		"a mediated device": {
			"../../../kernel/iommu_groups/7",
			map[string]string{
				"sys/kernel/iommu_groups/7/name": "vfio-noiommu\n",
				"sys/class/vfio/7/dev":           "243:7",
				"sys/class/misc/vfio/dev":        "10:196",
			},
			[]*specs.DeviceNode{node("/dev/vfio/7", 243, 7), node("/dev/vfio/vfio", 10, 196)}, "",
		},
		"a mediated device without a group": {
			"",
			map[string]string{"sys/class/misc/iommu/dev": "10:125", function + "/vfio-dev/vfio0/dev": "510:0"},
			[]*specs.DeviceNode{node("/dev/vfio/devices/vfio0", 510, 0), node("/dev/iommu", 10, 125)}, "",
		},
		"no IOMMU": {
			"../../../kernel/iommu_groups/0",
			map[string]string{
				"sys/kernel/iommu_groups/0/name": "vfio-noiommu\n",
				"sys/class/vfio/noiommu-0/dev":   "243:0",
				"sys/class/misc/vfio/dev":        "10:196",
			},
			[]*specs.DeviceNode{node("/dev/vfio/noiommu-0", 243, 0), node("/dev/vfio/vfio", 10, 196)}, "",
		},
		"numbers that are none": {
			"../../../kernel/iommu_groups/7",
			map[string]string{"sys/class/vfio/7/dev": "7", "sys/class/misc/vfio/dev": "10:196"},
			[]*specs.DeviceNode{node("/dev/vfio/7", 0, 0), node("/dev/vfio/vfio", 10, 196)}, "device node /dev/vfio/7",
		},
		"a node without its number": {
			"../../../kernel/iommu_groups/7",
			map[string]string{function + "/vfio-dev/vfio0/uevent": "DEVNAME=vfio/devices/vfio0", "sys/class/misc/iommu/dev": "10:125"},
			[]*specs.DeviceNode{node("/dev/vfio/devices/vfio0", 0, 0), node("/dev/iommu", 10, 125)}, "device node /dev/vfio/devices/vfio0",
		},
		"nothing to use a group through": {
			"../../../kernel/iommu_groups/7", map[string]string{"sys/class/vfio/7/dev": "243:7"},
			[]*specs.DeviceNode{node("/dev/vfio/7", 243, 7)}, "neither /dev/vfio/vfio nor /dev/iommu",
		},
		"neither": {
			"../../../kernel/iommu_groups/7",
			map[string]string{"sys/class/misc/vfio/dev": "10:196", function + "/vfio-dev/vfio0/uevent": ""},
			nil, "no node for the device or for its IOMMU group",
		},
		"no group":             {"", nil, nil, "has no IOMMU group"},
		"a group of no number": {"../..", nil, nil, `IOMMU group ".."`},
	} {
		t.Run(name, func(t *testing.T) {
			fsys := fstest.MapFS{function: &fstest.MapFile{Mode: fs.ModeDir}}
			for file, content := range test.files {
				fsys[file] = &fstest.MapFile{Data: []byte(content)}
			}
			if test.group != "" {
				fsys[function+"/iommu_group"] = &fstest.MapFile{Data: []byte(test.group), Mode: fs.ModeSymlink}
			}
			got, err := pci.VFIONodes(&discovery.Host{FS: fsys}, sysfs.At(fsys, function))
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("nodes (-want +got):\n%s", diff)
			}
			if (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("error %v, want %q", err, test.err)
			}
			if errors.Is(err, pci.ErrNoIOMMUGroup) != (name == "no group") {
				t.Errorf("error %v", err)
			}
		})
	}
}
