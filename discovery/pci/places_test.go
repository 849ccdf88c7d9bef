package pci_test

import (
	"fmt"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
)

// machineWithNodes has two sockets with two NUMA nodes each, and a fifth node without firmware
// information.
func machineWithNodes() fstest.MapFS {
	fsys := fstest.MapFS{}
	for node, distances := range []string{"10 12 21 21", "12 10 21 21", "21 21 10 12", "21 21 12 10"} {
		dir := fmt.Sprintf("sys/devices/system/node/node%d/", node)
		fsys[dir+"distance"] = &fstest.MapFile{Data: []byte(distances + "\n")}
		fsys[dir+"cpulist"] = &fstest.MapFile{Data: fmt.Appendf(nil, "%d\n", node)}
		fsys[fmt.Sprintf("sys/devices/system/cpu/cpu%d/topology/physical_package_id", node)] = &fstest.MapFile{Data: fmt.Appendf(nil, "%d\n", node/2)}
	}
	return fsys
}

func TestListsOfPlaces(t *testing.T) {
	const first, second, third = "sys/devices/pci0000:00/0000:01:00.0", "sys/devices/pci0000:00/0000:02:00.0", "sys/devices/pci0000:80/0000:81:00.0"
	at := func(name string, node int64, dirs ...string) discovery.Device {
		d := discovery.Device{Name: name, Source: dirs[0], Includes: dirs[1:], Attributes: discovery.Attributes{}}
		if node >= 0 {
			d.Attributes.SetInt("resource.kubernetes.io/numaNode", node)
		}
		return d
	}
	const numa, root resourceapi.QualifiedName = "resource.kubernetes.io/numaNode", "resource.kubernetes.io/pcieRoot"
	tests := map[string]struct {
		device discovery.Device
		fsys   fstest.MapFS
		want   discovery.Lists
	}{
		"a neighbour on its socket":    {device: at("a", 1, first), want: discovery.Lists{numa: {IntValues: []int64{1, 0}}}},
		"of the other socket":          {device: at("a", 2, first), want: discovery.Lists{numa: {IntValues: []int64{2, 3}}}},
		"no distances":                 {device: at("a", 4, first)},
		"a machine without NUMA nodes": {device: at("a", 0, first), fsys: fstest.MapFS{}},
		"a node that there is not":     {device: at("a", 5000, first)},
		"no node":                      {device: at("a", -1, first)},
		"functions on one root":        {device: at("a", -1, first, second)},
		"functions on two roots":       {device: at("a", -1, third, second, first), want: discovery.Lists{root: {StringValues: []string{"pci0000:80", "pci0000:00"}}}},
		"both": {
			device: at("a", 0, first, third, "sys/devices/virtual/misc/x"),
			want:   discovery.Lists{numa: {IntValues: []int64{0, 1}}, root: {StringValues: []string{"pci0000:00", "pci0000:80"}}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if test.fsys == nil {
				test.fsys = machineWithNodes()
			}
			test.fsys["sys/bus/pci/devices/0000:01:00.0/vendor"] = &fstest.MapFile{Data: []byte("0x1002\n")}
			devices := []discovery.Device{test.device}
			pci.SetPlaceLists(&discovery.Host{FS: test.fsys}, devices)
			if diff := cmp.Diff(test.want, devices[0].Lists); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
