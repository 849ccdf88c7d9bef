package topology

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"chandler.dev/discovery"
)

// gpu returns a GPU with the given NUMA node and path below the root.
func gpu(name string, node int64, path string, linked ...string) discovery.Device {
	d := device(name, node, path, linked...)
	d.Attributes.SetString("kind", "gpu")
	return *d
}

// rooted returns a GPU at a root port of its own below a root.
func rooted(name string, node int64, root int) discovery.Device {
	return gpu(name, node, fmt.Sprintf("pci0000:%02x/0000:%02x:00.0", root, root))
}

// rootOf are the roots of eight devices: b and c have a common root, and f and g.
var rootOf = []int{0, 1, 1, 2, 3, 4, 4, 5}

func (g Groups) text() string {
	var sets []string
	for _, own := range g {
		for _, group := range own {
			sets = append(sets, strings.Join(group, ""))
		}
	}
	slices.Sort(sets)
	slices.SortStableFunc(sets, func(a, b string) int { return len(a) - len(b) })
	return strings.Join(slices.Compact(sets), " ")
}

func TestAlignedGroups(t *testing.T) {
	var nodes, pairs, six, square, cube []discovery.Device
	for i := range 8 {
		name := string(rune('a' + i))
		nodes = append(nodes, rooted(name, int64(i%2), i))
		pairs = append(pairs, rooted(name, int64(i/4), rootOf[i]))
		if i < 6 {
			six = append(six, rooted(name, int64(i/3), i))
		}
		// The corners of a cube are linked along its edges.
		cube = append(cube, gpu(name, -1, "pci0000:00/0000:00:00.0", string(rune('a'+(i^1))), string(rune('a'+(i^2))), string(rune('a'+(i^4)))))
	}
	// A path of links, c-a-b-d: a pair of a and b would leave c and d alone.
	for name, linked := range map[string][]string{"a": {"c", "b"}, "b": {"a", "d"}, "c": {"a"}, "d": {"b"}} {
		square = append(square, gpu(name, 0, "pci0000:00/0000:00:00.0", linked...))
	}
	for i := range cube {
		delete(cube[i].Attributes, "resource.kubernetes.io/numaNode")
		cube[i].Attributes.SetString("resource.kubernetes.io/pcieRoot", cube[i].Name)
	}
	partition := rooted("p", 0, 0)
	partition.PartOf = &discovery.Silicon{Name: "a"}
	another := rooted("z", 0, 0)
	another.Attributes.SetString("model", "another")
	for name, test := range map[string]struct {
		devices []discovery.Device
		want    string
	}{
		"no device":            {nil, ""},
		"nodes":                {nodes, "ac bd eg fh aceg bdfh"},
		"roots within a node":  {pairs, "ad bc eh fg bcad fgeh"},
		"three on each node":   {six, "ab de"},
		"links":                {square, "ac bd acbd"},
		"a cube":               {cube, "ab cd ef gh abcd efgh abcdefgh"},
		"partitions":           {[]discovery.Device{rooted("a", 0, 0), partition}, ""},
		"different products":   {[]discovery.Device{rooted("a", 0, 0), another}, ""},
		"nothing in common":    {[]discovery.Device{rooted("a", 0, 0), rooted("b", 1, 1)}, ""},
		"with unlimited users": {[]discovery.Device{rooted("a", 0, 0), {Name: "kvm", Shareable: true}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 {
				if got := AlignedGroups(test.devices).text(); got != test.want {
					t.Errorf("got %q, want %q", got, test.want)
				}
				slices.Reverse(test.devices)
			}
		})
	}
}

// The members of a group follow each other, and groups of two follow each other in a group of four.
func TestOrderOfGroups(t *testing.T) {
	var devices []discovery.Device
	for i := range 8 {
		devices = append(devices, rooted(string(rune('a'+i)), int64(i/4), rootOf[i]))
	}
	if got := strings.Join(OrderSilicon(devices, AlignedGroups(devices)), ""); got != "adbcehfg" {
		t.Errorf("got %s", got)
	}
}

func TestNearestAdapters(t *testing.T) {
	adapter := func(name string, node int64, path string) discovery.Device {
		d := device(name, node, path)
		d.Attributes.SetString("kind", "nic")
		return *d
	}
	function := adapter("vf", 0, "pci0000:00/0000:00:01.0/0000:01:00.0/0000:03:00.1")
	function.Attributes.SetString("parent", "switch")
	devices := []discovery.Device{
		gpu("a", 0, "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0"),
		gpu("b", 0, "pci0000:10/0000:10:00.0"),
		gpu("c", 0, "pci0000:11/0000:11:00.0"),
		gpu("d", 1, "pci0000:80/0000:80:00.0"),
		function,
		adapter("node-1", 0, "pci0000:20/0000:20:00.0"),
		adapter("node-2", 0, "pci0000:21/0000:21:00.0"),
		adapter("switch", 0, "pci0000:00/0000:00:01.0/0000:01:00.0/0000:03:00.0"),
		adapter("unused", 2, "pci0000:90/0000:90:00.0"),
	}
	want := "map[a:switch b:node-1 c:node-2 node-1:node-1 node-2:node-2 switch:switch vf:switch]"
	for range 2 {
		if got := fmt.Sprint(NearestAdapters(devices)); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		slices.Reverse(devices)
	}
	for i := range devices {
		if devices[i].Name == "node-2" {
			devices[i].SetNames("rdmaDevice", []string{"mlx5_0"})
		}
	}
	if got, want := fmt.Sprint(NearestAdapters(devices)), "map[a:node-2 b:node-2 c:node-2 node-2:node-2]"; got != want {
		t.Errorf("with RDMA: got %s, want %s", got, want)
	}
}

func BenchmarkAlignedGroups(b *testing.B) {
	var devices []discovery.Device
	for i := range 128 {
		devices = append(devices, rooted(fmt.Sprintf("%03d", i), 0, i)) // all are equally close
	}
	for b.Loop() {
		AlignedGroups(devices)
	}
}
