package scan

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// stuck is a host file system with files whose reads hang.
type stuck struct {
	mu     sync.Mutex
	files  fstest.MapFS
	blocks map[string]chan struct{} // by path: closed when the file answers again
	asked  map[string]int           // number of reads of blocked files
}

func (s *stuck) now() fstest.MapFS {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.files)
}

func (s *stuck) write(name, content string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.files[name] = &fstest.MapFile{Data: []byte(content + "\n")}
}

// block makes reads of a file hang until answer is called.
func (s *stuck) block(name string) (answer func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := make(chan struct{})
	s.blocks[name] = c
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.blocks, name)
		close(c)
	})
}

func (s *stuck) ask(name string) {
	s.mu.Lock()
	blocked := s.blocks[name]
	if blocked != nil {
		s.asked[name]++
	}
	s.mu.Unlock()
	if blocked != nil {
		<-blocked
	}
}

func (s *stuck) Open(name string) (fs.File, error) {
	f, err := s.now().Open(name)
	return &stuckFile{f, s, name}, err
}
func (s *stuck) Stat(name string) (fs.FileInfo, error) {
	s.ask("stat " + name)
	return s.now().Stat(name)
}
func (s *stuck) Lstat(name string) (fs.FileInfo, error) { return s.now().Lstat(name) }
func (s *stuck) ReadLink(name string) (string, error)   { return s.now().ReadLink(name) }
func (s *stuck) ReadDir(name string) ([]fs.DirEntry, error) {
	s.ask(name)
	return s.now().ReadDir(name)
}

type stuckFile struct {
	fs.File
	on   *stuck
	name string
}

func (f *stuckFile) Read(p []byte) (int, error) { f.on.ask(f.name); return f.File.Read(p) }

const pciDir = "sys/bus/pci/devices/"

// boards returns a family for the PCI functions of a vendor. The label of a function is the
// device's model.
func boards(name, vendor string) *discovery.Family {
	return &discovery.Family{
		Name: name, Doc: "Boards", Match: []discovery.Match{{Bus: "pci", Vendor: vendor}},
		Describe: func(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
			for _, function := range found {
				d, err := pci.DescribeFunction(host, function)
				label, labelErr := function.Text("label")
				if err == nil {
					err = labelErr
				}
				d.Attributes.SetString("model", label)
				devices = append(devices, d)
				problems = append(problems, discovery.Problems(d.Name, err)...)
			}
			return devices, problems
		},
	}
}

// rest returns a family of leftovers that matches all PCI functions with a driver.
func rest() *discovery.Family {
	f := boards("rest", "")
	f.Match, f.Leftovers = []discovery.Match{{Bus: "pci", Driver: "x"}}, true
	return f
}

const (
	gpu1, gpu2, nic, other = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0"
	label1                 = pciDir + gpu1 + "/label"
)

// machine returns a host with two GPUs, a network adapter, a board that belongs to no other family,
// and a widget.
func machine() *stuck {
	s := &stuck{files: fstest.MapFS{}, blocks: make(map[string]chan struct{}), asked: make(map[string]int)}
	for address, vendor := range map[string]string{gpu1: "1111", gpu2: "1111", nic: "2222", other: "3333"} {
		for file, content := range map[string]string{"vendor": "0x" + vendor, "device": "0x0001", "class": "0x030000", "label": "first"} {
			s.write(pciDir+address+"/"+file, content)
		}
		s.files[pciDir+address+"/driver"] = &fstest.MapFile{Data: []byte("../../../../bus/pci/drivers/x"), Mode: fs.ModeSymlink}
		s.files[pciDir+address+"/subsystem"] = &fstest.MapFile{Data: []byte("../../../../bus/pci"), Mode: fs.ModeSymlink}
	}
	s.write("sys/class/widget/a/label", "first")
	return s
}

// watched is a running Watch with its published snapshots.
type watched struct {
	t       *testing.T
	host    *stuck
	events  chan Changes
	start   time.Time
	mu      sync.Mutex
	last    *discovery.Snapshot
	settled *discovery.Snapshot
	count   int
}

// watchMachine watches a host in a synctest bubble. The test must call stop, and then unblock
// hanging reads.
func watchMachine(t *testing.T, host *stuck, families ...*discovery.Family) (w *watched, stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	w = &watched{t: t, host: host, events: make(chan Changes, 1), start: time.Now()}
	settler, ended := &Settler{}, make(chan struct{})
	go func() {
		defer close(ended)
		Watch{Host: &discovery.Host{FS: host}, Families: families, Events: w.events}.Run(ctx, func(s *discovery.Snapshot) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.last, w.count = s, w.count+1
			w.settled, _ = settler.SettleStates(s, time.Now())
		})
	}()
	return w, func() { cancel(); <-ended }
}

// at waits until a time after the start, and returns the published models by device name. "!" marks
// devices that could not be read, and "?" other devices with health Unknown.
func (w *watched) at(after time.Duration) map[string]string {
	time.Sleep(time.Until(w.start.Add(after)))
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.last == nil {
		return nil
	}
	models := make(map[string]string)
	for i, d := range w.last.Devices {
		model := d.Family + " " + d.Attributes.String("model")
		if d.Health.Status == discovery.Unknown {
			model += "!"
		}
		if w.settled.Devices[i].Health.Status == discovery.Unknown {
			model += "?"
		}
		models[strings.TrimPrefix(d.Name, "pci-0000-")] = model
	}
	return models
}

func (w *watched) problems() []discovery.Problem {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.last == nil {
		return nil
	}
	return w.last.Problems
}

func (w *watched) want(after time.Duration, want map[string]string) {
	w.t.Helper()
	if got := w.at(after); !maps.Equal(got, want) {
		w.t.Errorf("after %s: %v; want %v; problems %v", after, got, want, w.problems())
	}
}

// all returns the expected result of at for the machine, with changes in pairs of name and model:
// "" removes a device.
func all(changes ...string) map[string]string {
	said := map[string]string{"01-00-0": "gpu first", "02-00-0": "gpu first", "03-00-0": "nic first", "04-00-0": "rest first", "a": "widget first"}
	for i := 0; i < len(changes); i += 2 {
		said[changes[i]] = changes[i+1]
		if changes[i+1] == "" {
			delete(said, changes[i])
		}
	}
	return said
}

func machineFamilies() []*discovery.Family {
	return []*discovery.Family{rest(), boards("gpu", "1111"), boards("nic", "2222"), widgets}
}

// An agent that starts while a device hangs offers the other devices: those of other families after
// ten seconds, and then the family's other devices. The hanging file is read once, and no other
// family gets its device.
func TestWatchStartsWhileADeviceHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := machine()
		answer := host.block(label1)
		defer answer()
		w, stop := watchMachine(t, host, machineFamilies()...)
		defer stop()
		w.want(9*time.Second, nil)
		w.want(11*time.Second, all("01-00-0", ""))
		if problems := w.problems(); len(problems) == 0 || slices.ContainsFunc(problems, func(p discovery.Problem) bool { return p.Device != "pci-0000-01-00-0" }) {
			t.Errorf("problems %v", problems)
		}

		// Changes are seen at once.
		host.write(pciDir+nic+"/label", "second")
		host.write(pciDir+gpu2+"/label", "second")
		w.events <- Changes{Everything: true}
		w.want(12*time.Second, all("01-00-0", "", "02-00-0", "gpu second", "03-00-0", "nic second"))
		w.want(10*time.Minute, all("01-00-0", "", "02-00-0", "gpu second", "03-00-0", "nic second"))
		if n := host.asked[label1]; n != 1 {
			t.Errorf("what hangs was read %d times", n)
		}
		w.mu.Lock()
		if w.count > 25 {
			t.Errorf("%d scans in ten minutes", w.count)
		}
		w.mu.Unlock()

		answer()
		w.want(10*time.Minute+time.Second, all("02-00-0", "gpu second", "03-00-0", "nic second"))
	})
}

// A device that begins to hang keeps its last description, and becomes Unknown after the patience.
// Wherever the read hangs, no other device is affected.
func TestWatchOfADeviceThatHangs(t *testing.T) {
	for name, test := range map[string]struct {
		file    string
		suffers string
	}{
		"its family's file":     {label1, "01-00-0"},
		"the list needs it":     {pciDir + gpu1 + "/vendor", "01-00-0"},
		"its temperature":       {pciDir + gpu1 + "/hwmon/hwmon1/temp1_crit", "01-00-0"},
		"of no family":          {pciDir + other + "/label", "04-00-0"},
		"a list of a class":     {"sys/class/widget", "a"},
		"the file of no device": {pciDir + "0000:00:01.0/vendor", ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				host := machine()
				host.write(pciDir+gpu1+"/hwmon/hwmon1/temp1_crit", "100000")
				host.write(pciDir+"0000:00:01.0/vendor", "0x4444")
				w, stop := watchMachine(t, host, machineFamilies()...)
				defer stop()
				unread := func(state string) map[string]string {
					if test.suffers == "" {
						return all()
					}
					return all(test.suffers, all()[test.suffers]+state)
				}
				w.want(0, all())
				answer := host.block(test.file)
				defer answer()
				w.want(39*time.Second, all())
				w.want(41*time.Second, unread("!"))
				host.write(pciDir+nic+"/label", "second")
				w.events <- Changes{Everything: true}
				if got := w.at(42 * time.Second); got["03-00-0"] != "nic second" {
					t.Errorf("a change is not seen: %v", got)
				}
				host.write(pciDir+nic+"/label", "first")
				w.want(2*time.Minute, unread("!?"))
				if n := host.asked[test.file]; n != 1 {
					t.Errorf("what hangs was read %d times", n)
				}
				answer()
				if got := w.at(2*time.Minute + time.Second); strings.Contains(fmt.Sprint(got), "!") {
					t.Errorf("after it has answered: %v", got)
				}
				w.want(4*time.Minute, all())
			})
		})
	}
}

// A read that ends after half a minute has no lasting effect.
func TestWatchOfADeviceThatIsSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := machine()
		answer := host.block(label1)
		time.AfterFunc(30*time.Second, answer)
		w, stop := watchMachine(t, host, machineFamilies()...)
		defer stop()
		w.want(29*time.Second, all("01-00-0", ""))
		w.want(31*time.Second, all())
	})
}

// All devices of a driver may hang, one after the other.
func TestWatchOfADriverThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := machine()
		w, stop := watchMachine(t, host, machineFamilies()...)
		defer stop()
		w.want(0, all())
		for _, address := range []string{gpu1, gpu2} {
			defer host.block(pciDir + address + "/label")()
		}
		both := all("01-00-0", "gpu first!", "02-00-0", "gpu first!")
		w.want(41*time.Second, both)
		w.want(51*time.Second, both)
		w.want(2*time.Minute, all("01-00-0", "gpu first!?", "02-00-0", "gpu first!?"))
	})
}

// If several devices of a driver hang, their family is delayed no longer than by one device: the
// others are offered after the same ten seconds. Each hanging file is read once.
func TestWatchOfSeveralDevicesThatHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := machine()
		want := all()
		var files []string
		for i := range 8 {
			address := fmt.Sprintf("0000:1%d:00.0", i)
			for file, content := range map[string]string{"vendor": "0x1111", "device": "0x0001", "class": "0x030000", "label": "first"} {
				host.write(pciDir+address+"/"+file, content)
			}
			if i == 7 {
				want["17-00-0"] = "gpu first"
				break
			}
			files = append(files, pciDir+address+"/label")
			defer host.block(files[i])()
		}
		w, stop := watchMachine(t, host, machineFamilies()...)
		defer stop()
		w.want(11*time.Second, want)
		w.want(10*time.Minute, want)
		for _, file := range files {
			if n := host.asked[file]; n != 1 {
				t.Errorf("%s was read %d times", file, n)
			}
		}
	})
}

// A slow family without a single hanging file is read once at a time. Its devices keep their last
// description in the meantime, leftovers get none of its devices, and its late answer is used.
func TestWatchOfAFamilyThatIsSlow(t *testing.T) {
	for _, start := range []bool{true, false} {
		t.Run(fmt.Sprintf("from the start: %t", start), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				host := machine()
				gpus := boards("gpu", "1111")
				describe := gpus.Describe
				block, asked := make(chan struct{}), 0
				gpus.Describe = func(host *discovery.Host, found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
					if asked++; start || asked > 1 {
						<-block
					}
					return describe(host, found)
				}
				w, stop := watchMachine(t, host, rest(), gpus, boards("nic", "2222"), widgets)
				defer stop()
				first, want := 1, all("01-00-0", "", "02-00-0", "")
				if !start {
					first, want = 2, all("01-00-0", "gpu first!", "02-00-0", "gpu first!")
				}
				w.want(41*time.Second, want)
				if !slices.ContainsFunc(w.problems(), func(p discovery.Problem) bool { return p.Device == "gpu" }) {
					t.Errorf("problems %v", w.problems())
				}
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				if asked != first {
					t.Errorf("described %d times before it answered; want %d", asked, first)
				}
				close(block)
				if got := w.at(time.Since(w.start) + time.Second); got["01-00-0"] != "gpu first" && got["01-00-0"] != "gpu first?" {
					t.Errorf("its answer is not used: %v", got)
				}
				w.want(time.Since(w.start)+time.Minute, all())
			})
		})
	}
}

// Several families that need longer than the patience are read once each: a late answer of one does
// not cause another read of the others.
func TestWatchOfSeveralFamiliesThatAreSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		read := make(map[string]int)
		slow := func(f discovery.Family, takes time.Duration) *discovery.Family {
			describe := f.Describe
			f.Describe = func(host *discovery.Host, found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
				mu.Lock()
				read[f.Name]++
				mu.Unlock()
				time.Sleep(takes)
				return describe(host, found)
			}
			return &f
		}
		families := []*discovery.Family{slow(*boards("gpu", "1111"), 12*time.Second), slow(*boards("nic", "2222"), 14*time.Second), slow(*widgets, time.Second)}
		ctx, cancel := context.WithCancel(t.Context())
		defer time.Sleep(time.Minute) // until all reads have ended
		defer cancel()
		go Watch{Host: &discovery.Host{FS: machine()}, Families: families, EventsArrive: func() bool { return true }}.Run(ctx, func(*discovery.Snapshot) {})
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if want := map[string]int{"gpu": 1, "nic": 1, "widget": 1}; !maps.Equal(read, want) {
			t.Errorf("read %v; want %v", read, want)
		}
	})
}

// A file that always answers just after the time limit causes a late answer in each scan. The scans
// do not follow each other without a pause.
func TestWatchOfAFileThatIsAlwaysLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var took atomic.Int64
		watch := Watch{
			Host: &discovery.Host{FS: lateFile{machine(), label1, 11 * time.Second}}, Families: machineFamilies(),
			EventsArrive: func() bool { return true }, Observe: func(s Result) { took.Add(int64(s.Took)) },
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer time.Sleep(time.Minute) // until all reads have ended
		defer cancel()
		go watch.Run(ctx, func(*discovery.Snapshot) {})
		time.Sleep(time.Hour)
		if share := time.Duration(took.Load()).Hours(); share > 0.5 {
			t.Errorf("scans take %.2f of the time", share)
		}
	})
}

// lateFile is a host file system with one file whose reads take a while.
type lateFile struct {
	*stuck
	name string
	took time.Duration
}

func (l lateFile) Open(name string) (fs.File, error) {
	f, err := l.stuck.Open(name)
	if err == nil && name == l.name {
		time.Sleep(l.took)
	}
	return f, err
}

// A device that is removed while its family hangs is gone.
func TestWatchOfADeviceThatGoesWhileItsFamilyHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := machine()
		w, stop := watchMachine(t, host, machineFamilies()...)
		defer stop()
		w.want(0, all())
		defer host.block(label1)()
		w.want(41*time.Second, all("01-00-0", "gpu first!"))
		host.mu.Lock()
		maps.DeleteFunc(host.files, func(name string, _ *fstest.MapFile) bool { return strings.HasPrefix(name, pciDir+gpu1+"/") })
		host.mu.Unlock()
		w.events <- Changes{Everything: true}
		w.want(42*time.Second, all("01-00-0", ""))

		// The check whether a device exists may itself hang.
		host.mu.Lock()
		delete(host.files, "sys/class/widget/a/label")
		host.mu.Unlock()
		defer host.block("stat sys/class/widget/a")()
		defer host.block("sys/class/widget")()
		w.events <- Changes{Everything: true}
		if got := w.at(2 * time.Minute); got["a"] != "widget first!?" {
			t.Errorf("a device of which nothing can be seen: %v", got)
		}
	})
}

// Nothing is published before the first successful read.
func TestWatchOfAHostThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := machine()
		answer := host.block("sys/class/widget/a/label")
		w, stop := watchMachine(t, host, widgets)
		w.want(11*time.Second, map[string]string{"a": "widget "})
		stop() // although the read has not ended
		answer()
	})
}

// A single scan ends too. Problems name the hanging device, or the family and the file that it
// waits for.
func TestOnceOfAHostThatHangs(t *testing.T) {
	for name, test := range map[string]struct {
		files   []string
		want    string // devices
		problem string
		took    time.Duration
	}{
		"nothing":           {nil, "a 01-00-0 02-00-0 03-00-0 04-00-0", "", 0},
		"a device":          {[]string{label1}, "a 02-00-0 03-00-0 04-00-0", "pci-0000-01-00-0: read /" + label1 + ": does not answer", 10 * time.Second},
		"all of a family":   {[]string{label1, pciDir + gpu2 + "/label"}, "a 03-00-0 04-00-0", "pci-0000-02-00-0: read /" + pciDir + gpu2 + "/label: does not answer", 10 * time.Second},
		"one after another": {[]string{label1, pciDir + gpu2 + "/label", pciDir + gpu2 + "/vendor"}, "a 03-00-0 04-00-0", "pci-0000-02-00-0: read /" + pciDir + gpu2 + "/vendor: does not answer", 20 * time.Second},
		"a list":            {[]string{"sys/class/widget"}, "01-00-0 02-00-0 03-00-0 04-00-0", "readdir /sys/class/widget: does not answer", 10 * time.Second},
		"no one file":       {[]string{"slow"}, "a 01-00-0 02-00-0 03-00-0 04-00-0", "slow: no answer in 10s", 10 * time.Second},
		"all of a bus":      {[]string{"sys/bus/pci/devices"}, "a", "readdir /sys/bus/pci/devices: does not answer", 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				host := machine()
				for _, file := range test.files {
					defer host.block(file)()
				}
				slow := *widgets
				slow.Name, slow.Describe = "slow", func(*discovery.Host, []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
					host.ask("slow")
					return nil, nil
				}
				families, start := append(machineFamilies(), &slow), time.Now()
				s, err := Watch{Host: &discovery.Host{FS: host}, Families: families}.ScanOnce(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				var names []string
				for _, d := range s.Devices {
					names = append(names, strings.TrimPrefix(d.Name, "pci-0000-"))
				}
				if got := strings.Join(names, " "); got != test.want || time.Since(start) != test.took {
					t.Errorf("after %s: %s; want %s after %s", time.Since(start), got, test.want, test.took)
				}
				if said := fmt.Sprint(s.Problems); !strings.Contains(said, test.problem) || test.problem == "" && len(s.Problems) > 0 {
					t.Errorf("problems %s; want %s", said, test.problem)
				}
			})
		})
	}
}

func TestOnceEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := machine()
		defer host.block(label1)()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if s, err := (Watch{Host: &discovery.Host{FS: host}, Families: machineFamilies()}).ScanOnce(ctx); err == nil {
			t.Errorf("found %v", s)
		}
	})
}
