package ondemand

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

const (
	whole     = "sys/cells/0"
	attribute = whole + "/divided"
)

// kernel divides a cell into a and b when "1" is written, and merges the parts when "0" is written.
type kernel struct {
	t   *testing.T
	dir string

	disk disk.FS // for the next manager; the operating system's if nil

	mu     sync.Mutex
	budget int           // writes until the agent is killed, -1 for any number
	refuse error         // the error of a write
	lazy   bool          // a write succeeds without effect
	slow   chan struct{} // a check for users of the cell blocks until it is closed
	hangs  chan struct{} // a write blocks until it is closed
	writes []string
	busy   error
}

var errKilled = errors.New("the agent was killed")

func newKernel(t *testing.T) *kernel {
	k := &kernel{t: t, dir: t.TempDir(), budget: -1}
	k.divide("0")
	return k
}

func (k *kernel) divide(value string) {
	for _, part := range []string{"a", "b"} {
		if err := os.RemoveAll(filepath.Join(k.dir, whole, part)); err != nil {
			k.t.Error(err)
		}
		if value == "1" {
			if err := os.MkdirAll(filepath.Join(k.dir, whole, part), 0o755); err != nil {
				k.t.Error(err)
			}
		}
	}
	if err := os.MkdirAll(filepath.Join(k.dir, whole), 0o755); err != nil {
		k.t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(k.dir, attribute), []byte(value+"\n"), 0o644); err != nil {
		k.t.Error(err)
	}
}

func (k *kernel) write(name, value string) error {
	k.mu.Lock()
	hangs := k.hangs
	k.mu.Unlock()
	if hangs != nil {
		<-hangs
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.budget == 0:
		return errKilled
	case k.refuse != nil:
		return k.refuse
	case name != attribute:
		return syscall.EINVAL
	}
	k.budget--
	k.writes = append(k.writes, value)
	if !k.lazy {
		k.divide(value)
	}
	return nil
}

func (k *kernel) looked(bool, ...sysfs.Device) error {
	k.mu.Lock()
	slow, busy := k.slow, k.busy
	k.mu.Unlock()
	if slow != nil {
		<-slow
	}
	return busy
}

// cells is a family that divides cells.
var cells = &discovery.Family{
	Name: "cells",
	Create: func(host *discovery.Host, tools discovery.Tools, m discovery.Creation) (discovery.Work, error) {
		return set(host, tools, m, "1")
	},
	Remove: func(host *discovery.Host, tools discovery.Tools, m discovery.Creation) (discovery.Work, error) {
		return set(host, tools, m, "0")
	},
}

func set(host *discovery.Host, tools discovery.Tools, m discovery.Creation, value string) (discovery.Work, error) {
	if now, err := host.ReadText("/" + m.How["attribute"]); err != nil || now == value {
		return nil, err
	}
	if err := tools.CheckBusy(value == "1", sysfs.At(host.FS, m.Of)); err != nil {
		return nil, err
	}
	return func(context.Context) error { return tools.Write(m.How["attribute"], value) }, nil
}

// scan describes the parts, existing or not.
func (k *kernel) scan() *discovery.Snapshot {
	s := &discovery.Snapshot{}
	for _, part := range []string{"a", "b"} {
		d := discovery.Device{Name: "cell-0-" + part, Family: "cells", Source: whole + "/" + part, Health: discovery.Health{Status: discovery.Healthy}, PartOf: &discovery.Silicon{Name: "cell-0"}}
		if _, err := os.Stat(filepath.Join(k.dir, d.Source)); err != nil {
			d.Creation = &discovery.Creation{Unit: "cell-0", Of: whole, How: map[string]string{"attribute": attribute}}
		}
		s.Devices = append(s.Devices, d)
	}
	return s
}

// maker returns a [Manager] with a new scan for each call of Device.
func (k *kernel) maker(boot string) *Manager {
	k.t.Helper()
	fsys, err := hostfs.Open(k.dir)
	if err != nil {
		k.t.Fatal(err)
	}
	var m *Manager
	l := ledger.New(ledger.Config{Dir: k.t.TempDir(), Boot: boot})
	if _, err := l.Open(k.t.Context()); err != nil {
		k.t.Fatal(err)
	}
	m = New(Config{
		Ledger: l, Stock: func() exclusion.Stock { return &exclusion.Present{} },
		Host: &discovery.Host{FS: fsys}, Families: []*discovery.Family{cells}, Journal: journal.Config{Files: disk.Files{FS: k.disk}, Dir: filepath.Join(k.dir, "state"), Boot: boot}, Earlier: filepath.Join(k.dir, "made"),
		Tools: discovery.Tools{Write: k.write, CheckBusy: k.looked},
		Device: func(name string) (discovery.Device, bool) {
			for _, d := range m.DescribeDevices(k.scan()).Devices {
				if d.Name == name {
					return d, true
				}
			}
			return discovery.Device{}, false
		},
	})
	if problems := m.Open(); len(problems) > 0 && k.disk == nil {
		k.t.Errorf("problems %v", problems)
	}
	m.DescribeDevices(k.scan())
	return m
}

func (k *kernel) records() []string {
	names, _ := filepath.Glob(filepath.Join(k.dir, "state/create/*"))
	return names
}

func (k *kernel) check(divided bool) {
	k.t.Helper()
	_, err := os.Stat(filepath.Join(k.dir, whole, "a"))
	if (err == nil) != divided || (len(k.records()) > 0) != divided {
		k.t.Errorf("divided: %v, written down: %q; want %v", err == nil, k.records(), divided)
	}
}

func nothing(d discovery.Device, _ discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
	return d, nil, nil
}

// get does the work of the Configurer for a consumer of a part.
func get(ctx context.Context, m *Manager, s *discovery.Snapshot, i int) error {
	_, work, err := m.Configurer(nothing)(s.Devices[i], nil, "claim")
	if work == nil || err != nil {
		return err
	}
	return work(ctx)
}

// A unit is created once for all of its devices, and removed once.
func TestCreates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		m := k.maker("1")
		before := m.DescribeDevices(k.scan())
		var group sync.WaitGroup
		for i := range before.Devices {
			group.Go(func() {
				if err := get(t.Context(), m, before, i); err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
		k.check(true)
		if made := m.CreatedUnits(); len(made) != 1 || strings.Join(made[0].Devices, " ") != "cell-0-a cell-0-b" || made[0].Silicon != "cell-0" {
			t.Errorf("made: %+v", made)
		}
		if err := get(t.Context(), m, m.DescribeDevices(k.scan()), 0); err != nil {
			t.Error(err)
		}
		for _, want := range []bool{true, false} { // the second time there is nothing to do
			if removed, err := m.RemoveUnit(t.Context(), "cell-0"); err != nil || removed != want {
				t.Errorf("removed: %t, %v; want %t", removed, err, want)
			}
			k.check(false)
		}
		if got := strings.Join(k.writes, " "); got != "1 0" {
			t.Errorf("written: %s", got)
		}
	})
}

// The next agent continues after an agent that was killed at any step, in both directions.
func TestKilled(t *testing.T) {
	for step := range 3 {
		for _, wanted := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				k := newKernel(t)
				k.budget = step
				m := k.maker("1")
				_ = get(t.Context(), m, k.scan(), 0)
				if step > 0 {
					_, _ = m.RemoveUnit(t.Context(), "cell-0")
				}
				k.budget = -1
				m = k.maker("1")
				if wanted {
					if err := get(t.Context(), m, k.scan(), 1); err != nil {
						t.Errorf("after %d writes: %v", step, err)
					}
					if s := k.scan(); s.Devices[0].Creation != nil {
						t.Errorf("after %d writes: it is not made", step)
					}
				}
				for _, made := range m.CreatedUnits() {
					if _, err := m.RemoveUnit(t.Context(), made.Unit); err != nil {
						t.Error(err)
					}
				}
				k.check(false)
			})
		}
	}
}

// A unit that could not be created, and is then created in another way, is removed in the latter
// way.
func TestCreatedInAnotherWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		m := k.maker("1")
		s := k.scan()
		s.Devices[0].Creation.How["count"] = "8"
		k.refuse = syscall.ERANGE
		if err := get(t.Context(), m, s, 0); err == nil {
			t.Error("it was made")
		}
		k.refuse = nil
		m = k.maker("1") // the administrator has changed the number
		s = k.scan()
		s.Devices[1].Creation.How["count"] = "4"
		if err := get(t.Context(), m, s, 1); err != nil {
			t.Error(err)
		}
		for _, m := range []*Manager{m, k.maker("1")} {
			r := m.journal.Get("cell-0")
			if r.Body.Creation.How["count"] != "4" || strings.Join(r.Devices, " ") != "cell-0-a cell-0-b" {
				t.Errorf("written down: %+v", r)
			}
		}
	})
}

// A reboot removes everything. Units of other programs are not removed.
func TestWhatIsNotOurs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		if err := get(t.Context(), k.maker("1"), k.scan(), 0); err != nil {
			t.Fatal(err)
		}
		m := k.maker("2") // an administrator divided the cell after the boot
		if made := m.CreatedUnits(); len(made) > 0 || len(k.records()) > 0 {
			t.Errorf("after a boot: %+v, %q", made, k.records())
		}
		if err := get(t.Context(), m, k.scan(), 0); err != nil || len(m.CreatedUnits()) > 0 {
			t.Errorf("made %+v: %v", m.CreatedUnits(), err)
		}
		if removed, err := m.RemoveUnit(t.Context(), "cell-0"); err != nil || removed || len(k.writes) != 1 {
			t.Errorf("written: %q, %v", k.writes, err)
		}
	})
}

// A record that cannot be read is reported and ignored.
func TestDamagedRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		if err := get(t.Context(), k.maker("1"), k.scan(), 0); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(k.records()[0], []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		m := New(Config{Journal: journal.Config{Dir: filepath.Join(k.dir, "state"), Boot: "1"}, Stock: func() exclusion.Stock { return &exclusion.Present{} }})
		if problems := m.Open(); len(problems) != 1 || !strings.Contains(problems[0].Error(), "cell-0.json is not valid") || len(m.CreatedUnits()) > 0 {
			t.Errorf("problems %v, made %+v", problems, m.CreatedUnits())
		}
	})
}

// A different device with the expected name is not given to the consumer of the missing device.
func TestAnotherDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		m, before := k.maker("1"), k.scan()
		before.Devices[0].Attributes = discovery.Attributes{}
		before.Devices[0].Attributes.SetString("parent", "cell-0")
		device := m.config.Device
		m.config.Device = func(name string) (discovery.Device, bool) {
			d, there := device(name)
			d.Attributes = discovery.Attributes{}
			d.Attributes.SetString("parent", "cell-7")
			return d, there
		}
		const want = `its parent is "cell-7" and not "cell-0"`
		for range 2 { // the second time the device is already there
			if err := get(t.Context(), m, before, 0); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want %q", err, want)
			}
		}
	})
}

// Devices that cannot be created are unhealthy for a while, and consumers get the reason.
func TestCannotBeCreated(t *testing.T) {
	for name, test := range map[string]struct {
		spoil func(*kernel, *Manager)
		want  string
	}{
		"refused":  {func(k *kernel, _ *Manager) { k.refuse = syscall.EBUSY }, "device or resource busy"},
		"in use":   {func(k *kernel, _ *Manager) { k.busy = errors.New("in use: swap is on it") }, "swap is on it"},
		"not seen": {func(k *kernel, _ *Manager) { k.lazy = true }, "it did not appear within 30s"},
		"read-only": {func(_ *kernel, m *Manager) {
			m.config.Tools.Write = func(string, string) error { return syscall.EROFS }
		}, "read-only file system: the agent may not change the host: this needs onDemand.enabled"},
		"no privilege":     {func(_ *kernel, m *Manager) { m.config.Tools.Write = nil }, "may not change the host"},
		"who uses it":      {func(_ *kernel, m *Manager) { m.config.Tools.CheckBusy = nil }, "cannot find out"},
		"family is absent": {func(_ *kernel, m *Manager) { m.config.Families = nil }, `family "cells" makes no devices`},
		"disk is full": {func(k *kernel, m *Manager) {
			m.journal = journal.New(journal.Config{Dir: filepath.Join(k.dir, attribute)}, "create", journal.Earlier[creation]{})
		}, "must be a writable directory on tmpfs"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newKernel(t)
				m := k.maker("1")
				test.spoil(k, m)
				if err := get(t.Context(), m, k.scan(), 0); err == nil || !strings.Contains(err.Error(), test.want) {
					t.Errorf("error %v, want %q", err, test.want)
				}
				d := m.DescribeDevices(k.scan()).Devices[1]
				if name != "family is absent" && (d.Health.Status != discovery.Unhealthy || !strings.Contains(d.Health.Reason, test.want)) {
					t.Errorf("health %+v", d.Health)
				}
				var again atomic.Bool
				changed := m.config.Changed
				m.config.Changed = func() { again.Store(true); changed() }
				if err := get(t.Context(), m, k.scan(), 0); err == nil {
					t.Error("made")
				}
				synctest.Wait()
				again.Store(false)
				time.Sleep(failureMemory)
				synctest.Wait()
				if !again.Load() && name != "family is absent" {
					t.Error("the end is not reported")
				}
				if d := m.DescribeDevices(k.scan()).Devices[1]; d.Health.Status != discovery.Healthy {
					t.Errorf("later: health %+v", d.Health)
				}
			})
		})
	}
}

// Devices that cannot be removed are still there and healthy, and the reason is reported.
func TestCannotBeUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		m := k.maker("1")
		if err := get(t.Context(), m, k.scan(), 0); err != nil {
			t.Fatal(err)
		}
		k.busy = errors.New("in use: process 7 (qemu) has it open")
		_, err := m.RemoveUnit(t.Context(), "cell-0")
		if made := m.CreatedUnits(); err == nil || len(made) != 1 || made[0].Err == nil || !strings.Contains(made[0].Err.Error(), "qemu") {
			t.Errorf("error %v, made %+v", err, made)
		}
		if d := m.DescribeDevices(k.scan()).Devices[0]; d.Health.Status != discovery.Healthy {
			t.Errorf("health %+v", d.Health)
		}
		k.check(true)
	})
}

// A removed record is written again. This does not call Changed: each call causes a scan, and the
// scans would never end while the disk cannot be written.
func TestRemovedRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		m := k.maker("1")
		if err := get(t.Context(), m, k.scan(), 0); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(m.journal.Dir()); err != nil {
			t.Fatal(err)
		}
		m.config.Changed = func() { t.Error("it is told as a change") }
		if err := m.RestoreRecords(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(m.journal.File("cell-0")); err != nil {
			t.Error(err)
		}
	})
}

// A write that hangs is waited for once. The unit does not change before the write ends.
func TestHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		hangs := make(chan struct{})
		k.hangs = hangs
		m := k.maker("1")
		if err := get(t.Context(), m, k.scan(), 0); err == nil || !strings.Contains(err.Error(), "has not ended after 1m0s") {
			t.Errorf("error %v", err)
		}
		if _, err := m.RemoveUnit(t.Context(), "cell-0"); err == nil || !strings.Contains(err.Error(), "has not ended yet") {
			t.Errorf("undone beside it: %v", err)
		}
		// The claim may have ended: the whole device changes as soon as the write ends.
		view := m.config.Ledger.View(&exclusion.Present{})
		if view.BlockedBy(discovery.ModeDRA, "other", []allocation.Hold{allocation.SiliconHold("cell-0")}) == nil {
			t.Error("another claim may have the whole device while the write goes on")
		}
		k.mu.Lock()
		k.hangs = nil
		k.mu.Unlock()
		close(hangs)
		synctest.Wait()
		if err := get(t.Context(), m, k.scan(), 0); err != nil {
			t.Error(err)
		}
		k.check(true)
	})
}

// A check that hangs is waited for once, too, and no work follows. Other units are processed
// meanwhile.
func TestHangingScan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		slow := make(chan struct{})
		k.slow = slow
		m := k.maker("1")
		if err := get(t.Context(), m, k.scan(), 0); err == nil || !strings.Contains(err.Error(), "a scan of /"+whole+" has not ended after 1m0s") {
			t.Errorf("error %v", err)
		}
		begun := time.Now()
		if err := get(t.Context(), m, k.scan(), 1); err == nil || !strings.Contains(err.Error(), "has not ended yet") || time.Since(begun) > time.Second {
			t.Errorf("done beside it: %v, after %s", err, time.Since(begun))
		}
		k.mu.Lock()
		k.slow = nil
		k.mu.Unlock()
		close(slow)
		synctest.Wait()
		k.check(false)
		if err := get(t.Context(), m, k.scan(), 0); err != nil {
			t.Error(err)
		}
		k.check(true)
	})
}

// A program that hangs is waited for once, and keeps the lease on its function until it ends.
func TestProgramHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		hangs := make(chan struct{})
		m := k.maker("1")
		m.config.Programs = map[string]func(context.Context, discovery.PartitionChange) ([]byte, error){
			"cells": func(context.Context, discovery.PartitionChange) ([]byte, error) {
				<-hangs
				return []byte("1"), nil
			},
		}
		m.config.Families = []*discovery.Family{{Name: "cells", Remove: cells.Remove, Create: func(_ *discovery.Host, tools discovery.Tools, c discovery.Creation) (discovery.Work, error) {
			return func(ctx context.Context) error {
				output, err := tools.ChangePartition(ctx, discovery.PartitionChange{Function: "cell-0"})
				if err != nil {
					return err
				}
				return tools.Write(c.How["attribute"], string(output))
			}, nil
		}}}
		if err := get(t.Context(), m, k.scan(), 0); err == nil || !strings.Contains(err.Error(), "has not ended after 1m2s") {
			t.Errorf("error %v", err)
		}
		if _, err := m.RemoveUnit(t.Context(), "cell-0"); err == nil || !strings.Contains(err.Error(), "has not ended yet") {
			t.Errorf("removed while the program runs: %v", err)
		}
		close(hangs)
		synctest.Wait()
		if err := get(t.Context(), m, k.scan(), 0); err != nil {
			t.Error(err)
		}
		k.check(true)
	})
}

// A removal does not wait for the disappearance of a device that exists only without the unit, such
// as the device that was divided, although that device belonged to the unit while it was missing.
func TestWholeComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		m := k.maker("1")
		if err := get(t.Context(), m, k.scan(), 0); err != nil {
			t.Fatal(err)
		}
		device := m.config.Device
		m.config.Device = func(name string) (discovery.Device, bool) {
			if name != "cell-0" {
				return device(name)
			}
			d := discovery.Device{Name: name, Family: "cells", Source: whole}
			if _, err := os.Stat(filepath.Join(k.dir, whole, "a")); err == nil {
				d.Creation = &discovery.Creation{Unit: "cell-0", Of: whole}
			}
			return d, true
		}
		r := m.journal.Get("cell-0")
		r.Devices = append(r.Devices, "cell-0")
		begun := time.Now()
		if _, err := m.RemoveUnit(t.Context(), "cell-0"); err != nil || time.Since(begun) > time.Second {
			t.Errorf("undone after %s: %v", time.Since(begun), err)
		}
		k.check(false)
	})
}

// A unit that another program has removed is forgotten at once.
func TestUndoneAlready(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		m := k.maker("1")
		if err := get(t.Context(), m, k.scan(), 0); err != nil {
			t.Fatal(err)
		}
		device := m.config.Device
		m.config.Device = func(name string) (discovery.Device, bool) {
			d, _ := device(name)
			d.Creation, d.Source = nil, whole // as if there had been no scan since
			return d, true
		}
		k.divide("0")
		begun := time.Now()
		if _, err := m.RemoveUnit(t.Context(), "cell-0"); err != nil || time.Since(begun) > time.Second {
			t.Errorf("after %s: %v", time.Since(begun), err)
		}
		k.check(false)
	})
}

// Only a creation in the way that failed is reported as failed.
func TestFailsInOneWay(t *testing.T) {
	k := newKernel(t)
	m := k.maker("1")
	k.refuse = syscall.EINVAL
	if err := get(t.Context(), m, k.scan(), 0); err == nil {
		t.Fatal("made")
	}
	s := k.scan()
	s.Devices[1].Creation.How = map[string]string{"attribute": attribute, "otherwise": "yes"}
	if now := m.DescribeDevices(s).Devices; now[0].Health.Status != discovery.Unhealthy || now[1].Health.Status == discovery.Unhealthy {
		t.Errorf("%+v", now)
	}
}

// No work begins after the context was cancelled.
func TestCalledOff(t *testing.T) {
	k := newKernel(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := get(ctx, k.maker("1"), k.scan(), 0); !errors.Is(err, context.Canceled) || len(k.writes) > 0 || len(k.records()) > 0 {
		t.Errorf("%v, writes %q", err, k.writes)
	}
}

// An ending agent does not wait for a scan that would find the device.
func TestCalledOffBeforeItIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		k.lazy = true
		m := k.maker("1")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begun := time.Now()
		err := get(ctx, m, k.scan(), 0)
		if took := time.Since(begun); !errors.Is(err, context.DeadlineExceeded) || took > 2*time.Second || len(m.CreatedUnits()) != 1 {
			t.Errorf("%v after %s, made %+v", err, took, m.CreatedUnits())
		}
		if d := m.DescribeDevices(k.scan()).Devices[0]; d.Health.Status != discovery.Healthy {
			t.Errorf("health %+v", d.Health)
		}
	})
}

// While a unit is changed, its devices are healthy, or not created yet.
func TestDescribeMeanwhile(t *testing.T) {
	k := newKernel(t)
	m := k.maker("1")
	m.DescribeDevices(k.scan())
	lease, blocked := m.config.Ledger.Leases.LeaseDevices(allocation.Change{Name: "unit cell-0"}, m.config.Stock())
	if blocked != nil {
		t.Fatal(blocked)
	}
	leave := m.begin("cell-0", lease)
	k.divide("1")
	s := k.scan()
	s.Devices[0].Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionDriverUnbound}
	s.Devices = s.Devices[:1] // the other device is missing
	var said []string
	for _, d := range m.DescribeDevices(s).Devices {
		said = append(said, fmt.Sprint(d.Name, " ", d.Health.Status, " ", d.Creation != nil))
	}
	if got, want := strings.Join(said, ", "), "cell-0-a Healthy true, cell-0-b Healthy true"; got != want {
		t.Errorf("meanwhile: %s", got)
	}
	leave()
	if now := m.DescribeDevices(s).Devices; len(now) != 1 || now[0].Creation != nil || now[0].Health.Status != discovery.Unhealthy {
		t.Errorf("afterwards: %+v", now)
	}
}

// A created device is then configured as the claim wants.
func TestWantedOtherwise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		m := k.maker("1")
		var got []string
		next := func(d discovery.Device, want discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
			return d, func(context.Context) error {
				got = append(got, fmt.Sprint(d.Name, " ", d.Creation == nil, " ", want[discovery.Driver]))
				return nil
			}, nil
		}
		_, work, err := m.Configurer(next)(k.scan().Devices[0], discovery.Parameters{discovery.Driver: discovery.DriverVFIO}, "claim")
		if err == nil {
			err = work(t.Context())
		}
		if err != nil || strings.Join(got, ", ") != "cell-0-a true vfio" {
			t.Errorf("%q, %v", got, err)
		}
	})
}

// A record of an earlier version is converted, and serves to remove the unit.
func TestRecordOfAnEarlierVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		k.divide("1")
		data, err := os.ReadFile("testdata/made/cell-0.json")
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(k.dir, "made")
		if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "cell-0.json"), data, 0o600)); err != nil {
			t.Fatal(err)
		}
		m := k.maker("1")
		if left, _ := os.ReadDir(dir); len(left) > 0 || len(k.records()) != 1 {
			t.Errorf("left %v, records %q", left, k.records())
		}
		if made := m.CreatedUnits(); len(made) != 1 || made[0].Family != "cells" || made[0].Silicon != "cell-0" || strings.Join(made[0].Devices, " ") != "cell-0-a cell-0-b" {
			t.Errorf("made: %+v", made)
		}
		if _, err := m.RemoveUnit(t.Context(), "cell-0"); err != nil {
			t.Error(err)
		}
		k.check(false)
	})
}
