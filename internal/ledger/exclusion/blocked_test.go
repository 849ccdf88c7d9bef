package exclusion

import (
	"fmt"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/stocktest"
)

const (
	dra     = discovery.ModeDRA
	classic = discovery.ModeDevicePlugin
)

// TestBlocked checks which owners exclude each other.
func TestBlocked(t *testing.T) {
	group := func(name string) rules.Offered {
		return rules.Offered{Device: discovery.Device{Name: name, PartOf: &discovery.Silicon{Name: "iommu-group-7"}}}
	}
	open := rules.Offered{Device: discovery.Device{Name: "kvm", Shareable: true}}
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewShared("big"), stocktest.NewPart("card", "p0", 4), stocktest.NewPart("card", "p1", 4), stocktest.NewPart("card", "p2", 1), stocktest.NewPart("card", "card", 8),
		group("f0"), group("f1"), open)
	of := func(names ...string) (holds []allocation.Hold) {
		for _, name := range names {
			d := s[name]
			holds = append(holds, allocation.Hold{Device: name, Silicon: d.Silicon(), Whole: d.PartOf == nil, Takes: d.Takes, Open: d.Shareable})
		}
		return holds
	}
	share := func(form, value string) []allocation.Hold {
		return []allocation.Hold{{Device: "big", Silicon: "big", Whole: true, Amount: stocktest.Amount(form, value), Form: form}}
	}
	numbered := func(shares int64) []allocation.Hold {
		r := allocation.Result{Source: "big", Silicon: "big", Whole: true, Consumes: stocktest.Amount("shares", "1"), Shares: shares}
		return []allocation.Hold{r.Hold()}
	}
	admin := func(name string) []allocation.Hold {
		h := of(name)
		h[0].Open = true
		return h
	}
	granted := func(exclusive bool, form string, silicon string, names ...string) []allocation.Hold {
		return (&allocation.Grant{Resource: "ours/gpu", ID: "1", Devices: names, Silicon: []string{silicon}, Exclusive: exclusive, Form: form}).Holds()
	}
	tests := map[string]struct {
		by      discovery.Mode
		has     []allocation.Hold
		wantBy  discovery.Mode
		want    []allocation.Hold
		blocked string // part of the reason, "" if not blocked
	}{
		"the same device":                  {dra, of("a"), dra, of("a"), "device a"},
		"another device":                   {dra, of("a"), dra, of("big"), ""},
		"an open device":                   {dra, of("kvm"), classic, of("kvm"), ""},
		"administration":                   {dra, of("a"), dra, admin("a"), ""},
		"beside administration":            {dra, admin("a"), dra, of("a"), ""},
		"parts that fit":                   {dra, of("p0"), dra, of("p1"), ""},
		"parts that do not fit":            {dra, of("p0", "p1"), dra, of("p2"), "counter slices"},
		"parts of one claim that fit":      {dra, of("p2"), dra, of("p0"), ""},
		"parts of one claim that do not":   {dra, of("p2"), dra, of("p0", "p1"), "counter slices"},
		"the whole beside a part":          {dra, of("p0"), dra, of("card"), "device p0"},
		"a part beside the whole":          {dra, of("card"), dra, of("p0"), "device card"},
		"functions of a group":             {dra, of("f0"), dra, of("f1"), ""},
		"a share":                          {dra, share("memory", "8Gi"), dra, share("memory", "8Gi"), ""},
		"a share too many":                 {dra, share("memory", "8Gi"), dra, share("memory", "9Gi"), "more of its memory"},
		"a share of another form":          {dra, share("shares", "1"), dra, share("memory", "1Gi"), "device big"},
		"a share of the same number":       {dra, numbered(4), dra, numbered(4), ""},
		"a share of another number":        {dra, numbered(4), dra, numbered(8), "device big"},
		"a share of an older agent's":      {dra, numbered(0), dra, numbered(8), ""},
		"more shares than there were":      {dra, numbered(1), dra, numbered(1), "more of its shares"},
		"all of a shared device":           {dra, share("shares", "1"), dra, of("big"), "device big"},
		"a share of a device that is had":  {dra, of("big"), dra, share("shares", "1"), "device big"},
		"the other API, the same device":   {dra, of("a"), classic, granted(true, "", "a", "a"), "device a"},
		"the other API, the other way":     {classic, granted(true, "", "a", "a"), dra, of("a"), "device a"},
		"the other API, parts":             {dra, of("p0"), classic, granted(true, "", "card", "p1"), "device p0"},
		"the other API, shares":            {classic, granted(false, "", "big", "big"), dra, share("shares", "1"), "device big"},
		"classic parts that fit":           {classic, granted(true, "", "card", "p0"), classic, granted(true, "", "card", "p1"), ""},
		"the classic whole beside a part":  {classic, granted(true, "", "card", "p0"), classic, granted(true, "", "card", "card"), "device p0"},
		"a part that is gone, the whole":   {classic, granted(true, "", "card", "p9"), classic, granted(true, "", "card", "card"), "device p9"},
		"a part that is gone, another":     {classic, granted(true, "", "card", "p9"), classic, granted(true, "", "card", "p0"), ""},
		"classic shares":                   {classic, granted(false, "4", "big", "big"), classic, granted(false, "4", "big", "big"), ""},
		"classic shares of another form":   {classic, granted(false, "4", "big", "big"), classic, granted(false, "8", "big", "big"), "device big"},
		"classic shares of no form":        {classic, granted(false, "", "big", "big"), classic, granted(false, "8", "big", "big"), ""},
		"classic shares of an older agent": {classic, granted(false, "shares by 1", "big", "big"), classic, granted(false, "shares by 1 of 8", "big", "big"), ""},
		"classic share, all of the device": {classic, granted(false, "4", "big", "big"), classic, granted(true, "", "big", "big"), "device big"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			x := NewIndex()
			var e allocation.Entry = stocktest.Claim("c")
			if test.by == classic {
				e = &allocation.Grant{Resource: "ours/gpu", ID: "1", Container: "default/pod main"}
			}
			a := NewAccount(e, allocation.Allocated)
			a.Holds = test.has
			x.Add(a)
			b := x.FindBlocked(Query{API: test.wantBy, OwnKey: "another", Wanted: test.want, Stock: s})
			switch {
			case b == nil && test.blocked != "":
				t.Error("not blocked")
			case b != nil && (test.blocked == "" || !strings.Contains(b.Error(), test.blocked)):
				t.Errorf("blocked: %v; want %q", b, test.blocked)
			}
			if own := x.FindBlocked(Query{API: test.wantBy, OwnKey: e.Key(), Wanted: test.want, Stock: s}); own != nil {
				t.Errorf("blocked by its own entry: %v", own)
			}
			x.Remove(a)
			if b := x.FindBlocked(Query{API: test.wantBy, Wanted: test.want, Stock: s}); b != nil || len(x.byTerm) > 0 {
				t.Errorf("blocked without an owner: %v, %v", b, x.byTerm)
			}
		})
	}
}

// A grant records the nodes of all its devices together. The nodes of a device do not block other
// owners' shares of another device.
func TestNodesOfAPool(t *testing.T) {
	devices := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129), stocktest.NewGPU("c", 130))
	pool := func(id string, names ...string) *allocation.Grant {
		g := &allocation.Grant{Resource: "ours/pool", ID: id, Form: "shares by 1"}
		for _, name := range names {
			g.Devices, g.Silicon, g.Nodes = append(g.Devices, name), append(g.Silicon, name), append(g.Nodes, NodesOf(name, devices)...)
		}
		return g
	}
	a := NewAccount(pool("1", "a", "b"), allocation.Allocated)
	x := NewIndex()
	x.Add(a)
	if b := x.FindBlocked(Query{API: classic, OwnKey: "another", Wanted: pool("2", "a", "b").Holds(), Stock: devices}); b != nil {
		t.Errorf("a second share: %v", b)
	}
	swapped := stocktest.New(stocktest.NewGPU("a", 130), stocktest.NewGPU("b", 129), stocktest.NewGPU("c", 128))
	if b := x.FindBlocked(Query{API: classic, OwnKey: "another", Wanted: pool("3", "c").Holds(), Stock: swapped}); b == nil || !strings.Contains(b.Error(), "given its nodes") {
		t.Errorf("what has a node of the pool now: %v", b)
	}
}

// Devices have other nodes if all of their own nodes have changed, or if a node has other numbers
// or belongs to another device. A shared node of all cards does not matter, nor does a node that
// appears or disappears next to others.
func TestRenumbered(t *testing.T) {
	both := func(name string, card, render int64) rules.Offered {
		d := stocktest.NewGPU(name, render)
		d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, &specs.DeviceNode{Path: fmt.Sprintf("/dev/dri/card%d", card), Type: "c", Major: 226, Minor: card})
		return d
	}
	monitor := both("monitor", 0, 128)
	monitor.Shareable = true
	given := stocktest.Claim("c", both("a", 0, 128)).Results[0].Nodes
	for name, test := range map[string]struct {
		now  stocktest.Stock
		want string
	}{
		"the same":               {stocktest.New(both("a", 0, 128), both("b", 1, 129)), ""},
		"swapped":                {stocktest.New(both("a", 1, 129), both("b", 0, 128)), "it was given as /dev/dri/renderD128 (226:128) and is /dev/dri/renderD129 (226:129), /dev/dri/card1 (226:1) now; /dev/dri/renderD128 is device b now"},
		"one of them swapped":    {stocktest.New(both("a", 1, 128), both("b", 0, 129)), "/dev/dri/card0 is device b now"},
		"found alone":            {stocktest.New(both("a", 7, 135)), "it was given as /dev/dri/card0 (226:0) and is /dev/dri/renderD135 (226:135), /dev/dri/card7 (226:7) now"},
		"one of them is gone":    {stocktest.New(stocktest.NewGPU("a", 128), monitor), ""},
		"gone":                   {stocktest.New(both("b", 0, 128)), ""},
		"without nodes":          {stocktest.New(rules.Offered{Device: discovery.Device{Name: "a"}}), ""},
		"without, and another's": {stocktest.New(rules.Offered{Device: discovery.Device{Name: "a", CommonNodes: []string{"/dev/kfd"}}}, both("b", 0, 128)), "/dev/dri/renderD128 is device b now"},
	} {
		if got := RenumberedNodes(given, []string{"a"}, test.now); (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
	other := stocktest.NewGPU("a", 128)
	other.Edits.DeviceNodes[1].Minor = 7
	if got := RenumberedNodes(given, []string{"a"}, stocktest.New(other)); got != "it was given as /dev/dri/renderD128 (226:128) and is /dev/dri/renderD128 (226:7) now" {
		t.Errorf("other numbers: %q", got)
	}
}
