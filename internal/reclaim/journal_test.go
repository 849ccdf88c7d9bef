package reclaim

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// A claim ends while its record is not writable, and its device is withheld. The record is written
// once the disk allows it. If the agent is killed before, the earlier record remains, and the next
// agent withholds the device from the start.
func TestClaimEndsWhileItsRecordCannotBeWritten(t *testing.T) {
	for _, killed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			b.open()
			b.trains()
			b.gives("pod")
			var full atomic.Bool
			full.Store(true)
			b.disk.Before = func(op disktest.Op, name string) error {
				if op == disktest.Write && strings.Contains(name, "reclaim") && full.Load() {
					return syscall.ENOSPC
				}
				return nil
			}
			b.ends()
			b.keeps("process 47 (train) has it open")
			if killed {
				full.Store(false)
				b.open()
				b.keeps(reasonChecking)
			}
			stop := b.run()
			time.Sleep(time.Minute)
			full.Store(false)
			time.Sleep(2 * refreshInterval)
			if files := b.files(); len(files) != 1 || !strings.Contains(readFile(t, files[0]), `"ended":true`) {
				t.Errorf("the record was not written: %q", files)
			}
			b.keeps("process 47 (train) has it open")
			b.handsOver(stop)
			if got := len(b.ListWrites()); got != 1 {
				t.Errorf("%d resets", got)
			}
		})
	}
}

// The agent is killed after the end of a container whose record was not writable. The next agent
// withholds the container's device from the start. If the container goes on, the device is not
// withheld, because the kubelet would find the container's ID unhealthy.
func TestContainerEndsWhileItsRecordCannotBeWritten(t *testing.T) {
	for _, ends := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			b.open()
			b.trains()
			b.config.PodOf = func(allocation.Owner) types.UID { return "pod" }
			g := &allocation.Grant{Resource: "example.com/d", ID: "d", Container: "default/old main", Devices: []string{"d"}, Silicon: []string{"d"}, Exclusive: true, Since: time.Now()}
			if err := b.ledger.Grants.AllocateIDs(&exclusion.Present{}, []*allocation.Grant{g}); err != nil {
				t.Fatal(err)
			}
			stop := b.run()
			time.Sleep(time.Second)
			stop()
			if ends {
				b.disk.Before = func(op disktest.Op, name string) error {
					if op == disktest.Write && strings.Contains(name, "reclaim") {
						return syscall.ENOSPC
					}
					return nil
				}
				if err := b.ledger.Grants.EndGrants([]*allocation.Grant{g}); err != nil {
					t.Error(err)
				}
				b.disk.Before = nil
			}
			if files := b.files(); len(files) != 1 || strings.Contains(readFile(t, files[0]), `"ended":true`) {
				t.Errorf("records %q", files)
			}
			b.open()
			reason := func() string { return b.ledger.View(&exclusion.Present{}).KeptReason("d") }
			if (reason() != "") != ends {
				t.Errorf("the container has ended: %t; before the first check, its device is withheld because %q", ends, reason())
			}
			b.config.PodOf = func(allocation.Owner) types.UID { return "pod" }
			stop = b.run()
			time.Sleep(time.Second)
			if !ends {
				if reason() != "" {
					t.Errorf("withheld because %q", reason())
				}
				stop()
				return
			}
			b.keeps("process 47 (train) has it open")
			b.handsOver(stop)
		})
	}
}

// At its start, the agent withholds the devices of records only until it has checked which claims
// continue.
func TestRecordOfClaimThatGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.open()
		b.gives("pod")
		b.open()
		withheld := func() bool { return b.ledger.View(&exclusion.Present{}).KeptReason("d") != "" }
		if !withheld() {
			t.Error("other consumers may have the device although it has not been checked whether its claim has ended")
		}
		stop := b.run()
		time.Sleep(time.Second)
		if withheld() {
			t.Error("withheld although its claim goes on")
		}
		b.ends()
		stop()
	})
}

// After Run has returned, nothing is written to a device or to the journal, even by a hanging check
// or for a claim with a later end.
func TestNothingIsWrittenAfterRun(t *testing.T) {
	for _, endsLater := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			hangs := make(chan struct{})
			b.fsys = hanging{b.FS(), hangs}
			if endsLater {
				close(hangs)
			}
			b.open()
			b.gives("pod")
			if !endsLater {
				b.ends()
			}
			ctx, cancel := context.WithCancel(t.Context())
			returned := false
			go func() { b.Run(ctx); returned = true }()
			time.Sleep(5 * time.Second)
			cancel()
			synctest.Wait()
			if !returned {
				t.Error("Run waits for a look that hangs, which writes nothing")
			}
			if endsLater {
				b.ends()
			} else {
				close(hangs)
			}
			time.Sleep(time.Minute)
			if got := b.ListWrites(); len(got) > 0 || len(b.files()) != 1 {
				t.Errorf("writes %q, records %q", got, b.files())
			}
		})
	}
}

// Run waits for a reset in progress, up to the limit of a call. The record of an unfinished reset
// stays.
func TestRunWaitsForAReset(t *testing.T) {
	for _, took := range []time.Duration{3 * time.Second, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			b.rule.Value.Methods = []string{"flr"}
			b.open()
			b.config.Write = func(name, value string) error {
				time.Sleep(took)
				return b.Kernel.Write(name, value)
			}
			b.gives("pod")
			b.ends()
			ctx, cancel := context.WithCancel(t.Context())
			returned := make(chan struct{})
			go func() { b.Run(ctx); close(returned) }()
			synctest.Wait()
			cancel()
			began := time.Now()
			<-returned
			if waited := time.Since(began); waited > b.config.Limit || waited < min(took, b.config.Limit)-endWait {
				t.Errorf("a write of %s: Run waited %s", took, waited)
			}
			if ended := b.ledger.Leases.EndLeases(ctx); ended != (took < b.config.Limit) {
				t.Errorf("a write of %s: no lease is left: %t", took, ended)
			}
			time.Sleep(2 * took)
			for _, write := range b.ListWrites() {
				if strings.HasSuffix(write, "/reset 1") {
					t.Errorf("a write of %s: reset after the end of Run", took)
				}
			}
			if len(b.files()) != 1 {
				t.Errorf("records %q", b.files())
			}
		})
	}
}

// An allocated claim in reconfiguration may have running pods: its device is withheld at its end. A
// claim that was never allocated leaves no record.
func TestClaimIsConfiguredAgain(t *testing.T) {
	for _, given := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			b.open()
			b.trains()
			if given {
				b.gives("pod")
			}
			if err := b.ledger.AllocateClaim(b.claim, allocation.Configuring, &exclusion.Present{}); err != nil {
				t.Fatal(err)
			}
			stop := b.run()
			defer stop()
			time.Sleep(time.Minute)
			b.ends()
			if given {
				b.keeps("process 47 (train) has it open")
			} else {
				b.keeps("")
			}
			if len(b.files()) > 0 != given {
				t.Errorf("records %q", b.files())
			}
		})
	}
}

// A claim ends while the records of all claims are compared with the ledger. Its device stays
// withheld without a gap.
func TestClaimEndsDuringRefresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.open()
		b.trains()
		b.gives("pod")
		wanted := []allocation.Hold{{Device: "d", Silicon: "d", Whole: true}}
		b.disk.Before = func(disktest.Op, string) error {
			if b.ledger.View(&exclusion.Present{}).BlockedBy(discovery.ModeDRA, "", wanted) == nil {
				t.Error("other consumers may have the device although process 47 has it open")
			}
			return nil
		}
		end := sync.OnceFunc(b.ends)
		b.config.Users = func(allocation.Owner) []string { end(); return nil }
		stop := b.run()
		time.Sleep(2 * refreshInterval)
		b.keeps("process 47 (train) has it open")
		b.handsOver(stop)
	})
}

// Records of earlier versions are read from their directory, and moved to the journal.
func TestRecordsOfEarlierVersions(t *testing.T) {
	for boot, kept := range map[string]string{"boot": "process 47 (train) has it open", "another": ""} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			const name = "handover/d.d253e6496504.json"
			earlier := strings.ReplaceAll(readFile(t, "testdata/"+name), "@boot", boot)
			if err := os.MkdirAll(filepath.Join(b.dir, "handover"), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(b.dir, name), []byte(earlier), 0o600); err != nil {
				t.Fatal(err)
			}
			b.trains()
			if problems := b.open(); len(problems) > 0 {
				t.Error(problems)
			}
			stop := b.run()
			time.Sleep(time.Second)
			b.keeps(kept)
			if left, _ := filepath.Glob(filepath.Join(b.dir, "handover/*")); len(left) > 0 || len(b.files()) > 0 != (kept != "") {
				t.Errorf("files of the earlier version %q, of this one %q", left, b.files())
			}
			stop()
		})
	}
}

func readFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
