package scan

import (
	"context"
	"io/fs"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// counted counts accesses to a host. A test may change the host between two calls of pass: every
// reader of the host loads a value that pass has stored.
type counted struct {
	fstest.MapFS

	slow   atomic.Int64 // duration of each open, in nanoseconds
	opened atomic.Int32
	asked  atomic.Int32 // the number of opens, stats and listings
}

func (c *counted) Open(name string) (fs.File, error) {
	c.asked.Add(1)
	c.opened.Add(1)
	time.Sleep(time.Duration(c.slow.Load()))
	return c.MapFS.Open(name)
}

func (c *counted) Stat(name string) (fs.FileInfo, error)  { return c.now().Stat(name) }
func (c *counted) Lstat(name string) (fs.FileInfo, error) { return c.now().Lstat(name) }
func (c *counted) ReadLink(name string) (string, error)   { return c.now().ReadLink(name) }

func (c *counted) ReadFile(name string) ([]byte, error) {
	c.asked.Add(1)
	c.opened.Add(1)
	return c.MapFS.ReadFile(name)
}

func (c *counted) ReadDir(name string) ([]fs.DirEntry, error) { return c.now().ReadDir(name) }

func (c *counted) now() fstest.MapFS {
	c.asked.Add(1)
	c.opened.Load()
	return c.MapFS
}

// quietHost returns a host with a PCI function that has a node, a sensor and an attribute of its
// driver.
func quietHost() *counted {
	const dir = "sys/devices/pci0000:00/0000:03:00.0/"
	file := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text + "\n")} }
	link := func(to string) *fstest.MapFile {
		return &fstest.MapFile{Data: []byte(to), Mode: fs.ModeSymlink}
	}
	return &counted{MapFS: fstest.MapFS{
		"sys/bus/pci/devices/0000:03:00.0": link("../../../devices/pci0000:00/0000:03:00.0"),
		dir + "modalias":                   file("pci:v00001E52d0000401Esv00000000sd00000000bc12sc00i00"),
		dir + "vendor":                     file("0x1e52"),
		dir + "device":                     file("0x401e"),
		dir + "class":                      file("0x120000"),
		dir + "firmware":                   file("1.0"),
		dir + "hwmon/hwmon1/temp1_input":   file("40000"),
		dir + "hwmon/hwmon1/temp1_crit":    file("90000"),
		dir + "numa_node":                  file("-1"),
		dir + "aer_dev_fatal":              file("TOTAL_ERR_FATAL 0"),
		"dev/one":                          file(""),
	}}
}

// quietFamily describes the function of quietHost.
var quietFamily = &discovery.Family{Name: "one", Match: []discovery.Match{{Bus: "pci", Vendor: "1e52"}}, Describe: func(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, f := range found {
		d, err := pci.DescribeFunction(host, f)
		firmware, _ := f.Text("firmware")
		d.Attributes.SetString("firmwareVersion", firmware)
		if !host.FileExists("/dev/one") {
			d.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionNodeMissing, Reason: "no node"}
		}
		devices, problems = append(devices, d), append(problems, discovery.Problems(d.Name, err)...)
	}
	return devices, problems
}}

// quietly is a host that is watched in a synctest bubble.
type quietly struct {
	host   *counted
	hears  atomic.Bool
	events chan Changes
	last   *discovery.Snapshot
	times  int // number of published snapshots
	looks  int
	took   time.Duration // of the last scan
}

func watchQuietly(t *testing.T, do func(w *quietly)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		w := &quietly{host: quietHost(), events: make(chan Changes, 1)}
		w.hears.Store(true)
		go Watch{
			Host: &discovery.Host{FS: w.host}, Families: []*discovery.Family{quietFamily}, Events: w.events, EventsArrive: w.hears.Load,
			Observe: func(s Result) { w.looks, w.took = w.looks+1, s.Took },
		}.Run(ctx, func(s *discovery.Snapshot) { w.last, w.times = s, w.times+1 })
		time.Sleep(time.Second)
		synctest.Wait()
		do(w)
		synctest.Wait()
	})
}

// pass lets time pass, and returns the number of published snapshots and the number of opened
// files.
func (w *quietly) pass(d time.Duration) (published, opened int) {
	times := w.times
	w.host.opened.Store(0)
	time.Sleep(d)
	synctest.Wait()
	return w.times - times, int(w.host.opened.Load())
}

// Without kernel events, the watch only compares files without events, and reads everything after
// ten intervals.
func TestWatchRestsWhileNothingHappens(t *testing.T) {
	watchQuietly(t, func(w *quietly) {
		looks := w.looks
		published, opened := w.pass(4 * 30 * time.Second)
		if published != 0 || w.looks != looks+4 {
			t.Errorf("%d published, %d looks; want none, and 4", published, w.looks-looks)
		}
		if opened/4 > 7 {
			t.Errorf("%d files opened in a look", opened/4)
		}
		if published, _ := w.pass(6 * 30 * time.Second); published != 1 {
			t.Errorf("%d published in five minutes; want 1", published)
		}
		w.hears.Store(false)
		if published, _ := w.pass(2 * 30 * time.Second); published != 2 {
			t.Errorf("%d published while nothing is heard; want 2", published)
		}
	})
}

// On a host where a scan of everything takes long, the next one follows later than after ten
// intervals.
func TestWatchRestsLongerAfterLongScans(t *testing.T) {
	watchQuietly(t, func(w *quietly) {
		w.host.slow.Store(int64(500 * time.Millisecond))
		w.events <- Changes{Everything: true}
		if published, _ := w.pass(29 * time.Second); published != 1 {
			t.Fatalf("%d published; want 1", published)
		}
		w.host.slow.Store(0)
		pause := 100 * w.took
		if pause < 6*time.Minute {
			t.Fatalf("the scan took %v", w.took)
		}
		if published, _ := w.pass(pause - 30*time.Second); published != 0 {
			t.Errorf("%d published before %v have passed; want none", published, pause)
		}
		if published, _ := w.pass(time.Minute); published != 1 {
			t.Errorf("%d published after %v; want 1", published, pause)
		}
	})
}

// While the time of /dev shows that no node was added, removed or replaced, the nodes are not read
// one by one.
func TestWatchComparesDirectoriesOfNodes(t *testing.T) {
	directory := func(age time.Duration) *fstest.MapFile {
		return &fstest.MapFile{Mode: fs.ModeDir | 0o755, ModTime: time.Now().Add(-age), Sys: &syscall.Stat_t{Ino: 2}}
	}
	for name, test := range map[string]struct {
		before, after time.Duration // age of the directory's time at the first comparison, and when the node is removed
		link          bool
		seen          bool
	}{
		"a removed node":                                {before: time.Hour, after: 0, seen: true},
		"a removed node behind a link":                  {before: time.Hour, after: time.Hour, link: true, seen: true},
		"an unchanged directory":                        {before: time.Hour, after: time.Hour},
		"a directory that changed during the last read": {before: -30 * time.Second, after: -30 * time.Second, seen: true},
	} {
		t.Run(name, func(t *testing.T) {
			watchQuietly(t, func(w *quietly) {
				now := time.Now()
				dev := func(age time.Duration) {
					w.host.MapFS["dev"] = directory(age + time.Since(now))
				}
				dev(test.before)
				if test.link {
					w.host.MapFS["dev/one"] = &fstest.MapFile{Data: []byte("../run/one"), Mode: fs.ModeSymlink}
					w.host.MapFS["run/one"] = &fstest.MapFile{}
				}
				w.pass(30 * time.Second)
				dev(test.after)
				delete(w.host.MapFS, "dev/one")
				if test.link {
					w.host.MapFS["dev/one"] = &fstest.MapFile{Data: []byte("../run/one"), Mode: fs.ModeSymlink}
					delete(w.host.MapFS, "run/one")
				}
				w.pass(30 * time.Second)
				if seen := w.last.Devices[0].Health.Key() == discovery.ConditionNodeMissing; seen != test.seen {
					t.Errorf("the missing node is seen: %v; want %v", seen, test.seen)
				}
			})
		})
	}
}

func TestCompletePause(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{
		0:               5 * time.Minute,
		3 * time.Second: 5 * time.Minute,
		6 * time.Second: 10 * time.Minute,
		time.Hour:       time.Hour,
	} {
		if got := completePause(30*time.Second, took); got != want {
			t.Errorf("after a scan of %v: %v; want %v", took, got, want)
		}
	}
}

// A change without an event is seen at the next interval, and a change with an event at once.
func TestWatchSeesWhatHasNoEvents(t *testing.T) {
	const dir = "sys/devices/pci0000:00/0000:03:00.0/"
	for name, test := range map[string]struct {
		file, text string // removed if empty
		want       func(d discovery.Device) bool
	}{
		"a sensor":             {dir + "hwmon/hwmon1/temp1_input", "95000", func(d discovery.Device) bool { return d.Health.Key() == discovery.ConditionOverTemperature }},
		"a node":               {"dev/one", "", func(d discovery.Device) bool { return d.Health.Key() == discovery.ConditionNodeMissing }},
		"a driver's attribute": {dir + "firmware", "1.1", func(d discovery.Device) bool { return d.Attributes.String("firmwareVersion") == "1.1" }},
		"a counter":            {dir + "aer_dev_fatal", "TOTAL_ERR_FATAL 1", func(d discovery.Device) bool { return d.Health.Key() == discovery.ConditionFatalErrors }},
	} {
		t.Run(name, func(t *testing.T) {
			watchQuietly(t, func(w *quietly) {
				w.pass(time.Minute)
				before := w.host.MapFS[test.file]
				delete(w.host.MapFS, test.file)
				if test.text != "" {
					w.host.MapFS[test.file] = &fstest.MapFile{Data: []byte(test.text + "\n")}
				}
				if published, _ := w.pass(30 * time.Second); published != 1 || !test.want(w.last.Devices[0]) {
					t.Errorf("%d published: %+v", published, w.last.Devices)
				}
				if delete(w.host.MapFS, test.file); before != nil {
					w.host.MapFS[test.file] = before
				}
				w.pass(30 * time.Second)
				if test.want(w.last.Devices[0]) {
					t.Errorf("afterwards: %+v", w.last.Devices)
				}
			})
		})
	}
	watchQuietly(t, func(w *quietly) {
		w.host.MapFS["sys/devices/pci0000:00/0000:03:00.0/numa_node"].Data = []byte("7\n")
		if published, _ := w.pass(time.Minute); published != 0 {
			t.Errorf("%d published before the event", published)
		}
		Changes{Everything: true}.Send(w.events)
		if published, _ := w.pass(time.Second); published != 1 || *w.last.Devices[0].Attributes["resource.kubernetes.io/numaNode"].IntValue != 7 {
			t.Errorf("%d published after the event: %+v", published, w.last.Devices)
		}
	})
}

// Changes of a sensor within the healthy range publish nothing.
func TestWatchLetsSensorsSpeak(t *testing.T) {
	watchQuietly(t, func(w *quietly) {
		for _, degrees := range []string{"41000", "42000", "89000"} {
			w.host.MapFS["sys/devices/pci0000:00/0000:03:00.0/hwmon/hwmon1/temp1_input"].Data = []byte(degrees)
			if published, _ := w.pass(30 * time.Second); published != 0 {
				t.Errorf("%s: %d published", degrees, published)
			}
		}
	})
}

// While a process has a function under vfio open, Linux before 6.6 sends no event about an unbind.
// The watch sees the unbind at the next interval.
func TestWatchSeesAnUnbindThatWaits(t *testing.T) {
	const link = "sys/devices/pci0000:00/0000:03:00.0/driver"
	watchQuietly(t, func(w *quietly) {
		w.host.MapFS[link] = &fstest.MapFile{Data: []byte("../../../bus/pci/drivers/vfio-pci"), Mode: fs.ModeSymlink}
		Changes{Uevents: []Uevent{{Path: "sys/devices/pci0000:00/0000:03:00.0", Subsystem: "pci"}}}.Send(w.events)
		if w.pass(time.Minute); w.last.Devices[0].Attributes.String("driver") != "vfio-pci" {
			t.Fatalf("bound: %+v", w.last.Devices)
		}
		delete(w.host.MapFS, link)
		if published, _ := w.pass(30 * time.Second); published != 1 || w.last.Devices[0].Attributes.String("driver") != "" {
			t.Errorf("unbound: %d published: %+v", published, w.last.Devices)
		}
	})
}

// Of the virtual functions of a physical function, the watch compares the first one at an interval,
// and all of them with everything else.
func TestWatchComparesOneVirtualFunction(t *testing.T) {
	watchQuietly(t, func(w *quietly) {
		const root = "sys/devices/pci0000:00/"
		file := func(function, name, text string) {
			w.host.MapFS[root+function+"/"+name] = &fstest.MapFile{Data: []byte(text + "\n")}
		}
		for _, function := range []string{"0000:03:00.1", "0000:03:00.2"} {
			w.host.MapFS["sys/bus/pci/devices/"+function] = &fstest.MapFile{Data: []byte("../../../devices/pci0000:00/" + function), Mode: fs.ModeSymlink}
			w.host.MapFS[root+function+"/physfn"] = &fstest.MapFile{Data: []byte("../0000:03:00.0"), Mode: fs.ModeSymlink}
			file(function, "modalias", "pci:v00001E52d0000401Esv00000000sd00000000bc12sc00i00")
			file(function, "aer_dev_fatal", "TOTAL_ERR_FATAL 0")
		}
		Changes{Everything: true}.Send(w.events)
		w.pass(time.Second)
		fatal := func() (names []string) {
			for _, d := range w.last.Devices {
				if d.Health.Key() == discovery.ConditionFatalErrors {
					names = append(names, d.Name)
				}
			}
			return names
		}
		file("0000:03:00.2", "aer_dev_fatal", "TOTAL_ERR_FATAL 1")
		if published, _ := w.pass(30 * time.Second); published != 0 {
			t.Errorf("%d published after a change of the second function", published)
		}
		file("0000:03:00.1", "aer_dev_fatal", "TOTAL_ERR_FATAL 1")
		if w.pass(30 * time.Second); len(fatal()) != 2 {
			t.Errorf("after a change of the first function, these have errors: %v", fatal())
		}
		file("0000:03:00.1", "aer_dev_fatal", "TOTAL_ERR_FATAL 0")
		w.pass(30 * time.Second)
		file("0000:03:00.2", "aer_dev_fatal", "TOTAL_ERR_FATAL 0")
		if w.pass(completeAfter * 30 * time.Second); len(fatal()) != 0 {
			t.Errorf("after everything was read, these have errors: %v", fatal())
		}
	})
}
