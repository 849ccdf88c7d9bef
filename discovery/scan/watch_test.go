package scan

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// widgets is a family for devices of class "widget". The label "unreadable" makes a device
// unreadable.
var widgets = &discovery.Family{
	Name: "widget", Doc: "Widgets", Match: []discovery.Match{{Class: "widget"}},
	Describe: func(_ *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
		for _, f := range found {
			d := discovery.Device{Name: discovery.DeviceName(f), Source: f.Path, Attributes: discovery.Attributes{}}
			if text, err := f.Text("label"); err == nil && text == "unreadable" {
				problems = append(problems, discovery.Problem{Device: d.Name, Err: errors.New("attribute label: input/output error")})
			} else if err == nil {
				d.Attributes.SetString("model", text)
			}
			devices = append(devices, d)
		}
		return devices, problems
	},
}

// widgetHost returns a host in a directory, with a widget for each label.
func widgetHost(t *testing.T, labels map[string]string) (*discovery.Host, string) {
	t.Helper()
	root := t.TempDir()
	for name, label := range labels {
		setLabel(t, root, name, label)
	}
	return &discovery.Host{FS: os.DirFS(root)}, root
}

func setLabel(t *testing.T, root, name, label string) {
	t.Helper()
	dir := filepath.Join(root, "sys/class/widget", name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "label"), []byte(label+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

// findingsIn returns the findings of a single look.
func findingsIn(l familyScan) *Findings { return findingsOf([]familyScan{l}) }

func TestMerge(t *testing.T) {
	host, root := widgetHost(t, map[string]string{"a": "first", "b": "second"})
	families := []*discovery.Family{widgets}
	first := RescanHost(host, families, nil)

	setLabel(t, root, "a", "unreadable")
	second := RescanHost(host, families, first)
	a, _ := second.Snapshot().Lookup("a")
	if a.Attributes.String("model") != "first" || a.Health.Status != discovery.Unknown || a.Health.Reason == "" {
		t.Errorf("unreadable: got model %q, health %+v; want the last description, Unknown and why", a.Attributes.String("model"), a.Health)
	}
	if b, _ := second.Snapshot().Lookup("b"); b.Health.Status != discovery.Healthy {
		t.Errorf("its neighbour: health %+v; want Healthy", b.Health)
	}

	// It stays unchanged for as long as the device cannot be read.
	third := RescanHost(host, families, second)
	if before, now := second.Snapshot(), third.Snapshot(); !discovery.SameSnapshots(before, now) {
		t.Errorf("a second scan of the same host differs: %v, %v", before.Devices, now.Devices)
	}

	setLabel(t, root, "a", "renamed")
	fourth := RescanHost(host, families, third)
	if a, _ := fourth.Snapshot().Lookup("a"); a.Attributes.String("model") != "renamed" || a.Health.Status != discovery.Healthy {
		t.Errorf("readable again: got model %q, health %+v", a.Attributes.String("model"), a.Health)
	}

	setLabel(t, root, "a", "unreadable")
	fifth := RescanHost(host, families, fourth)
	if err := os.RemoveAll(filepath.Join(root, "sys/class/widget/a")); err != nil {
		t.Fatal(err)
	}
	if _, there := RescanHost(host, families, fifth).Snapshot().Lookup("a"); there {
		t.Error("gone: the device is still there")
	}
}

// A device is not gone if the read of its physical device, its family or its list failed.
func TestMergeKeepsWhatCannotBeReached(t *testing.T) {
	host, _ := widgetHost(t, map[string]string{"a": "first"})
	part := discovery.Device{Name: "a-1", Family: "widget", Source: "sys/class/widget/a", PartOf: &discovery.Silicon{Name: "a"}}
	last := findingsIn(familyScan{Devices: []discovery.Device{part}})
	broken := errors.New("input/output error")
	for name, next := range map[string]familyScan{
		"silicon":                  {Problems: []discovery.Problem{{Device: "a", Err: broken}}},
		"family":                   {Problems: []discovery.Problem{{Device: "widget", Err: broken}}},
		"list":                     {Problems: []discovery.Problem{{Device: "/sys/class/widget", Err: broken}}},
		"taken for a whole":        {Devices: []discovery.Device{{Name: "a"}}, Problems: []discovery.Problem{{Device: "a", Err: broken}}},
		"itself":                   {Problems: []discovery.Problem{{Device: "a-1", Err: broken}}},
		"described without a fact": {Devices: []discovery.Device{{Name: "a-1"}}, Problems: []discovery.Problem{{Device: "a-1", Err: broken}}},
	} {
		t.Run(name, func(t *testing.T) {
			got := mergeFindings(host, last, findingsIn(next)).Snapshot().Devices
			if len(got) != 1 || got[0].Name != "a-1" || got[0].PartOf == nil || got[0].Health.Status != discovery.Unknown {
				t.Errorf("got %+v; want the last description of a-1, Unknown", got)
			}
		})
	}
	for name, next := range map[string]familyScan{
		"nothing is wrong":    {},
		"another is":          {Problems: []discovery.Problem{{Device: "b", Err: broken}}},
		"it is a whole again": {Devices: []discovery.Device{{Name: "a"}}},
	} {
		t.Run(name, func(t *testing.T) {
			if _, there := mergeFindings(host, last, findingsIn(next)).Snapshot().Lookup("a-1"); there {
				t.Error("a-1 is kept")
			}
		})
	}
	whole := findingsIn(familyScan{Devices: []discovery.Device{{Name: "a", Family: "widget", Source: part.Source}}})
	divided := findingsIn(familyScan{Devices: []discovery.Device{part}, Problems: []discovery.Problem{{Device: "widget", Err: broken}}})
	if _, there := mergeFindings(host, whole, divided).Snapshot().Lookup("a"); there {
		t.Error("a whole is kept beside its parts")
	}
}

// A PCI function that its family no longer describes, because no driver is bound, is not gone, but
// unhealthy.
func TestMergeKeepsWhatHasNoDriver(t *testing.T) {
	const dir = "sys/devices/pci0000:00/0000:03:00.0"
	bound := fstest.MapFS{dir + "/vendor": {Data: []byte("0x1e52\n")}, dir + "/driver": {Data: []byte("../../../bus/pci/drivers/x"), Mode: fs.ModeSymlink}}
	unbound := fstest.MapFS{dir + "/vendor": bound[dir+"/vendor"]}
	one := discovery.Device{Name: "a", Source: dir, Attributes: discovery.Attributes{}, Readings: []discovery.Health{{Status: discovery.Unhealthy}}}
	one.Attributes.SetString("driver", "x")
	one.Attributes.SetString("model", "n150")
	part := discovery.Device{Name: "a-1", Source: dir, PartOf: &discovery.Silicon{Name: "a"}}
	virtual := discovery.Device{Name: "a-1", Source: dir, PartOf: &discovery.Silicon{Name: "physical"}}
	sibling := discovery.Device{Name: "a-2", Source: dir[:len(dir)-1] + "1", PartOf: &discovery.Silicon{Name: "physical"}}
	inGroup := func(d discovery.Device) discovery.Device {
		d.Edits.DeviceNodes = []*specs.DeviceNode{{Path: "/dev/vfio/7", HostPath: "/dev/vfio/7"}}
		return d
	}
	tests := map[string]struct {
		host       fstest.MapFS
		last, next []discovery.Device
		kept       []string
	}{
		"unbound":                   {unbound, []discovery.Device{one}, nil, []string{"a"}},
		"its parts":                 {unbound, []discovery.Device{part}, nil, []string{"a-1"}},
		"its family says so":        {unbound, []discovery.Device{part}, []discovery.Device{{Name: "a", Source: dir}}, nil},
		"another describes it":      {unbound, []discovery.Device{one}, []discovery.Device{{Name: "b", Source: dir}}, nil},
		"beside a virtual function": {unbound, []discovery.Device{virtual, sibling}, []discovery.Device{sibling}, []string{"a-1"}},
		"beside one of its group":   {unbound, []discovery.Device{inGroup(virtual), inGroup(sibling)}, []discovery.Device{inGroup(sibling)}, []string{"a-1"}},
		"beside its physical one":   {unbound, []discovery.Device{virtual}, []discovery.Device{{Name: "physical", Source: dir[:len(dir)-1] + "2"}}, []string{"a-1"}},
		"parts of it are described": {unbound, []discovery.Device{one}, []discovery.Device{{Name: "a-1", Source: dir + "/part", PartOf: &discovery.Silicon{Name: "a"}}}, nil},
		"an included function":      {unbound, []discovery.Device{one}, []discovery.Device{{Name: "b", Source: "sys/b", Includes: []string{dir}}}, nil},
		"bound, of no family":       {bound, []discovery.Device{one}, nil, nil},
		"gone":                      {fstest.MapFS{}, []discovery.Device{one}, nil, nil},
		"no PCI function, and left": {fstest.MapFS{"sys/class/widget/a/label": {}}, []discovery.Device{{Name: "a", Source: "sys/class/widget/a"}}, nil, nil},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			host := &discovery.Host{FS: test.host}
			last := mergeFindings(host, findingsIn(familyScan{Devices: test.last}), findingsIn(familyScan{Devices: test.next}))
			merged, again := last.Snapshot(), mergeFindings(host, last, findingsIn(familyScan{Devices: test.next})).Snapshot()
			if !discovery.SameSnapshots(merged, again) {
				t.Errorf("then %+v, and again %+v", merged.Devices, again.Devices)
			}
			var kept []string
			for _, d := range merged.Devices {
				if d.Health.Key() == discovery.ConditionDriverUnbound && d.Readings == nil && d.Attributes.String("driver") == "" {
					kept = append(kept, d.Name)
				}
			}
			if !slices.Equal(kept, test.kept) {
				t.Errorf("kept %q, want %q; all are %+v", kept, test.kept, merged.Devices)
			}
		})
	}
	stub := fstest.MapFS{dir + "/vendor": bound[dir+"/vendor"], dir + "/driver": {Data: []byte("../../../bus/pci/drivers/pci-stub"), Mode: fs.ModeSymlink}}
	got, _ := mergeFindings(&discovery.Host{FS: stub}, findingsIn(familyScan{Devices: []discovery.Device{one}}), findingsIn(familyScan{})).Snapshot().Lookup("a")
	if got.Health.Key() != discovery.ConditionDriverUnbound || !strings.Contains(got.Health.Reason, "pci-stub") || got.Attributes.String("driver") != "pci-stub" {
		t.Errorf("under pci-stub: %+v", got)
	}
	if one.Attributes.String("driver") != "x" {
		t.Error("the last description was modified")
	}
}

// wakingLinks is a host that fails the test when the attributes of a link are read, because the
// read would resume the function.
type wakingLinks struct {
	fstest.MapFS

	t *testing.T
}

func (f wakingLinks) Open(name string) (fs.File, error) {
	if strings.Contains(name, "_link_") {
		f.t.Errorf("reads %s, which resumes the function", name)
	}
	return f.MapFS.Open(name)
}

// A scan does not wake a function in D3cold; the function keeps the link attributes of the last
// snapshot. In D3hot the link is read, so that the attributes do not depend on whether the agent
// has seen the function awake. The same holds for a partition of the function.
func TestSuspendedFunctionKeepsItsLink(t *testing.T) {
	const dir = "sys/devices/pci0000:00/0000:03:00.0/"
	family := &discovery.Family{Name: "one", Match: []discovery.Match{{Bus: "pci", Vendor: "1e52"}}, Describe: func(host *discovery.Host, found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
		d, err := pci.DescribeFunction(host, found[0])
		part := d
		part.Name, part.Source, part.Attributes = "part", "sys/devices/platform/part", maps.Clone(d.Attributes)
		return []discovery.Device{part, d}, discovery.Problems(d.Name, err)
	}}
	var last *Findings
	for i, step := range []struct {
		status, state, width string
		want                 int64 // 0 means unknown
	}{
		{"suspended", "D3cold", "8", 0},
		{"suspended", "D3hot", "8", 8},
		{"suspended", "D3hot", "63", 8}, // the port is suspended too
		{"suspended", "D3cold", "4", 8},
		{"resuming", "D3cold", "4", 8},
		{"active", "D0", "4", 4},
		{"active", "D0", "63", 0},
		{"suspended", "D3cold", "4", 0},
	} {
		files := fstest.MapFS{
			"sys/bus/pci/devices/0000:03:00.0": {Data: []byte("../../../devices/pci0000:00/0000:03:00.0"), Mode: fs.ModeSymlink},
			dir + "modalias":                   {Data: []byte("pci:v00001E52d0000401Esv00000000sd00000000bc12sc00i00\n")},
			dir + "power/runtime_status":       {Data: []byte(step.status + "\n")},
			dir + "power_state":                {Data: []byte(step.state + "\n")},
			dir + "max_link_speed":             {Data: []byte("16.0 GT/s PCIe\n")},
			dir + "max_link_width":             {Data: []byte(step.width + "\n")},
		}
		host := &discovery.Host{FS: files}
		if step.state == "D3cold" {
			host.FS = wakingLinks{files, t}
		}
		last = RescanHost(host, []*discovery.Family{family}, last)
		s := last.Snapshot()
		for _, d := range s.Devices {
			width := ptr.Deref(d.Attributes["linkWidth"].IntValue, 0)
			if width != step.want || len(s.Problems) > 0 || len(s.Devices) != 2 {
				t.Errorf("step %d, %+v: device %s has %d lanes, %v", i, step, d.Name, width, s.Problems)
			}
		}
	}
}

// A whole device described beside its parts is kept with the parts, even if none can be read.
func TestMergeKeepsAWholeBesideItsParts(t *testing.T) {
	host, _ := widgetHost(t, map[string]string{"whole": "x", "part": "x"})
	silicon := &discovery.Silicon{Name: "whole", Counters: map[string]resource.Quantity{"parts": resource.MustParse("1")}}
	last := findingsIn(familyScan{Devices: []discovery.Device{
		{Name: "part", Source: "sys/class/widget/part", PartOf: silicon},
		{Name: "whole", Source: "sys/class/widget/whole", PartOf: silicon},
	}})
	unreadable := errors.New("input/output error")
	for name, next := range map[string]familyScan{
		"both":  {Problems: []discovery.Problem{{Device: "part", Err: unreadable}, {Device: "whole", Err: unreadable}}},
		"whole": {Devices: last.Snapshot().Devices[:1], Problems: []discovery.Problem{{Device: "whole", Err: unreadable}}},
	} {
		if got := mergeFindings(host, last, findingsIn(next)).Snapshot().Devices; len(got) != 2 || got[1].Health.Status != discovery.Unknown {
			t.Errorf("%s unreadable: %+v", name, got)
		}
	}
}

// paced is a watched host with the times of its scans.
type paced struct {
	events chan Changes

	mu    sync.Mutex // sleeps in a bubble are no synchronisation for the race detector
	began time.Time
	scans []time.Duration
}

// begin drops the scans so far, and measures time from now.
func (p *paced) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.scans, p.began = nil, time.Now()
}

func (p *paced) scanned(*discovery.Snapshot) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.scans = append(p.scans, time.Since(p.began))
}

// times returns the times of the scans.
func (p *paced) times() []time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.scans)
}

// pacing watches a host in a synctest bubble.
func pacing(t *testing.T, do func(p *paced)) {
	t.Helper()
	host, _ := widgetHost(t, map[string]string{"a": "first"})
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		p := &paced{events: make(chan Changes, 1)}
		watch := Watch{Host: host, Families: []*discovery.Family{widgets}, Interval: time.Hour, Events: p.events}
		go watch.Run(ctx, p.scanned)
		synctest.Wait()
		p.begin()
		do(p)
		synctest.Wait()
	})
}

// storm sends events with a gap after each, and then pauses.
func (p *paced) storm(events int, gap time.Duration) {
	for range events {
		Changes{Everything: true}.Send(p.events)
		time.Sleep(gap)
	}
	time.Sleep(10 * time.Second)
	synctest.Wait()
}

// The events of one device cause one scan, soon.
func TestWatchAnswersOneDeviceAtOnce(t *testing.T) {
	pacing(t, func(p *paced) {
		for range 3 {
			p.begin()
			p.storm(5, 5*time.Millisecond)
			if scans := p.times(); len(scans) != 1 || scans[0] > 50*time.Millisecond {
				t.Errorf("scans at %v; want one within 50 ms", scans)
			}
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if scans := p.times(); len(scans) != 2 {
			t.Errorf("%d scans after the interval; want 2", len(scans))
		}
	})
}

// A driver that binds a while after its device appeared is seen soon too.
func TestWatchAnswersStepsOfADevice(t *testing.T) {
	pacing(t, func(p *paced) {
		for range 20 {
			p.begin()
			Changes{Everything: true}.Send(p.events)
			time.Sleep(time.Second)
			synctest.Wait()
			if scans := p.times(); len(scans) != 1 || scans[0] > 400*time.Millisecond {
				t.Fatalf("scans at %v; want one within 400 ms", scans)
			}
		}
	})
}

// Many devices at once cause only a few scans, and the last scan comes soon after the end.
func TestWatchAnswersStormsSlowly(t *testing.T) {
	for gap, most := range map[time.Duration]int{time.Millisecond: 4, 10 * time.Millisecond: 7, 20 * time.Millisecond: 10} {
		pacing(t, func(p *paced) {
			p.storm(500, gap)
			last := 500 * gap
			if scans := p.times(); len(scans) > most || scans[0] > 300*time.Millisecond || scans[len(scans)-1] < last-gap || scans[len(scans)-1] > last+400*time.Millisecond {
				t.Errorf("500 events in %v: scans at %v; want at most %d, the first soon and the last soon after the end", last, scans, most)
			}
		})
	}
}

// A storm without end does not prevent scans.
func TestWatchDoesNotStarve(t *testing.T) {
	pacing(t, func(p *paced) {
		p.storm(2500, 10*time.Millisecond)
		scans := p.times()
		for i, at := range scans[1:] {
			if at-scans[i] > 2100*time.Millisecond {
				t.Errorf("scans at %v; want one in 2 s at least", scans)
			}
		}
	})
}

// Scans that take longer than the interval do not follow each other without a pause.
func TestWatchRestsAfterSlowScans(t *testing.T) {
	host, _ := widgetHost(t, map[string]string{"a": "first"})
	for took, want := range map[time.Duration]time.Duration{time.Second: 4 * time.Second, 3 * time.Second: 6 * time.Second, 9 * time.Second: 18 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			slow := *widgets
			slow.Describe = func(host *discovery.Host, found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
				time.Sleep(took)
				return widgets.Describe(host, found)
			}
			p := &paced{began: time.Now()}
			go Watch{Host: host, Families: []*discovery.Family{&slow}, Interval: 4 * time.Second}.Run(ctx, p.scanned)
			time.Sleep(took + 10*want)
			synctest.Wait()
			scans := p.times()
			if len(scans) != 11 {
				t.Fatalf("scans of %v ended at %v; want one every %v", took, scans, want)
			}
			for i, at := range scans {
				if at != took+time.Duration(i)*want {
					t.Errorf("scans of %v ended at %v; want one every %v", took, scans, want)
				}
			}
		})
	}
}

// A reader that keeps the first of two equal snapshots must not keep a second description of each
// device in memory.
func TestScansShareDescriptions(t *testing.T) {
	host, root := widgetHost(t, map[string]string{"a": "first", "b": "second"})
	scanner := newScanner(Watch{Host: host, Families: []*discovery.Family{widgets}})
	first, _ := scanner.scan(t.Context(), nil)
	setLabel(t, root, "b", "another")
	second, _ := scanner.scan(t.Context(), nil)
	attributes := func(s *discovery.Snapshot, name string) (text string, memory uintptr) {
		d, _ := s.Lookup(name)
		return d.Attributes.String("model"), reflect.ValueOf(d.Attributes).Pointer()
	}
	for name, want := range map[string]struct {
		text   string
		shared bool
	}{"a": {"first", true}, "b": {"another", false}} {
		_, before := attributes(first, name)
		text, after := attributes(second, name)
		if text != want.text || (before == after) != want.shared {
			t.Errorf("%s is %q, and shares its description with the scan before: %t; want %+v", name, text, before == after, want)
		}
	}
	if text, _ := attributes(first, "b"); text != "second" {
		t.Errorf("a scan changed the snapshot of the one before: %q", text)
	}
}

func TestWatchEndsWithItsContext(t *testing.T) {
	host, _ := widgetHost(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		Watch{Host: host, Families: []*discovery.Family{widgets}}.Run(ctx, func(*discovery.Snapshot) { cancel() })
	}()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("Run did not return when its context ended")
	}
}

func TestListenEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Listen(ctx, make(chan Changes, 1), nil); err != nil {
		t.Fatal(err)
	}
}

// A kernel event reaches the listener and names its device. Writing to a device's uevent file makes
// the kernel send an event.
func TestListen(t *testing.T) {
	const trigger = "/sys/class/mem/null/uevent"
	file, err := os.OpenFile(trigger, os.O_WRONLY, 0)
	if err != nil {
		t.Skipf("cannot make the kernel send an event: %v", err)
	}
	defer file.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events, ended := make(chan Changes, 1), make(chan error, 1)
	go func() { ended <- Listen(ctx, events, new(Recoveries)) }()
	for {
		if _, err := file.WriteString("change"); err != nil {
			t.Skipf("cannot make the kernel send an event: %v", err)
		}
		select {
		case changes := <-events:
			if slices.Contains(changes.Uevents, Uevent{Path: "sys/devices/virtual/mem/null", Subsystem: "mem", Node: "dev/null"}) {
				return
			}
		case err := <-ended:
			t.Fatal(err)
		case <-time.After(50 * time.Millisecond): // Listen may not have begun
		}
		if t.Context().Err() != nil {
			return
		}
	}
}

func TestScanLeavesOutFilesElsewhere(t *testing.T) {
	s := familyScan{}
	s.add([]discovery.Device{
		{Name: "good", Files: []discovery.HostFile{{Path: "/run/x/{resource}-good", Text: ""}}},
		{Name: "bad", Files: []discovery.HostFile{{Path: "/etc/{resource}-bad", Text: ""}}},
	}, &discovery.Family{Name: "x", FileDirs: []string{"/run/x"}})
	if len(s.Devices) != 1 || s.Devices[0].Name != "good" || len(s.Problems) != 1 || s.Problems[0].Device != "bad" {
		t.Errorf("got %v, %v; want only the device whose file is where the family says", s.Devices, s.Problems)
	}
}
