package pciids

import (
	"bytes"
	"testing"
	"testing/fstest"

	"chandler.dev/discovery"
)

const repository = `#
#	List of PCI ID's
10de  NVIDIA Corporation
	15f8  GP100GL [Tesla P100 PCIe 16GB]
		10de 118f  a subsystem
	15f9  GP100GL [Tesla P100 SXM2 16GB]
8086  Intel Corporation
	37c8  C62x Chipset QuickAssist Technology
	# a comment
	46a6  Alder Lake-P GT2 [Iris Xe Graphics]
C 03  Display controller
	00  VGA compatible controller
`

func device(vendor, id string) discovery.Device {
	d := discovery.Device{Attributes: make(discovery.Attributes)}
	d.Attributes.SetString("pciVendor", vendor)
	d.Attributes.SetString("pciDevice", id)
	return d
}

func TestRead(t *testing.T) {
	devices := []discovery.Device{device("10de", "15f8"), device("8086", "37c8"), device("8086", "ffff"), {}}
	for _, file := range files {
		names := Read(fstest.MapFS{file: {Data: []byte(repository)}}, devices)
		for i, want := range []string{"Tesla P100 PCIe 16GB", "C62x Chipset QuickAssist Technology", "", ""} {
			if got := names.Product(&devices[i]); got != want {
				t.Errorf("%s: device %d is called %q, want %q", file, i, got, want)
			}
		}
		if len(names) != 2 {
			t.Errorf("%s: names of other devices: %v", file, names)
		}
		again := Read(fstest.MapFS{File: {Data: names.Text()}}, devices)
		if !bytes.Equal(again.Text(), names.Text()) || len(again) != 2 {
			t.Errorf("%s: read again: %v, want %v", file, again, names)
		}
	}
	if names := Read(fstest.MapFS{}, devices); len(names) != 0 {
		t.Errorf("without a repository: %v", names)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(repository))
	f.Fuzz(func(t *testing.T, data []byte) {
		devices := []discovery.Device{device("10de", "15f8"), device("8086", "37c8")}
		names := Read(fstest.MapFS{File: {Data: data}}, devices)
		if len(names) > len(devices) {
			t.Errorf("names of other devices: %v", names)
		}
		names.Product(&devices[0])
	})
}
