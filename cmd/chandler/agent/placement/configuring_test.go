package placement

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// card is a fake configurer of devices whose function can be changed.
type card struct {
	has      map[string]string
	readable bool
	hold     chan struct{}
	fails    error
	works    int
}

func newCard() *card { return &card{has: map[string]string{}, readable: true} }

// acceleratorFunction is a parameter that requires work.
const acceleratorFunction discovery.Parameter = "acceleratorFunction"

func (c *card) configure(d discovery.Device, want discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
	function := want[acceleratorFunction]
	if !c.readable {
		return d, nil, errors.New("busy")
	}
	if c.has[d.Name] == function {
		d.Identity = function
		return d, nil, nil
	}
	return d, func(context.Context) error {
		c.works++
		if c.hold != nil {
			<-c.hold
		}
		if c.fails != nil {
			return c.fails
		}
		c.has[d.Name] = function
		return nil
	}, nil
}

func (c *card) configuring(l *ledger.Ledger) *configurator {
	return newConfiguring(c.configure, func(given []discovery.Device, _ discovery.Parameters) error {
		if given[0].Family != "" {
			return errors.New("takes no such parameter")
		}
		return nil
	}, l)
}

// openLedger returns an open ledger with its files in dir.
func openLedger(t *testing.T, dir string) *ledger.Ledger {
	t.Helper()
	l := ledger.New(ledger.Config{Dir: dir, Boot: "boot"})
	if problems, err := l.Open(t.Context()); err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	return l
}

// port returns a device with the given function in its parameters, or without parameters for "".
func port(name, function, unit string) rules.Offered {
	d := rules.Offered{Device: discovery.Device{Name: name}, Offers: []discovery.Offer{{Resource: "example.com/fn", IDs: []string{name}, Unit: unit}}}
	if function != "" {
		d.Want = discovery.Parameters{acceleratorFunction: function}
	}
	return d
}

// listedNames returns the names of the listed devices.
func listedNames(s *rules.Snapshot) string {
	var listed []string
	for _, d := range s.Devices {
		if len(d.Offers) > 0 {
			listed = append(listed, d.Name)
		}
	}
	return strings.Join(listed, " ")
}

func TestFit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCard()
		c.hold = make(chan struct{})
		c.has["b"] = "new"
		dir := t.TempDir()
		l := openLedger(t, dir)
		f := c.configuring(l)
		snapshot := &rules.Snapshot{Devices: []rules.Offered{port("a", "new", ""), port("b", "new", ""), port("c", "", "")}}
		expect := func(when, want string, wantSoon bool, wantWorks int) *rules.Snapshot {
			t.Helper()
			listed, soon := f.listableDevices(t.Context(), snapshot, &exclusion.Present{Snapshot: snapshot}, nil)
			synctest.Wait()
			if listedNames(listed) != want || soon != wantSoon || c.works != wantWorks {
				t.Errorf("%s: listed %q, soon %v, %d works; want %q, %v, %d", when, listedNames(listed), soon, c.works, want, wantSoon, wantWorks)
			}
			return listed
		}
		expect("before the kubelet has heard of it", "b c", true, 0)
		stock := &exclusion.Present{Snapshot: snapshot}
		pod := []*allocation.Grant{grantOf("x", "a")}
		if err := l.Grants.AllocateIDs(stock, pod); err != nil {
			t.Fatal(err)
		}
		expect("while a pod has it", "b c", true, 0)
		if err := l.Grants.EndGrants(pod); err != nil {
			t.Fatal(err)
		}
		expect("once it is free", "b c", false, 1)
		expect("while it is made so", "b c", false, 1)
		if err := l.AllocateClaim(claimOf("c", "a"), allocation.Allocated, stock); err == nil || !strings.Contains(err.Error(), "the agent, which is changing it") {
			t.Errorf("a claim while it is made so: %v", err)
		}
		if err := l.Grants.AllocateIDs(stock, pod); err == nil {
			t.Error("a pod gets it while it is made so")
		}
		if err := openLedger(t, dir).AllocateClaim(claimOf("c", "a"), allocation.Allocated, stock); err != nil {
			t.Errorf("a claim after the agent was killed: %v", err)
		}
		close(c.hold)
		<-f.workEnded
		if err := l.Grants.AllocateIDs(stock, pod); err != nil {
			t.Errorf("a pod once it is made so: %v", err)
		}
		if listed := expect("then", "a b c", false, 1); listed.Devices[0].Identity != "new" {
			t.Error("it is not described anew")
		}
		c.readable = false
		snapshot.Devices[0].Health.Status = discovery.Unknown
		expect("what cannot be read any more", "a c", false, 1)
		if listedNames(snapshot) != "a b c" {
			t.Error("the snapshot was modified")
		}
		f.wait()
	})
}

func TestFitFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCard()
		c.fails = errors.New("CRC error")
		l := openLedger(t, t.TempDir())
		f := c.configuring(l)
		snapshot := &rules.Snapshot{Devices: []rules.Offered{port("a", "new", "card"), port("b", "", "card"), port("c", "", "")}}
		other := port("d", "new", "")
		other.Family = "gpu"
		snapshot.Devices = append(snapshot.Devices, other)
		for range 5 {
			listed, _ := f.listableDevices(t.Context(), snapshot, &exclusion.Present{Snapshot: snapshot}, nil)
			synctest.Wait()
			if listedNames(listed) != "c" {
				t.Errorf("listed %q; want neither the device, nor what is handed out with it", listedNames(listed))
			}
		}
		if c.works != 1 || f.reasons["a"] != "CRC error" || f.reasons["d"] != "takes no such parameter" {
			t.Errorf("%d works, reasons %q", c.works, f.reasons)
		}
		if who := l.View(&exclusion.Present{Snapshot: snapshot}).OwnerOf(classic, "a"); who != "" {
			t.Errorf("%s keeps it after the work has failed", who)
		}
		c.fails = nil
		time.Sleep(WorkInterval)
		f.listableDevices(t.Context(), snapshot, &exclusion.Present{Snapshot: snapshot}, nil)
		f.wait()
		if listed, _ := f.listableDevices(t.Context(), snapshot, &exclusion.Present{Snapshot: snapshot}, nil); listedNames(listed) != "a b c" || c.works != 2 {
			t.Errorf("after a while: listed %q, %d works", listedNames(listed), c.works)
		}
	})
}

func TestFitSurvivesPanic(t *testing.T) {
	f := newConfiguring(func(d discovery.Device, _ discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
		return d, func(context.Context) error { panic("a defect") }, nil
	}, func([]discovery.Device, discovery.Parameters) error { return nil }, openLedger(t, t.TempDir()))
	snapshot := &rules.Snapshot{Devices: []rules.Offered{port("a", "new", "")}}
	for range 3 {
		f.listableDevices(t.Context(), snapshot, &exclusion.Present{Snapshot: snapshot}, nil)
		f.wait()
	}
	if !strings.Contains(f.reasons["a"], "a defect") {
		t.Errorf("reasons %q", f.reasons)
	}
}
