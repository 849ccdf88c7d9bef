package handover

import (
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/rebind/rebindtest"
)

// A driver that is loaded again gives the names of two devices, such as neuron0 and neuron1, to each other's functions.
// The device of a record is then another one, which another claim may have, and is not reset.
func TestRenumberedDeviceIsNotReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		const second = "0000:04:00.0"
		b.Add(second, "nvme", "4")
		e := b.device
		e.Name, e.Source = "e", rebindtest.Source(second)
		b.others = []discovery.Device{e}
		b.open()
		b.trains()
		b.gives("pod")
		other := &ledger.Claim{Version: 1, UID: "other", Namespace: "default", Name: "other", Boot: "boot", Results: []ledger.Result{{Request: "r", Device: "e", Silicon: "e", Whole: true, Source: "e", CDI: "e"}}}
		if err := b.ledger.Give(other, ledger.Given, &ledger.Present{}); err != nil {
			t.Fatal(err)
		}
		stop := b.run()
		b.ends()
		time.Sleep(2 * time.Second)
		b.keeps("process 47 (train) has it open")
		b.swapped.Store(true)
		time.Sleep(2 * time.Second)
		b.Ends("47")
		time.Sleep(2 * time.Second)
		b.keeps("")
		stop()
		if got := b.Written(); len(got) > 0 {
			t.Errorf("writes %q", got)
		}
	})
}
