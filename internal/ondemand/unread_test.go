package ondemand

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/disk/disktest"
)

// A record that the disk temporarily does not read or list is read later, and its unit is removed.
// The old record does not apply to a unit created again in the meantime.
func TestUnreadRecord(t *testing.T) {
	for i := range 4 {
		anew, unread := i%2 > 0, []string{".json", "create"}[i/2]
		synctest.Test(t, func(t *testing.T) {
			k := newKernel(t)
			if err := get(t.Context(), k.maker("1"), k.scan(), 0); err != nil {
				t.Fatal(err)
			}
			m, failing := k.maker("1"), true
			config := m.config
			config.Journal.Files = disk.Files{FS: &disktest.Disk{BeforeRead: func(name string) error {
				if failing && strings.HasSuffix(name, unread) {
					return syscall.EIO
				}
				return nil
			}}}
			m = New(config)
			if problems := m.Open(); len(problems) == 0 || !m.unread() || len(m.CreatedUnits()) > 0 {
				t.Errorf("problems %v, made %+v", problems, m.CreatedUnits())
			}
			if anew {
				now := discovery.Device{Name: "cell-0-a", Family: "cells", Creation: &discovery.Creation{Unit: "cell-0", Of: whole, How: map[string]string{"attribute": attribute, "anew": "yes"}}}
				if err := m.recordUnit(&now); err != nil {
					t.Fatal(err)
				}
			}
			failing = false
			if m.unread() {
				t.Error("unread still")
			}
			if how, has := m.Has("cell-0"); !has || (how["anew"] != "") != anew {
				t.Errorf("%v: %v", has, how)
			}
			if _, err := m.RemoveUnit(t.Context(), "cell-0"); err != nil {
				t.Error(err)
			}
			k.check(false)
			if left, _ := filepath.Glob(filepath.Join(k.dir, "state/create/*")); len(left) > 0 || m.unread() {
				t.Errorf("left %q", left)
			}
		})
	}
}

func (m *Manager) unread() bool {
	_, unread := m.ReadAgain()
	return unread
}
