package ledger

import (
	"errors"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/ledger/stocktest"
)

// A kept device is allocated to no owner, by either API, until its release. No owner waits for
// the end of the keeper.
func TestKept(t *testing.T) {
	l := newBench(t).Ledger
	s := stocktest.New(stocktest.NewGPU("gpu-0", 1), stocktest.NewGPU("gpu-1", 1))
	had := allocation.Owner{API: dra, Namespace: "default", Name: "old", UID: "old"}
	kept := &KeptDevice{Name: "gpu-0.1", Previous: had, Hold: wantAll("gpu-0")[0], Reason: "process 47 (train) has /dev/gpu0 open"}
	l.Leases.KeepDevice(kept)
	for _, by := range []discovery.Mode{dra, discovery.ModeDevicePlugin} {
		b := l.View(s).BlockedBy(by, "old", wantAll("gpu-0"))
		if b == nil || b.Error() != "device gpu-0 is in use by claim default/old, which has ended: process 47 (train) has /dev/gpu0 open (device gpu-0)" {
			t.Errorf("%s: %v", by, b)
		}
		if b := l.View(s).BlockedBy(by, "", wantAll("gpu-1")); b != nil {
			t.Errorf("%s: %v", by, b)
		}
	}
	if owners, ending := l.View(s).Owners(); len(owners)+len(ending) > 0 {
		t.Errorf("owners %v, %v", owners, ending)
	}
	if e := kept.Owner(); e.UID != "" {
		t.Errorf("its outputs would be kept for %v", e)
	}
	if _, blocked := l.Leases.LeaseDevices(allocation.Change{Name: "gpu-0", Devices: []allocation.Hold{allocation.SiliconHold("gpu-0")}}, s); blocked == nil {
		t.Error("it can be changed")
	}
	again := *kept
	again.Reason = "it is reset"
	l.Leases.KeepDevice(&again)
	if b := l.View(s).BlockedBy(dra, "", wantAll("gpu-0")); b == nil || !strings.Contains(b.Error(), "it is reset") {
		t.Errorf("%v", b)
	}
	l.Leases.Release(kept.Name)
	if b := l.View(s).BlockedBy(dra, "", wantAll("gpu-0")); b != nil {
		t.Error(b)
	}
}

// A kept share of an earlier number of shares does not determine the number of the next claim's
// shares: the device is published in the present form while it is kept.
func TestKeptShareOfAnotherNumber(t *testing.T) {
	l := newBench(t).Ledger
	s := stocktest.New(stocktest.NewShared("big"))
	share := func(number int64) allocation.Result {
		return allocation.Result{Device: "big", Source: "big", Silicon: "big", Whole: true, Consumes: stocktest.Amount("shares", "1"), Shares: number}
	}
	earlier := share(2)
	kept := &KeptDevice{Name: "big.1", Previous: allocation.Owner{API: dra, Name: "old", UID: "old"}, Hold: earlier.Hold(), Reason: "process 47 (train) has /dev/big open"}
	l.Leases.KeepDevice(kept)
	next := l.NewClaim("new", "default", "new")
	next.Results = []allocation.Result{share(3)}
	var blocked *exclusion.Blocked
	if err := l.AllocateClaim(next, allocation.Allocated, s); !errors.As(err, &blocked) || blocked.Kind != exclusion.Reclaiming {
		t.Errorf("while a share of another number is kept: %v", err)
	}
	l.Leases.Release(kept.Name)
	if err := l.AllocateClaim(next, allocation.Allocated, s); err != nil {
		t.Fatal(err)
	}
	if got := next.Results[0].Shares; got != 3 {
		t.Errorf("the claim has a share of %d, and not of 3", got)
	}
}

// A kept partition is not taken while another consumer has another partition of the same physical
// device. Otherwise, processes that outlive their pod would not be waited for.
func TestKeptPartitionIsNotTaken(t *testing.T) {
	b := newBench(t)
	parts := []rules.Offered{stocktest.NewPart("chip", "core-0", 4), stocktest.NewPart("chip", "core-1", 4)}
	s := stocktest.New(parts...)
	beside, ended := stocktest.Claim("beside", parts[0]), stocktest.Claim("ended", parts[1])
	for _, c := range []*allocation.Claim{beside, ended} {
		if err := b.AllocateClaim(c, allocation.Allocated, s); err != nil {
			t.Fatal(err)
		}
	}
	kept := &KeptDevice{Name: "core-1.1", Previous: ended.Owner(), Hold: ended.Holds()[0], Reason: "process 47 (train) has /dev/chip open"}
	b.Leases.KeepDevice(kept)
	if b.Leases.IsTaken(kept.Name, ended.Key(), kept.Previous) {
		t.Error("it is taken by the claim of core-0")
	}
	if err := b.End(ended.UID, s); err != nil {
		t.Fatal(err)
	}
	if b.Leases.IsTaken(kept.Name, ended.Key(), kept.Previous) {
		t.Error("it is taken after the end of its claim")
	}
}

// passer records passed IDs, or fails like a disk.
type passer struct {
	HostFiles

	ledger *Ledger
	passed []string
	err    error
}

func (p *passer) GrantsReplaced(earlier []*allocation.Grant) error {
	for _, g := range earlier {
		p.passed = append(p.passed, g.Container)
		if p.err == nil {
			p.ledger.Leases.KeepDevice(&KeptDevice{Name: g.ID, Previous: g.Owner(), Hold: g.Holds()[0], Reason: "it is being reclaimed"})
		}
	}
	return p.err
}

// The outputs are called before an ID passes to another container, and can prevent the pass. A
// never listed container counts as ended before its start.
func TestPass(t *testing.T) {
	l := newBench(t).Ledger
	p := &passer{ledger: l}
	l.SetOutputs(p)
	s := stocktest.New(stocktest.NewGPU("gpu-0", 1))
	grant := func() *allocation.Grant {
		return &allocation.Grant{Resource: "a.b/c", ID: "0", Devices: []string{"gpu-0"}, Silicon: []string{"gpu-0"}, Exclusive: true}
	}
	for range 2 {
		if err := l.Grants.AllocateIDs(s, []*allocation.Grant{grant()}); err != nil || len(p.passed) > 0 {
			t.Fatal(err, p.passed)
		}
	}
	named := grant()
	named.Container = "default/old main"
	l.mu.Lock()
	l.Grants.replace(named, allocation.Allocated)
	l.mu.Unlock()
	p.err = errors.New("the disk is full")
	if err := l.Grants.AllocateIDs(s, []*allocation.Grant{grant()}); !errors.Is(err, p.err) {
		t.Error(err)
	}
	p.err = nil
	var blocked *exclusion.Blocked
	if err := l.Grants.AllocateIDs(s, []*allocation.Grant{grant()}); !errors.As(err, &blocked) || !strings.Contains(err.Error(), "default/old main, which has ended: it is being reclaimed") {
		t.Error(err)
	}
	l.Leases.Release("0")
	p.ledger = New(Config{})
	if err := l.Grants.AllocateIDs(s, []*allocation.Grant{grant()}); err != nil {
		t.Error(err)
	}
}

// A container may still run while the kubelet allocates its ID again.
func TestPassOfLost(t *testing.T) {
	l := newBench(t).Ledger
	p := &passer{ledger: l}
	l.SetOutputs(p)
	s := stocktest.New(stocktest.NewGPU("gpu-0", 1))
	grant := func() *allocation.Grant {
		return &allocation.Grant{Resource: "a.b/c", ID: "0", Devices: []string{"gpu-0"}, Silicon: []string{"gpu-0"}, Exclusive: true}
	}
	if err := l.Grants.AllocateIDs(s, []*allocation.Grant{grant()}); err != nil {
		t.Fatal(err)
	}
	runs := grant()
	runs.Container, runs.IsLost = "default/old main", true
	l.mu.Lock()
	l.Grants.replace(runs, allocation.Allocated)
	l.mu.Unlock()
	var blocked *exclusion.Blocked
	if err := l.Grants.AllocateIDs(s, []*allocation.Grant{grant()}); !errors.As(err, &blocked) || blocked.Kind != exclusion.ForgottenByKubelet || len(p.passed) > 0 {
		t.Errorf("%v, passed %q", err, p.passed)
	}
}

// A blocked set of grants does not signal a release: waiting callers would retry at once, without
// end.
func TestBlockedGrantsFreeNothing(t *testing.T) {
	l := newBench(t).Ledger
	s := stocktest.New(stocktest.NewGPU("gpu-0", 1), stocktest.NewGPU("gpu-1", 1))
	var grants []*allocation.Grant
	for _, device := range []string{"gpu-0", "gpu-1"} {
		grants = append(grants, &allocation.Grant{Resource: "a.b/c", ID: device, Devices: []string{device}, Silicon: []string{device}, Exclusive: true})
	}
	l.Leases.KeepDevice(&KeptDevice{Name: "gpu-1.1", Previous: allocation.Owner{API: dra, Namespace: "default", Name: "old"}, Hold: wantAll("gpu-1")[0], Reason: "it is being reclaimed"})
	freed := l.FreedSignal()
	var blocked *exclusion.Blocked
	if err := l.Grants.AllocateIDs(s, grants); !errors.As(err, &blocked) || len(l.View(s).OwnGrants()) > 0 {
		t.Fatal(err)
	}
	select {
	case <-freed:
		t.Error("something is free")
	default:
	}
	l.Leases.Release("gpu-1.1")
	<-freed
	if err := l.Grants.AllocateIDs(s, grants); err != nil {
		t.Error(err)
	}
}
