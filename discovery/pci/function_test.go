package pci_test

import (
	"io/fs"
	"maps"
	"path"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// TestPCIValues checks that values which the kernel reports as absent are left out, and that
// impossible values are an error.
func TestPCIValues(t *testing.T) {
	const dir = "sys/devices/pci0000:00/0000:00:01.0"
	node := resourceapi.QualifiedName("resource.kubernetes.io/numaNode")
	for _, test := range []struct {
		file, content string
		attribute     resourceapi.QualifiedName
		want          int64 // -1 if left out
		fail          bool
	}{
		{"numa_node", "1\n", node, 1, false},
		{"numa_node", "-1\n", node, -1, false},
		{"numa_node", "-2\n", node, -1, true},
		{"numa_node", "", node, -1, true},
		{"numa_node", "0x1\n", node, -1, true},
		{"numa_node", "01\n", node, -1, true},
		{"numa_node", "7\n", node, -1, true}, // the host has no such node
		{"max_link_speed", "16.0 GT/s PCIe\n", "linkSpeed", 16000, false},
		{"max_link_speed", "2.5 GT/s\n", "linkSpeed", 2500, false},
		{"max_link_speed", "Unknown\n", "linkSpeed", -1, false},
		{"max_link_speed", "Unknown speed\n", "linkSpeed", -1, false},
		{"max_link_speed", "16.0 GT/", "linkSpeed", -1, true},
		{"max_link_speed", "16.0 GT/s P", "linkSpeed", -1, true},
		{"max_link_speed", "", "linkSpeed", -1, true},
		{"max_link_width", "16\n", "linkWidth", 16, false},
		{"max_link_width", "0\n", "linkWidth", -1, false},
		{"max_link_width", "63\n", "linkWidth", -1, false},
		{"max_link_width", "255\n", "linkWidth", -1, false},
		{"max_link_width", "17\n", "linkWidth", -1, true},
		{"max_link_width", "many\n", "linkWidth", -1, true},
		{"iommu_group", "../../../kernel/iommu_groups/42", "iommuGroup", 42, false},
		{"iommu_group", "../../../kernel/iommu_gr", "iommuGroup", -1, true},
	} {
		t.Run(test.file+" "+test.content, func(t *testing.T) {
			host := fstest.MapFS{"sys/devices/system/node/node1": {Mode: fs.ModeDir}, dir + "/max_link_width": {Data: []byte("1\n")}}
			host[dir+"/"+test.file] = &fstest.MapFile{Data: []byte(test.content)}
			if test.file == "iommu_group" {
				host[dir+"/"+test.file].Mode = fs.ModeSymlink
			}
			d, err := pci.DescribeFunction(&discovery.Host{FS: host}, sysfs.At(host, dir))
			got := int64(-1)
			if value := d.Attributes[test.attribute].IntValue; value != nil {
				got = *value
			}
			if got != test.want || (err != nil) != test.fail {
				t.Errorf("%d, %v", got, err)
			}
		})
	}
	t.Run("iommu_group is a directory", func(t *testing.T) {
		host := fstest.MapFS{dir + "/iommu_group": {Mode: fs.ModeDir}}
		if _, err := pci.DescribeFunction(&discovery.Host{FS: host}, sysfs.At(host, dir)); err == nil {
			t.Error("no error")
		}
	})
	t.Run("nodes not listed", func(t *testing.T) {
		host := fstest.MapFS{dir + "/numa_node": {Data: []byte("999\n")}}
		d, err := pci.DescribeFunction(&discovery.Host{FS: host}, sysfs.At(host, dir))
		if value := d.Attributes[node].IntValue; err != nil || value == nil || *value != 999 {
			t.Error(value, err)
		}
	})
}

// TestLinkMaximum checks that the attributes of a function's link are the maximum of both ends,
// whatever the link's current speed and width are.
func TestLinkMaximum(t *testing.T) {
	const port = "sys/devices/pci0000:00/0000:00:01.0/"
	const function = port + "0000:03:00.0/"
	base := map[string]string{
		function + "max_link_speed": "32.0 GT/s PCIe", function + "max_link_width": "16",
		port + "max_link_speed": "32.0 GT/s PCIe", port + "max_link_width": "16",
		function + "current_link_speed": "32.0 GT/s PCIe", function + "current_link_width": "16",
	}
	for name, test := range map[string]struct {
		files        map[string]string
		speed, width int64 // 0 if left out
	}{
		"both ends alike":          {nil, 32000, 16},
		"idle":                     {map[string]string{function + "current_link_speed": "2.5 GT/s PCIe", function + "current_link_width": "8"}, 32000, 16},
		"slow port":                {map[string]string{port + "max_link_speed": "16.0 GT/s PCIe"}, 16000, 16},
		"narrow port":              {map[string]string{port + "max_link_width": "8"}, 32000, 8},
		"slow and narrow card":     {map[string]string{function + "max_link_speed": "8.0 GT/s PCIe", function + "max_link_width": "4"}, 8000, 4},
		"port not known":           {map[string]string{port + "max_link_speed": "Unknown", port + "max_link_width": "255"}, 32000, 16},
		"port unreadable":          {map[string]string{port + "max_link_speed": "x", port + "max_link_width": "x"}, 32000, 16},
		"card not known":           {map[string]string{function + "max_link_speed": "Unknown", function + "max_link_width": "255"}, 0, 0},
		"registers read as ones":   {map[string]string{function + "max_link_speed": "64.0 GT/s PCIe", function + "max_link_width": "63"}, 0, 0},
		"virtual function":         {map[string]string{function + "physfn": "../0000:03:01.0"}, 0, 0},
		"suspended":                {map[string]string{function + "power/runtime_status": "suspended", function + "power_state": "D3hot"}, 32000, 16},
		"suspended, without power": {map[string]string{function + "power/runtime_status": "suspended", function + "power_state": "D3cold"}, 0, 0},
		"suspended, old kernel":    {map[string]string{function + "power/runtime_status": "suspended"}, 0, 0},
		"being suspended":          {map[string]string{function + "power/runtime_status": "suspending", function + "power_state": "D0"}, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			files := maps.Clone(base)
			maps.Copy(files, test.files)
			host := fstest.MapFS{}
			for name, text := range files {
				host[name] = &fstest.MapFile{Data: []byte(text + "\n")}
				if path.Base(name) == "physfn" {
					host[name] = &fstest.MapFile{Data: []byte(text), Mode: fs.ModeSymlink}
				}
			}
			d, err := pci.DescribeFunction(&discovery.Host{FS: host}, sysfs.At(host, path.Clean(function)))
			if err != nil {
				t.Error(err)
			}
			for name, want := range map[resourceapi.QualifiedName]int64{"linkSpeed": test.speed, "linkWidth": test.width} {
				if got := ptr.Deref(d.Attributes[name].IntValue, 0); got != want {
					t.Errorf("%s is %d, want %d", name, got, want)
				}
			}
		})
	}
}

// FuzzPCI gives the same content to every file of a PCI function, and uses it as the target of a
// link. The resulting attributes must be plausible.
func FuzzPCI(f *testing.F) {
	for _, seed := range []string{
		"", "0x10de\n", "-1\n", "1024\n", "16.0 GT/s PCIe\n", "8 GT/s", "Inf GT/s", "1e300 GT/s", "Unknown", "255", "0x7fffffffffffffff",
		"../../kernel/iommu_groups/42", "../0000:00:00.0", "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		const dir = "sys/devices/pci0000:00/0000:00:01.0"
		host := fstest.MapFS{}
		for _, name := range []string{"vendor", "device", "class", "modalias", "numa_node", "max_link_speed", "max_link_width", "uevent"} {
			host[dir+"/"+name] = &fstest.MapFile{Data: content}
		}
		for _, name := range []string{"driver", "iommu_group", "physfn"} {
			host[dir+"/"+name] = &fstest.MapFile{Data: content, Mode: fs.ModeSymlink}
		}
		d, _ := pci.DescribeFunction(&discovery.Host{FS: host}, sysfs.At(host, dir))
		if err := d.Validate(); err != nil {
			t.Error(err)
		}
		for name, most := range map[string]int64{"linkSpeed": 1_000_000, "linkWidth": 32, "resource.kubernetes.io/numaNode": 1023, "iommuGroup": 1<<31 - 1} {
			if value := d.Attributes[resourceapi.QualifiedName(name)].IntValue; value != nil && (*value < 0 || *value > most) {
				t.Errorf("%s of %d", name, *value)
			}
		}
	})
}

// slowProbe is a host whose drivers never finish to probe their functions: the kernel makes readers
// of sriov_numvfs wait. Its function 0000:04:00.0 is unreadable.
type slowProbe struct {
	fstest.MapFS
	t *testing.T
}

func (f slowProbe) Open(name string) (fs.File, error) {
	if path.Base(name) == "sriov_numvfs" {
		f.t.Errorf("reads %s, which waits for the device's lock", name)
	}
	return f.MapFS.Open(name)
}

func (f slowProbe) Lstat(name string) (fs.FileInfo, error) {
	if strings.Contains(name, "0000:04:00.0") {
		return nil, &fs.PathError{Op: "lstat", Path: name, Err: syscall.EIO}
	}
	return f.MapFS.Lstat(name)
}

// A virtual function is part of its physical function, which is divided.
func TestVirtualFunctions(t *testing.T) {
	const dir = "sys/bus/pci/devices/"
	host := slowProbe{t: t, MapFS: fstest.MapFS{
		dir + "0000:01:00.0/virtfn0":      {Data: []byte("../0000:01:00.1"), Mode: fs.ModeSymlink},
		dir + "0000:01:00.1/physfn":       {Data: []byte("../0000:01:00.0"), Mode: fs.ModeSymlink},
		dir + "0000:01:00.0/sriov_numvfs": {Data: []byte("1\n")},
		dir + "0000:03:00.0/sriov_numvfs": {Data: []byte("0\n")},
		dir + "0000:04:00.0/numa_node":    {Data: []byte("0\n")},
	}}
	for address, want := range map[string]struct {
		divided, unread bool
		partOf          string
	}{
		"0000:01:00.0": {divided: true},
		"0000:01:00.1": {partOf: "pci-0000-01-00-0"},
		"0000:03:00.0": {},
		"0000:04:00.0": {unread: true},
	} {
		function := sysfs.At(host, dir+address)
		divided, err := pci.HasVirtualFunctions(function)
		if divided != want.divided || (err != nil) != want.unread {
			t.Errorf("%s: divided %t, error %v; want %+v", address, divided, err, want)
		}
		d, err := pci.DescribeFunction(&discovery.Host{FS: host}, function)
		if err != nil || (d.PartOf == nil) != (want.partOf == "") || d.PartOf != nil && d.Silicon() != want.partOf {
			t.Errorf("%s: part of %+v, error %v; want %q", address, d.PartOf, err, want.partOf)
		}
	}
}
