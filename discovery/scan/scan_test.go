package scan_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
)

// scanFamily returns a family with the given Describe function.
func scanFamily(name string, match discovery.Match, describe func(found []sysfs.Device) ([]discovery.Device, []discovery.Problem)) *discovery.Family {
	return &discovery.Family{Name: name, Doc: "test", Match: []discovery.Match{match},
		Describe: func(_ *discovery.Host, found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
			return describe(found)
		}}
}

// named describes each kernel device with only a name.
func named(found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, d := range found {
		devices = append(devices, discovery.Device{Name: discovery.DeviceName(d)})
	}
	return devices, nil
}

func miscHost(names ...string) *discovery.Host {
	fsys := fstest.MapFS{}
	for _, name := range names {
		fsys["sys/class/misc/"+name+"/dev"] = &fstest.MapFile{Data: []byte("10:1")}
	}
	return &discovery.Host{FS: fsys}
}

var misc = discovery.Match{Class: "misc"}

func TestScanOrdersAndMarks(t *testing.T) {
	f := scanFamily("one", misc, func(found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
		devices, _ := named(found)
		slices.Reverse(devices)
		return devices, []discovery.Problem{
			{Device: "b", Err: errors.New("one thing")},
			{Device: "c", Setting: discovery.SettingPassthrough, Err: errors.New("does not apply")},
		}
	})
	s := scan.ReadHost(miscHost("a", "b", "c"), []*discovery.Family{f})
	var got []string
	for _, d := range s.Devices {
		got = append(got, fmt.Sprint(d.Name, " ", d.Family, " ", d.Attributes.String("family"), " ", d.Health.Status, " ", d.Health.Reason))
	}
	want := []string{"a one one Healthy ", "b one one Unknown one thing", "c one one Healthy "}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if _, ok := s.Lookup("c"); !ok {
		t.Error("c is not found")
	}
	if _, ok := s.Lookup("bb"); ok {
		t.Error("bb is found")
	}
}

func TestScanKeepsTheFirstOfNamesakes(t *testing.T) {
	s := scan.ReadHost(miscHost("a", "b"), []*discovery.Family{scanFamily("one", misc, named), scanFamily("two", misc, named)})
	if len(s.Devices) != 2 || s.Devices[0].Family != "one" || s.Devices[1].Family != "one" {
		t.Errorf("devices %+v", s.Devices)
	}
	if len(s.Problems) != 2 || !errors.Is(s.Problems[0], discovery.ErrNotUnique) || s.Problems[0].Error() != "two a: the name is not unique, so the description by family one is used" {
		t.Errorf("problems %v", s.Problems)
	}
}

// A family of leftovers gets only devices that the other families, wherever they are in the list,
// neither described nor reported a problem for. It reports no problems for the other devices.
func TestScanLeftovers(t *testing.T) {
	rest := scanFamily("rest", misc, named)
	rest.Leftovers = true
	one := scanFamily("one", misc, func(found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
		return []discovery.Device{{Name: "first", Source: found[0].Path, Includes: []string{found[1].Path}}},
			[]discovery.Problem{{Device: "c", Err: errors.New("cannot be read")}, {Device: "e", Setting: discovery.SettingPassthrough, Err: errors.New("does not apply")}}
	})
	last := scanFamily("last", discovery.Match{Class: "misc", Name: "d"}, func(found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
		return []discovery.Device{{Name: "last", Source: found[0].Path}}, nil
	})
	s := scan.ReadHost(miscHost("a", "b", "c", "d", "e"), []*discovery.Family{rest, one, last})
	var got []string
	for _, d := range s.Devices {
		got = append(got, d.Family+" "+d.Name)
	}
	if diff := cmp.Diff([]string{"rest e", "one first", "last last"}, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if len(s.Problems) != 2 {
		t.Errorf("problems %v; want those of c and e alone", s.Problems)
	}
}

// An Unclaimed family does not get devices that another family matched but left out.
func TestScanUnclaimed(t *testing.T) {
	rest := scanFamily("rest", misc, named)
	rest.Leftovers, rest.Unclaimed = true, true
	choosy := scanFamily("choosy", discovery.Match{Class: "misc", Name: "a"}, func([]sysfs.Device) ([]discovery.Device, []discovery.Problem) {
		return nil, nil
	})
	s := scan.ReadHost(miscHost("a", "b"), []*discovery.Family{rest, choosy})
	if len(s.Devices) != 1 || s.Devices[0].Name != "b" {
		t.Errorf("devices %v; want b alone", s.Devices)
	}
}

func TestScanLeavesOutWhatCannotBePublished(t *testing.T) {
	tooMany := discovery.Attributes{}
	for i := range 40 {
		tooMany.SetInt(resourceapi.QualifiedName(fmt.Sprintf("a%d", i)), 1)
	}
	long := strings.Repeat("x", 65)
	invalid := []discovery.Device{
		{Name: "Upper_Case"},
		{Name: strings.Repeat("x", 64)},
		{Name: "many", Attributes: tooMany},
		{Name: "long", Attributes: discovery.Attributes{"model": {StringValue: &long}}},
		{Name: "resource", PluginOffers: []discovery.Offer{{Resource: "not a resource"}}},
		{Name: "nameless", PluginOffers: []discovery.Offer{{IDs: []string{"1"}}}},
		{Name: "pattern", PluginOffers: []discovery.Offer{{Resource: "example.com/gpu*"}}},
		{Name: "attribute", Attributes: discovery.Attributes{"not-an-identifier": {IntValue: new(int64(1))}}},
		{Name: "domain", Attributes: discovery.Attributes{"Not_A.Domain/model": {IntValue: new(int64(1))}}},
		{Name: "lengthy", Capacity: discovery.Capacity{resourceapi.QualifiedName(long): {}}},
		{Name: "nothing", Attributes: discovery.Attributes{"model": {}}},
		{Name: "both", Attributes: discovery.Attributes{"model": {StringValue: new("a"), IntValue: new(int64(1))}}},
		{Name: "version", Attributes: discovery.Attributes{"driverVersion": {VersionValue: new("535.104.05")}}},
		{Name: "utf-8", Attributes: discovery.Attributes{"model": {StringValue: new("\xff")}}},
		{Name: "edits", Edits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{HostPath: "/dev/a"}}}},
	}
	f := scanFamily("one", misc, func([]sysfs.Device) ([]discovery.Device, []discovery.Problem) {
		return append(slices.Clone(invalid), discovery.Device{Name: "good", PluginOffers: []discovery.Offer{{Resource: discovery.AnyName}, {Resource: "nvidia.com/*"}}}), nil
	})
	s := scan.ReadHost(miscHost("a"), []*discovery.Family{f})
	if len(s.Devices) != 1 || s.Devices[0].Name != "good" {
		t.Errorf("devices %+v", s.Devices)
	}
	for _, d := range invalid {
		if !slices.ContainsFunc(s.Problems, func(p discovery.Problem) bool { return p.Device == d.Name }) {
			t.Errorf("no problem names %s", d.Name)
		}
	}
}

// ids returns all device plugin IDs of a device.
func ids(d discovery.Device) []string {
	var ids []string
	for _, offer := range d.PluginOffers {
		ids = append(ids, offer.IDs...)
	}
	return ids
}

// Two devices with the same identity lose the identity in DRA and the IDs in the device plugin API
// that equal it, but are still offered otherwise. Other devices, and the parts of one GPU, keep
// their identities.
func TestScanDropsAnIdentityOfTwo(t *testing.T) {
	device := func(name, identity, whole string, offers ...discovery.Offer) discovery.Device {
		d := discovery.Device{Name: name, Identity: identity, Attributes: discovery.Attributes{}, PluginOffers: offers}
		d.Attributes.SetString("uuid", strings.TrimSuffix(identity, "/mode"))
		d.Attributes.SetString("serial", "S"+name)
		if whole != "" {
			d.PartOf = &discovery.Silicon{Name: whole}
		}
		return d
	}
	gpu := func(ids ...string) discovery.Offer { return discovery.Offer{Resource: "example.com/gpu", IDs: ids} }
	described := []discovery.Device{
		device("a", "U1", "", gpu("U1")),
		device("b", "U1", "", gpu("U1", "b")),
		device("c", "U2", "", gpu("U2")),
		device("d", "U3/mode", "x", gpu("d")),
		device("e", "U3/mode", "x", gpu("e")),
		device("f", "U4/mode", "x", gpu("f")),
		device("g", "U4/mode", "y", gpu("g")),
		device("h", "", "", gpu("h")),
	}
	f := scanFamily("one", misc, func([]sysfs.Device) ([]discovery.Device, []discovery.Problem) { return described, nil })
	s := scan.ReadHost(miscHost("a"), []*discovery.Family{f})
	var got []string
	for _, d := range s.Devices {
		got = append(got, fmt.Sprint(d.Name, " ", d.Identity, " ", d.Attributes.String("uuid"), " ", d.Attributes.String("serial"), " ", ids(d), " ", d.Health.Status))
	}
	want := []string{
		"a   Sa [] Healthy",
		"b   Sb [b] Healthy",
		"c U2 U2 Sc [U2] Healthy",
		"d U3/mode U3 Sd [d] Healthy",
		"e U3/mode U3 Se [e] Healthy",
		"f   Sf [f] Healthy",
		"g   Sg [g] Healthy",
		"h   Sh [h] Healthy",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	wantProblems := `[a and b: identity "U1" is not unique, so it is ignored f and g: identity "U4/mode" is not unique, so it is ignored]`
	if fmt.Sprint(s.Problems) != wantProblems || !errors.Is(s.Problems[0], discovery.ErrNotUnique) {
		t.Errorf("problems %v, want %s", s.Problems, wantProblems)
	}
}

// A process that opens an IOMMU group can use all its functions, regardless of their families: the
// functions are one physical device and one unit. A function alone in its group stays as it is.
func TestScanJoinsIOMMUGroups(t *testing.T) {
	device := func(name, resource string, nodes ...string) discovery.Device {
		d := discovery.Device{Name: name, PluginOffers: []discovery.Offer{{Resource: resource, IDs: []string{name}}}}
		for _, node := range append(nodes, "/dev/vfio/vfio") {
			d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, &specs.DeviceNode{Path: node, HostPath: node})
		}
		return d
	}
	described := []discovery.Device{
		device("b", "example.com/x", "/dev/vfio/7"),
		device("a", "example.com/x", "/dev/vfio/7"),
		device("c", "example.com/y", "/dev/vfio/7"),
		device("d", "example.com/x", "/dev/vfio/8"),
		device("e", "example.com/x", "/dev/vfio/noiommu-7"),
	}
	for i := range described { // with the same resource name, but separate IDs
		pool := discovery.Offer{Resource: described[i].PluginOffers[0].Resource, IDs: []string{"pool-" + described[i].Name}, SRIOV: true}
		described[i].PluginOffers = append(described[i].PluginOffers, pool)
	}
	f := scanFamily("one", misc, func([]sysfs.Device) ([]discovery.Device, []discovery.Problem) { return described, nil })
	s := scan.ReadHost(miscHost("a"), []*discovery.Family{f})
	var got []string
	for _, d := range s.Devices {
		line := fmt.Sprint(d.Name, " ", d.PluginOffers[0].Resource, d.PluginOffers[0].IDs, d.PluginOffers[1].IDs, " ", d.PluginOffers[0].Unit, " ", d.Silicon())
		if d.PartOf != nil {
			takes, all := d.Takes["group"], d.PartOf.Counters["group"]
			line += fmt.Sprintf(" %s of %s", takes.String(), all.String())
		}
		got = append(got, line)
	}
	want := []string{
		"a example.com/x[a] [pool-a] iommu-group-7 iommu-group-7 1 of 1",
		"b example.com/x[a] [pool-a] iommu-group-7 iommu-group-7 1 of 1",
		"c example.com/y[c] [pool-c] iommu-group-7 iommu-group-7 1 of 1",
		"d example.com/x[d] [pool-d]  d",
		"e example.com/x[e] [pool-e]  e",
	}
	if diff := cmp.Diff(want, got); diff != "" || len(s.Problems) > 0 {
		t.Errorf("problems %v, devices (-want +got):\n%s", s.Problems, diff)
	}
}

// A device with several IOMMU groups joins the devices of all its groups, because it cannot be
// allocated beside any of them.
func TestScanJoinsDevicesOfSeveralIOMMUGroups(t *testing.T) {
	device := func(name string, groups ...string) discovery.Device {
		d := discovery.Device{Name: name}
		for _, group := range groups {
			node := "/dev/vfio/" + group
			d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, &specs.DeviceNode{Path: node, HostPath: node})
		}
		return d
	}
	described := []discovery.Device{device("a", "7"), device("b", "8", "9"), device("c", "9"), device("d", "7", "8"), device("e", "10")}
	f := scanFamily("one", misc, func([]sysfs.Device) ([]discovery.Device, []discovery.Problem) { return described, nil })
	var got []string
	for _, d := range scan.ReadHost(miscHost("a"), []*discovery.Family{f}).Devices {
		got = append(got, d.Name+" "+d.Silicon())
	}
	want := []string{"a iommu-group-7", "b iommu-group-7", "c iommu-group-7", "d iommu-group-7", "e e"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("silicon (-want +got):\n%s", diff)
	}
}

// A device plugin ID stands for at most one unit.
func TestScanDropsAnIDOfTwo(t *testing.T) {
	offer := func(resource, unit string, ids ...string) []discovery.Offer {
		return []discovery.Offer{{Resource: resource, Unit: unit, IDs: ids}}
	}
	described := []discovery.Device{
		{Name: "a", PluginOffers: offer("example.com/x", "", "1", "2")},
		{Name: "b", PluginOffers: offer("example.com/x", "", "2", "3")},
		{Name: "c", PluginOffers: offer("example.com/y", "", "2")},
		{Name: "d", PluginOffers: offer(discovery.AnyName, "", "2")},
		{Name: "e", PluginOffers: offer("example.com/x", "card", "4")},
		{Name: "f", PluginOffers: offer("example.com/x", "card", "4")},
	}
	f := scanFamily("one", misc, func([]sysfs.Device) ([]discovery.Device, []discovery.Problem) { return described, nil })
	s := scan.ReadHost(miscHost("a"), []*discovery.Family{f})
	var got []string
	for _, d := range s.Devices {
		got = append(got, fmt.Sprint(d.Name, ids(d)))
	}
	if diff := cmp.Diff([]string{"a[1]", "b[3]", "c[2]", "d[2]", "e[4]", "f[4]"}, got); diff != "" {
		t.Errorf("IDs (-want +got):\n%s", diff)
	}
	want := `[a and b: ID "2" of example.com/x is not unique, so the device plugin API does not offer it]`
	if fmt.Sprint(s.Problems) != want || !errors.Is(s.Problems[0], discovery.ErrNotUnique) {
		t.Errorf("problems %v, want %s", s.Problems, want)
	}
}

func TestScanConfinesPanics(t *testing.T) {
	panicking := scanFamily("panics", misc, func([]sysfs.Device) ([]discovery.Device, []discovery.Problem) { panic("at what it found") })
	s := scan.ReadHost(miscHost("a"), []*discovery.Family{panicking, scanFamily("one", misc, named)})
	if len(s.Devices) != 1 || len(s.Problems) != 1 || !strings.Contains(s.Problems[0].Error(), "panics: describe: panic: at what it found") {
		t.Errorf("%+v", s)
	}
}

func TestScanWithoutSysfs(t *testing.T) {
	s := scan.ReadHost(&discovery.Host{FS: os.DirFS(t.TempDir())}, families.All)
	if len(s.Devices) != 0 || len(s.Problems) != 1 || s.Problems[0].Device != "/sys/bus/pci" || !errors.Is(s.Problems[0].Err, fs.ErrNotExist) {
		t.Errorf("a host without /sys: %+v", s)
	}
}

func TestMatch(t *testing.T) {
	fsys := fstest.MapFS{
		"sys/class/misc/gone": {Data: []byte("../../devices/gone"), Mode: fs.ModeSymlink},
		"sys/class/misc/kvm":  {Mode: fs.ModeDir | 0o755},
	}
	for address, ids := range map[string][3]string{
		"0000:01:00.0": {"0x10de", "0x030200", "nvidia"},
		"0000:02:00.0": {"0x10de", "0x030000", "vfio-pci"},
		"0000:03:00.0": {"0x10DE", "0x040300", "snd_hda_intel"},
		"0000:04:00.0": {"0x1002", "0x030000", "amdgpu"},
		"0000:05:00.0": {"garbage", "0x030000", "nvidia"},
	} {
		dir := "sys/bus/pci/devices/" + address
		fsys[dir+"/vendor"] = &fstest.MapFile{Data: []byte(ids[0] + "\n")}
		fsys[dir+"/class"] = &fstest.MapFile{Data: []byte(ids[1] + "\n")}
		fsys[dir+"/driver"] = &fstest.MapFile{Data: []byte("../../drivers/" + ids[2]), Mode: fs.ModeSymlink}
	}
	for name, test := range map[string]struct {
		match    discovery.Match
		want     []string
		problems int
	}{
		"all of a bus":      {discovery.Match{Bus: "pci"}, []string{"pci-0000-01-00-0", "pci-0000-02-00-0", "pci-0000-03-00-0", "pci-0000-04-00-0", "pci-0000-05-00-0"}, 0},
		"vendor":            {discovery.Match{Bus: "pci", Vendor: "10de"}, []string{"pci-0000-01-00-0", "pci-0000-02-00-0", "pci-0000-03-00-0"}, 1},
		"class and driver":  {discovery.Match{Bus: "pci", Vendor: "10de", PCIClass: "03", Driver: "nvidia"}, []string{"pci-0000-01-00-0"}, 1},
		"subclass":          {discovery.Match{Bus: "pci", PCIClass: "0302"}, []string{"pci-0000-01-00-0"}, 0},
		"name":              {discovery.Match{Class: "misc", Name: "kv*"}, []string{"kvm"}, 0},
		"what is gone":      {discovery.Match{Class: "misc", Name: "gone"}, nil, 0},
		"class not there":   {discovery.Match{Class: "drm"}, nil, 0},
		"bus not there":     {discovery.Match{Bus: "platform"}, nil, 0},
		"a driver not here": {discovery.Match{Bus: "pci", Driver: "xe"}, nil, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := scan.ReadHost(&discovery.Host{FS: fsys}, []*discovery.Family{scanFamily("one", test.match, named)})
			var got []string
			for _, d := range s.Devices {
				got = append(got, d.Name)
			}
			if diff := cmp.Diff(test.want, got); diff != "" || len(s.Problems) != test.problems {
				t.Errorf("problems %v, devices:\n%s", s.Problems, diff)
			}
		})
	}
}

func layout(tb testing.TB, file, dir string) {
	tb.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		tb.Fatal(err)
	}
	host, err := recorded.Parse(data)
	if err != nil {
		tb.Fatal(err)
	}
	if err := host.WriteHost(dir); err != nil {
		tb.Fatal(err)
	}
}

// counting counts the accesses to a file system.
type counting struct {
	fs.FS

	asked int
}

func (c *counting) Open(name string) (fs.File, error) { c.asked++; return c.FS.Open(name) }
func (c *counting) Stat(name string) (fs.FileInfo, error) {
	c.asked++
	return fs.Stat(c.FS, name)
}
func (c *counting) Lstat(name string) (fs.FileInfo, error) {
	c.asked++
	return fs.Lstat(c.FS, name)
}
func (c *counting) ReadLink(name string) (string, error) {
	c.asked++
	return fs.ReadLink(c.FS, name)
}

// A scan accesses each function three times, however many families and functions there are: link,
// modalias and driver. Families read more of some functions, in this test the network adapters,
// which are a quarter of all functions.
func TestScanReadsEachFunctionThreeTimes(t *testing.T) {
	asked := func(functions int) int {
		dir := t.TempDir()
		layFunctions(t, dir, functions)
		host := &counting{FS: os.DirFS(dir)}
		scan.ReadHost(&discovery.Host{FS: host}, families.All)
		return host.asked
	}
	few, many := asked(64), asked(192)
	each := float64(many-few) / (192 - 64)
	t.Logf("%.1f looks at each function", each)
	if each > 5 {
		t.Errorf("looks %.1f times at each function", each)
	}
}

// BenchmarkScan scans directories with eight GPUs among many other PCI functions, as in a server:
// bridges, disks, network adapters and virtual functions. A constant ns/function shows linear
// growth.
func BenchmarkScan(b *testing.B) {
	for _, functions := range []int{256, 1024, 4096, 16384} {
		b.Run(fmt.Sprint(functions), func(b *testing.B) {
			dir := b.TempDir()
			layout(b, "families/amdgpu/testdata/mi210x8.host", dir)
			layFunctions(b, dir, functions)
			hostFS, err := hostfs.Open(dir)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				if s := scan.ReadHost(&discovery.Host{FS: hostFS}, families.All); len(s.Devices) != 8 || len(s.Problems) > 0 {
					b.Fatal(len(s.Devices), s.Problems)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(functions), "ns/function")
		})
	}
}

// layFunctions creates PCI functions that no family offers.
func layFunctions(tb testing.TB, dir string, count int) {
	tb.Helper()
	kinds := []struct{ vendor, device, class, driver string }{
		{"8086", "352a", "060400", "pcieport"},
		{"8086", "3250", "088000", ""},
		{"8086", "0998", "088000", "intel_vsec"},
		{"1022", "14a5", "060400", "pcieport"},
		{"144d", "a80a", "010802", "nvme"},
		{"15b3", "101d", "020000", "mlx5_core"},
		{"8086", "1592", "020000", "ice"},
		{"1a03", "2000", "030000", "ast"},
	}
	layFiles(tb, filepath.Join(dir, "sys/bus/pci/devices"), nil)
	for i := range count {
		kind := kinds[i%len(kinds)]
		domain, bus := 1+i>>16, i>>8&0xff
		root := fmt.Sprintf("devices/pci%04x:%02x", domain, bus)
		address := fmt.Sprintf("%04x:%02x:%02x.%d", domain, bus, i>>3&0x1f, i&7)
		layFiles(tb, filepath.Join(dir, "sys", root, address), map[string]string{
			"vendor":             "0x" + kind.vendor,
			"device":             "0x" + kind.device,
			"class":              "0x" + kind.class,
			"modalias":           fmt.Sprintf("pci:v0000%sd0000%ssv00000000sd00000000bc%ssc%si%s", strings.ToUpper(kind.vendor), strings.ToUpper(kind.device), kind.class[:2], kind.class[2:4], kind.class[4:]),
			"numa_node":          "0",
			"current_link_speed": "16.0 GT/s PCIe",
			"current_link_width": "16",
			"max_link_speed":     "16.0 GT/s PCIe",
			"max_link_width":     "16",
			"uevent":             "PCI_SLOT_NAME=" + address,
		})
		links := map[string]string{
			filepath.Join(dir, "sys/bus/pci/devices", address):    "../../../" + root + "/" + address,
			filepath.Join(dir, "sys", root, address, "subsystem"): "../../../bus/pci",
		}
		if kind.driver != "" {
			links[filepath.Join(dir, "sys", root, address, "driver")] = "../../../bus/pci/drivers/" + kind.driver
		}
		for name, target := range links {
			if err := os.Symlink(target, name); err != nil {
				tb.Fatal(err)
			}
		}
	}
}

func layFiles(tb testing.TB, dir string, files map[string]string) {
	tb.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		tb.Fatal(err)
	}
	for name, content := range files {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			tb.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content+"\n"), 0o644); err != nil {
			tb.Fatal(err)
		}
	}
}

// A family of configured paths is read even if no kernel device matches, and its devices have
// FromConfig set.
func TestScanConfigured(t *testing.T) {
	family := &discovery.Family{Name: "named", Doc: "what is named", FromConfig: true,
		Describe: func(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, _ []discovery.Problem) {
			for _, resource := range host.Paths {
				devices = append(devices, discovery.Device{Name: resource.Name})
			}
			return devices, nil
		},
	}
	if err := discovery.Validate([]*discovery.Family{family}); err != nil {
		t.Error(err)
	}
	host := &discovery.Host{FS: fstest.MapFS{}, Paths: []discovery.PathResource{{Name: "port"}}}
	got := scan.ReadHost(host, []*discovery.Family{family}).Devices
	if len(got) != 1 || got[0].Name != "port" || !got[0].FromConfig {
		t.Errorf("got %+v", got)
	}
}

// A device with parts takes everything that its parts take, and is allocated only without the
// parts, even if the parts do not compete with each other.
func TestScanJoinsWholes(t *testing.T) {
	parts := func(whole string) *discovery.Silicon { return &discovery.Silicon{Name: whole} }
	two := map[string]resource.Quantity{"mediated": resource.MustParse("2")}
	mediated := &discovery.Silicon{Name: "gpu", Counters: two}
	one := map[string]resource.Quantity{"mediated": resource.MustParse("1")}
	family := &discovery.Family{Name: "gpus", Doc: "GPUs and parts of them", FromConfig: true,
		Describe: func(*discovery.Host, []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
			return []discovery.Device{
				{Name: "alone"},
				{Name: "gpu"}, {Name: "gpu-a", PartOf: mediated, Takes: one}, {Name: "gpu-b", PartOf: parts("gpu")},
				{Name: "nic"}, {Name: "nic-a", PartOf: parts("nic")}, {Name: "nic-b", PartOf: parts("nic")},
				{Name: "part", PartOf: parts("hidden")},
			}, nil
		},
	}
	snapshot := scan.ReadHost(&discovery.Host{FS: fstest.MapFS{}}, []*discovery.Family{family})
	var got []string
	for _, d := range snapshot.Devices {
		line := d.Name
		if d.PartOf != nil {
			line += " takes" + quantities(d.Takes) + " of " + d.PartOf.Name + quantities(d.PartOf.Counters)
		}
		got = append(got, line)
	}
	want := []string{
		"alone",
		"gpu takes[mediated=2 parts=1] of gpu[mediated=2 parts=1]",
		"gpu-a takes[mediated=1] of gpu[mediated=2 parts=1]",
		"gpu-b takes[parts=1] of gpu[mediated=2 parts=1]",
		"nic takes[parts=2] of nic[parts=2]",
		"nic-a takes[parts=1] of nic[parts=2]",
		"nic-b takes[parts=1] of nic[parts=2]",
		"part takes[] of hidden[]",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// quantities returns the counters as text, sorted by name.
func quantities(counters map[string]resource.Quantity) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(counters)) {
		quantity := counters[name]
		all = append(all, name+"="+quantity.String())
	}
	return fmt.Sprint(all)
}
