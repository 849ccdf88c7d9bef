package sharing

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A claim that begins again while it ends has one daemon, which the supervisor has recorded, or none.
func TestBeginWhileItEnds(t *testing.T) {
	m := newMachine(t)
	k := m.supervisor()
	if err := k.Begin(t.Context(), "one", plain); err != nil {
		t.Fatal(err)
	}
	c := k.claims["one"]
	c.busy.Lock() // simulates a call in progress
	ended, begun := make(chan error, 1), make(chan error, 1)
	go func() { ended <- k.End(t.Context(), "one") }()
	time.Sleep(50 * time.Millisecond)
	go func() { begun <- k.Begin(t.Context(), "one", plain) }()
	time.Sleep(50 * time.Millisecond)
	c.busy.Unlock()
	if err := errors.Join(<-ended, <-begun); err != nil {
		t.Error(err)
	}
	if all := k.Claims(); len(all) == 0 && len(ofClaim(m.dir("one"))) > 0 {
		t.Errorf("the supervisor has no claim, and a daemon runs: %v", ofClaim(m.dir("one")))
	}
	if err := k.End(t.Context(), "one"); err != nil || len(ofClaim(m.dir("one"))) > 0 {
		t.Errorf("end: %v; left %v", err, ofClaim(m.dir("one")))
	}
	if err := k.Begin(t.Context(), "two", plain); err != nil {
		t.Errorf("the next claim of the GPU: %v", err)
	}
	if err := k.End(t.Context(), "two"); err != nil {
		t.Error(err)
	}
}

// An order during the program's end is refused, so that the agent repeats the order to the next
// process.
func TestOrderWhileItStops(t *testing.T) {
	m := newMachine(t)
	k := m.supervisor()
	if err := k.Begin(t.Context(), "one", plain); err != nil {
		t.Fatal(err)
	}
	k.Stop(t.Context())
	if err := k.Begin(t.Context(), "one", plain); !errors.Is(err, errStopping) {
		t.Errorf("begin: %v", err)
	}
	if err := k.End(t.Context(), "one"); !errors.Is(err, errStopping) {
		t.Errorf("end: %v", err)
	}
	if err := m.supervisor().End(t.Context(), "one"); err != nil {
		t.Errorf("by the next program: %v", err)
	}
}

// A claim does not end before its GPU is in the default mode again: neither while nvidia-smi fails,
// nor while it succeeds without an effect, nor after the program was killed before the claim had
// begun. Until then, its daemon goes on.
func TestGPUIsSetBackBeforeTheEnd(t *testing.T) {
	for _, behaviour := range []string{"may not manage", "sets nothing"} {
		for _, killed := range []bool{false, true} {
			m := newMachine(t)
			k := m.supervisor()
			if err := k.Begin(t.Context(), "one", plain); err != nil {
				t.Fatal(err)
			}
			if killed { // after the change of the GPU, and before the record of completion
				k.Stop(t.Context())
				c := k.claims["one"]
				c.set(func() { c.Begun = false })
				if err := k.saveClaim(c); err != nil {
					t.Fatal(err)
				}
				k = m.supervisor()
			}
			m.behave(behaviour)
			if err := k.End(t.Context(), "one"); err == nil {
				t.Errorf("%s, killed %t: ended while the GPU is for one process", behaviour, killed)
			}
			if !killed && len(ofClaim(m.dir("one"))) == 0 {
				t.Errorf("%s: a claim that has not ended has no daemon", behaviour)
			}
			if err := k.Begin(t.Context(), "two", plain); err == nil {
				t.Errorf("%s, killed %t: another claim has the GPU", behaviour, killed)
			}
			m.behave()
			if err := k.End(t.Context(), "one"); err != nil || len(m.left("one")) > 0 {
				t.Errorf("%s, killed %t: %v; left %q", behaviour, killed, err, m.left("one"))
			}
		}
	}
}

// A claim whose files cannot be removed is reported as broken, so that the agent starts its daemon
// again.
func TestFilesCannotBeRemoved(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, for a mount")
	}
	m := newMachine(t)
	k := m.supervisor()
	if err := k.Begin(t.Context(), "one", plain); err != nil {
		t.Fatal(err)
	}
	busy := filepath.Join(m.dir("one"), "busy")
	if err := os.Mkdir(busy, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("busy", busy, "tmpfs", 0, ""); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	unmount := sync.OnceFunc(func() {
		if err := unix.Unmount(busy, 0); err != nil {
			t.Error(err)
		}
	})
	defer unmount()
	if err := k.End(t.Context(), "one"); err == nil {
		t.Fatal("ended")
	}
	if all := k.Claims(); len(all) != 1 || all[0].Broken == "" {
		t.Errorf("claims %+v", all)
	}
	if err := k.Begin(t.Context(), "one", plain); err != nil || len(ofClaim(m.dir("one"))) == 0 {
		t.Errorf("begun again: %v", err)
	}
	unmount()
	if err := k.End(t.Context(), "one"); err != nil {
		t.Error(err)
	}
}

// Another order for a claim reserves the GPUs of the order before the GPUs of the previous order are
// restored.
func TestAnotherOrderReservesItsGPUs(t *testing.T) {
	m := newMachine(t)
	k := m.supervisor()
	if err := k.Begin(t.Context(), "one", plain); err != nil {
		t.Fatal(err)
	}
	another := order(gpus, gpuB, mps, "true")
	wanted, err := parse(another.How)
	if err != nil {
		t.Fatal(err)
	}
	c, err := k.enterClaim("one", wanted, another.How) // as a call in progress
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Begin(t.Context(), "two", another); err == nil {
		t.Error("another claim has the GPU of the order")
	}
	if err := k.Begin(t.Context(), "two", plain); err == nil {
		t.Error("another claim has the GPU of the previous order")
	}
	k.leaveClaim(c)
	if err := k.End(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	if err := k.Begin(t.Context(), "two", another); err != nil {
		t.Errorf("after the end: %v", err)
	}
	if err := k.End(t.Context(), "two"); err != nil {
		t.Error(err)
	}
}

// An order whose client has given up before the work begins changes nothing. Otherwise the order could
// follow the end of its claim.
func TestClientHasGivenUp(t *testing.T) {
	m := newMachine(t)
	k := m.supervisor()
	gone, giveUp := context.WithCancel(t.Context())
	giveUp()
	if err := k.Begin(gone, "one", plain); !errors.Is(err, context.Canceled) {
		t.Errorf("begun: %v", err)
	}
	if all := k.Claims(); len(all) != 0 {
		t.Errorf("claims %+v", all)
	}
	if err := k.Begin(t.Context(), "two", plain); err != nil { // the GPU is not reserved
		t.Fatal(err)
	}
	if err := k.Begin(gone, "two", plain); err != nil {
		t.Errorf("an order for work in force: %v", err)
	}
	if err := k.End(t.Context(), "two"); err != nil {
		t.Error(err)
	}
}
