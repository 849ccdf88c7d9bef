package ondemand

import (
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"

	"chandler.dev/internal/disk/disktest"
)

// registerAgain makes the kernel register the cell again, divided or not. The old directory remains
// outside of the host, so that its inode number is not used again, as in sysfs.
func (k *kernel) registerAgain(value string) {
	k.t.Helper()
	if err := os.Rename(filepath.Join(k.dir, whole), filepath.Join(k.dir, "removed")); err != nil {
		k.t.Fatal(err)
	}
	k.divide(value)
}

// Devices on a function that the kernel has registered again, as after a card was replaced, were
// not created by the agent, and stay. The old record is removed, by the same agent and by the next
// one.
func TestCreatedBeforeTheFunctionWasRegisteredAgain(t *testing.T) {
	for _, restart := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			k := newKernel(t)
			m := k.maker("1")
			if err := get(t.Context(), m, k.scan(), 0); err != nil {
				t.Fatal(err)
			}
			k.registerAgain("1") // and an administrator has divided it
			if restart {
				m = k.maker("1")
			}
			if how, has := m.Has("cell-0"); has {
				t.Errorf("created by the agent: %v", how)
			}
			if removed, err := m.RemoveUnit(t.Context(), "cell-0"); removed || err != nil {
				t.Errorf("removed: %t, %v", removed, err)
			}
			if len(k.writes) != 1 || len(m.CreatedUnits()) > 0 || len(k.records()) > 0 {
				t.Errorf("written %q, records %q", k.writes, k.records())
			}
		})
	}
}

// A claim gets a device on the newly registered function: the device is created again, and removed.
func TestCreatedOnTheFunctionThatWasRegisteredAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		m := k.maker("1")
		if err := get(t.Context(), m, k.scan(), 0); err != nil {
			t.Fatal(err)
		}
		k.registerAgain("0")
		if err := get(t.Context(), m, k.scan(), 0); err != nil {
			t.Fatal(err)
		}
		k.check(true)
		if removed, err := m.RemoveUnit(t.Context(), "cell-0"); !removed || err != nil {
			t.Errorf("removed: %t, %v", removed, err)
		}
		k.check(false)
	})
}

// If an agent has no file descriptors left, it can neither write a record nor read it back. The next
// attempt writes the record before it creates the unit, so that the agent after a kill removes the
// unit.
func TestRecordIsUncertain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel(t)
		faulty := &disktest.Disk{}
		k.disk = faulty
		m := k.maker("1")
		faulty.Before = func(disktest.Op, string) error { return syscall.EMFILE }
		faulty.BeforeRead = func(string) error { return syscall.EMFILE }
		if err := get(t.Context(), m, k.scan(), 0); err == nil {
			t.Error("created without a record")
		}
		faulty.Before, faulty.BeforeRead = nil, nil
		if err := get(t.Context(), m, k.scan(), 0); err != nil {
			t.Fatal(err)
		}
		k.check(true)
		if _, err := k.maker("1").RemoveUnit(t.Context(), "cell-0"); err != nil {
			t.Error(err)
		}
		k.check(false)
	})
}

// The disk fails in any operation of creating and removing a unit, and the agent is killed after
// that. While the unit is there, its record is there too, and the next agent, whose disk works,
// removes the unit.
func TestDiskFails(t *testing.T) {
	for _, forGood := range []bool{false, true} {
		for nth, reached := 1, true; reached; nth++ {
			synctest.Test(t, func(t *testing.T) {
				k := newKernel(t)
				operations := 0
				k.disk = &disktest.Disk{Before: func(disktest.Op, string) error {
					operations++
					if operations == nth || forGood && operations > nth {
						return syscall.ENOSPC
					}
					return nil
				}}
				m := k.maker("1")
				divided := func() bool { _, err := os.Stat(filepath.Join(k.dir, whole, "a")); return err == nil }
				err := get(t.Context(), m, k.scan(), 0)
				if divided() && len(k.records()) == 0 {
					t.Errorf("operation %d: created without a record: %v", nth, err)
				}
				_, _ = m.RemoveUnit(t.Context(), "cell-0")
				if divided() && len(k.records()) == 0 {
					t.Errorf("operation %d: not removed, and no record", nth)
				}
				k.disk = nil
				if _, err := k.maker("1").RemoveUnit(t.Context(), "cell-0"); err != nil {
					t.Errorf("operation %d: the next agent: %v", nth, err)
				}
				// The fake clock hides the age of temporary files, so they are not swept here.
				left := slices.DeleteFunc(k.records(), func(name string) bool { return filepath.Base(name)[0] == '.' })
				if divided() || len(left) > 0 {
					t.Errorf("operation %d: there still: %t, records %q", nth, divided(), left)
				}
				reached = operations >= nth
			})
		}
	}
}
