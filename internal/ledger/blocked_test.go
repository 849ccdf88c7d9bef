package ledger

import (
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

const (
	dra     = discovery.ModeDRA
	classic = discovery.ModeDevicePlugin
)

func amount(name string, value string) Amounts {
	return Amounts{resourceapi.QualifiedName(name): resource.MustParse(value)}
}

// shared returns a device with memory and a number of shares.
func shared(name string) rules.Offered {
	return rules.Offered{Device: discovery.Device{Name: name, Capacity: discovery.Capacity{
		"memory": {Value: resource.MustParse("16Gi")}, "shares": {Value: resource.MustParse("4")},
	}}}
}

// TestBlocked checks which owners exclude each other.
func TestBlocked(t *testing.T) {
	group := func(name string) rules.Offered {
		return rules.Offered{Device: discovery.Device{Name: name, PartOf: &discovery.Silicon{Name: "iommu-group-7"}}}
	}
	open := rules.Offered{Device: discovery.Device{Name: "kvm", Shareable: true}}
	s := host(gpu("a", 128), shared("big"), part("card", "p0", 4), part("card", "p1", 4), part("card", "p2", 1), part("card", "card", 8),
		group("f0"), group("f1"), open)
	of := func(names ...string) (holds []Hold) {
		for _, name := range names {
			d := s[name]
			holds = append(holds, Hold{Device: name, Silicon: d.Silicon(), Whole: d.PartOf == nil, Takes: d.Takes, Open: d.Shareable})
		}
		return holds
	}
	share := func(form, value string) []Hold {
		return []Hold{{Device: "big", Silicon: "big", Whole: true, Amount: amount(form, value), Form: form}}
	}
	numbered := func(shares int64) []Hold {
		r := Result{Source: "big", Silicon: "big", Whole: true, Consumes: amount("shares", "1"), Shares: shares}
		return []Hold{r.Hold()}
	}
	admin := func(name string) []Hold {
		h := of(name)
		h[0].Open = true
		return h
	}
	granted := func(exclusive bool, form string, silicon string, names ...string) []Hold {
		return (&Grant{Resource: "ours/gpu", ID: "1", Devices: names, Silicon: []string{silicon}, Exclusive: exclusive, Form: form}).Holds()
	}
	tests := map[string]struct {
		by      discovery.Mode
		has     []Hold
		wantBy  discovery.Mode
		want    []Hold
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
			x := newIndex()
			var e Entry = claim("c")
			if test.by == classic {
				e = &Grant{Resource: "ours/gpu", ID: "1", Container: "default/pod main"}
			}
			a := newAccount(e, Allocated)
			a.holds = test.has
			x.add(a)
			b := x.findBlocked(query{api: test.wantBy, ownKey: "another", wanted: test.want, stock: s})
			switch {
			case b == nil && test.blocked != "":
				t.Error("not blocked")
			case b != nil && (test.blocked == "" || !strings.Contains(b.Error(), test.blocked)):
				t.Errorf("blocked: %v; want %q", b, test.blocked)
			}
			if own := x.findBlocked(query{api: test.wantBy, ownKey: e.Key(), wanted: test.want, stock: s}); own != nil {
				t.Errorf("blocked by its own entry: %v", own)
			}
			x.remove(a)
			if b := x.findBlocked(query{api: test.wantBy, wanted: test.want, stock: s}); b != nil || len(x.byTerm) > 0 {
				t.Errorf("blocked by nobody: %v, %v", b, x.byTerm)
			}
		})
	}
}

// After two cards were removed and found again with each other's numbers, a container with a node
// has the other card, which no other owner may get. A shared node of all cards is not considered.
func TestNodesThatAnotherDeviceHasNow(t *testing.T) {
	before := host(gpu("a", 128), gpu("b", 129))
	b := newBench(t)
	b.mustGive(claim("c", before["a"]), before)
	now := host(gpu("a", 129), gpu("b", 128))
	b.mustRefuse(claim("other", now["b"]), now, "claim default/c, which was given its nodes as those of device a")
	b.mustRefuse(claim("other", now["a"]), now, "device a is in use by claim default/c")
	alone := gpu("b", 131)
	alone.Edits.DeviceNodes[1].Path = "/dev/dri/renderD128" // after a restart the container was given the path
	renamed := host(gpu("a", 130), alone)
	b.mustRefuse(claim("other", renamed["b"]), renamed, "given its nodes")
	numbers := gpu("b", 128)
	numbers.Edits.DeviceNodes[1].Path = "/dev/dri/renderD200" // and the container may open the numbers
	renumbered := host(gpu("a", 130), numbers)
	b.mustRefuse(claim("other", renumbered["b"]), renumbered, "given its nodes")
	left := host(gpu("d", 130)) // the other card has only the shared node
	b.mustGive(claim("other", left["d"]), left)
}

// A grant records the nodes of all its devices together. The nodes of a device do not block other
// owners' shares of another device.
func TestNodesOfAPool(t *testing.T) {
	devices := host(gpu("a", 128), gpu("b", 129), gpu("c", 130))
	pool := func(id string, names ...string) *Grant {
		g := &Grant{Resource: "ours/pool", ID: id, Form: "shares by 1"}
		for _, name := range names {
			g.Devices, g.Silicon, g.Nodes = append(g.Devices, name), append(g.Silicon, name), append(g.Nodes, NodesOf(name, devices)...)
		}
		return g
	}
	a := newAccount(pool("1", "a", "b"), Allocated)
	x := newIndex()
	x.add(a)
	if b := x.findBlocked(query{api: classic, ownKey: "another", wanted: pool("2", "a", "b").Holds(), stock: devices}); b != nil {
		t.Errorf("a second share: %v", b)
	}
	swapped := host(gpu("a", 130), gpu("b", 129), gpu("c", 128))
	if b := x.findBlocked(query{api: classic, ownKey: "another", wanted: pool("3", "c").Holds(), stock: swapped}); b == nil || !strings.Contains(b.Error(), "given its nodes") {
		t.Errorf("what has a node of the pool now: %v", b)
	}
}

// Devices have other nodes if all of their own nodes have changed, or if a node has other numbers
// or belongs to another device. A shared node of all cards does not matter, nor does a node that
// appears or disappears next to others.
func TestRenumbered(t *testing.T) {
	both := func(name string, card, render int64) rules.Offered {
		d := gpu(name, render)
		d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, &specs.DeviceNode{Path: fmt.Sprintf("/dev/dri/card%d", card), Type: "c", Major: 226, Minor: card})
		return d
	}
	monitor := both("monitor", 0, 128)
	monitor.Shareable = true
	given := claim("c", both("a", 0, 128)).Results[0].Nodes
	for name, test := range map[string]struct {
		now  stock
		want string
	}{
		"the same":               {host(both("a", 0, 128), both("b", 1, 129)), ""},
		"swapped":                {host(both("a", 1, 129), both("b", 0, 128)), "it was given as /dev/dri/renderD128 (226:128) and is /dev/dri/renderD129 (226:129), /dev/dri/card1 (226:1) now; /dev/dri/renderD128 is device b now"},
		"one of them swapped":    {host(both("a", 1, 128), both("b", 0, 129)), "/dev/dri/card0 is device b now"},
		"found alone":            {host(both("a", 7, 135)), "it was given as /dev/dri/card0 (226:0) and is /dev/dri/renderD135 (226:135), /dev/dri/card7 (226:7) now"},
		"one of them is gone":    {host(gpu("a", 128), monitor), ""},
		"gone":                   {host(both("b", 0, 128)), ""},
		"without nodes":          {host(rules.Offered{Device: discovery.Device{Name: "a"}}), ""},
		"without, and another's": {host(rules.Offered{Device: discovery.Device{Name: "a", CommonNodes: []string{"/dev/kfd"}}}, both("b", 0, 128)), "/dev/dri/renderD128 is device b now"},
	} {
		if got := RenumberedNodes(given, []string{"a"}, test.now); (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
	other := gpu("a", 128)
	other.Edits.DeviceNodes[1].Minor = 7
	if got := RenumberedNodes(given, []string{"a"}, host(other)); got != "it was given as /dev/dri/renderD128 (226:128) and is /dev/dri/renderD128 (226:7) now" {
		t.Errorf("other numbers: %q", got)
	}
}

// All shares of a device together take the device's part of its physical device.
func TestSharesOfAPart(t *testing.T) {
	p := part("card", "p0", 4)
	p.Capacity = discovery.Capacity{"shares": {Value: resource.MustParse("4")}}
	s := host(p, part("card", "p1", 4))
	b := newBench(t)
	for _, name := range []string{"one", "two"} {
		c := claim(name, p)
		c.Results[0].Consumes = amount("shares", "1")
		b.mustGive(c, s)
	}
	b.mustGive(claim("rest", s["p1"]), s)
}
