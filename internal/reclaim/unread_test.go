package reclaim

import (
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// A record that the disk temporarily does not read or list is read later, and its device is
// withheld.
func TestUnreadRecord(t *testing.T) {
	for _, unread := range []string{"d.", "reclaim"} {
		t.Run(unread, func(t *testing.T) { readLater(t, unread) })
	}
}

func readLater(t *testing.T, unread string) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.open()
		b.trains()
		b.gives("pod")
		b.ends()
		var failing atomic.Bool
		failing.Store(true)
		b.disk.BeforeRead = func(name string) error {
			if failing.Load() && strings.HasPrefix(filepath.Base(name), unread) {
				return syscall.EIO
			}
			return nil
		}
		if problems := b.open(); len(problems) == 0 || len(b.files()) != 1 {
			t.Errorf("problems %v, files %q", problems, b.files())
		}
		stop := b.run()
		time.Sleep(time.Minute)
		b.keeps("")
		failing.Store(false)
		time.Sleep(10 * time.Second)
		b.keeps("claim default/old, which has ended: /dev/d: process 47 (train) has it open")
		b.handsOver(stop)
	})
}
