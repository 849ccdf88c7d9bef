package intelgpu

import (
	"testing"
	"testing/fstest"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// The link that a GPU behind the switch of its card reports is never published: the link of the
// upstream port is, if it is known.
func TestCardLink(t *testing.T) {
	const root = "sys/devices/pci0000:00/"
	const upstream = root + "0000:00:06.0/0000:01:00.0/"
	for function, want := range map[string]int64{
		upstream + "0000:02:01.0/0000:03:00.0": 8,
		root + "0000:03:00.0":                  0, // as in a guest
	} {
		file := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text + "\n")} }
		host := fstest.MapFS{
			upstream + "max_link_speed": file("16.0 GT/s PCIe"), upstream + "max_link_width": file("8"),
			function + "/vendor": file("0x8086"),
		}
		attributes := discovery.Attributes{}
		attributes.SetInt("linkSpeed", 2500)
		attributes.SetInt("linkWidth", 1)
		err := setCardLink(attributes, sysfs.At(host, function))
		var got int64
		if width := attributes["linkWidth"].IntValue; width != nil {
			got = *width
		}
		if _, has := attributes["linkSpeed"]; err != nil || got != want || has != (want > 0) {
			t.Errorf("%s: %d lanes, speed %v, %v; want %d", function, got, has, err, want)
		}
	}
}
