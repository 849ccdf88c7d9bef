package discovery_test

import (
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
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
		group string // the target of the link, "" for none
		files map[string]string
		want  []*specs.DeviceNode
		err   string
	}{
		"a group": {
			"../../../kernel/iommu_groups/42",
			map[string]string{
				"sys/class/vfio/42/dev":       "243:3",
				"sys/class/vfio/42/uevent":    "DEVNAME=vfio/42",
				"sys/class/misc/vfio/dev":     "10:196",
				"sys/class/misc/vfio/uevent":  "DEVNAME=vfio/vfio",
				"sys/kernel/iommu_groups/142": "not ours",
			},
			[]*specs.DeviceNode{node("/dev/vfio/42", 243, 3), node("/dev/vfio/vfio", 10, 196)}, "",
		},
		"no IOMMU": {
			"../../../kernel/iommu_groups/0",
			map[string]string{
				"sys/kernel/iommu_groups/0/name": "vfio-noiommu\n",
				"sys/class/vfio/noiommu-0/dev":   "243:0",
			},
			[]*specs.DeviceNode{node("/dev/vfio/noiommu-0", 243, 0), node("/dev/vfio/vfio", 0, 0)}, "",
		},
		"numbers that are none": {
			"../../../kernel/iommu_groups/7",
			map[string]string{"sys/class/vfio/7/dev": "7"},
			[]*specs.DeviceNode{node("/dev/vfio/7", 0, 0), node("/dev/vfio/vfio", 0, 0)}, "device node /dev/vfio/7",
		},
		"a name that cannot be read": {
			"../../../kernel/iommu_groups/7",
			map[string]string{"sys/kernel/iommu_groups/7/name/x": ""},
			nil, "IOMMU group 7",
		},
		"no group":             {"", nil, nil, "in no IOMMU group"},
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
			got, err := discovery.VFIO(&discovery.Host{FS: fsys}, sysfs.At(fsys, function))
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("nodes (-want +got):\n%s", diff)
			}
			if (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("error %v, want %q", err, test.err)
			}
		})
	}
}
