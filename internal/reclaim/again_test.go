package reclaim

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/internal/disk/disktest"
)

// If the end of a claim fails because its record cannot be removed, the claim stays allocated: its
// device is not reset until the end succeeds, and then once.
func TestRepeatedEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		failing := true
		b.ledgerDisk = &disktest.Disk{Before: func(op disktest.Op, name string) error {
			if failing && op == disktest.Remove && strings.HasSuffix(name, ".record") {
				return syscall.EIO
			}
			return nil
		}}
		b.open()
		b.gives("pod")
		stop := b.run()
		for range 3 {
			if err := b.ledger.End("old", nil); err == nil {
				t.Error("ended")
			}
			time.Sleep(time.Minute)
		}
		if got := len(b.ListWrites()); got != 0 {
			t.Errorf("%d resets before the end", got)
		}
		b.gives("pod")
		failing = false
		b.ends()
		b.gives("pod")
		b.ends()
		if got := len(b.ListWrites()); got != 2 || len(b.files()) != 0 {
			t.Errorf("%d resets, files %q", got, b.files())
		}
		stop()
	})
}

// The device of a claim with a damaged record is reclaimed nevertheless: when the claim ends, and
// also if the claim was ending before the damage.
func TestSealedClaim(t *testing.T) {
	for _, ending := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			b.ledgerDisk = &disktest.Disk{Before: func(op disktest.Op, name string) error {
				if op == disktest.Remove && strings.HasSuffix(name, ".record") {
					return syscall.EIO
				}
				return nil
			}}
			b.open()
			b.trains()
			b.gives("pod")
			if ending {
				if err := b.ledger.End("old", nil); err == nil {
					t.Error("ended")
				}
			}
			records, _ := filepath.Glob(filepath.Join(b.dir, "state/claims/*.record"))
			if len(records) != 1 {
				t.Fatalf("records %q", records)
			}
			text, err := os.ReadFile(records[0])
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(records[0], append(text, '\n'), 0o600); err != nil {
				t.Fatal(err)
			}
			b.ledgerDisk = nil
			b.open()
			stop := b.run()
			time.Sleep(time.Minute)
			b.ends()
			b.keeps("claim default/old, which has ended: /dev/d: process 47 (train) has it open")
			if len(b.ListWrites()) > 0 {
				t.Errorf("writes %q", b.ListWrites())
			}
			b.EndProcess("47")
			time.Sleep(2 * time.Second)
			b.keeps("")
			stop()
			if len(b.ListWrites()) != 1 || len(b.files()) != 0 {
				t.Errorf("writes %q, files %q", b.ListWrites(), b.files())
			}
		})
	}
}

// Removed records are written again while devices are allocated, and during reclaim.
func TestWipedRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.open()
		b.trains()
		b.gives("pod")
		stop := b.run()
		wiped := func() {
			t.Helper()
			synctest.Wait() // no record is being written
			before := b.files()
			if err := os.RemoveAll(filepath.Join(b.dir, "reclaim")); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * refreshInterval)
			if after := b.files(); len(before) != 1 || !slices.Equal(after, before) {
				t.Errorf("files %q, and %q before they were wiped", after, before)
			}
		}
		wiped()
		b.ends()
		time.Sleep(time.Second)
		wiped()
		stop()
		b.open()
		stop = b.run()
		b.keeps("claim default/old, which has ended")
		b.handsOver(stop)
	})
}
