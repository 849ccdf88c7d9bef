package agent

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// card stands in for devices that can be made something else, and for who has
// their silicon.
type card struct {
	has      map[string]string
	readable bool
	hold     chan struct{}
	fails    error
	works    int
	heldBy   string
}

func newCard() *card { return &card{has: map[string]string{}, readable: true} }

func (c *card) Holder(string) (string, bool) { return c.heldBy, c.heldBy != "" }

func (c *card) configure(d discovery.Device, want discovery.Parameters) (discovery.Device, discovery.Work, error) {
	function := want[discovery.AcceleratorFunction]
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

func (c *card) fitter() *fitter {
	return newFitter(c.configure, func(given []discovery.Device, _ discovery.Parameters) error {
		if given[0].Family != "" {
			return errors.New("takes no such parameter")
		}
		return nil
	}, c)
}

// port is a device that is to have a function, "" if none is wanted.
func port(name, function, unit string) rules.Offered {
	d := rules.Offered{Device: discovery.Device{Name: name}, Offers: []discovery.Offer{{Resource: "example.com/fn", IDs: []string{name}, Unit: unit}}}
	if function != "" {
		d.Want = discovery.Parameters{discovery.AcceleratorFunction: function}
	}
	return d
}

// listedNames returns the devices that are listed.
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
		f := c.fitter()
		snapshot := &rules.Snapshot{Devices: []rules.Offered{port("a", "new", ""), port("b", "new", ""), port("c", "", "")}}
		expect := func(when, want string, wantSoon bool, wantWorks int) *rules.Snapshot {
			t.Helper()
			listed, soon := f.fit(t.Context(), snapshot)
			synctest.Wait()
			if listedNames(listed) != want || soon != wantSoon || c.works != wantWorks {
				t.Errorf("%s: listed %q, soon %v, %d works; want %q, %v, %d", when, listedNames(listed), soon, c.works, want, wantSoon, wantWorks)
			}
			return listed
		}
		expect("before the kubelet has heard of it", "b c", true, 0)
		c.heldBy = "pod default/x"
		expect("while a pod has it", "b c", true, 0)
		c.heldBy = ""
		expect("once it is free", "b c", false, 1)
		expect("while it is made so", "b c", false, 1)
		close(c.hold)
		<-f.ended
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
		f := c.fitter()
		snapshot := &rules.Snapshot{Devices: []rules.Offered{port("a", "new", "card"), port("b", "", "card"), port("c", "", "")}}
		other := port("d", "new", "")
		other.Family = "gpu"
		snapshot.Devices = append(snapshot.Devices, other)
		for range 5 {
			listed, _ := f.fit(t.Context(), snapshot)
			synctest.Wait()
			if listedNames(listed) != "c" {
				t.Errorf("listed %q; want neither the device, nor what is handed out with it", listedNames(listed))
			}
		}
		if c.works != 1 || f.reasons["a"] != "CRC error" || f.reasons["d"] != "takes no such parameter" {
			t.Errorf("%d works, reasons %q", c.works, f.reasons)
		}
		c.fails = nil
		time.Sleep(refitInterval)
		f.fit(t.Context(), snapshot)
		f.wait()
		if listed, _ := f.fit(t.Context(), snapshot); listedNames(listed) != "a b c" || c.works != 2 {
			t.Errorf("after a while: listed %q, %d works", listedNames(listed), c.works)
		}
	})
}

func TestFitSurvivesPanic(t *testing.T) {
	f := newFitter(func(d discovery.Device, _ discovery.Parameters) (discovery.Device, discovery.Work, error) {
		return d, func(context.Context) error { panic("a defect") }, nil
	}, func([]discovery.Device, discovery.Parameters) error { return nil })
	snapshot := &rules.Snapshot{Devices: []rules.Offered{port("a", "new", "")}}
	for range 3 {
		f.fit(t.Context(), snapshot)
		f.wait()
	}
	if !strings.Contains(f.reasons["a"], "a defect") {
		t.Errorf("reasons %q", f.reasons)
	}
}
