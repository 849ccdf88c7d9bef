package families_test

import (
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/scan"
)

// half rewrites one file of a recorded host.
func half(t *testing.T, file, name, content string) *discovery.Host {
	t.Helper()
	return rewritten(t, file, func(text string) string {
		before, rest, found := strings.Cut(text, "-- "+name+" --\n")
		_, after, _ := strings.Cut(rest, "\n-- ")
		if !found {
			t.Fatalf("%s: no %s", file, name)
		}
		return before + "-- " + name + " --\n" + content + "\n-- " + after
	})
}

// A function with truncated IDs belongs to no family. The scan reports a problem with the device's
// name, and the device keeps its last description.
func TestHalfWrittenIDs(t *testing.T) {
	for _, test := range []struct{ file, attribute, content string }{
		{"gaudi/testdata/gaudi2x8.host", "vendor", "0x1d"},
		{"intelgpu/testdata/flex170x2.host", "vendor", "0x80"},
		{"nvidia/testdata/h100x8.host", "vendor", "0x2"},
		{"nvidia/testdata/h100x8.host", "class", "0x2"},
		{"nvidia/testdata/h100x8.host", "class", "0x03020"},
		{"nvidia/testdata/h100x8.host", "device", "0x2"},
	} {
		t.Run(filepath.Base(test.file)+" "+test.attribute+" "+test.content, func(t *testing.T) {
			last := scan.RescanHost(discoverytest.ReadHost(t, test.file), families.All, nil)
			whole := last.Snapshot()
			d := firstFunction(t, whole)
			host := half(t, test.file, d.Source+"/"+test.attribute, test.content)
			now := scan.ReadHost(host, families.All)
			if got, found := now.Lookup(d.Name); found && (got.Health.Status != discovery.Unknown || got.Family != d.Family) {
				t.Errorf("is %s", format(t, got))
			}
			if len(now.Problems) != len(whole.Problems)+1 || now.Problems[0].Device != d.Name || !strings.Contains(now.Problems[0].Error(), "attribute "+test.attribute) {
				t.Errorf("problems %v", now.Problems)
			}
			kept, _ := scan.RescanHost(host, families.All, last).Snapshot().Lookup(d.Name)
			if kept.Health.Status != discovery.Unknown || kept.Attributes.String("pciDevice") != d.Attributes.String("pciDevice") {
				t.Errorf("its last description is not kept: %s", format(t, kept))
			}
		})
	}
}

// A value that the kernel and firmware never write is left out. The scan reports a problem of the
// device, and the device's health is Unknown.
func TestImpossibleValues(t *testing.T) {
	const flex = "intelgpu/testdata/flex170x2.host"
	const chips = "tenstorrent/testdata/mixed.host"
	for _, test := range []struct{ file, attribute, content string }{
		{flex, "drm/card1/lmem_total_bytes", "9223372036854775808"},
		{flex, "drm/card1/dev", ""},
		{flex, "numa_node", ""},
		{chips, "tenstorrent/*/tt_serial", "0xzzzz"},
		{chips, "tenstorrent/*/tt_serial", ""},
		{chips, "tenstorrent/*/tt_asic_id", "7C0A3188"},
		{chips, "tenstorrent/*/tt_fw_bundle_ver", ""},
		{chips, "tenstorrent/*/tt_fw_bundle_ver", "19.4"},
		{chips, "tenstorrent/*/tt_card_type", ""},
	} {
		t.Run(test.attribute+" "+test.content, func(t *testing.T) {
			whole := discoverytest.ReadHost(t, test.file)
			d := firstFunction(t, scan.ReadHost(whole, families.All))
			files, err := fs.Glob(whole.FS, d.Source+"/"+test.attribute)
			if err != nil || len(files) != 1 {
				t.Fatal(files, err)
			}
			got, found := scan.ReadHost(half(t, test.file, files[0], test.content), families.All).Lookup(d.Name)
			if !found || got.Health.Status != discovery.Unknown || !strings.Contains(got.Health.Reason, "attribute "+path.Base(files[0])) {
				t.Errorf("found %t: %s", found, format(t, got))
			}
			if strings.Contains(format(t, got.Attributes)+got.Identity, test.content) && test.content != "" {
				t.Errorf("published: %s", format(t, got))
			}
		})
	}
}

// If the partitioning of a GPU is unreadable, the GPU is not described as a whole GPU and keeps its
// last description.
func TestGarbledInformation(t *testing.T) {
	for file, address := range map[string]string{"nvidia/testdata/gke.host": "0000:00:05.0", "nvidia/testdata/h100-mig.host": "0000:1b:00.0"} {
		last := scan.RescanHost(discoverytest.ReadHost(t, file), families.All, nil)
		gpu := "pci-" + strings.NewReplacer(":", "-", ".", "-").Replace(address)
		host := half(t, file, "proc/driver/nvidia/gpus/"+address+"/information", "half")
		now := scan.ReadHost(host, families.All)
		for _, d := range now.Devices {
			if d.Silicon() == gpu {
				t.Errorf("%s: %s", file, format(t, d))
			}
		}
		problem := func(p discovery.Problem) bool {
			return p.Device == gpu && strings.Contains(p.Error(), "information: no device minor")
		}
		if !slices.ContainsFunc(now.Problems, problem) {
			t.Errorf("%s: problems %v", file, now.Problems)
		}
		kept := scan.RescanHost(host, families.All, last).Snapshot()
		for _, d := range last.Snapshot().Devices {
			if got, _ := kept.Lookup(d.Name); d.Silicon() == gpu && got.Health.Status != discovery.Unknown {
				t.Errorf("%s: %s is not kept: %s", file, d.Name, format(t, got))
			}
		}
	}
}

// firstFunction returns the first device that is a PCI function.
func firstFunction(t *testing.T, s *discovery.Snapshot) discovery.Device {
	t.Helper()
	for _, d := range s.Devices {
		if d.Attributes.String("pciDevice") != "" && d.PartOf == nil && d.Health.Status == discovery.Healthy {
			return d
		}
	}
	t.Fatal("no PCI function")
	return discovery.Device{}
}

// A GPU whose instances cannot be listed keeps its last description as well.
func TestUnlistedInstances(t *testing.T) {
	const file = "nvidia/testdata/h100x8.host"
	d := firstFunction(t, scan.ReadHost(discoverytest.ReadHost(t, file), families.All))
	host := rewritten(t, file, func(text string) string {
		const first = "-- proc/devices --\n"
		for minor := range 6 { // GPU 6 has instances
			text = strings.Replace(text, first, fmt.Sprintf("-- proc/driver/nvidia/capabilities/gpu%d/mig --\nno directory\n", minor)+first, 1)
		}
		return text
	})
	now := scan.ReadHost(host, families.All)
	if got, found := now.Lookup(d.Name); found {
		t.Errorf("is %s", format(t, got))
	}
	problem := func(p discovery.Problem) bool {
		return p.Device == d.Name && strings.Contains(p.Error(), "list MIG instances")
	}
	if !slices.ContainsFunc(now.Problems, problem) {
		t.Errorf("problems %v", now.Problems)
	}
}
