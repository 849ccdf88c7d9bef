package rules

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/api/resource"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/discovery"
)

// mebibytes returns a share in units of n MiB of memory.
func mebibytes(n int) Share {
	return Share{Unit: resource.MustParse(fmt.Sprintf("%dMi", n)), Capacity: "memory", Resource: "aliyun.com/gpu-mem"}
}

// gpus returns GPUs with the given sizes in GiB and IDs of the length of a UUID.
func gpus(sizes ...int64) (devices []discovery.Device) {
	for i, size := range sizes {
		devices = append(devices, gpu(fmt.Sprintf("GPU-8d9b9e1b-0000-0000-0000-%012d", i), "acme", size*gib))
	}
	return devices
}

// idsOf counts the IDs of each device, and the bytes of their list.
func idsOf(s *Snapshot) (ids []int, bytes int) {
	list := &pluginapi.ListAndWatchResponse{}
	for _, d := range s.Devices {
		n := 0
		for _, offer := range d.Offers {
			n += len(offer.IDs)
			for _, id := range offer.IDs {
				list.Devices = append(list.Devices, &pluginapi.Device{ID: id, Health: pluginapi.Unhealthy, Topology: &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: 1}}}})
			}
		}
		ids = append(ids, n)
	}
	return ids, proto.Size(list)
}

// The list limits how small units may be. A device with smaller units is shared only in DRA, and
// the problem contains the smallest unit for which all devices fit.
func TestSmallUnits(t *testing.T) {
	for name, test := range map[string]struct {
		devices  []discovery.Device
		unit     Share
		mode     discovery.Mode
		ids      []int
		smallest string // "" if all fit
	}{
		"one of 48 GiB":         {gpus(48), mebibytes(1), discovery.ModeAuto, []int{49152}, ""},
		"one of 80 GiB":         {gpus(80), mebibytes(1), discovery.ModeAuto, []int{0}, "2Mi"},
		"one of 80 GiB, larger": {gpus(80), mebibytes(2), discovery.ModeAuto, []int{40960}, ""},
		"eight of 24 GiB":       {gpus(24, 24, 24, 24, 24, 24, 24, 24), mebibytes(1), discovery.ModeAuto, []int{24576, 24576, 0, 0, 0, 0, 0, 0}, "4Mi"},
		"of two sizes":          {gpus(80, 16), mebibytes(1), discovery.ModeAuto, []int{0, 16384}, "2Mi"},
		"in DRA":                {gpus(80), mebibytes(1), discovery.ModeDRA, []int{0}, ""},
		"of bytes": {gpus(80), Share{Unit: resource.MustParse("1"), Capacity: "memory", Resource: "aliyun.com/gpu-mem"}, discovery.ModeAuto, []int{0},
			"1551006"},
	} {
		r := &Rules{Mode: test.mode}
		test.unit.Selector = selector(t, everyGPU)
		r.Sharing = []Share{test.unit}
		s := r.ApplyTo(&discovery.Snapshot{Devices: test.devices})
		ids, bytes := idsOf(s)
		if fmt.Sprint(ids) != fmt.Sprint(test.ids) || bytes > MaxList {
			t.Errorf("%s: %d IDs in a list of %d bytes; want %d", name, ids, bytes, test.ids)
		}
		for _, d := range s.Devices {
			if d.Sharing == nil || d.Resource() != "aliyun.com/gpu-mem" {
				t.Errorf("%s: %s is shared by %v as %q", name, d.Name, d.Sharing, d.Resource())
			}
		}
		want := "the smallest unit that fits is " + test.smallest
		if told := fmt.Sprint(s.Problems); (len(s.Problems) == 0) != (test.smallest == "") || test.smallest != "" && (len(s.Problems) != 1 || !strings.HasSuffix(told, want+"]")) {
			t.Errorf("%s: problems %v; want %q", name, s.Problems, test.smallest)
		}
		if test.smallest == "" {
			continue
		}
		for times, fits := range map[int64]bool{0: true, -1: false} { // the reported unit fits, and the next smaller unit does not
			unit := resource.MustParse(test.smallest)
			below := test.unit.Unit.Value() * times
			unit.Add(*resource.NewQuantity(below, resource.BinarySI))
			r.Sharing[0].Unit = unit
			if s := r.ApplyTo(&discovery.Snapshot{Devices: test.devices}); (len(s.Problems) == 0) != fits {
				t.Errorf("%s, in units of %s: problems %v; want any: %v", name, unit.String(), s.Problems, !fits)
			}
		}
	}
}

// BenchmarkUnits applies the rules to a GPU with as many units as fit into a list, and compares two
// of its snapshots.
func BenchmarkUnits(b *testing.B) {
	share := mebibytes(1)
	share.Selector, _ = Compile(everyGPU)
	r := &Rules{Sharing: []Share{share}}
	devices := gpus(48)
	for b.Loop() {
		if !SameSnapshots(r.ApplyTo(&discovery.Snapshot{Devices: devices}), r.ApplyTo(&discovery.Snapshot{Devices: devices})) {
			b.Fatal("two snapshots differ")
		}
	}
}
