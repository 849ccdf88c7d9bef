package paths_test

import (
	"io/fs"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/paths"
	"chandler.dev/discovery/scan"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, paths.Family) }

func scanPaths(fsys fs.FS, groups ...discovery.PathGroup) *discovery.Snapshot {
	host := &discovery.Host{FS: fsys, Paths: []discovery.PathResource{{Name: "example.com/a", Groups: groups}}}
	return scan.ReadHost(host, []*discovery.Family{paths.Family})
}

// The number of devices for paths with several matches, and the combination of the matches, are the
// same as in the generic-device-plugin.
func TestSets(t *testing.T) {
	fsys := fstest.MapFS{"dev/a0": {}, "dev/a1": {}, "dev/a2": {}, "dev/b0": {}, "dev/b1": {}, "dev/c": {}}
	type p = discovery.HostPath
	for name, test := range map[string]struct {
		paths []p
		want  []string
	}{
		"one":              {[]p{{Path: "/dev/c"}}, []string{"c"}},
		"pattern":          {[]p{{Path: "/dev/a*"}}, []string{"a0", "a1", "a2"}},
		"scarcest counts":  {[]p{{Path: "/dev/a*"}, {Path: "/dev/b*"}}, []string{"a0 b0", "a1 b1"}},
		"limit":            {[]p{{Path: "/dev/a*"}, {Path: "/dev/c", Limit: 9}}, []string{"a0 c", "a1 c", "a2 c"}},
		"limit too low":    {[]p{{Path: "/dev/c", Limit: 2}, {Path: "/dev/a*"}}, []string{"c a0", "c a1"}},
		"limit alone":      {[]p{{Path: "/dev/c", Limit: 5}}, []string{"c"}},
		"limit in turn":    {[]p{{Path: "/dev/a*"}, {Path: "/dev/b*", Limit: 2}}, []string{"a0 b0", "a1 b1", "a2 b0"}},
		"missing":          {[]p{{Path: "/dev/c"}, {Path: "/dev/none"}}, nil},
		"optional":         {[]p{{Path: "/dev/none", Optional: true}, {Path: "/dev/c"}}, []string{"c"}},
		"optional, there":  {[]p{{Path: "/dev/b*", Optional: true}, {Path: "/dev/c"}}, []string{"b0 c"}},
		"nothing optional": {[]p{{Path: "/dev/none", Optional: true}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			snapshot := scanPaths(fsys, discovery.PathGroup{Paths: test.paths})
			var got []string
			for _, d := range snapshot.Devices {
				var nodes []string
				for _, node := range d.Edits.DeviceNodes {
					nodes = append(nodes, strings.TrimPrefix(node.HostPath, "/dev/"))
				}
				got = append(got, strings.Join(nodes, " "))
			}
			slices.Sort(got)
			if !slices.Equal(got, test.want) || len(snapshot.Problems) > 0 {
				t.Errorf("got %q, want %q; %v", got, test.want, snapshot.Problems)
			}
		})
	}
}

// A file that is not a device node is never a node of a device.
func TestNoNode(t *testing.T) {
	fsys := fstest.MapFS{
		"etc/hostname":   {Data: []byte("node\n")},
		"etc/empty":      {},
		"dev/pipe":       {Mode: fs.ModeNamedPipe},
		"dev/log":        {Mode: fs.ModeSocket},
		"dev/shm/a":      {Data: []byte("a")},
		"dev/port":       {Mode: fs.ModeDevice | fs.ModeCharDevice},
		"dev/full/port":  {Mode: fs.ModeDevice | fs.ModeCharDevice},
		"dev/full/pipe":  {Mode: fs.ModeNamedPipe},
		"dev/full/notes": {Data: []byte("a")},
	}
	for path, healthy := range map[string]bool{
		"/etc/hostname": false, "/etc/empty": false, "/dev/pipe": false, "/dev/log": false, "/dev/shm/a": false,
		"/dev/port": true, "/dev/full": true,
	} {
		s := scanPaths(fsys, discovery.PathGroup{Paths: []discovery.HostPath{{Path: path}}})
		if len(s.Devices) != 1 || (s.Devices[0].Health.Status == discovery.Healthy) != healthy || (len(s.Problems) == 0) != healthy {
			t.Fatalf("%s: %+v, problems %v", path, s.Devices, s.Problems)
		}
		if nodes := len(s.Devices[0].Edits.DeviceNodes); (nodes == 1) != healthy {
			t.Errorf("%s: %d nodes", path, nodes)
		}
		if !healthy && !strings.Contains(s.Problems[0].Error(), path+": no device node") {
			t.Errorf("%s: %v", path, s.Problems)
		}
		mounted := scanPaths(fsys, discovery.PathGroup{Paths: []discovery.HostPath{{Path: path, Mount: true}}})
		if len(mounted.Devices) != 1 || len(mounted.Problems) > 0 {
			t.Errorf("%s mounted: problems %v", path, mounted.Problems)
		}
	}
}

// Each unit contains all matches, and no other device has them. The name of a unit stays the same
// when there are more matches.
func TestUnits(t *testing.T) {
	fsys := fstest.MapFS{"dev/a0": {}}
	patterns := []discovery.HostPath{{Path: "/dev/a*"}, {Path: "/dev/a0"}, {Path: "/dev/b", Optional: true}}
	units := discovery.PathGroup{Units: 2, Paths: patterns}
	before := scanPaths(fsys, units).Devices
	fsys["dev/a1"], fsys["dev/b"] = &fstest.MapFile{}, &fstest.MapFile{}
	s := scanPaths(fsys, units, discovery.PathGroup{Paths: []discovery.HostPath{{Path: "/dev/a1"}}})
	if len(before) != 2 || len(s.Devices) != 2 || len(s.Problems) != 1 || !strings.Contains(s.Problems[0].Error(), "/dev/a1 is in") {
		t.Fatalf("%d units, then %d; problems %v", len(before), len(s.Devices), s.Problems)
	}
	for i, d := range s.Devices {
		var nodes []string
		for _, node := range d.Edits.DeviceNodes {
			nodes = append(nodes, node.HostPath)
		}
		if want := []string{"/dev/a0", "/dev/a1", "/dev/b"}; !slices.Equal(nodes, want) || d.Name != before[i].Name {
			t.Errorf("%s, before %s: nodes %q, want %q", d.Name, before[i].Name, nodes, want)
		}
	}
	delete(fsys, "dev/a0")
	if left := scanPaths(fsys, units).Devices; len(left) > 0 {
		t.Errorf("without one of the paths: %+v", left)
	}
}

// A node that several devices contain belongs to none of them alone.
func TestCommonNodes(t *testing.T) {
	fsys := fstest.MapFS{"dev/a0": {}, "dev/a1": {}, "dev/b": {}}
	for name, test := range map[string]struct {
		group discovery.PathGroup
		want  string
	}{
		"one":   {discovery.PathGroup{Paths: []discovery.HostPath{{Path: "/dev/b"}}}, "/dev/b"},
		"limit": {discovery.PathGroup{Paths: []discovery.HostPath{{Path: "/dev/b", Limit: 2}, {Path: "/dev/a*"}}}, "/dev/a0 /dev/a1"},
		"count": {discovery.PathGroup{Count: 2, Paths: []discovery.HostPath{{Path: "/dev/b"}}}, ""},
		"units": {discovery.PathGroup{Units: 2, Paths: []discovery.HostPath{{Path: "/dev/b"}}}, ""},
	} {
		var own []string
		for _, d := range scanPaths(fsys, test.group).Devices {
			for _, node := range d.OwnNodes() {
				own = append(own, node.HostPath)
			}
		}
		slices.Sort(own)
		if got := strings.Join(own, " "); got != test.want {
			t.Errorf("%s: own nodes %q, want %q", name, got, test.want)
		}
	}
}

// The IDs equal the output of sha1sum for the number of the share and the paths, so the kubelet's
// checkpoint of the replaced plugin remains valid.
func TestIDs(t *testing.T) {
	fsys := fstest.MapFS{"dev/fuse": {}, "dev/snd/pcmC0D0c": {}, "dev/snd/controlC0": {}}
	for want, group := range map[string]discovery.PathGroup{
		"a68db766f638034740111848aafee2d2dcd6b642": {Paths: []discovery.HostPath{{Path: "/dev/fuse"}}},
		"a6a12fe5e9397cf9922cdcb98c53f0976ac80e3c": {Paths: []discovery.HostPath{{Path: "/dev/snd/pcmC0D0c"}, {Path: "/dev/snd/controlC0"}}, Count: 2},
	} {
		ids := scanPaths(fsys, group).Devices[0].PluginOffers[0].IDs
		if ids[len(ids)-1] != want {
			t.Errorf("%v: IDs %q, the last is to be %s", group, ids, want)
		}
	}
}

func usb(bus, number, serial string) fstest.MapFS {
	return fstest.MapFS{
		"sys/bus/usb/devices/1-4/idVendor":  {Data: []byte("1a86\n")},
		"sys/bus/usb/devices/1-4/idProduct": {Data: []byte("7523\n")},
		"sys/bus/usb/devices/1-4/serial":    {Data: []byte(serial)},
		"sys/bus/usb/devices/1-4/busnum":    {Data: []byte(bus)},
		"sys/bus/usb/devices/1-4/devnum":    {Data: []byte(number)},
		"dev/bus/usb/001/002":               {},
		"dev/bus/usb/001/003":               {},
	}
}

// A USB device that is plugged in again has another number, and so another ID in the device plugin
// API. In DRA the name stays the same, because it depends on the USB port.
func TestPluggedInAgain(t *testing.T) {
	group := discovery.PathGroup{USB: []discovery.USBID{{Vendor: "1a86", Product: "7523"}}}
	before, after := scanPaths(usb("1", "2", "A"), group).Devices[0], scanPaths(usb("1", "3", "B"), group).Devices[0]
	if before.Name != after.Name || before.Identity != "A" || after.Identity != "B" {
		t.Errorf("%s of serial %s is %s of serial %s now", before.Name, before.Identity, after.Name, after.Identity)
	}
	if node := after.Edits.DeviceNodes[0]; node.HostPath != "/dev/bus/usb/001/003" || after.PluginOffers[0].IDs[0] == before.PluginOffers[0].IDs[0] {
		t.Errorf("node %s, ID %s", node.HostPath, after.PluginOffers[0].IDs[0])
	}
}

// FuzzUSB checks that no serial number or bus address leads to an invalid device, or to a node
// outside of the bus directory.
func FuzzUSB(f *testing.F) {
	f.Add("1", "2", "A")
	f.Add("001", "0x10", "\x00")
	f.Add("-1", "../../sda", strings.Repeat("ä", 99))
	f.Fuzz(func(t *testing.T, bus, number, serial string) {
		for _, d := range scanPaths(usb(bus, number, serial), discovery.PathGroup{USB: []discovery.USBID{{Vendor: "1a86", Product: "7523"}}}).Devices {
			if err := d.Validate(); err != nil {
				t.Error(err)
			}
			for _, node := range d.Edits.DeviceNodes {
				if !strings.HasPrefix(node.HostPath, "/dev/bus/usb/") || strings.Contains(node.HostPath, "..") {
					t.Errorf("node %s", node.HostPath)
				}
			}
		}
	})
}

// noDirectory is a host with an unreadable directory.
type noDirectory struct {
	fs.FS

	name string
}

func (f noDirectory) ReadDir(name string) ([]fs.DirEntry, error) {
	if name == f.name {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	return fs.ReadDir(f.FS, name)
}

// If a directory is unreadable, its devices are not gone. The same applies to an unreadable USB
// bus.
func TestUnreadable(t *testing.T) {
	whole := usb("1", "2", "A")
	whole["dev/serial/port"] = &fstest.MapFile{}
	groups := []discovery.PathGroup{{Paths: []discovery.HostPath{{Path: "/dev/serial/p*"}}}, {USB: []discovery.USBID{{Vendor: "1a86", Product: "7523"}}}}
	rescan := func(fsys fs.FS, last *scan.Findings) *scan.Findings {
		host := &discovery.Host{FS: fsys, Paths: []discovery.PathResource{{Name: "example.com/a", Groups: groups}}}
		return scan.RescanHost(host, []*discovery.Family{paths.Family}, last)
	}
	last := rescan(whole, nil)
	before := last.Snapshot()
	for _, dir := range []string{"dev/serial", "sys/bus/usb/devices"} {
		host := noDirectory{whole, dir}
		after := rescan(host, last).Snapshot()
		if len(before.Devices) != 2 || len(after.Devices) != 2 || len(after.Problems) != 1 {
			t.Errorf("%s: %d devices of %d, problems %v", dir, len(after.Devices), len(before.Devices), after.Problems)
		}
	}
	delete(whole, "dev/serial/port")
	if after := rescan(whole, last).Snapshot(); len(after.Devices) != 1 {
		t.Errorf("the port is gone, and there are %d devices", len(after.Devices))
	}
}

func TestGrant(t *testing.T) {
	group := discovery.PathGroup{USB: []discovery.USBID{{Vendor: "1a86", Product: "7523"}}}
	given := append(scanPaths(usb("1", "2", "A"), group).Devices, scanPaths(usb("1", "3", "A"), group).Devices...)
	got := paths.Family.Grant(given, discovery.Grant{Resource: "kubevirt.io/usb-key.a"}).Env
	if want := []string{"USB_RESOURCE_KUBEVIRT_IO_USB-KEY_A=1:2,1:3"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	units := scanPaths(fstest.MapFS{}, discovery.PathGroup{Units: 12, UnitEnv: "UNITS"}).Devices
	got = paths.Family.Grant([]discovery.Device{units[0], units[2]}, discovery.Grant{API: discovery.ModeDRA}).Env
	if want := []string{"UNITS=0,10"}; !slices.Equal(got, want) { // in name order, 10 comes before 2
		t.Errorf("got %q, want %q", got, want)
	}
	if got := paths.Family.Grant(given, discovery.Grant{API: discovery.ModeDRA, Resource: "kubevirt.io/usb-key.a"}).Env; len(got) > 0 {
		t.Errorf("without a resource: got %q", got)
	}
}
