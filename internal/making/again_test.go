package making

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
)

// registerAgain has the kernel register the cell again, divided or not. The directory before stays outside of the host,
// so that its inode number is not used again, as in sysfs.
func (k *kernel) registerAgain(value string) {
	k.t.Helper()
	if err := os.Rename(filepath.Join(k.dir, whole), filepath.Join(k.dir, "removed")); err != nil {
		k.t.Fatal(err)
	}
	k.divide(value)
}

// What is on a function that the kernel has registered again, as after a card was replaced, was not created by the agent,
// and stays. The record before is removed, by the same agent and by the next one.
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
			if removed, err := m.Undo(t.Context(), "cell-0"); removed || err != nil {
				t.Errorf("removed: %t, %v", removed, err)
			}
			if len(k.writes) != 1 || len(m.Made()) > 0 || len(k.records()) > 0 {
				t.Errorf("written %q, records %q", k.writes, k.records())
			}
		})
	}
}

// What a claim gets on the function that was registered again is created once more, and removed.
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
		if removed, err := m.Undo(t.Context(), "cell-0"); !removed || err != nil {
			t.Errorf("removed: %t, %v", removed, err)
		}
		k.check(false)
	})
}
