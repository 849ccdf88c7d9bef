package passthrough

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// A function that the kernel has registered again is a different function, whatever its driver: the
// old record is removed, and the new function is described as a scan finds it and keeps its driver.
// The sibling in its group, which was not registered again, is returned.
func TestRegisteredAgain(t *testing.T) {
	for name, driver := range map[string]string{
		"the administrator's rule binds it to vfio": "vfio-pci",
		"another card":        "e1000e",
		"none has taken it":   "",
		"the card came back":  "nvme",
		"after another start": "vfio-pci",
	} {
		t.Run(name, func(t *testing.T) {
			k := newKernel(t)
			b := k.binder("1", nil)
			if _, err := take(t.Context(), b, device(other)); err != nil {
				t.Fatal(err)
			}
			k.ReturnFunction(first, driver, "9")
			if strings.HasSuffix(name, "start") {
				b = k.binder("1", nil)
			}
			now := device()
			now.Attributes = discovery.Attributes{}
			now.Attributes.SetString("model", "another card")
			now.Attributes.SetString("driver", driver)
			s := b.DescribeDevices(&discovery.Snapshot{Devices: []discovery.Device{now}})
			if len(s.Devices) != 1 || s.Devices[0].Attributes.String("model") != "another card" {
				t.Errorf("described: %+v", s.Devices)
			}
			want := []LeftUnit{{Unit: "iommu-group-3", Devices: []string{"pci-0000-03-00-1"}}}
			if left := b.LeftUnits(); len(left) != 1 || !slices.Equal(left[0].Devices, want[0].Devices) {
				t.Errorf("left %+v, want %+v", left, want)
			}
			before := len(k.ListWrites())
			if err := giveAll(t.Context(), b); err != nil || len(b.LeftUnits()) > 0 || len(k.records()) > 0 {
				t.Errorf("left %v: %v", b.LeftUnits(), err)
			}
			k.check(driver, "(null)", first)
			k.check("nvme", "(null)", other)
			for _, write := range k.ListWrites()[before:] {
				if strings.Contains(write, first) {
					t.Errorf("written: %s", write)
				}
			}
		})
	}
}

// The record stays while another call changes the function, or while the disk cannot remove the
// record. The next call does not apply the record to the new function.
func TestRegisteredAgainWhileTheRecordStays(t *testing.T) {
	k := newKernel(t)
	b := k.binder("1", nil)
	if _, err := take(t.Context(), b, device(other)); err != nil {
		t.Fatal(err)
	}
	k.ReturnFunction(first, "e1000e", "3")
	lease, err := b.leaseRecord(passthroughtest.Source(first))
	if err != nil {
		t.Fatal(err)
	}
	now := device(other)
	now.Attributes.SetString("driver", "e1000e")
	s := b.DescribeDevices(&discovery.Snapshot{Devices: []discovery.Device{now}})
	if got := s.Devices[0].Attributes.String("driver"); got != "e1000e" {
		t.Errorf("described with driver %q", got)
	}
	lease.Release()
	if _, err := take(t.Context(), b, now); err != nil {
		t.Fatal(err)
	}
	k.check("vfio-pci", "vfio-pci", first, other)
	if err := giveAll(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	k.check("e1000e", "(null)", first)
	k.check("nvme", "(null)", other)
}

// A change of the driver leaves the function the same, so the next agent finds the record again.
func TestSameFunctionUnderAnotherDriver(t *testing.T) {
	k := newKernel(t)
	before := discovery.FunctionKey(k.Host(), passthroughtest.Source(first))
	if _, err := take(t.Context(), k.binder("1", nil), device(other)); err != nil {
		t.Fatal(err)
	}
	b := k.binder("1", nil)
	f := b.functions[first]
	if f == nil || f.Key != before || before.Inode == 0 || !b.config.isCurrent(f) {
		t.Errorf("record %+v, key before %+v", f, before)
	}
}

// A record with invalid functions is treated like a record that cannot be decoded: the kernel
// chooses the drivers.
func TestRecordWithoutFunctions(t *testing.T) {
	for name, functions := range map[string]string{
		"none":         `[]`,
		"null":         `[null]`,
		"nameless":     `[{}]`,
		"no directory": `[{"function":"0000:03:00.0"}]`,
		"another's":    `[{"function":"0000:03:00.0","source":"sys/devices/pci0000:00/0000:00:03.0/0000:03:00.1"}]`,
	} {
		t.Run(name, func(t *testing.T) {
			k := newKernel(t)
			if _, err := take(t.Context(), k.binder("1", nil), device(other)); err != nil {
				t.Fatal(err)
			}
			k.File(damagedRecord, `{"boot":"1","trade":"rebind","group":"iommu-group-3","body":{"functions":`+functions+`}}`)
			b := newBinder(t, Config{Host: k.Host(), Write: k.Write, Journal: k.journal("1")})
			if problems := b.Open(); len(problems) != 1 || !strings.Contains(problems[0].Error(), "iommu-group-3") {
				t.Errorf("problems %v", problems)
			}
			if err := giveAll(t.Context(), b); err != nil {
				t.Fatal(err)
			}
			k.check("nvme", "(null)", first, other)
		})
	}
}

// An agent was killed while it converted the records of an earlier version, and its new record was
// damaged. The file of the earlier version, which is still there, has the driver.
func TestDamagedWhileConverted(t *testing.T) {
	k := newKernel(t)
	if _, err := take(t.Context(), k.binder("1", nil), device(other)); err != nil {
		t.Fatal(err)
	}
	earlier := filepath.Join(k.Dir, "state/rebound")
	if err := os.CopyFS(earlier, os.DirFS("testdata/rebound")); err != nil {
		t.Fatal(err)
	}
	k.File(damagedRecord, "{")
	b := newBinder(t, Config{Host: k.Host(), Write: k.Write, Journal: k.journal("1"), Earlier: earlier})
	if problems := b.Open(); len(problems) != 1 {
		t.Errorf("problems %v", problems)
	}
	for _, address := range []string{first, other} {
		if f := b.functions[address]; f.Choose || f.Driver != "nvme" {
			t.Errorf("record of %s: %+v", address, f)
		}
	}
	if err := giveAll(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	k.check("nvme", "(null)", first, other)
}

// An agent was killed while a function with unknown driver moved from the record of one unit to
// that of another. The known driver is used, and both records are removed.
func TestFunctionInTwoRecords(t *testing.T) {
	for _, unit := range []string{"iommu-group-2", "iommu-group-4"} {
		k := newKernel(t)
		b := k.binder("1", nil)
		if _, err := take(t.Context(), b, device(other)); err != nil {
			t.Fatal(err)
		}
		if err := b.changeRecord(unit, nil, b.unknownFunction(passthroughtest.Source(first))); err != nil {
			t.Fatal(err)
		}
		b = k.binder("1", nil)
		if f := b.functions[first]; f.Choose || f.Driver != "nvme" {
			t.Errorf("%s: %+v", unit, f)
		}
		if err := errors.Join(giveAll(t.Context(), b), giveAll(t.Context(), b)); err != nil || len(k.records()) > 0 {
			t.Errorf("%s: %v, records %q", unit, err, k.records())
		}
		k.check("nvme", "(null)", first, other)
	}
}

// A scan that has seen a function under its own driver checks again once it has the lease. So the
// record stays if another call has bound the function to vfio meanwhile, or is still running.
func TestReturnedFunctionIsTakenAgain(t *testing.T) {
	k := newKernel(t)
	b := k.binder("1", nil)
	if _, err := take(t.Context(), b, device(other)); err != nil {
		t.Fatal(err)
	}
	seen := b.functions[first] // by a scan that found the function under nvme
	b.forgetIfReturned(seen)
	if f := b.functions[first]; f != seen {
		t.Errorf("record of a function under vfio: %+v", f)
	}
	k.SetDriver(first, "nvme")
	k.File(passthroughtest.Source(first)+"/driver_override", "(null)\n")
	lease, err := b.leaseFunctions([]string{passthroughtest.Source(first)}, "")
	if err != nil {
		t.Fatal(err)
	}
	b.forgetIfReturned(seen)
	if f := b.functions[first]; f != seen {
		t.Errorf("record while a call changes the function: %+v", f)
	}
	lease.Release()
	b.forgetIfReturned(seen)
	if f := b.functions[first]; f != nil {
		t.Errorf("record of a function that was returned: %+v", f)
	}
}

// The disk fails once, or from then on, in any operation of taking and returning a group, and the
// agent is killed after that. The next agent, whose disk works, returns every changed function.
// While a function is changed, its record is there.
func TestDiskFails(t *testing.T) {
	for _, forGood := range []bool{false, true} {
		for nth, reached := 1, true; reached; nth++ {
			k := newKernel(t)
			operations := 0
			place := k.journal("1")
			place.Files = disk.Files{FS: &disktest.Disk{Before: func(disktest.Op, string) error {
				operations++
				if operations == nth || forGood && operations > nth {
					return syscall.ENOSPC
				}
				return nil
			}}}
			config := Config{
				Host: k.Host(), Write: k.Write, Family: "vfio", Journal: place, Wait: time.Millisecond,
				Busy: func(...sysfs.Device) error { return nil },
			}
			b := newBinder(t, config)
			_ = b.Open() // the sweep of temporary files may fail
			changed := func() bool { return k.Driver(first) != "nvme" || k.Driver(other) != "nvme" }
			_, err := take(t.Context(), b, device(other))
			if changed() && len(k.records()) == 0 {
				t.Errorf("operation %d: changed without a record: %v", nth, err)
			}
			_ = giveAll(t.Context(), b)
			if changed() && len(k.records()) == 0 {
				t.Errorf("operation %d: not returned, and no record", nth)
			}
			if err := giveAll(t.Context(), k.binder("1", nil)); err != nil {
				t.Errorf("operation %d: the next agent: %v", nth, err)
			}
			k.check("nvme", "(null)", first, other)
			if got := k.records(); len(got) > 0 {
				t.Errorf("operation %d: records %q", nth, got)
			}
			reached = operations >= nth
		}
	}
}

// If an agent has no file descriptors left, it can neither write a record nor read it back. The next
// attempt writes the record before it changes a function, so that the agent after a kill returns all
// functions of the group.
func TestRecordIsUncertain(t *testing.T) {
	for _, half := range []bool{false, true} {
		k := newKernel(t)
		faulty := &disktest.Disk{}
		place := k.journal("1")
		place.Files = disk.Files{FS: faulty}
		b := newBinder(t, Config{Host: k.Host(), Write: k.Write, Family: "vfio", Journal: place, Wait: time.Millisecond, Busy: func(...sysfs.Device) error { return nil }})
		if half { // the other function is plugged into the group later
			k.ReturnFunction(other, "nvme", "4")
			if _, err := take(t.Context(), b, device()); err != nil {
				t.Fatal(err)
			}
			k.ReturnFunction(other, "nvme", "3")
		}
		faulty.Before = func(disktest.Op, string) error { return syscall.EMFILE }
		faulty.BeforeRead = func(string) error { return syscall.EMFILE }
		if _, err := take(t.Context(), b, device(other)); err == nil {
			t.Error("taken without a record")
		}
		k.check("nvme", "(null)", other)
		faulty.Before, faulty.BeforeRead = nil, nil
		if _, err := take(t.Context(), b, device(other)); err != nil {
			t.Fatal(err)
		}
		k.check("vfio-pci", "vfio-pci", first, other)
		if err := giveAll(t.Context(), k.binder("1", nil)); err != nil {
			t.Error(err)
		}
		k.check("nvme", "(null)", first, other)
	}
}

// The same for the conversion of the records of an earlier version, which begins when the agent
// starts.
func TestDiskFailsDuringConversion(t *testing.T) {
	for _, returns := range []bool{false, true} {
		for nth, reached := 1, true; reached; nth++ {
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
			operations := 0
			place := k.journal("1")
			place.Files = disk.Files{FS: &disktest.Disk{Before: func(disktest.Op, string) error {
				if operations++; operations >= nth {
					return syscall.ENOSPC
				}
				return nil
			}}}
			b := newBinder(t, Config{Host: k.Host(), Write: k.Write, Journal: place, Earlier: earlier, Wait: time.Millisecond})
			_ = b.Open() // reports disk errors
			for _, address := range []string{first, other} {
				if f := b.functions[address]; f == nil || f.Driver != "nvme" {
					t.Errorf("operation %d: record of %s: %+v", nth, address, f)
				}
			}
			if returns {
				_ = giveAll(t.Context(), b)
			}
			if err := giveAll(t.Context(), k.binder("1", nil)); err != nil {
				t.Errorf("operation %d: the next agent: %v", nth, err)
			}
			k.check("nvme", "(null)", first, other)
			if got := append(k.records(), filesIn(earlier)...); len(got) > 0 {
				t.Errorf("operation %d: records %q", nth, got)
			}
			reached = operations >= nth
		}
	}
}

// While no agent runs, one function of a group under vfio is unplugged and another one is plugged
// in. The next agent returns the remaining function, and takes the new one too if the claim still
// exists.
func TestGroupChangesWhileNoAgentRuns(t *testing.T) {
	const third = "0000:03:00.2"
	for _, goesOn := range []bool{false, true} {
		k := newKernel(t)
		if _, err := take(t.Context(), k.binder("1", nil), device(other)); err != nil {
			t.Fatal(err)
		}
		for _, gone := range []string{passthroughtest.Source(other), "sys/bus/pci/devices/" + other, "sys/kernel/iommu_groups/3/devices/" + other} {
			if err := os.RemoveAll(filepath.Join(k.Dir, gone)); err != nil {
				t.Fatal(err)
			}
		}
		k.Add(third, "nvme", "3")
		before := len(k.ListWrites())
		b := k.binder("1", nil)
		now := device(third)
		now.Name, now.Source, now.Passthrough = "pci-0000-03-00-2", passthroughtest.Source(third), &discovery.PassthroughOption{Driver: "vfio-pci"}
		b.DescribeDevices(&discovery.Snapshot{Devices: []discovery.Device{now}})
		if goesOn {
			if _, err := take(t.Context(), b, device(third)); err != nil {
				t.Fatal(err)
			}
			k.check("vfio-pci", "vfio-pci", first, third)
		}
		if err := giveAll(t.Context(), b); err != nil || len(k.records()) > 0 {
			t.Errorf("%v, records %q", err, k.records())
		}
		k.check("nvme", "(null)", first, third)
		written := slices.ContainsFunc(k.ListWrites()[before:], func(write string) bool { return strings.Contains(write, third) })
		if written != goesOn {
			t.Errorf("claim goes on: %t; written %q", goesOn, k.ListWrites()[before:])
		}
	}
}
