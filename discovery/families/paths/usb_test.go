package paths_test

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"chandler.dev/discovery"
)

// A set has one USB device for each entry, and two devices for two equal entries. There are as many
// sets as the found devices can fill completely.
func TestUSBSets(t *testing.T) {
	for name, test := range map[string]struct {
		entries, found string // product:serial
		want           []string
	}{
		"one entry":         {"0001:", "0001: 0001: 0001:", []string{"1", "2", "3"}},
		"two entries":       {"0001: 0002:", "0002: 0001: 0001: 0002: 0002:", []string{"2 1", "3 4"}},
		"two equal ones":    {"0001: 0001:", "0001: 0001: 0001: 0001: 0001:", []string{"1 2", "3 4"}},
		"one is missing":    {"0001: 0002:", "0001: 0001:", nil},
		"one with a number": {"0001: 0001:a", "0001:a 0001:", []string{"2 1"}},
	} {
		group := discovery.PathGroup{Each: true}
		for entry := range strings.FieldsSeq(test.entries) {
			product, serial, _ := strings.Cut(entry, ":")
			group.USB = append(group.USB, discovery.USBID{Vendor: "46f4", Product: product, Serial: serial})
		}
		fsys := fstest.MapFS{}
		for i, found := range strings.Fields(test.found) {
			product, serial, _ := strings.Cut(found, ":")
			dir, number := fmt.Sprintf("sys/devices/usb1/1-%d", i+1), fmt.Sprint(i+1)
			fsys[fmt.Sprintf("sys/bus/usb/devices/1-%d", i+1)] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("../../../devices/usb1/1-" + number)}
			for file, text := range map[string]string{"idVendor": "46f4", "idProduct": product, "serial": serial, "busnum": "1", "devnum": number} {
				fsys[dir+"/"+file] = &fstest.MapFile{Data: []byte(text + "\n")}
			}
			fsys["dev/bus/usb/001/00"+number] = &fstest.MapFile{Mode: fs.ModeDevice | fs.ModeCharDevice}
		}
		var got []string
		for _, d := range scanPaths(fsys, group).Devices {
			var nodes []string
			for _, node := range d.Edits.DeviceNodes {
				nodes = append(nodes, strings.TrimPrefix(node.HostPath, "/dev/bus/usb/001/00"))
			}
			got = append(got, strings.Join(nodes, " "))
		}
		if slices.Sort(got); !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}
