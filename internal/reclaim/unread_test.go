package reclaim

import (
	"context"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
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

// A claim continues while its record cannot be read at first, and ends before or after the record is
// read. A pod that only the record names has the claim's device open. The device is withheld from the
// next consumer until the pod has closed the device, or for as long as unknown pods may continue.
func TestUnreadRecordOfClaimThatGoesOn(t *testing.T) {
	for _, ends := range []string{"before", "after"} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			b.rule.Value.Reset = false
			b.open()
			b.trains()
			b.gives("pod")
			var failing atomic.Bool
			failing.Store(true)
			b.disk.BeforeRead = func(name string) error {
				if failing.Load() && strings.HasPrefix(filepath.Base(name), "d.") {
					return syscall.EIO
				}
				return nil
			}
			b.open()
			b.listed = []string{"next"}
			b.podsOf = func(context.Context) (map[types.NamespacedName]Pod, error) {
				return map[types.NamespacedName]Pod{{Namespace: "default", Name: "next"}: {UID: "next", Claims: []string{"old"}}}, nil
			}
			stop := b.run()
			time.Sleep(time.Minute)
			if ends == "before" {
				b.ends()
				b.keeps("it is unknown whether a process has it open (its previous pods are unknown)")
				stop()
				return
			}
			failing.Store(false)
			time.Sleep(time.Minute)
			b.ends()
			time.Sleep(time.Hour)
			b.keeps("claim default/old, which has ended: /dev/d: process 47 (train) has it open")
			b.handsOver(stop)
		})
	}
}
