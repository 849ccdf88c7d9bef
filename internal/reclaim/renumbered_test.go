package reclaim

import (
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// A reloaded driver may exchange the names of two devices, such as neuron0 and neuron1. The name in
// a record then belongs to another device, which another claim may have and which is not reset.
func TestRenumberedDeviceIsNotReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		const second = "0000:04:00.0"
		b.Add(second, "nvme", "4")
		e := b.device
		e.Name, e.Source = "e", passthroughtest.Source(second)
		b.others = []discovery.Device{e}
		b.open()
		b.trains()
		b.gives("pod")
		other := &allocation.Claim{Version: 1, UID: "other", Namespace: "default", Name: "other", Boot: "boot", Results: []allocation.Result{{Request: "r", Device: "e", Silicon: "e", Whole: true, Source: "e", CDI: "e"}}}
		if err := b.ledger.AllocateClaim(other, allocation.Allocated, &exclusion.Present{}); err != nil {
			t.Fatal(err)
		}
		stop := b.run()
		b.ends()
		time.Sleep(2 * time.Second)
		b.keeps("process 47 (train) has it open")
		b.swapped.Store(true)
		time.Sleep(2 * time.Second)
		b.EndProcess("47")
		time.Sleep(2 * time.Second)
		b.keeps("")
		stop()
		if got := b.ListWrites(); len(got) > 0 {
			t.Errorf("writes %q", got)
		}
	})
}

// The kernel registers a function again while the check for open files hangs. The function is not
// reset, because another card may have its address.
func TestRegisteredAgainDuringCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		hangs := make(chan struct{})
		b.fsys = hanging{b.FS(), hangs}
		b.open()
		b.gives("pod")
		stop := b.run()
		b.ends()
		time.Sleep(2 * time.Second)
		b.ReturnFunction(address, "nvme", "3")
		close(hangs)
		time.Sleep(time.Minute)
		b.keeps("")
		stop()
		if got := b.ListWrites(); len(got) > 0 {
			t.Errorf("writes %q", got)
		}
	})
}

// A function that was registered again is not reset, even if its attributes could not be read when
// the claim got the device. The record has the inode, which no driver delays.
func TestRegisteredAgainAfterReadOfKeyHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		hangs := make(chan struct{})
		b.fsys = passthroughtest.HangFile(b.FS(), "vendor", hangs)
		b.open()
		b.gives("pod")
		close(hangs)
		stop := b.run()
		b.ReturnFunction(address, "nvme", "3")
		b.ends()
		time.Sleep(time.Minute)
		b.keeps("")
		stop()
		if got := b.ListWrites(); len(got) > 0 {
			t.Errorf("writes %q", got)
		}
	})
}

// A function with unreadable attributes does not prevent claims from being prepared and from
// ending. Its device is withheld until the device behind the name is certain.
func TestReadOfAKeyHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		hangs := make(chan struct{})
		b.fsys = passthroughtest.HangFile(b.FS(), "vendor", hangs)
		b.open()
		began := time.Now()
		b.gives("pod")
		stop := b.run()
		b.ends()
		if took := time.Since(began); took > 2*keyLimit {
			t.Errorf("a claim took %s to begin and end", took)
		}
		time.Sleep(time.Hour)
		b.keeps("it cannot be described at present: reading the IDs of its function has not ended yet")
		if got := b.ListWrites(); len(got) > 0 {
			t.Errorf("writes %q", got)
		}
		close(hangs)
		time.Sleep(2 * time.Second)
		b.keeps("")
		stop()
		if got := b.ListWrites(); len(got) != 1 {
			t.Errorf("writes %q", got)
		}
	})
}
