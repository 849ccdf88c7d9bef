package families_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/scan"
)

func TestAllAreValid(t *testing.T) {
	if err := discovery.Validate(families.All); err != nil {
		t.Error(err)
	}
}

// TestTableOfFamilies expects one row for each family on the start page of the documentation, in
// the order of [families.All].
func TestTableOfFamilies(t *testing.T) {
	text, err := os.ReadFile("../../docs/index.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(text), "\n| family |")
	if !found {
		t.Fatal("docs/index.md has no table of families")
	}
	var rows, want []string
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		if len(cells) < 3 && len(rows) > 0 {
			break // the end of the table
		}
		name := strings.TrimSpace(cells[1])
		if page, ok := strings.CutPrefix(name, "["); ok {
			name, _, _ = strings.Cut(page[1:], "`")
			if page != fmt.Sprintf("`%s`](families/%[1]s.md)", name) {
				t.Errorf("%s is no link to the family's page", cells[1])
			}
			rows = append(rows, name)
		}
	}
	for _, f := range families.All {
		want = append(want, f.Name)
	}
	if diff := cmp.Diff(want, rows); diff != "" {
		t.Errorf("families in docs/index.md (-listed in All +rows):\n%s", diff)
	}
}

// TestOverlay lays out servers of several families in one directory, as "chandler simulate" does,
// and expects all of their devices.
func TestOverlay(t *testing.T) {
	dir := t.TempDir()
	want := make(map[string]string)
	for _, file := range []string{"hypervisor/testdata/five.host", "amdgpu/testdata/mi300x-cpx.host", "nvidia/testdata/h100x8.host"} {
		for _, d := range scan.ReadHost(discoverytest.ReadHost(t, file), families.All).Devices {
			want[d.Name] = format(t, d)
		}
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		host, err := recorded.Parse(data)
		if err != nil {
			t.Fatal(err)
		}
		if err := host.WriteHost(dir); err != nil {
			t.Fatal(err)
		}
	}
	got := make(map[string]string)
	snapshot := scan.ReadHost(&discovery.Host{FS: os.DirFS(dir)}, families.All)
	for _, d := range snapshot.Devices {
		got[d.Name] = format(t, d)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices of three hosts in one directory (-each alone +overlay):\n%s", diff)
	}
	if len(snapshot.Problems) > 0 {
		t.Errorf("problems: %v", snapshot.Problems)
	}
}

// TestRecordedHosts scans every recorded host with all families. No family describes another
// family's device, and all devices of the host's own family remain. A family of leftovers gets only
// the devices that no other family describes.
func TestRecordedHosts(t *testing.T) {
	hosts, err := filepath.Glob("*/testdata/*.host")
	if err != nil || len(hosts) == 0 {
		t.Fatalf("no recorded hosts (%v)", err)
	}
	for _, file := range hosts {
		host := discoverytest.ReadHost(t, file)
		folder, _, _ := strings.Cut(filepath.ToSlash(file), "/")
		family := nameOf(folder)
		devices := make(map[string][]discovery.Device) // of each family alone
		owner := make(map[string]string)               // of a directory in sysfs
		for _, f := range families.All {
			devices[f.Name] = scan.ReadHost(host, []*discovery.Family{f}).Devices
			if f.Leftovers {
				continue
			}
			for _, d := range devices[f.Name] {
				if other := owner[d.Source]; other != "" && other != f.Name {
					t.Errorf("%s: families %s and %s describe %s", file, other, f.Name, d.Name)
				}
				owner[d.Source] = f.Name
			}
		}
		snapshot := scan.ReadHost(host, families.All)
		checkShared(t, file, snapshot)
		checkSilicon(t, file, snapshot)
		names := namesOf(snapshot)
		all := slices.DeleteFunc(snapshot.Devices, func(d discovery.Device) bool { return d.Family != family })
		left := slices.DeleteFunc(devices[family], func(d discovery.Device) bool { return owner[d.Source] != "" && owner[d.Source] != family })
		withoutCounters(left, names)
		withoutCounters(all, names)
		if diff := cmp.Diff(format(t, left), format(t, all)); diff != "" {
			t.Errorf("%s (-%s alone +all):\n%s", file, family, diff)
		}
	}
}

// namesOf returns the families of devices by device name.
func namesOf(snapshot *discovery.Snapshot) map[string]string {
	names := make(map[string]string)
	for _, d := range snapshot.Devices {
		names[d.Name] = d.Family
	}
	return names
}

// withoutCounters removes the counters that devices take of another family's device. A scan without
// that family has no such counters; see checkSilicon.
func withoutCounters(devices []discovery.Device, names map[string]string) {
	for i := range devices {
		d := &devices[i]
		if d.PartOf != nil && names[d.PartOf.Name] != "" && names[d.PartOf.Name] != d.Family {
			d.PartOf, d.Takes = &discovery.Silicon{Name: d.PartOf.Name}, nil
		}
	}
}

// nameOf returns the name of the family in a folder. Folders are Go packages, so their names have
// no hyphens.
func nameOf(folder string) string {
	for _, f := range families.All {
		if strings.ReplaceAll(f.Name, "-", "") == folder {
			return f.Name
		}
	}
	return folder
}

// checkShared expects that no device and no device node is offered twice.
func checkShared(t *testing.T, file string, snapshot *discovery.Snapshot) {
	t.Helper()
	discoverytest.CheckNodes(t, snapshot)
	for _, p := range snapshot.Problems {
		if strings.Contains(p.Error(), "described by families") {
			t.Errorf("%s: %v", file, p)
		}
	}
}

// TestRecordTwice records a host, lays the record out and records the layout again.
func TestRecordTwice(t *testing.T) {
	for _, file := range []string{"amdgpu/testdata/mi300x-cpx.host", "nvidia/testdata/a100-root.host", "nvidia/testdata/mps.host", "hypervisor/testdata/broken.host"} {
		host := discoverytest.ReadHost(t, file)
		first, err := recorded.RecordHost(host, families.All, "A comment.")
		if err != nil {
			t.Fatal(err)
		}
		copied := filepath.Join(t.TempDir(), "copy.host")
		if err := os.WriteFile(copied, first, 0o644); err != nil {
			t.Fatal(err)
		}
		again := discoverytest.ReadHost(t, copied)
		second, err := recorded.RecordHost(&discovery.Host{FS: again.FS, Roots: host.Roots}, families.All, "A comment.")
		if err != nil {
			t.Fatal(err)
		}
		if os.Geteuid() != 0 {
			continue // without device nodes the second record differs
		}
		if diff := cmp.Diff(string(first), string(second)); diff != "" {
			t.Errorf("%s: the record of a record (-first +second):\n%s", file, diff)
		}
	}
}

// FuzzScan replaces files and links of the recorded hosts and scans them with all families.
func FuzzScan(f *testing.F) {
	hosts, err := filepath.Glob("*/testdata/*.host")
	if err != nil || len(hosts) == 0 {
		f.Fatalf("no recorded hosts (%v)", err)
	}
	discoverytest.Fuzz(f, families.All, hosts)
}

func format(t *testing.T, v any) string {
	t.Helper()
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintln(string(text))
}

// TestMediated scans GPUs with mediated devices, one of them on a virtual function. One family
// describes the GPU and another the mediated devices. All of them belong to the same physical
// device.
func TestMediated(t *testing.T) {
	for file, want := range map[string]struct {
		gpu, family string
		devices     int64
	}{
		"vfio/testdata/gvt.host":         {"pci-0000-00-02-0", "intelgpu", 2},
		"vfio/testdata/mdev-broken.host": {"pci-0000-41-00-0", "nvidia", 4},
	} {
		gpu, found := scan.ReadHost(discoverytest.ReadHost(t, file), families.All).Lookup(want.gpu)
		taken := gpu.Takes["mediated"]
		if !found || gpu.Family != want.family || gpu.Silicon() != gpu.Name || taken.Value() != want.devices {
			t.Errorf("%s: the GPU: %s", file, format(t, gpu))
		}
	}
}

// checkSilicon expects that a device with partitions, or the parent of virtual devices, cannot be
// allocated together with them.
func checkSilicon(t *testing.T, file string, snapshot *discovery.Snapshot) {
	t.Helper()
	for _, part := range snapshot.Devices {
		for _, name := range []string{part.Silicon(), part.Attributes.String("parent")} {
			whole, found := snapshot.Lookup(name)
			if !found || name == part.Name && part.PartOf == nil {
				continue
			}
			if whole.Silicon() != part.Silicon() || len(whole.Takes) == 0 || len(part.Takes) == 0 {
				t.Errorf("%s: %s is given out beside %s, which is part of it", file, whole.Name, part.Name)
			}
			for counter, taken := range whole.Takes {
				if all := part.PartOf.Counters[counter]; taken.Cmp(all) != 0 {
					t.Errorf("%s: %s takes %s of %s %s, though %s is part of it", file, whole.Name, taken.String(), all.String(), counter, part.Name)
				}
			}
		}
	}
}

// A physical function with virtual functions is not described as a device of its own.
func TestDivided(t *testing.T) {
	for file, physical := range map[string]string{
		"dlb/testdata/vfs.host":       "pci-0000-6d-00-0",
		"dlb/testdata/broken.host":    "pci-0000-03-00-0",
		"generic/testdata/sriov.host": "pci-0000-75-00-0",
	} {
		snapshot := scan.ReadHost(discoverytest.ReadHost(t, file), families.All)
		if d, found := snapshot.Lookup(physical); found {
			t.Errorf("%s: %s is described beside its virtual functions: %s", file, physical, format(t, d))
		}
		if !slices.ContainsFunc(snapshot.Devices, func(d discovery.Device) bool { return d.Silicon() == physical }) {
			t.Errorf("%s: no virtual function of %s", file, physical)
		}
	}
}

// An unreadable function under vfio does not hide other functions of its IOMMU group. Their health
// is unknown.
func TestUnreadFunctionOfGroup(t *testing.T) {
	const vendor = "0000:01:00.1/vendor --\n"
	host := rewritten(t, "vfio/testdata/kubevirt.host", func(text string) string {
		return strings.Replace(text, vendor, vendor+"garbage ", 1)
	})
	d, found := scan.ReadHost(host, families.All).Lookup("pci-0000-01-00-0")
	if !found || d.Health.Status != discovery.Unknown || !strings.Contains(d.Health.Reason, "function 0000:01:00.1: attribute vendor:") {
		t.Errorf("the GPU beside it: %s", format(t, d))
	}
}
