package changes

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/ledger/stocktest"
	"chandler.dev/internal/ondemand"
	"chandler.dev/internal/passthrough/passthroughtest"
	"chandler.dev/internal/reclaim"
)

// functionsOf returns the devices of a unit as both APIs offer them, created or not.
func functionsOf(unit string, created bool, names ...string) *placement.Placed {
	s := &rules.Snapshot{}
	for _, name := range names {
		d := discovery.Device{
			Name: name, Family: "adapters", Health: discovery.Health{Status: discovery.Healthy}, PartOf: &discovery.Silicon{Name: unit},
			Attributes: discovery.Attributes{"parent": {StringValue: new(unit)}},
		}
		if !created {
			d.Creation = &discovery.Creation{Unit: unit, Of: passthroughtest.Source("0000:03:00.0")}
		}
		s.Devices = append(s.Devices, rules.Offered{Device: d})
	}
	return &placement.Placed{Snapshot: s}
}

// A virtual function that no plan contains appears after the agent has listed the units to remove, or
// while the lease for the removal begins, and a claim gets the function. The unit is not removed.
func TestFunctionAppearsBeforeRemoval(t *testing.T) {
	for _, leasing := range []bool{false, true} {
		k := passthroughtest.New(t)
		k.Add("0000:03:00.0", "adapter", "3")
		l := ledger.New(ledger.Config{Dir: t.TempDir(), Boot: "boot-1"})
		if _, err := l.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		placed := functionsOf("adapter", false, "vf-1")
		removals, appear := 0, func() {}
		stock := func() exclusion.Stock {
			s := &exclusion.Present{Snapshot: placed.Snapshot}
			appear()
			return s
		}
		adapters := &discovery.Family{
			Name: "adapters",
			Create: func(*discovery.Host, discovery.Tools, discovery.Creation) (discovery.Work, error) {
				return func(context.Context) error { placed = functionsOf("adapter", true, "vf-1"); return nil }, nil
			},
			Remove: func(*discovery.Host, discovery.Tools, discovery.Creation) (discovery.Work, error) {
				return func(context.Context) error { removals++; placed = functionsOf("adapter", false, "vf-1"); return nil }, nil
			},
		}
		manager := ondemand.New(ondemand.Config{
			Host: k.Host(), Families: []*discovery.Family{adapters}, Journal: journal.Config{Dir: t.TempDir(), Boot: "boot-1"}, Ledger: l, Stock: stock,
			Device: func(name string) (discovery.Device, bool) {
				d, found := placed.Snapshot.Lookup(name)
				return d.Device, found
			},
		})
		manager.Open()
		created := createdUnits{
			manager: manager, ledger: l, placed: func() *placement.Placed { return placed }, idleTime: func() time.Duration { return 0 }, idleSince: make(map[string]time.Time),
		}
		nothing := func(d discovery.Device, _ discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
			return d, nil, nil
		}
		_, work, err := manager.Configurer(nothing)(placed.Snapshot.Devices[0].Device, nil, "claim")
		if err == nil {
			err = work(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		units := created.list()
		if len(units) != 1 || units[0].stays() > 0 {
			t.Fatalf("to be removed: %v", units)
		}
		var claim *allocation.Claim
		appear = func() {
			appear = func() {}
			placed = functionsOf("adapter", true, "vf-1", "vf-9")
			claim = stocktest.Claim("c", placed.Snapshot.Devices[1])
			if err := l.AllocateClaim(claim, allocation.Allocated, stock()); err != nil {
				t.Fatal(err)
			}
		}
		if !leasing {
			appear()
		}
		if err := units[0].undo(t.Context()); err != nil || removals > 0 {
			t.Errorf("during the lease %t: %d removals although a claim has a function of the unit: %v", leasing, removals, err)
		}
		if err := l.End(claim.UID, stock()); err != nil {
			t.Fatal(err)
		}
		if err := units[0].undo(t.Context()); err != nil || removals != 1 {
			t.Errorf("during the lease %t: %d removals after the end of the claim: %v", leasing, removals, err)
		}
	}
}

// A claim for a virtual function by its common name begins and ends between two checks. The unit of
// the chosen function remains for the idle time after the end of the claim.
func TestUnitWasInUseByItsCommonName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := passthroughtest.New(t)
		k.Add("0000:03:00.0", "adapter", "3")
		l := ledger.New(ledger.Config{Dir: t.TempDir(), Boot: "boot-1"})
		placed := functionsOf("adapter", false, "vf-1")
		stock := func() exclusion.Stock { return &exclusion.Present{Snapshot: placed.Snapshot} }
		adapters := &discovery.Family{
			Name: "adapters",
			Create: func(*discovery.Host, discovery.Tools, discovery.Creation) (discovery.Work, error) {
				return func(context.Context) error { placed = functionsOf("adapter", true, "vf-1"); return nil }, nil
			},
			Remove: func(*discovery.Host, discovery.Tools, discovery.Creation) (discovery.Work, error) { return nil, nil },
		}
		c := New(Config{
			Host: k.Host(), Families: []*discovery.Family{adapters}, Journal: journal.Config{Dir: t.TempDir(), Boot: "boot-1"}, Ledger: l,
			Placed: func() *placement.Placed { return placed }, IdleTime: func() time.Duration { return time.Minute }, RequestScan: func() {},
			Reclaim: func() []discovery.Selection[reclaim.Rule] { return nil }, Snapshot: noSnapshot,
		})
		l.SetOutputs(c.LedgerOutputs()...)
		if _, err := l.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		c.OpenRecords(t.Context())
		_, work, err := c.Configurer()(placed.Snapshot.Devices[0].Device, nil, "claim")
		if err == nil {
			err = work(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		remaining := func() time.Duration { return c.created.list()[0].stays() }
		if got := remaining(); got != time.Minute {
			t.Errorf("remains %s", got)
		}
		time.Sleep(50 * time.Second)
		claim := stocktest.Claim("c", placed.Snapshot.Devices[0])
		claim.Results[0].Device = "vfs"
		if err := l.AllocateClaim(claim, allocation.Allocated, stock()); err != nil {
			t.Fatal(err)
		}
		if err := l.End(claim.UID, stock()); err != nil {
			t.Fatal(err)
		}
		if got := remaining(); got != time.Minute {
			t.Errorf("remains %s after the end of the claim", got)
		}
	})
}
