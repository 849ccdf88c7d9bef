package guest_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"chandler.dev/e2e/guest"
)

// seenOn are the kernels and the QEMU with which TestFinding last found the devices of seen. The
// pages of families name them.
const seenOn = "Linux 6.1 and 6.12 in QEMU 10.0"

// noDriver describes hardware that QEMU does not have.
const noDriver = "a function without a driver"

// seen maps the families with devices in TestFinding to these devices, as described in the page of
// the family.
var seen = map[string]string{
	"amdgpu":      noDriver,
	"apex":        noDriver,
	"ascend":      noDriver,
	"fpga-aws":    noDriver,
	"fpga-xilinx": noDriver,
	"gaudi":       noDriver,
	"generic":     "virtio-gpu",
	"hailo":       noDriver,
	"hypervisor":  "`/dev/kvm`, `/dev/net/tun`, `/dev/vhost-net` and `/dev/vhost-vsock`",
	"intelgpu":    noDriver,
	"nvidia":      noDriver,
	"qat":         noDriver,
	"rdma":        noDriver,
	"slingshot":   noDriver,
	"sriovnet":    "virtual functions of igb under igbvf",
	"vfio":        "functions alone in their IOMMU group, two behind one bridge, and virtual functions of an igb and of an NVMe controller",
}

// TestPages compares the pages of families, and the table of all families, with seen.
func TestPages(t *testing.T) {
	const begin = "It is also tested on real kernels, "
	pages, err := filepath.Glob("../../docs/families/*.md")
	if err != nil || len(pages) == 0 {
		t.Fatalf("no pages of families: %v", err)
	}
	for _, page := range pages {
		family := strings.TrimSuffix(filepath.Base(page), ".md")
		text := strings.Join(strings.Fields(readPage(t, page)), " ")
		devices, listed := seen[family]
		if sentence := begin + seenOn + ": " + devices + "."; listed && !strings.Contains(text, sentence) {
			t.Errorf("docs/families/%s.md does not say: %s", family, sentence)
		}
		if !listed && strings.Contains(text, begin) {
			t.Errorf("docs/families/%s.md says that it was tested on real kernels, and no test says so", family)
		}
	}
	table := "| family | tested on " + seenOn + " |\n|---|---|\n"
	for _, family := range slices.Sorted(maps.Keys(seen)) {
		table += fmt.Sprintf("| [%s](families/%s.md#tested-on) | %s |\n", family, family, seen[family])
	}
	if !strings.Contains(readPage(t, "../../docs/testing.md"), table) {
		t.Errorf("docs/testing.md does not contain the table\n%s", table)
	}
}

// seesFamilies checks that the families of seen have devices.
func seesFamilies(t *testing.T, g *guest.Guest, devices []device, fake bool) {
	t.Helper()
	for family, what := range seen {
		if what == noDriver && !fake {
			continue
		}
		if !slices.ContainsFunc(devices, func(d device) bool { return d.Family == family }) {
			t.Errorf("no device of family %s is found, and its page says that there is: %s", family, what)
		}
	}
	version := strings.Join(strings.SplitN(g.Kernel, ".", 3)[:2], ".")
	if !slices.Contains(strings.Fields(seenOn), version) {
		t.Logf("the pages say %s, and this is Linux %s: mend seenOn, and the pages", seenOn, g.Kernel)
	}
}

func readPage(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
