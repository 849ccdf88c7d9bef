package passthrough

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/overdue"
	"chandler.dev/internal/passthrough/passthroughtest"
)

const (
	first = "0000:03:00.0"
	other = "0000:03:00.1" // in the IOMMU group of the first
)

// kernel is a host with two disks in one IOMMU group.
type kernel struct {
	*passthroughtest.Kernel

	t *testing.T
}

func newKernel(t *testing.T) *kernel {
	k := &kernel{passthroughtest.New(t), t}
	k.Add(first, "nvme", "3")
	k.Add(other, "nvme", "3")
	return k
}

// binder returns the [Manager] of a new agent. users names the user of each used function.
func (k *kernel) binder(boot string, users map[string]string) *Manager {
	k.t.Helper()
	b := newBinder(k.t, Config{
		Host: k.Host(), Write: k.Write, Family: "vfio", Journal: k.journal(boot), Earlier: filepath.Join(k.Dir, "state/rebound"),
		Limit: time.Minute, Wait: 100 * time.Millisecond,
		Busy: func(functions ...sysfs.Device) error {
			for _, function := range functions {
				if user := users[function.Name()]; user != "" {
					return errors.New(function.Name() + ": in use: " + user)
				}
			}
			return nil
		},
	})
	for _, problem := range b.Open() {
		k.t.Error(problem)
	}
	return b
}

// journal returns the journal's configuration for a boot.
func (k *kernel) journal(boot string) journal.Config {
	return journal.Config{Dir: filepath.Join(k.Dir, "run/journal"), Boot: boot}
}

// device returns the disk as a scan describes it, alone in its group or with others.
func device(others ...string) discovery.Device {
	d := discovery.Device{
		Name: "pci-0000-03-00-0", Family: "disks", Source: passthroughtest.Source(first), Attributes: discovery.Attributes{},
		Health: discovery.Health{Status: discovery.Healthy}, Passthrough: &discovery.PassthroughOption{Driver: "vfio-pci"},
	}
	d.Attributes.SetString("driver", "nvme")
	d.Attributes.SetString("model", "a disk")
	d.Attributes.SetInt("iommuGroup", 3)
	for _, address := range others {
		d.Passthrough.Others = append(d.Passthrough.Others, passthroughtest.Source(address))
	}
	return d
}

// openLedger returns an empty ledger, and the devices of the host.
func openLedger(t testing.TB) (*ledger.Ledger, func() exclusion.Stock) {
	t.Helper()
	l := ledger.New(ledger.Config{Dir: t.TempDir(), Boot: "1"})
	if _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	return l, func() exclusion.Stock { return &exclusion.Present{} }
}

// newBinder returns a [Manager] with a ledger of its own.
func newBinder(t testing.TB, config Config) *Manager {
	t.Helper()
	config.Ledger, config.Stock = openLedger(t)
	return New(config)
}

func nothing(d discovery.Device, _ discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
	return d, nil, nil
}

var vfio = discovery.Parameters{discovery.Driver: discovery.DriverVFIO}

// take does what the driver does for a claim: it calls the Configurer, runs the work, and calls the
// Configurer again.
func take(ctx context.Context, b *Manager, d discovery.Device) (discovery.Device, error) {
	configure := b.Configurer(nothing)
	now, work, err := configure(d, vfio, "claim")
	if err == nil && work != nil {
		if err = work(ctx); err == nil {
			now, work, err = configure(d, vfio, "claim")
			if err == nil && work != nil {
				err = errors.New("there is work again")
			}
		}
	}
	return now, err
}

func giveAll(ctx context.Context, b *Manager) (errs error) {
	for _, l := range b.LeftUnits() {
		errs = errors.Join(errs, b.ReturnUnit(ctx, l.Unit))
	}
	return errs
}

// check reports functions without the expected driver and override.
func (k *kernel) check(driver, override string, addresses ...string) {
	k.t.Helper()
	for _, address := range addresses {
		if k.Driver(address) != driver || k.DriverOverride(address) != override {
			k.t.Errorf("%s: driver %q, override %q; want %q, %q\nwrites:\n%s", address, k.Driver(address), k.DriverOverride(address), driver, override, strings.Join(k.Writes, "\n"))
		}
	}
}

// records returns the files of the journal.
func (k *kernel) records() []string { return filesIn(filepath.Join(k.Dir, "run/journal/rebind")) }

func filesIn(dir string) (names []string) {
	entries, _ := os.ReadDir(dir)
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

// A function is bound to vfio with its whole group, and returned.
func TestTakeAndGive(t *testing.T) {
	k := newKernel(t)
	b := k.binder("1", nil)
	now, err := take(t.Context(), b, device(other))
	if err != nil {
		t.Fatal(err)
	}
	k.check("vfio-pci", "vfio-pci", first, other)
	if len(now.Edits.DeviceNodes) != 2 || now.Edits.DeviceNodes[0].HostPath != "/dev/vfio/3" || now.Family != "vfio" || now.Attributes.String("model") != "a disk" {
		t.Errorf("described as %+v", now)
	}
	if _, _, err := b.Configurer(nothing)(device(other), nil, "claim"); err == nil || !strings.Contains(err.Error(), "until it is returned to driver nvme") {
		t.Errorf("who wants it otherwise gets it: %v", err)
	}
	writes := len(k.Writes)
	if _, err := take(t.Context(), b, device(other)); err != nil || len(k.Writes) != writes {
		t.Errorf("taken again: %v, writes %q", err, k.Writes[writes:])
	}
	for range 2 { // the second call has nothing to do
		if err := giveAll(t.Context(), b); err != nil {
			t.Fatal(err)
		}
		k.check("nvme", "(null)", first, other)
	}
	if left := k.records(); len(left) > 0 || len(b.LeftUnits()) > 0 {
		t.Errorf("left: %q", left)
	}
	if d, work, err := b.Configurer(nothing)(device(other), nil, "claim"); work != nil || err != nil || d.Family != "disks" {
		t.Errorf("after it: %v, %v", d.Family, err)
	}
}

// A refused passthrough causes no write and no record.
func TestRefused(t *testing.T) {
	for name, test := range map[string]struct {
		users map[string]string
		spoil func(*kernel, *Manager)
		want  string
	}{
		"in use":                   {users: map[string]string{first: "it is mounted on /data"}, want: "it is mounted on /data"},
		"its group is in use":      {users: map[string]string{other: "swap is on it"}, want: "0000:03:00.1: in use: swap is on it"},
		"driver is not loaded":     {spoil: func(k *kernel, _ *Manager) { _ = os.RemoveAll(filepath.Join(k.Dir, driverDir("vfio-pci"))) }, want: "modprobe vfio-pci"},
		"no privilege":             {spoil: func(_ *kernel, b *Manager) { b.config.Write = nil }, want: "may not change the host"},
		"who uses it is not known": {spoil: func(_ *kernel, b *Manager) { b.config.Busy = nil }, want: "are unknown"},
		"virtual functions":        {spoil: func(k *kernel, _ *Manager) { k.Link(passthroughtest.Source(first)+"/virtfn0", "../0000:03:10.0") }, want: "has virtual functions"},
		"disk is full": {spoil: func(k *kernel, b *Manager) {
			b.journal = journal.New(journal.Config{Dir: filepath.Join(k.Dir, "dev/vfio/vfio/none"), Boot: "1"}, "rebind", journal.Earlier[binding]{})
		}, want: "write the record of iommu-group-3"},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKernel(t)
			b := k.binder("1", test.users)
			if test.spoil != nil {
				test.spoil(k, b)
			}
			if _, err := take(t.Context(), b, device(other)); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
			if len(k.Writes) > 0 || len(k.records()) > 0 {
				t.Errorf("written: %q, written down: %q", k.Writes, k.records())
			}
			k.check("nvme", "(null)", first, other)
		})
	}
}

// A program begins to use a function while another function of the group is taken. The used
// function keeps its driver until it is free.
func TestUsedMeanwhile(t *testing.T) {
	k := newKernel(t)
	users := make(map[string]string)
	b := k.binder("1", users)
	b.config.Write = func(name, value string) error {
		if len(k.Writes) == 0 {
			users[other] = "it is mounted on /data"
		}
		return k.Write(name, value)
	}
	if _, err := take(t.Context(), b, device(other)); err == nil || !strings.Contains(err.Error(), "it is mounted on /data") {
		t.Errorf("error %v", err)
	}
	k.check("nvme", "(null)", other)
	delete(users, other)
	if _, err := take(t.Context(), b, device(other)); err != nil {
		t.Error(err)
	}
	k.check("vfio-pci", "vfio-pci", first, other)
}

// A program begins to use a function during the slow write of the record. Nothing changes.
func TestUsedDuringRecordWrite(t *testing.T) {
	k := newKernel(t)
	users := make(map[string]string)
	b := k.binder("1", users)
	place := k.journal("1")
	place.Files = disk.Files{FS: &disktest.Disk{Before: func(op disktest.Op, _ string) error {
		if op == disktest.Write {
			users[first] = "it is mounted on /data"
		}
		return nil
	}}}
	b.journal = journal.New(place, "rebind", journal.Earlier[binding]{})
	if _, err := take(t.Context(), b, device(other)); err == nil || !strings.Contains(err.Error(), "it is mounted on /data") {
		t.Errorf("error %v", err)
	}
	if err := giveAll(t.Context(), b); err != nil || len(k.Writes) > 0 || len(k.records()) > 0 {
		t.Errorf("%v, written: %q, written down: %q", err, k.Writes, k.records())
	}
	k.check("nvme", "(null)", first, other)
}

// An agent was killed after it had set the override, and the next agent cannot read the record. The
// function can be returned nevertheless.
func TestOverrideIsLeft(t *testing.T) {
	k := newKernel(t)
	if err := k.Write(passthroughtest.Source(first)+"/driver_override", "vfio-pci"); err != nil {
		t.Fatal(err)
	}
	b := k.binder("1", nil)
	if _, err := take(t.Context(), b, device(other)); err != nil {
		t.Fatal(err)
	}
	if err := giveAll(t.Context(), b); err != nil {
		t.Error(err)
	}
	k.check("nvme", "(null)", first, other)
}

// A function of the group had no driver when the device was described, because it was being
// returned. By now the function has a driver. It is taken with the device, but only after a scan
// has confirmed that it may be.
func TestGivenBackMeanwhile(t *testing.T) {
	for name, half := range map[string]bool{"at first": false, "when the device was taken without it": true} {
		t.Run(name, func(t *testing.T) {
			k := newKernel(t)
			b := k.binder("1", nil)
			alone, beside := device(), device()
			beside.Name, beside.Source = "pci-0000-03-00-1", passthroughtest.Source(other)
			if half {
				k.SetDriver(other, "")
				if _, err := take(t.Context(), b, alone); err != nil {
					t.Fatal(err)
				}
				k.SetDriver(other, "nvme")
			}
			writes := len(k.Writes)
			if _, err := take(t.Context(), b, alone); err == nil || !strings.Contains(err.Error(), "not yet known whether passthrough") || len(k.Writes) > writes {
				t.Errorf("error %v, writes %q", err, k.Writes[writes:])
			}
			b.DescribeDevices(&discovery.Snapshot{Devices: []discovery.Device{alone, beside}})
			if _, err := take(t.Context(), b, alone); err != nil {
				t.Fatal(err)
			}
			k.check("vfio-pci", "vfio-pci", first, other)
			if err := giveAll(t.Context(), b); err != nil {
				t.Fatal(err)
			}
			k.check("nvme", "(null)", first, other)
		})
	}
}

// A function that was under vfio before the first request stays under vfio.
func TestBoundBefore(t *testing.T) {
	k := newKernel(t)
	k.SetDriver(first, "vfio-pci")
	d := device(other)
	d.Passthrough = nil
	d.Attributes.SetString("driver", "vfio-pci")
	b := k.binder("1", nil)
	if _, err := take(t.Context(), b, d); err != nil || len(k.Writes) > 0 || len(b.LeftUnits()) > 0 {
		t.Errorf("%v, writes %q", err, k.Writes)
	}
}

// If an agent is killed before any of its writes, the next agent can continue with the passthrough
// or return the functions.
func TestKilled(t *testing.T) {
	for _, ends := range []string{"taken", "given back"} {
		for step := range 13 {
			t.Run(fmt.Sprintf("%d %s", step, ends), func(t *testing.T) {
				k := newKernel(t)
				k.Budget = step
				b := k.binder("1", nil)
				_, err := take(t.Context(), b, device(other))
				if step < 6 && !errors.Is(err, passthroughtest.ErrKilled) || step >= 6 && err != nil {
					t.Fatalf("taking: %v", err)
				}
				if step >= 6 {
					_ = giveAll(t.Context(), b) // killed on the way, or not
				}
				k.Budget = -1
				b = k.binder("1", nil)
				if ends == "taken" {
					d := b.DescribeDevices(&discovery.Snapshot{Devices: []discovery.Device{device(other)}}).Devices[0]
					if _, err := take(t.Context(), b, d); err != nil {
						t.Fatalf("after %d writes: %v", step, err)
					}
					if k.Driver(first) != "vfio-pci" || k.Driver(other) != "vfio-pci" {
						t.Errorf("after %d writes: drivers %s, %s", step, k.Driver(first), k.Driver(other))
					}
				}
				if err := giveAll(t.Context(), b); err != nil {
					t.Fatalf("after %d writes: %v", step, err)
				}
				k.check("nvme", "(null)", first, other)
				if left := k.records(); len(left) > 0 {
					t.Errorf("left: %q", left)
				}
			})
		}
	}
}

// A reboot halfway leaves nothing to return.
func TestReboot(t *testing.T) {
	for step := range 7 {
		k := newKernel(t)
		k.Budget = step
		_, _ = take(t.Context(), k.binder("1", nil), device(other))
		k.Budget, k.Writes = -1, nil
		k.Reboot()
		b := k.binder("2", nil)
		if len(b.LeftUnits()) > 0 || len(k.records()) > 0 {
			t.Errorf("after %d writes and a reboot: %v", step, b.LeftUnits())
		}
		k.check("nvme", "(null)", first, other)
	}
}

// If a driver refuses to take its function back, the device is unhealthy, and the return is
// retried.
func TestRefusesToComeBack(t *testing.T) {
	k := newKernel(t)
	b := k.binder("1", nil)
	if _, err := take(t.Context(), b, device(other)); err != nil {
		t.Fatal(err)
	}
	k.Refuses["nvme"] = syscall.EIO
	if err := giveAll(t.Context(), b); !errors.Is(err, syscall.EIO) || !strings.Contains(err.Error(), "driver nvme did not take it") {
		t.Errorf("error %v", err)
	}
	d := b.DescribeDevices(&discovery.Snapshot{}).Devices[0]
	if d.Health.Status != discovery.Unhealthy || d.Health.Condition != discovery.ConditionDriverUnbound || !strings.Contains(d.Health.Reason, "not returned to driver nvme") {
		t.Errorf("health %+v", d.Health)
	}
	delete(k.Refuses, "nvme")
	if err := giveAll(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	k.check("nvme", "(null)", first)
}

// The vfio driver can refuse a function too. The device stays with the claim, and is returned after
// the claim has ended.
func TestProbeFails(t *testing.T) {
	k := newKernel(t)
	k.Refuses["vfio-pci"] = syscall.EINVAL
	b := k.binder("1", nil)
	if _, err := take(t.Context(), b, device(other)); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("error %v", err)
	}
	if err := giveAll(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	k.check("nvme", "(null)", first)
}

// A hanging write is waited for once. The function is not changed again until the write has ended,
// and then work continues.
func TestUnbindHangs(t *testing.T) {
	k := newKernel(t)
	hangs := make(chan struct{})
	k.Hangs["nvme"] = hangs
	b := k.binder("1", nil)
	b.config.Limit = 100 * time.Millisecond
	if _, err := take(t.Context(), b, device(other)); err == nil || !strings.Contains(err.Error(), "unbind it from nvme has not ended after") {
		t.Errorf("error %v", err)
	}
	if err := giveAll(t.Context(), b); err == nil || !strings.Contains(err.Error(), "has not ended yet") {
		t.Errorf("given back beside it: %v", err)
	}
	close(hangs)
	b.config.Limit = time.Minute
	for limit := time.Now().Add(time.Minute); b.config.Ledger.Leases.LeaseOn(discovery.DeviceKey{Function: first}) != ""; time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatal("it hangs still")
		}
	}
	if _, err := take(t.Context(), b, device(other)); err != nil {
		t.Fatal(err)
	}
	k.check("vfio-pci", "vfio-pci", first)
}

// A device that a process has open is not unbound from vfio, because the kernel would wait for the
// process.
func TestKeptOpen(t *testing.T) {
	k := newKernel(t)
	users := make(map[string]string)
	b := k.binder("1", users)
	if _, err := take(t.Context(), b, device(other)); err != nil {
		t.Fatal(err)
	}
	users[first] = "process 47 (qemu) has /dev/vfio/3 open"
	users[other], k.Writes = users[first], nil
	if err := giveAll(t.Context(), b); err == nil || !strings.Contains(err.Error(), "process 47 (qemu)") {
		t.Errorf("error %v", err)
	}
	if len(k.Writes) > 0 {
		t.Errorf("written: %q", k.Writes)
	}
	clear(users)
	if err := giveAll(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	k.check("nvme", "(null)", first)
}

// A read that hangs in the kernel delays one scan for a moment. The function is not changed until
// the read has ended.
func TestHangingOverrideRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		b := k.binder("1", nil)
		if _, err := take(t.Context(), b, device(other)); err != nil {
			t.Fatal(err)
		}
		k.SetDriver(first, "nvme") // by an administrator
		k.File(passthroughtest.Source(first)+"/driver_override", "(null)\n")
		stuck := &stuckFS{FS: k.FS(), until: make(chan struct{})}
		b.config.Host = &discovery.Host{FS: stuck}
		began := time.Now()
		b.DescribeDevices(&discovery.Snapshot{})
		b.DescribeDevices(&discovery.Snapshot{})
		if waited := time.Since(began); waited != overrideReadLimit || stuck.opened.Load() != 1 || len(b.functions) != 2 {
			t.Errorf("two scans waited %s, looked %d times, and left %v", waited, stuck.opened.Load(), b.LeftUnits())
		}
		if err := giveAll(t.Context(), b); err == nil || !strings.Contains(err.Error(), "a read of its driver_override has not ended yet") {
			t.Error(err)
		}
		close(stuck.until)
		synctest.Wait()
		b.DescribeDevices(&discovery.Snapshot{})
		if left := k.binder("1", nil).LeftUnits(); len(left) != 1 || !slices.Equal(left[0].Devices, []string{"pci-0000-03-00-1"}) {
			t.Errorf("left %v", left)
		}
	})
}

// stuckFS is a host file system that blocks reads of driver_override until a channel is closed, as
// the kernel does while it holds a function's lock.
type stuckFS struct {
	fs.FS

	opened atomic.Int64
	until  chan struct{}
}

func (s *stuckFS) Open(name string) (fs.File, error) {
	if path.Base(name) == "driver_override" {
		s.opened.Add(1)
		<-s.until
	}
	return s.FS.Open(name)
}

// ReadLink implements [fs.ReadLinkFS].
func (s *stuckFS) ReadLink(name string) (string, error) { return fs.ReadLink(s.FS, name) }

// Lstat implements [fs.ReadLinkFS].
func (s *stuckFS) Lstat(name string) (fs.FileInfo, error) { return fs.Lstat(s.FS, name) }

// Changes by an administrator during the passthrough remain.
func TestAdministratorActs(t *testing.T) {
	for name, test := range map[string]struct {
		driver   string
		override string
	}{
		"gave it back":    {"nvme", "(null)"},
		"has it for good": {"e1000e", "vfio-pci"},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKernel(t)
			b := k.binder("1", nil)
			if _, err := take(t.Context(), b, device(other)); err != nil {
				t.Fatal(err)
			}
			k.SetDriver(first, test.driver)
			if err := giveAll(t.Context(), b); err != nil || len(b.LeftUnits()) > 0 {
				t.Errorf("left %v: %v", b.LeftUnits(), err)
			}
			k.check(test.driver, test.override, first)
		})
	}
}

// A function that is gone has nothing to return.
func TestGone(t *testing.T) {
	k := newKernel(t)
	b := k.binder("1", nil)
	if _, err := take(t.Context(), b, device(other)); err != nil {
		t.Fatal(err)
	}
	_ = os.RemoveAll(filepath.Join(k.Dir, passthroughtest.Source(first)))
	if s := b.DescribeDevices(&discovery.Snapshot{}); len(s.Devices) > 0 {
		t.Errorf("described: %+v", s.Devices)
	}
	if err := giveAll(t.Context(), b); err != nil || len(b.LeftUnits()) > 0 {
		t.Errorf("left %v: %v", b.LeftUnits(), err)
	}
}

// damagedRecord is the file with the record of the group.
const damagedRecord = "run/journal/rebind/iommu-group-3.json"

// If the record of a function cannot be read, the kernel chooses the driver.
func TestDamagedRecord(t *testing.T) {
	k := newKernel(t)
	if _, err := take(t.Context(), k.binder("1", nil), device(other)); err != nil {
		t.Fatal(err)
	}
	k.File(damagedRecord, "{")
	b := newBinder(t, Config{Host: k.Host(), Write: k.Write, Journal: k.journal("1")})
	if problems := b.Open(); len(problems) != 1 || !strings.Contains(problems[0].Error(), "iommu-group-3") {
		t.Errorf("problems %v", problems)
	}
	if err := giveAll(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	k.check("nvme", "(null)", first)
}

// The records of earlier versions, one file per function, become one record of the group.
func TestEarlierRecords(t *testing.T) {
	for name, damaged := range map[string]string{"valid": "", "one is damaged": other} {
		t.Run(name, func(t *testing.T) {
			k := newKernel(t)
			if _, err := take(t.Context(), k.binder("1", nil), device(other)); err != nil {
				t.Fatal(err)
			}
			if err := os.RemoveAll(filepath.Join(k.Dir, "run/journal")); err != nil {
				t.Fatal(err)
			}
			earlier := filepath.Join(k.Dir, "state/rebound")
			if err := os.CopyFS(earlier, os.DirFS("testdata/rebound")); err != nil {
				t.Fatal(err)
			}
			problems := 0
			if damaged != "" {
				k.File("state/rebound/"+damaged+".json", "{")
				problems = 1
			}
			b := newBinder(t, Config{Host: k.Host(), Write: k.Write, Journal: k.journal("1"), Earlier: earlier})
			if got := b.Open(); len(got) != problems {
				t.Errorf("problems %v", got)
			}
			want := []LeftUnit{{Unit: "iommu-group-3", Devices: []string{"pci-0000-03-00-0", "pci-0000-03-00-1"}, DriverUnknown: damaged != ""}}
			if left := b.LeftUnits(); !reflect.DeepEqual(left, want) {
				t.Errorf("left %+v, want %+v", left, want)
			}
			if got := k.records(); !slices.Equal(got, []string{"iommu-group-3.json"}) || len(filesIn(earlier)) > 0 {
				t.Errorf("records %q, earlier ones %q", got, filesIn(earlier))
			}
			if err := giveAll(t.Context(), b); err != nil || len(k.records()) > 0 {
				t.Errorf("%v, records %q", err, k.records())
			}
			k.check("nvme", "(null)", first, other)
		})
	}
}

// If the directory is deleted while half of a group is under vfio, the next agent finds the
// complete record or none.
func TestWipedHalfway(t *testing.T) {
	k := newKernel(t)
	k.Budget = 4 // the first function is under vfio, and the other is not
	b := k.binder("1", nil)
	if _, err := take(t.Context(), b, device(other)); !errors.Is(err, passthroughtest.ErrKilled) || k.Driver(first) != "vfio-pci" || k.Driver(other) == "vfio-pci" {
		t.Fatalf("%v, drivers %s and %s", err, k.Driver(first), k.Driver(other))
	}
	k.Budget = -1
	if err := os.RemoveAll(b.journal.Dir()); err != nil {
		t.Fatal(err)
	}
	if err := b.RestoreRecords(); err != nil {
		t.Fatal(err)
	}
	b = k.binder("1", nil)
	if left := b.LeftUnits(); len(left) != 1 || len(left[0].Devices) != 2 {
		t.Errorf("left %+v", left)
	}
	if err := giveAll(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	k.check("nvme", "(null)", first, other)
}

// Records that the disk temporarily fails to list are read later.
func TestUnlistedRecords(t *testing.T) {
	k := newKernel(t)
	if _, err := take(t.Context(), k.binder("1", nil), device(other)); err != nil {
		t.Fatal(err)
	}
	failing := true
	place := k.journal("1")
	place.Files = disk.Files{FS: &disktest.Disk{BeforeRead: func(name string) error {
		if failing && strings.HasSuffix(name, "rebind") {
			return syscall.EIO
		}
		return nil
	}}}
	b := newBinder(t, Config{Host: k.Host(), Write: k.Write, Journal: place})
	if problems := b.Open(); len(problems) == 0 {
		t.Error("no problem")
	}
	if _, unread := b.ReadAgain(); !unread || len(b.LeftUnits()) > 0 {
		t.Errorf("unread %t, left %v", unread, b.LeftUnits())
	}
	failing = false
	if problems, unread := b.ReadAgain(); unread || len(problems) > 0 || len(b.LeftUnits()) != 1 {
		t.Errorf("unread %t, problems %v, left %v", unread, problems, b.LeftUnits())
	}
	if err := giveAll(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	k.check("nvme", "(null)", first, other)
}

// Removed records are written again, even while a write to a function hangs. The next agent uses
// them to return the functions.
func TestRemovedRecords(t *testing.T) {
	k := newKernel(t)
	hangs := make(chan struct{})
	b := k.binder("1", nil)
	if _, err := take(t.Context(), b, device(other)); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(b.journal.Dir()); err != nil {
		t.Fatal(err)
	}
	lease, err := b.leaseFunctions([]string{first}, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.Do(time.Millisecond, "a write", func() error { <-hangs; return nil }); !errors.Is(err, overdue.Err) {
		t.Fatal(err)
	}
	if err := b.RestoreRecords(); err != nil || len(k.records()) != 1 {
		t.Errorf("%v, records %q", err, k.records())
	}
	close(hangs)
	b = k.binder("1", nil)
	if err := giveAll(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	k.check("nvme", "(null)", first, other)
	if err := b.RestoreRecords(); err != nil || len(k.records()) > 0 {
		t.Errorf("after it: %v, records %q", err, k.records())
	}
}

// An unreadable record, such as one emptied by a power loss, is replaced by the function's present
// state when the function has its own driver and is taken again.
func TestDamagedRecordOfAnEarlierBoot(t *testing.T) {
	k := newKernel(t)
	k.File(damagedRecord, "")
	b := newBinder(t, Config{Host: k.Host(), Write: k.Write, Busy: func(...sysfs.Device) error { return nil }, Journal: k.journal("2")})
	if problems := b.Open(); len(problems) != 1 || len(b.LeftUnits()) != 1 {
		t.Fatalf("problems %v, left %v", problems, b.LeftUnits())
	}
	if _, err := take(t.Context(), b, device(other)); err != nil {
		t.Fatal(err)
	}
	if s := b.DescribeDevices(&discovery.Snapshot{}); len(s.Devices) == 0 || s.Devices[0].Name != device().Name {
		t.Errorf("described: %+v", s.Devices)
	}
	if err := giveAll(t.Context(), b); err != nil || len(b.LeftUnits()) > 0 {
		t.Errorf("left %v: %v", b.LeftUnits(), err)
	}
	k.check("nvme", "(null)", first)
}

// An unreadable record of a missing function, such as a virtual function after a reboot, does not
// apply to the next function at its address.
func TestDamagedRecordOfNothing(t *testing.T) {
	k := newKernel(t)
	const virtual = "0000:09:10.2"
	k.File("state/rebound/"+virtual+".json", "")
	earlier := filepath.Join(k.Dir, "state/rebound")
	b := newBinder(t, Config{Host: k.Host(), Write: k.Write, Journal: k.journal("2"), Earlier: earlier})
	if problems := b.Open(); len(problems) > 0 || len(b.LeftUnits()) > 0 || len(k.records()) > 0 || len(filesIn(earlier)) > 0 {
		t.Errorf("problems %v, left %v, records %q", problems, b.LeftUnits(), k.records())
	}
	k.Add(virtual, "igbvf", "9")
	d := discovery.Device{Name: "pci-0000-09-10-2", Source: passthroughtest.Source(virtual)}
	if _, work, err := b.Configurer(nothing)(d, nil, "claim"); work != nil || err != nil {
		t.Errorf("work %t, error %v", work != nil, err)
	}
}

// If the function's own driver has refused it in the meantime, the kernel chooses a driver at the
// return.
func TestDamagedRecordWithoutDriver(t *testing.T) {
	k := newKernel(t)
	k.File(damagedRecord, "")
	b := newBinder(t, Config{Host: k.Host(), Write: k.Write, Busy: func(...sysfs.Device) error { return nil }, Journal: k.journal("2")})
	if problems := b.Open(); len(problems) != 1 {
		t.Fatalf("problems %v", problems)
	}
	k.SetDriver(first, "")
	if _, err := take(t.Context(), b, device(other)); err != nil {
		t.Fatal(err)
	}
	if s := b.DescribeDevices(&discovery.Snapshot{}); len(s.Devices) == 0 || s.Devices[0].Name != device().Name {
		t.Errorf("described: %+v", s.Devices)
	}
	if err := giveAll(t.Context(), b); err != nil || len(b.LeftUnits()) > 0 {
		t.Errorf("left %v: %v", b.LeftUnits(), err)
	}
	k.check("nvme", "(null)", first)
}

// A function with its own driver keeps that driver if its record cannot be read: nothing is
// unbound. If the driver that the kernel chooses refuses the function, the return is retried.
func TestDamagedRecordOfWhatIsWell(t *testing.T) {
	k := newKernel(t)
	k.File(damagedRecord, "")
	b := newBinder(t, Config{Host: k.Host(), Write: k.Write, Journal: k.journal("2")})
	b.Open()
	if err := giveAll(t.Context(), b); err != nil || len(k.ListWrites()) > 0 {
		t.Errorf("%v, writes %q", err, k.ListWrites())
	}
	k.File(damagedRecord, "")
	k.SetDriver(first, "")
	k.RefuseProbes("nvme", syscall.EIO)
	b.Open()
	if err := giveAll(t.Context(), b); err == nil || len(b.LeftUnits()) != 1 {
		t.Errorf("left %v: %v", b.LeftUnits(), err)
	}
	k.RefuseProbes("nvme", nil)
	if err := giveAll(t.Context(), b); err != nil || len(b.LeftUnits()) > 0 {
		t.Errorf("left %v: %v", b.LeftUnits(), err)
	}
	k.check("nvme", "(null)", first)
}

// A device under passthrough is described once, by its description before the passthrough,
// whichever family finds it.
func TestDescribe(t *testing.T) {
	k := newKernel(t)
	b := k.binder("1", nil)
	d := device(other)
	d.PartOf = &discovery.Silicon{Name: "iommu-group-3"}
	if _, err := take(t.Context(), b, d); err != nil {
		t.Fatal(err)
	}
	found := discovery.Device{Name: d.Name, Family: "vfio", Source: d.Source, Attributes: discovery.Attributes{}, Readings: []discovery.Health{{Status: discovery.Unhealthy, Condition: discovery.ConditionFatalErrors, Reason: "errors"}}}
	neighbour := discovery.Device{Name: "a", Source: "sys/a"}
	scanned := &discovery.Snapshot{Devices: []discovery.Device{neighbour, found}}
	for range 2 {
		s := b.DescribeDevices(scanned)
		if len(s.Devices) != 2 || s.Devices[0].Name != "a" {
			t.Fatalf("devices %+v", s.Devices)
		}
		now := s.Devices[1]
		if now.Family != "disks" || now.Attributes.String("driver") != "nvme" || now.Silicon() != "iommu-group-3" || now.Passthrough == nil {
			t.Errorf("described as %+v", now)
		}
		if len(now.Edits.DeviceNodes) != 2 || now.Health.Condition != discovery.ConditionFatalErrors {
			t.Errorf("nodes %v, health %v", now.Edits.DeviceNodes, now.Health)
		}
		if found.Family != "vfio" || scanned.Devices[1].Family != "vfio" {
			t.Error("the scan's snapshot was modified")
		}
		b = k.binder("1", nil) // a new agent gives the same description
	}
}

// A device whose nodes were described under vfio is taken again, and the agent is killed halfway.
// For the next agent, the control node of vfio is still not the device's own, so the device can be
// returned while other devices use that node.
func TestCommonNodesAreRecorded(t *testing.T) {
	k := newKernel(t)
	d := device(other)
	for _, node := range []string{"/dev/vfio/3", pci.VFIOControl()[0]} {
		d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, &specs.DeviceNode{Path: node, HostPath: node})
	}
	d.CommonNodes = pci.VFIOControl()
	if _, err := take(t.Context(), k.binder("1", nil), d); err != nil {
		t.Fatal(err)
	}
	k.SetDriver(first, "")
	s := k.binder("1", nil).DescribeDevices(&discovery.Snapshot{Devices: []discovery.Device{d}})
	own := s.Devices[0].OwnNodes()
	if len(own) != 1 || own[0].Path != "/dev/vfio/3" {
		t.Errorf("its own nodes are %v", own)
	}
}

// A function that has left the group since the device was described keeps its driver.
func TestFunctionHasLeftTheGroup(t *testing.T) {
	k := newKernel(t)
	d := device(other)
	k.ReturnFunction(other, "nvme", "4")
	if _, err := take(t.Context(), k.binder("1", nil), d); err != nil {
		t.Fatal(err)
	}
	k.check("vfio-pci", "vfio-pci", first)
	k.check("nvme", "(null)", other)
}

// A device that has moved to another IOMMU group since it was described is not taken before the
// next description: its record would belong to the earlier group.
func TestMovedSinceItWasDescribed(t *testing.T) {
	k := newKernel(t)
	d := device()
	k.ReturnFunction(first, "nvme", "4")
	if _, err := take(t.Context(), k.binder("1", nil), d); err == nil || !strings.Contains(err.Error(), "is in iommu-group-4 by now") {
		t.Errorf("%v", err)
	}
	k.check("nvme", "(null)", first)
}

// A group is not taken again while the last scan describes one of its functions under vfio: the
// record would lack the function's own description.
func TestTakenAgainBeforeTheNextScan(t *testing.T) {
	k := newKernel(t)
	b := k.binder("1", nil)
	second := device(first)
	second.Name, second.Source = "pci-0000-03-00-1", passthroughtest.Source(other)
	scanned := &discovery.Snapshot{Devices: []discovery.Device{device(other), second}}
	b.DescribeDevices(scanned)
	if _, err := take(t.Context(), b, device(other)); err != nil {
		t.Fatal(err)
	}
	underVFIO := second
	underVFIO.Passthrough, underVFIO.Attributes = nil, discovery.Attributes{}
	underVFIO.Attributes.SetString("driver", "vfio-pci")
	b.DescribeDevices(&discovery.Snapshot{Devices: []discovery.Device{device(other), underVFIO}}) // while the group is being returned
	if err := giveAll(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	if _, err := take(t.Context(), b, device(other)); err == nil || !strings.Contains(err.Error(), "was described under vfio") {
		t.Errorf("before the next scan: %v", err)
	}
	k.check("nvme", "(null)", first, other)
	b.DescribeDevices(scanned)
	if _, err := take(t.Context(), b, device(other)); err != nil {
		t.Fatal(err)
	}
	s := b.DescribeDevices(&discovery.Snapshot{Devices: []discovery.Device{underVFIO}})
	if d, found := s.Lookup(second.Name); !found || d.Passthrough == nil {
		t.Errorf("the other function is described as %+v", d)
	}
}

// A cancelled call changes nothing.
func TestCalledOff(t *testing.T) {
	k := newKernel(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := take(ctx, k.binder("1", nil), device(other)); !errors.Is(err, context.Canceled) || len(k.Writes) > 0 {
		t.Errorf("%v, writes %q", err, k.Writes)
	}
}
