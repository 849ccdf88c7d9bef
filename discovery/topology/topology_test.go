package topology

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"chandler.dev/discovery"
)

// device returns a device with the given NUMA node and path below the root.
func device(name string, node int64, path string, linked ...string) *discovery.Device {
	d := &discovery.Device{Name: name, Source: "sys/devices/" + path, Attributes: discovery.Attributes{}}
	root, _, _ := strings.Cut(path, "/")
	d.Attributes.SetString("resource.kubernetes.io/pcieRoot", root)
	d.Attributes.SetInt("resource.kubernetes.io/numaNode", node)
	d.SetNames("linkedTo", linked)
	return d
}

// Each pair of devices is closer than the previous pair.
func TestNearness(t *testing.T) {
	const top, below = "pci0000:00/0000:00:01.0/0000:01:00.0/", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/"
	own := device("own", 0, below+"0000:03:00.0")
	linked := device("linked", 1, "pci0000:80/0000:81:00.0", "own")
	fabric := device("fabric", 1, "pci0000:80/0000:82:00.0")
	part := device("own-part", 1, "pci0000:80/0000:83:00.0")
	part.PartOf = &discovery.Silicon{Name: "own"}
	own.Attributes.SetString("fabric", "hive")
	fabric.Attributes.SetString("fabric", "hive")
	steps := []*discovery.Device{
		device("far", 1, "pci0000:80/0000:84:00.0"),
		device("node", 0, "pci0000:80/0000:85:00.0"),
		device("root", 0, "pci0000:00/0000:05:00.0"),
		device("port", 0, "pci0000:00/0000:00:01.0/0000:05:00.0"),
		device("switch", 0, top+"0000:05:00.0"),
		device("nearest switch", 0, below+"0000:04:00.0"),
		fabric, linked, part,
	}
	near := -1
	for _, d := range steps {
		now := Nearness(PlaceOf(own), PlaceOf(d))
		if now != Nearness(PlaceOf(d), PlaceOf(own)) {
			t.Errorf("%s is nearer from one side than from the other", d.Name)
		}
		if now <= near {
			t.Errorf("%s is as near as %d, what comes before it %d", d.Name, now, near)
		}
		near = now
	}
}

// A device below a PCI function is below the bridges of the function. Several devices that are
// allocated together are located at the first device.
func TestPlaceOf(t *testing.T) {
	p := PlaceOf(device("a", 1, "pci0000:00/0000:00:01.0/0000:01:00.0/drm/card0"), device("b", 0, "pci0000:40/0000:41:00.0"))
	if !slices.Equal(p.bridges, []string{"0000:00:01.0"}) || p.root != "pci0000:00" || !slices.Equal(p.numa, []int64{0, 1}) || !slices.Equal(p.Silicon(), []string{"a", "b"}) {
		t.Errorf("got %+v", p)
	}
	if p := PlaceOf(&discovery.Device{Name: "kvm", Source: "sys/devices/virtual/misc/kvm", Shareable: true}); len(p.bridges)+len(p.silicon)+len(p.numa) > 0 {
		t.Errorf("a device that is nowhere is at %+v", p)
	}
}

func TestOrder(t *testing.T) {
	var wires, islands, roots []discovery.Device
	for i := range 4 {
		// 0 is linked to 2 and 1 to 3, like cards with bridges between every second slot.
		wires = append(wires, *device(fmt.Sprint(i), int64(i/2), "pci0000:00/0000:0"+fmt.Sprint(i)+":00.0", fmt.Sprint((i+2)%4)))
		// Addresses that alternate between NUMA nodes.
		islands = append(islands, *device(fmt.Sprint(i), int64(i%2), "pci0000:0"+fmt.Sprint(i)+"/0000:0"+fmt.Sprint(i)+":00.0"))
		// The middle two have a common root; all have a common node.
		roots = append(roots, *device(fmt.Sprint(i), 0, "pci0000:0"+fmt.Sprint((i+1)/2)+"/0000:0"+fmt.Sprint(i)+":00.0"))
	}
	part := *device("0-part", 0, "pci0000:00/0000:00:00.0")
	part.PartOf = &discovery.Silicon{Name: "0"}
	for name, test := range map[string]struct {
		devices []discovery.Device
		want    string
	}{
		"nothing":             {nil, ""},
		"links":               {wires, "0 2 3 1"},
		"nodes":               {islands, "0 2 1 3"},
		"roots":               {roots, "0 1 2 3"},
		"a part is its whole": {append(slices.Clone(wires), part), "0 2 3 1"},
	} {
		t.Run(name, func(t *testing.T) {
			slices.Reverse(test.devices)
			if got := strings.Join(OrderSilicon(test.devices, AlignedGroups(test.devices)), " "); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

func BenchmarkOrder(b *testing.B) {
	var devices []discovery.Device
	for i := range 512 {
		devices = append(devices, *device(fmt.Sprintf("%03d", i), int64(i%2), fmt.Sprintf("pci%04x:00/%04x:00:01.0/%04x:01:%02x.0", i/32, i/32, i/32, i%32)))
	}
	for b.Loop() {
		OrderSilicon(devices, AlignedGroups(devices))
	}
}
