package reclaim

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
)

// An expression is evaluated once for a device until the rules or the snapshot change.
func TestChoosesOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		var evaluated atomic.Int64
		var selected atomic.Bool
		b.rule.Selects = func(discovery.Device) (bool, error) { evaluated.Add(1); return selected.Load(), nil }
		b.open()
		var rules atomic.Pointer[[]discovery.Selection[Rule]]
		var snapshot atomic.Pointer[discovery.Snapshot]
		rules.Store(&[]discovery.Selection[Rule]{b.rule})
		snapshot.Store(b.config.Snapshot())
		b.config.Rules = func() []discovery.Selection[Rule] { return *rules.Load() }
		b.config.Snapshot = snapshot.Load
		b.gives("pod")
		stop := b.run()
		defer stop()
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := evaluated.Load(); n != 1 || len(b.files()) != 0 {
			t.Errorf("evaluated %d times in an hour; written down %q", n, b.files())
		}
		selected.Store(true)
		snapshot.Store(&discovery.Snapshot{Devices: snapshot.Load().Devices})
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := evaluated.Load(); n != 2 || len(b.files()) != 1 {
			t.Errorf("evaluated %d times; written down %q", n, b.files())
		}
		rules.Store(&[]discovery.Selection[Rule]{b.rule})
		b.ends()
		synctest.Wait()
		if n := evaluated.Load(); n != 3 || len(b.ListWrites()) != 1 {
			t.Errorf("evaluated %d times; writes %q", n, b.ListWrites())
		}
	})
}
