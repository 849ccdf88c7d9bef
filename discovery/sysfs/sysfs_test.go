package sysfs_test

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery/sysfs"
)

const address = "sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0"

func link(target string) *fstest.MapFile {
	return &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink}
}

func text(content string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(content)} }

func host() fstest.MapFS {
	return fstest.MapFS{
		"sys/bus/pci/devices/0000:03:00.0":         link("../../../devices/pci0000:00/0000:00:01.0/0000:03:00.0"),
		"sys/bus/pci/devices/0000:04:00.0":         link("../../../../outside"),
		"sys/bus/pci/devices/0000:05:00.0/vendor":  text("0x10DE\n"), // a tree copied without links
		"sys/bus/pci/devices/stray":                text("no device"),
		address + "/vendor":                        text("0x1002\n"),
		address + "/class":                         text("0x038000\n"),
		address + "/numa_node":                     text("-1\n"),
		address + "/size":                          text("0x40\n"),
		address + "/octal":                         text("010\n"),
		address + "/word":                          text("many\n"),
		address + "/empty":                         text("\n"),
		address + "/long":                          text(strings.Repeat("1", 5000)),
		address + "/binary":                        text("a\x00b"),
		address + "/dangling":                      link("nowhere"),
		address + "/driver":                        link("../../../../bus/pci/drivers/amdgpu"),
		address + "/iommu_group":                   link("../../../../kernel/iommu_groups/42"),
		address + "/physfn":                        link("../0000:02:00.0"),
		address + "/uevent":                        text("DRIVER=other\nPCI_ID=1002:740F\nbroken\nA=b=c\n"),
		address + "/drm/card1/dev":                 text("226:1\n"),
		address + "/drm/card1/uevent":              text("DEVNAME=dri/card1\n"),
		address + "/drm/renderD129/dev":            text("226:129:1\n"),
		address + "/drm/card2/dev":                 text("\n"),
		address + "/drm/card3/dev":                 text("0:0\n"),
		address + "/drm/card4/dev":                 link("nowhere"),
		address + "/drm/card5/uevent":              text("DEVNAME=dri/card5\n"),
		address + "/drm/version":                   text("1"),
		address + "/block/a!b/dev":                 text("259:3"),
		address + "/block/a!b/subsystem":           link("../../../../../../class/block"),
		"sys/class/misc/kvm":                       link("../../devices/virtual/misc/kvm"),
		"sys/devices/virtual/misc/kvm/uevent":      text("DEVNAME=../../etc/passwd\n"),
		"sys/devices/pci10000:00/10000:00:00.0/id": text("1"),
	}
}

func paths(devices []sysfs.Device) []string {
	names := []string{}
	for _, d := range devices {
		names = append(names, d.Path)
	}
	return names
}

func TestBus(t *testing.T) {
	devices, err := sysfs.BusDevices(host(), "pci")
	want := []string{address, "sys/bus/pci/devices/0000:04:00.0", "sys/bus/pci/devices/0000:05:00.0"}
	if diff := cmp.Diff(want, paths(devices)); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	if _, err := sysfs.BusDevices(host(), "cxl"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a bus that is not there: %v", err)
	}
	devices, err = sysfs.ClassDevices(host(), "misc")
	if diff := cmp.Diff([]string{"sys/devices/virtual/misc/kvm"}, paths(devices)); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
}

func TestDevice(t *testing.T) {
	d := sysfs.At(host(), address)
	for what, values := range map[string][2]string{
		"name":           {d.Name(), "0000:03:00.0"},
		"driver":         {d.Driver(), "amdgpu"},
		"link":           {d.Link("iommu_group"), "42"},
		"no link":        {d.Link("vendor"), ""},
		"missing link":   {d.Link("subsystem"), ""},
		"root":           {d.PCIRoot(), "pci0000:00"},
		"uevent":         {d.Uevent()["PCI_ID"], "1002:740F"},
		"uevent's value": {d.Uevent()["A"], "b=c"},
	} {
		if values[0] != values[1] {
			t.Errorf("%s: %q, want %q", what, values[0], values[1])
		}
	}
	if diff := cmp.Diff([]string{address + "/drm/card1", address + "/drm/card2", address + "/drm/card3", address + "/drm/card4", address + "/drm/card5", address + "/drm/renderD129"}, paths(d.Children("drm"))); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{address + "/drm/renderD129"}, paths(d.NumberedChildren("drm", "renderD"))); diff != "" {
		t.Error(diff)
	}
	if none := d.NumberedChildren("drm", "render"); len(none) > 0 {
		t.Errorf("numbers that are none: %v", paths(none))
	}
	if physical, ok := d.LinkTo("physfn"); !ok || physical.Path != "sys/devices/pci0000:00/0000:00:01.0/0000:02:00.0" {
		t.Errorf("physical function %v, %v", physical.Path, ok)
	}
	if function, ok := d.Child("drm/card1").PCIFunction(); !ok || function.Path != address {
		t.Errorf("function of a card %v, %v", function.Path, ok)
	}
	if _, ok := sysfs.At(host(), "sys/devices/virtual/misc/kvm").PCIFunction(); ok {
		t.Error("a PCI function of /dev/kvm")
	}
	if root := sysfs.At(host(), "sys/devices/pci10000:00/10000:00:00.0").PCIRoot(); root != "pci10000:00" {
		t.Errorf("root of a domain of five digits: %q", root)
	}
	if !d.HasEntry("physfn") || d.HasEntry("virtfn0") {
		t.Error("Exists follows links, or finds what is not there")
	}
}

func TestAttrs(t *testing.T) {
	attrs := sysfs.At(host(), address).Attrs()
	if vendor, ok := attrs.Hex("vendor", 4); vendor != "1002" || !ok {
		t.Errorf("vendor %q, %v", vendor, ok)
	}
	if node, ok := attrs.Int("numa_node"); node != -1 || !ok {
		t.Errorf("numa_node %d, %v", node, ok)
	}
	if size, ok := attrs.Uint("size"); size != 64 || !ok {
		t.Errorf("size %d, %v", size, ok)
	}
	if octal, ok := attrs.Uint("octal"); octal != 10 || !ok {
		t.Errorf("a number with a leading zero: %d, %v", octal, ok)
	}
	for _, name := range []string{"empty", "missing"} {
		if value, ok := attrs.Text(name); ok {
			t.Errorf("%s is there: %q", name, value)
		}
	}
	if value, ok := attrs.Uint("missing"); ok {
		t.Errorf("missing is the number %d", value)
	}
	if err := attrs.Err(); err != nil {
		t.Errorf("what is not there is an error: %v", err)
	}
	for name, width := range map[string]int{"vendor": 3, "class": 8, "word": 4, "empty": 4, "dangling": 4} {
		attrs := sysfs.At(host(), address).Attrs()
		if digits, ok := attrs.Hex(name, width); ok || attrs.Err() == nil {
			t.Errorf("%s as %d hexadecimal digits: %q, error %v", name, width, digits, attrs.Err())
		}
	}
	for _, name := range []string{"word", "long", "binary", "empty", "dangling"} {
		if value, ok := attrs.Uint(name); ok {
			t.Errorf("%s is the number %d", name, value)
		}
		if err := attrs.Err(); err == nil || !strings.Contains(err.Error(), "attribute "+name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func TestNode(t *testing.T) {
	for name, test := range map[string]struct {
		path string
		want sysfs.Node
		fail bool
	}{
		"named by uevent":    {address + "/drm/card1", sysfs.Node{Path: "/dev/dri/card1", Major: 226, Minor: 1}, false},
		"numbers garbled":    {address + "/drm/renderD129", sysfs.Node{Path: "/dev/fallback/renderD129"}, true},
		"numbers empty":      {address + "/drm/card2", sysfs.Node{Path: "/dev/fallback/card2"}, true},
		"numbers of nothing": {address + "/drm/card3", sysfs.Node{Path: "/dev/fallback/card3"}, true},
		"block, with a !":    {address + "/block/a!b", sysfs.Node{Path: "/dev/fallback/a/b", Block: true, Major: 259, Minor: 3}, false},
		"name leads outside": {"sys/devices/virtual/misc/kvm", sysfs.Node{Path: "/dev/fallback/kvm"}, true},
		"a link to nothing":  {address + "/drm/card4", sysfs.Node{Path: "/dev/fallback/card4"}, true},
		"named, no numbers":  {address + "/drm/card5", sysfs.Node{Path: "/dev/dri/card5"}, true},
		"not there":          {"sys/devices/virtual/misc/tun", sysfs.Node{Path: "/dev/fallback/tun"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := sysfs.At(host(), test.path).Node("/dev/fallback")
			if got != test.want || (err != nil) != test.fail {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
}

// TestReadErrorNamesThePath checks that a read error contains the path on the host, regardless of
// the mount point, because errors are displayed and compared over time.
func TestReadErrorNamesThePath(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "sys/attribute"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, err := sysfs.ReadText(os.DirFS(dir), "sys/attribute", 16)
	if err == nil || strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "sys/attribute") {
		t.Errorf("error %v", err)
	}
}

func TestIsPCIAddress(t *testing.T) {
	for s, want := range map[string]bool{
		"0000:03:00.0": true, "10000:e1:1f.7": true, "0000:03:20.0": false, "0000:03:00.8": false,
		"03:00.0": false, "0000:03:00": false, "": false, "0000:03:00.0/drm": false, "pci0000:00": false,
	} {
		if got := sysfs.IsPCIAddress(s); got != want {
			t.Errorf("%q: %v", s, got)
		}
	}
}

func TestPCIID(t *testing.T) {
	const modalias = "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00"
	all := sysfs.PCIID{Vendor: "10de", Device: "2330", Class: "030200"}
	files := map[string]string{"vendor": "0x1002\n", "device": "0x740f\n", "class": "0x038000\n"}
	byFiles := sysfs.PCIID{Vendor: "1002", Device: "740f", Class: "038000"}
	same := map[string]string{"vendor": "0x10de", "device": "0x2330", "class": "0x030200"}
	with := func(files map[string]string, file, content string) map[string]string {
		changed := maps.Clone(files)
		changed[file] = content
		return changed
	}
	const none, checked, both = 0, 1, 2 // which of the two functions fail
	for name, test := range map[string]struct {
		modalias string
		files    map[string]string
		want     sysfs.PCIID
		check    sysfs.PCIID
		fail     int
	}{
		"modalias alone":              {modalias + "\n", nil, all, all, none},
		"modalias and files":          {modalias, same, all, all, none},
		"files":                       {"", files, byFiles, byFiles, none},
		"no file":                     {"", nil, sysfs.PCIID{}, sysfs.PCIID{}, none},
		"modalias and a garbled file": {modalias, with(same, "vendor", "garbage"), all, sysfs.PCIID{Device: "2330", Class: "030200"}, checked},
		"modalias and half a vendor":  {modalias, with(same, "vendor", "0x10"), all, sysfs.PCIID{Device: "2330", Class: "030200"}, checked},
		"modalias and an empty class": {modalias, with(same, "class", ""), all, sysfs.PCIID{Vendor: "10de", Device: "2330"}, checked},
		"modalias says otherwise":     {modalias, with(same, "device", "0x740f"), all, sysfs.PCIID{Vendor: "10de", Class: "030200"}, checked},
		"an empty file":               {"", with(files, "vendor", ""), sysfs.PCIID{Device: "740f", Class: "038000"}, sysfs.PCIID{Device: "740f", Class: "038000"}, both},
		"half a vendor":               {"", with(files, "vendor", "0x10"), sysfs.PCIID{Device: "740f", Class: "038000"}, sysfs.PCIID{Device: "740f", Class: "038000"}, both},
		"half a device":               {"", with(files, "device", "0x2"), sysfs.PCIID{Vendor: "1002", Class: "038000"}, sysfs.PCIID{Vendor: "1002", Class: "038000"}, both},
		"half a class":                {"", with(files, "class", "0x0380"), sysfs.PCIID{Vendor: "1002", Device: "740f"}, sysfs.PCIID{Vendor: "1002", Device: "740f"}, both},
		"no 0x":                       {"", with(files, "class", "038000"), sysfs.PCIID{Vendor: "1002", Device: "740f"}, sysfs.PCIID{Vendor: "1002", Device: "740f"}, both},
		"more than four digits":       {"", with(files, "device", "0x1740f"), sysfs.PCIID{Vendor: "1002", Class: "038000"}, sysfs.PCIID{Vendor: "1002", Class: "038000"}, both},
		"a sign":                      {"", with(files, "device", "0x+40f"), sysfs.PCIID{Vendor: "1002", Class: "038000"}, sysfs.PCIID{Vendor: "1002", Class: "038000"}, both},
		"one is missing":              {"", map[string]string{"vendor": "0x1002", "device": "0x740f"}, sysfs.PCIID{Vendor: "1002", Device: "740f"}, sysfs.PCIID{Vendor: "1002", Device: "740f"}, both},
		"half a modalias":             {modalias[:40], files, byFiles, byFiles, none},
		"half a modalias alone":       {modalias[:40], nil, sysfs.PCIID{}, sysfs.PCIID{}, both},
		"more than a modalias":        {modalias + "0", files, byFiles, byFiles, none},
		"a vendor of 32 bits":         {strings.Replace(modalias, "v0000", "v0001", 1), files, byFiles, byFiles, none},
		"another bus's":               {"usb:v1D6Bp0002d0618dc09dsc00dp01ic09isc00ip00in00", nil, sysfs.PCIID{}, sysfs.PCIID{}, none},
	} {
		t.Run(name, func(t *testing.T) {
			fsys := fstest.MapFS{"d": {Mode: fs.ModeDir | 0o755}}
			if test.modalias != "" {
				fsys["d/modalias"] = text(test.modalias)
			}
			for file, content := range test.files {
				fsys["d/"+file] = text(content)
			}
			got, err := sysfs.At(fsys, "d").PCIID()
			if got != test.want || (err != nil) != (test.fail == both) {
				t.Errorf("got %+v, %v; want %+v", got, err, test.want)
			}
			got, err = sysfs.At(fsys, "d").CheckedPCIID()
			if got != test.check || (err != nil) != (test.fail != none) {
				t.Errorf("checked: got %+v, %v; want %+v", got, err, test.check)
			}
		})
	}
}

// FuzzModalias checks that an invalid text never leads to a vendor, device or class.
func FuzzModalias(f *testing.F) {
	for _, seed := range []string{"", "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00", "pci:v00008086d000", "pci:vd", "acpi:PNP0A08:"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		id, err := sysfs.At(fstest.MapFS{"d/modalias": {Data: content}}, "d").PCIID()
		if err != nil && id != (sysfs.PCIID{}) || id != (sysfs.PCIID{}) && (len(id.Vendor) != 4 || len(id.Device) != 4 || len(id.Class) != 6) ||
			strings.Trim(id.Vendor+id.Device+id.Class, "0123456789abcdef") != "" {
			t.Errorf("%+v, %v", id, err)
		}
	})
}

// TestDriver checks when the uevent file is read: in a tree that was copied without its links, and
// never on a running kernel.
func TestDriver(t *testing.T) {
	for name, test := range map[string]struct {
		link, subsystem string
		want            string
	}{
		"bound":                {"../../bus/pci/drivers/amdgpu", "../../bus/pci", "amdgpu"},
		"not bound":            {"", "../../bus/pci", ""},
		"copied without links": {"", "", "stale"},
	} {
		t.Run(name, func(t *testing.T) {
			fsys := fstest.MapFS{"sys/bus/pci/devices/d/uevent": text("DRIVER=stale\n")}
			if test.link != "" {
				fsys["sys/bus/pci/devices/d/driver"] = link(test.link)
			}
			if test.subsystem != "" {
				fsys["sys/bus/pci/devices/d/subsystem"] = link(test.subsystem)
			}
			devices, err := sysfs.BusDevices(fsys, "pci")
			if err != nil || len(devices) != 1 {
				t.Fatal(devices, err)
			}
			for range 2 { // the second result is cached
				if got := devices[0].Driver(); got != test.want {
					t.Errorf("driver %q, want %q", got, test.want)
				}
			}
			if got := sysfs.At(fsys, devices[0].Path).Driver(); got != test.want {
				t.Errorf("driver %q, want %q", got, test.want)
			}
		})
	}
}

// Zero bytes at the end are padding and not part of the value. Zero bytes before the end mean that
// the value is binary.
func TestTextPadding(t *testing.T) {
	for content, want := range map[string]string{
		"INSTINCT\x00":            "INSTINCT",
		"SN 42\x00\x00\x00\x00":   "SN 42",
		"SN 42\x00\x00\n":         "SN 42",
		"SN 42\n\x00":             "SN 42",
		" SN 42 \x00 \x00":        "SN 42",
		"\x00\x00\x00\x00":        "",
		"rockchip,a\x00arm,b\x00": "not a text",
		"\x00SN 42":               "not a text",
		"SN\x0042\n":              "not a text",
	} {
		got, err := sysfs.At(fstest.MapFS{"d/a": text(content)}, "d").Text("a")
		if want == "not a text" {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q: %q, %v; want an error", content, got, err)
			}
			continue
		}
		if got != want || err != nil {
			t.Errorf("%q: %q, %v; want %q", content, got, err, want)
		}
	}
}

// FuzzAttributes passes the same content to every reader.
func FuzzAttributes(f *testing.F) {
	for _, seed := range []string{"", "0x10de\n", "-1", "226:128", "4096:1", "DEVNAME=dri/card0\nMAJOR=226\n", "DEVNAME=/etc/passwd", "=\n==", "0x", "\x00", "a\x00\x00", "a\x00b", "\x00\n", "18446744073709551616"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		fsys := fstest.MapFS{"d/uevent": {Data: content}, "d/dev": {Data: content}, "d/a": {Data: content}}
		d := sysfs.At(fsys, "d")
		attrs := d.Attrs()
		if digits, ok := attrs.Hex("a", 4); ok && (len(digits) != 4 || strings.Trim(digits, "0123456789abcdef") != "") {
			t.Errorf("hexadecimal digits %q", digits)
		}
		attrs.Uint("a")
		attrs.Int("a")
		value, ok := attrs.Text("a")
		if ok && (strings.TrimSpace(value) != value || strings.ContainsRune(value, 0)) {
			t.Errorf("text %q", value)
		}
		fsys["d/a"] = &fstest.MapFile{Data: append(slices.Clone(content), "\x00\x00"...)}
		if padded, ok2 := attrs.Text("a"); ok2 != ok && len(content) < 4000 || padded != value && ok && ok2 {
			t.Errorf("text %q, %v; with two zero bytes after it %q, %v", value, ok, padded, ok2)
		}
		node, err := d.Node("/dev")
		if !strings.HasPrefix(node.Path, "/dev/") || strings.Contains(node.Path, "..") && !strings.Contains(string(content), "..") {
			t.Errorf("node %+v", node)
		}
		if err != nil && (node.Major != 0 || node.Minor != 0) || node.Major < 0 || node.Major > 4095 || node.Minor > 1<<20-1 {
			t.Errorf("node %+v, %v", node, err)
		}
	})
}
