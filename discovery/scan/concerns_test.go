package scan

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// An event makes a family scan invalid only if the scan may depend on the device of the event.
func TestSeesDeviceOf(t *testing.T) {
	const port = "sys/devices/pci0000:00/0000:00:01.0"
	const physical, virtual, other = port + "/0000:03:00.0", port + "/0000:03:10.0", "sys/devices/pci0000:00/0000:00:02.0/0000:04:00.0"
	for name, test := range map[string]struct {
		reads string // a file or a link
		event Uevent
		want  bool
	}{
		"a function":                          {physical + "/vendor", Uevent{Path: physical, Subsystem: "pci"}, true},
		"another function":                    {physical + "/vendor", Uevent{Path: other + "/net/eth0", Subsystem: "net"}, false},
		"a device below it":                   {physical + "/vendor", Uevent{Path: physical + "/net/eth0/queues/rx-0", Subsystem: "queues"}, true},
		"the port above it":                   {physical + "/vendor", Uevent{Path: port, Subsystem: "pci"}, true},
		"a virtual function that it has":      {physical + "/virtfn0", Uevent{Path: virtual, Subsystem: "pci"}, true},
		"its port, of which a width was read": {port + "/max_link_width", Uevent{Path: physical + "/net/eth0", Subsystem: "net"}, true},
		"a device of a class":                 {"sys/class/misc/kvm", Uevent{Path: "sys/devices/virtual/misc/kvm", Subsystem: "misc"}, true},
		"another of that class":               {"sys/class/misc/kvm", Uevent{Path: "sys/devices/virtual/misc/tun", Subsystem: "misc"}, false},
		"a file of a device of a class":       {"sys/class/net/bond0/master", Uevent{Path: "sys/devices/virtual/net/bond0", Subsystem: "net"}, true},
		"the list of a class":                 {"sys/class/misc", Uevent{Path: "sys/devices/virtual/misc/tun", Subsystem: "misc"}, true},
		"the list of classes":                 {"sys/class", Uevent{Path: "sys/devices/virtual/misc/tun", Subsystem: "misc"}, false},
		"a class in the list of classes":      {"sys/class", Uevent{Path: "sys/class/accel", Subsystem: "class"}, true},
		"a device of a bus":                   {"sys/bus/dsa/devices/wq0.0", Uevent{Path: "sys/devices/platform/dsa0/wq0.0", Subsystem: "dsa"}, true},
		"a driver's devices":                  {"sys/bus/pci/drivers/x/0000:04:00.0", Uevent{Path: other, Subsystem: "pci"}, true},
		"the name that an interface had":      {"sys/class/net/eth0", Uevent{Path: other + "/net/lan0", OldPath: other + "/net/eth0", Subsystem: "net"}, true},
		"where it was with that name":         {"sys/devices/virtual/net/br0/type", Uevent{Path: "sys/devices/virtual/net/br1", OldPath: "sys/devices/virtual/net/br0", Subsystem: "net"}, true},
		"an IOMMU group":                      {"sys/kernel/iommu_groups/7/devices", Uevent{Path: other, Subsystem: "pci"}, true},
		"an IOMMU group, and no member":       {"sys/kernel/iommu_groups/7/devices", Uevent{Path: other + "/net/eth0", Subsystem: "net"}, false},
		"a module":                            {"sys/module/nvidia/version", Uevent{Path: "sys/module/nvidia", Subsystem: "module"}, true},
		"another module":                      {"sys/module/nvidia/version", Uevent{Path: "sys/module/nvidia_uvm", Subsystem: "module"}, false},
		"a device number":                     {"sys/dev/char/1:3", Uevent{Path: "sys/devices/virtual/mem/null", Subsystem: "mem", Node: "dev/null"}, true},
		"a node":                              {"dev/kvm", Uevent{Path: "sys/devices/virtual/misc/kvm", Subsystem: "misc", Node: "dev/kvm"}, true},
		"another node":                        {"dev/kvm", Uevent{Path: "sys/devices/virtual/mem/null", Subsystem: "mem", Node: "dev/null"}, false},
		"the list of nodes":                   {"dev", Uevent{Path: "sys/devices/x/tty0", Subsystem: "tty", Node: "dev/tty0"}, true},
		"a directory of nodes":                {"dev/dri/card0", Uevent{Path: "sys/devices/x/drm/card0", Subsystem: "drm", Node: "dev/dri/card0"}, true},
		"a file that has no events":           {"proc/devices", Uevent{Path: other, Subsystem: "pci"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			traced, _ := newTrace(&discovery.Host{FS: fstest.MapFS{}})
			_, _ = traced.Open(test.reads)
			steps, _ := traced.done(nil)
			l := familyScan{steps: steps, places: placesOf(nil, traced)}
			if got := l.seesDeviceOf(test.event); got != test.want {
				t.Errorf("a look that read %s depends on %+v: %t, want %t", test.reads, test.event, got, test.want)
			}
		})
	}
	l := familyScan{places: placesOf([]sysfs.Device{sysfs.At(nil, other)})}
	if !l.seesDeviceOf(Uevent{Path: other, Subsystem: "pci"}) || l.seesDeviceOf(Uevent{Path: virtual, Subsystem: "pci"}) {
		t.Error("a look does not depend on the devices that the family matches, and only on these")
	}
}

// An event about a device of no family causes no read of the host, and does not delay the
// comparison at the interval.
func TestWatchIgnoresDevicesOfNoFamily(t *testing.T) {
	watchQuietly(t, func(w *quietly) {
		for _, e := range []Uevent{
			{Path: "sys/devices/virtual/mem/null", Subsystem: "mem", Node: "dev/null"},
			{Path: "sys/devices/virtual/net/veth0", Subsystem: "net"},
			{Path: "sys/devices/virtual/net/veth0/queues/rx-0", Subsystem: "queues"},
			{Path: "sys/devices/pci0000:00/0000:00:1f.2/ata1/host0/block/sda", Subsystem: "block", Node: "dev/sda"},
		} {
			w.host.asked.Store(0)
			Changes{Uevents: []Uevent{e}}.Send(w.events)
			if published, _ := w.pass(time.Second); published != 0 || w.host.asked.Load() != 0 {
				t.Errorf("%+v: %d published, %d reads of the host; want none", e, published, w.host.asked.Load())
			}
		}
		looks := w.looks
		for range 90 {
			Changes{Uevents: []Uevent{{Path: "sys/devices/virtual/mem/null", Subsystem: "mem"}}}.Send(w.events)
			w.pass(time.Second)
		}
		if w.looks != looks+3 {
			t.Errorf("%d looks in 90 s of such events; want 3, at the interval", w.looks-looks)
		}
		Changes{Uevents: []Uevent{{Path: "sys/devices/pci0000:00/0000:03:00.0", Subsystem: "pci"}}}.Send(w.events)
		if published, _ := w.pass(time.Second); published != 1 {
			t.Errorf("%d published after an event of a device; want 1", published)
		}
	})
}

// After an event that concerns one family, the watch reads only this family, and the families of
// leftovers whose set of devices has changed.
func TestWatchReadsTheFamilyThatAnEventConcerns(t *testing.T) {
	const dir = "sys/devices/pci0000:00/"
	link := func(to string) *fstest.MapFile {
		return &fstest.MapFile{Data: []byte(to), Mode: fs.ModeSymlink}
	}
	host := &counted{MapFS: fstest.MapFS{}}
	var files []string
	for _, name := range []string{"a/0000:00:01.0", "b/0000:00:02.0", "c/0000:00:03.0", "c/0000:00:04.0"} {
		class, address, _ := strings.Cut(name, "/")
		vendor := map[string]string{"a": "000a", "b": "000b", "c": "000c"}[class]
		host.MapFS["sys/bus/pci/devices/"+address] = link("../../../devices/pci0000:00/" + address)
		host.MapFS[dir+address+"/vendor"] = &fstest.MapFile{Data: []byte("0x" + vendor + "\n")}
		host.MapFS[dir+address+"/device"] = &fstest.MapFile{Data: []byte("0x0001\n")}
		host.MapFS[dir+address+"/class"] = &fstest.MapFile{Data: []byte("0x120000\n")}
		files = append(files, dir+address)
	}
	var mu sync.Mutex // families are read concurrently
	var read []string
	family := func(name string, f discovery.Family) *discovery.Family {
		f.Name, f.Doc = name, name
		f.Describe = func(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
			mu.Lock()
			read = append(read, name)
			mu.Unlock()
			for _, d := range found {
				if name == "b" && d.HasEntry("spoiled") {
					continue
				}
				if d.HasEntry("unreadable") {
					problems = append(problems, discovery.Problem{Device: discovery.DeviceName(d), Err: fs.ErrInvalid})
				}
				devices = append(devices, discovery.Device{Name: discovery.DeviceName(d), Source: d.Path, Attributes: discovery.Attributes{}})
			}
			return devices, problems
		}
		return &f
	}
	families := []*discovery.Family{
		family("a", discovery.Family{Match: []discovery.Match{{Bus: "pci", Vendor: "000a"}, {Class: "test"}}}), // the class of the events
		family("b", discovery.Family{Match: []discovery.Match{{Bus: "pci", Vendor: "000b"}}}),
		family("leftovers", discovery.Family{Match: []discovery.Match{{Bus: "pci"}}, Leftovers: true}),
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		events := make(chan Changes, 1)
		var last *discovery.Snapshot
		go Watch{Host: &discovery.Host{FS: host}, Families: families, Events: events, EventsArrive: func() bool { return true }}.Run(ctx, func(s *discovery.Snapshot) { last = s })
		after := func(changes Changes, change func()) string {
			synctest.Wait()
			mu.Lock()
			read = nil
			mu.Unlock()
			change()
			changes.Send(events)
			time.Sleep(3 * time.Second)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			slices.Sort(read)
			return strings.Join(read, " ")
		}
		at := func(function string) Changes {
			// An event of subsystem pci would concern all functions of the bus.
			return Changes{Uevents: []Uevent{{Path: function, Subsystem: "test"}}}
		}
		nothing := func() {}
		for _, step := range []struct {
			what    string
			changes Changes
			change  func()
			want    string
		}{
			{"everything", Changes{Everything: true}, nothing, "a b leftovers"},
			{"a device of a", at(files[0]), nothing, "a"},
			{"a device of leftovers", at(files[3]), nothing, "leftovers"},
			{"b leaves its device out", at(files[1]), func() { host.MapFS[files[1]+"/spoiled"] = &fstest.MapFile{} }, "b leftovers"},
			{"b has it again", at(files[1]), func() { delete(host.MapFS, files[1]+"/spoiled") }, "b leftovers"},
			{"a device that no family has read is removed", at("sys/devices/elsewhere"), func() {
				maps.DeleteFunc(host.MapFS, func(name string, _ *fstest.MapFile) bool { return strings.Contains(name, "0000:00:04.0") })
			}, "leftovers"},
			{"b has a problem", at(files[1]), func() { host.MapFS[files[1]+"/unreadable"] = &fstest.MapFile{} }, "b"},
			{"a device of a, while b has a problem", at(files[0]), nothing, "a"},
			{"the interval, while b has a problem", Changes{}, func() { time.Sleep(30 * time.Second) }, "b"},
		} {
			if got := after(step.changes, step.change); got != step.want {
				t.Errorf("%s: families %q are read; want %q", step.what, got, step.want)
			}
		}
		if len(last.Devices) != 3 {
			t.Errorf("got %v", last.Devices)
		}
	})
}

// Send keeps changes that wait in the channel, and replaces too many events by Everything.
func TestChangesAreSentTogether(t *testing.T) {
	events := make(chan Changes, 1)
	e := func(i int) Uevent { return Uevent{Path: fmt.Sprintf("sys/devices/%d", i), Subsystem: "test"} }
	for i := range 3 {
		Changes{Uevents: []Uevent{e(i)}}.Send(events)
	}
	if got := <-events; got.Everything || !slices.Equal(got.Uevents, []Uevent{e(0), e(1), e(2)}) {
		t.Errorf("three events: %+v", got)
	}
	Changes{Uevents: []Uevent{e(0)}}.Send(events)
	Changes{Everything: true}.Send(events)
	Changes{Uevents: []Uevent{e(1)}}.Send(events)
	if got := <-events; !got.Everything {
		t.Errorf("everything, and more: %+v", got)
	}
	for i := range maxUevents + 1 {
		Changes{Uevents: []Uevent{e(i)}}.Send(events)
	}
	if got := <-events; !got.Everything || len(got.Uevents) > 0 {
		t.Errorf("too many events: %d", len(got.Uevents))
	}
}

// The event of a device names the device. Any other event may concern everything.
func TestChangesOfAnEvent(t *testing.T) {
	text := func(lines ...string) []byte { return []byte(strings.Join(lines, "\x00") + "\x00") }
	for name, test := range map[string]struct {
		message []byte
		want    Changes
	}{
		"a node": {
			text("change@/devices/virtual/mem/null", "ACTION=change", "DEVPATH=/devices/virtual/mem/null", "SUBSYSTEM=mem", "SYNTH_UUID=0", "MAJOR=1", "MINOR=3", "DEVNAME=null", "DEVMODE=0666", "SEQNUM=1470"),
			Changes{Uevents: []Uevent{{Path: "sys/devices/virtual/mem/null", Subsystem: "mem", Node: "dev/null"}}},
		},
		"a new name": {
			text("move@/devices/virtual/net/lan1", "ACTION=move", "DEVPATH=/devices/virtual/net/lan1", "SUBSYSTEM=net", "DEVPATH_OLD=/devices/virtual/net/eth0", "INTERFACE=lan1", "IFINDEX=2", "SEQNUM=1471"),
			Changes{Uevents: []Uevent{{Path: "sys/devices/virtual/net/lan1", OldPath: "sys/devices/virtual/net/eth0", Subsystem: "net"}}},
		},
		"no subsystem": {text("add@/devices/x", "ACTION=add", "DEVPATH=/devices/x"), Changes{Everything: true}},
		"no path":      {text("add@", "ACTION=add", "SUBSYSTEM=pci"), Changes{Everything: true}},
		"garbage":      {[]byte("libudev\x00\xfe\xed"), Changes{Everything: true}},
		"nothing":      {nil, Changes{Everything: true}},
	} {
		if got := changesOf(ueventVariables(test.message)); got.Everything != test.want.Everything || !slices.Equal(got.Uevents, test.want.Uevents) {
			t.Errorf("%s: %+v; want %+v", name, got, test.want)
		}
	}
}

// A family of hardware network interfaces does not match the interfaces of pods, so events about
// these do not concern the family.
func TestMayMatch(t *testing.T) {
	const virtual, hardware = "sys/devices/virtual/net/", "sys/devices/pci0000:00/0000:03:00.0/net/"
	f := &discovery.Family{Match: []discovery.Match{{Class: "net", Hardware: true}, {Bus: "usb"}}}
	for e, want := range map[Uevent]bool{
		{Path: virtual + "veth0", Subsystem: "net"}:                             false,
		{Path: virtual + "eth1", OldPath: virtual + "veth0", Subsystem: "net"}:  false,
		{Path: hardware + "eth0", Subsystem: "net"}:                             true,
		{Path: hardware + "lan0", OldPath: hardware + "eth0", Subsystem: "net"}: true,
		{Path: "sys/devices/virtual/misc/kvm", Subsystem: "misc"}:               false,
		{Path: "sys/devices/pci0000:00/usb1/1-1", Subsystem: "usb"}:             true,
	} {
		if got := mayMatch(f, e); got != want {
			t.Errorf("%+v: %t, want %t", e, got, want)
		}
	}
	for path, want := range map[string]bool{virtual + "veth0": false, hardware + "eth0": true} {
		host := fstest.MapFS{path + "/type": {}}
		if got, err := selectsDevice(f.Match[0], sysfs.At(host, path)); got != want || err != nil {
			t.Errorf("%s is selected: %t, %v; want %t", path, got, err, want)
		}
	}
}
