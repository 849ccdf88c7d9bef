package list

import (
	"math"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list/listtest"
)

// step is a snapshot with the expected list.
type step struct {
	devices   []rules.Offered
	held      []*allocation.Grant
	elsewhere map[string]string
	leave     int // IDs may leave if marked in this version or before; or everything
	want      string
	why       map[string]string // text of the refusal, by ID
	withheld  map[string]string // by physical device
}

// everything lets all IDs leave that were ever marked as gone.
const everything = math.MaxInt

// grace is the grace period of the tests.
const grace = 10 * time.Second

func had(id string, d rules.Offered) *allocation.Grant {
	return hadAs(id, BuildOffers(listtest.Snapshot(d)).Units[listtest.Resource][0], listtest.Resource)
}

// hadAs is the grant of a container for an ID of a unit.
func hadAs(id string, u *Unit, resource string) *allocation.Grant {
	g := u.Grant(resource, id, nil)
	g.Container = "default/train main"
	return g
}

// viewOf returns a view with grants of containers, and with claims on physical devices.
func viewOf(stock exclusion.Stock, had []*allocation.Grant, claimed map[string]string) *ledger.View {
	var entries []allocation.Entry
	for _, g := range had {
		entries = append(entries, g)
	}
	for silicon, name := range claimed {
		entries = append(entries, &allocation.Claim{UID: types.UID(name), Namespace: "default", Name: name, Results: []allocation.Result{{Source: silicon, Silicon: silicon, Whole: true}}})
	}
	return ledger.ViewOf(stock, entries...)
}

// belief is the belief of an idle kubelet. If leave is true, the kubelet no longer allocates IDs
// marked as gone.
func belief(leave bool) Belief {
	b := Belief{IdleSince: listtest.Time.Add(-time.Minute), ListedAt: listtest.Time}
	if leave {
		b.GoneSentAt = listtest.Time.Add(-time.Minute)
	}
	return b
}

// first returns the first list of a resource with the devices.
func first(resource string, devices ...rules.Offered) *List {
	lists, _ := Lists{}.Next(Input{Snapshot: listtest.Snapshot(devices...), View: viewOf(StockOf(listtest.FoundDevices(devices), Lists{}), nil, nil), Now: listtest.Time, Grace: grace})
	return lists.lists[resource]
}

// The first list of a resource contains the IDs in the kubelet's checkpoint, until the kubelet has
// listed all its pods.
func TestFirstListHasWhatTheKubeletHasWrittenDown(t *testing.T) {
	s, in := listtest.GPU("a"), Input{Now: listtest.Time, Grace: grace, CheckpointIDs: map[string][]string{listtest.Resource: {"a", "old"}, "other.example.com/x": {"y"}}}
	in.Snapshot, in.View = listtest.Snapshot(s), viewOf(StockOf(listtest.FoundDevices([]rules.Offered{s}), Lists{}), nil, nil)
	lists, _ := Lists{}.Next(in)
	if l := lists.lists[listtest.Resource]; len(lists.lists) != 1 || kubelettest.Text(l.devices) != "a old!" || l.rows["old"].refusalReason() != "no longer offered" {
		t.Errorf("the first lists are %v", lists.lists)
	}
	in.CheckpointIDs = nil
	for _, step := range []struct {
		leave bool
		want  string
	}{{false, "a old!"}, {true, "a"}} {
		in.Beliefs = map[string]Belief{listtest.Resource: belief(step.leave)}
		lists, _ = lists.Next(in)
		if got := kubelettest.Text(lists.lists[listtest.Resource].devices); got != step.want {
			t.Errorf("listed are %s, want %s", got, step.want)
		}
	}
}

// New consumers get neither a share nor a whole device if a container may have it by an ID of
// another plugin.
func TestWhatContainersHavePerhaps(t *testing.T) {
	d := listtest.InUnits("a", 3)
	stock := StockOf(listtest.FoundDevices([]rules.Offered{d}), Lists{})
	in := Input{Now: listtest.Time, Grace: grace, Snapshot: listtest.Snapshot(d), View: viewOf(stock, nil, nil)}
	share := hadAs("before-1", BuildOffers(in.Snapshot).Units[listtest.MemoryResource][0], listtest.MemoryResource)
	whole := had("before", listtest.GPU("a"))
	for _, test := range []struct {
		perhaps *allocation.Grant
		want    string
	}{{share, "a-_-0 a-_-1! a-_-2"}, {whole, "a-_-0! a-_-1! a-_-2!"}} {
		in.PossibleHolders = viewOf(stock, []*allocation.Grant{test.perhaps}, nil)
		lists, _ := Lists{}.Next(in)
		if got := kubelettest.Text(lists.lists[listtest.MemoryResource].devices); got != test.want {
			t.Errorf("listed are %s, want %s", got, test.want)
		}
		in.PossibleHolders = nil
		lists, _ = lists.Next(in)
		if got := kubelettest.Text(lists.lists[listtest.MemoryResource].devices); got != "a-_-0 a-_-1 a-_-2" {
			t.Errorf("listed are %s once it is known that no container has it", got)
		}
	}
}

func TestList(t *testing.T) {
	a, b := listtest.GPU("a"), listtest.GPU("b")
	hot := listtest.WithHealth(a, discovery.Unhealthy, "hot")
	unread := listtest.WithHealth(a, discovery.Unknown, "cannot be read")
	told, evicting := hot, hot
	told.Health.Effect = resourceapi.DeviceTaintEffectNone
	evicting.Health.Effect = resourceapi.DeviceTaintEffectNoExecute
	shareable := listtest.GPU("s")
	shareable.Shareable = true
	part := offer(listtest.GPU("a-1"), "", "p")
	part.PartOf = &discovery.Silicon{Name: "gpu-a"}
	another := offer(listtest.GPU("a-2"), "", "q")
	another.PartOf = part.PartOf
	elsewhere := func(h *allocation.Grant) *allocation.Grant {
		h.Resource = "example.com/other"
		return h
	}
	tests := map[string][]step{
		"topology": {{devices: []rules.Offered{at(a, 1, "", ""), at(b, -1, "", "")}, want: "a@1 b"}},
		"topology of a unit": {{devices: []rules.Offered{
			at(offer(a, "card", "c"), 1, "", ""), at(offer(b, "card", "c"), 0, "", ""),
		}, want: "c@0@1"}},
		"unhealthy and back": {
			{devices: []rules.Offered{hot}, want: "a!", why: map[string]string{"a": "hot"}},
			{devices: []rules.Offered{a}, want: "a"},
		},
		"one sick device of a unit": {{devices: []rules.Offered{
			offer(a, "card", "c"), listtest.WithHealth(offer(b, "card", "c"), discovery.Unhealthy, "hot"),
		}, want: "c!"}},
		"a pool with one that can be used": {{devices: []rules.Offered{
			pooled(a), listtest.WithHealth(pooled(b), discovery.Unhealthy, "hot"),
		}, want: "0 1"}},
		"a pool with none that can be used": {{devices: []rules.Offered{
			listtest.WithHealth(pooled(a), discovery.Unhealthy, "hot"), listtest.WithHealth(pooled(b), discovery.Unhealthy, "cold"),
		}, want: "0! 1!", why: map[string]string{"0": "hot"}}},
		"a pool with one that is withheld": {{devices: []rules.Offered{pooled(a), pooled(b)}, withheld: map[string]string{"gpu-b": "moves to DRA"}, want: "0! 1!"}},
		"unknown is unhealthy":             {{devices: []rules.Offered{unread}, want: "a!", why: map[string]string{"a": "cannot be read"}}},
		"what has no effect is heard":      {{devices: []rules.Offered{told}, want: "a"}},
		"evicted in DRA":                   {{devices: []rules.Offered{evicting}, want: "a!"}},
		"marked before it leaves, whatever may leave": {
			{devices: []rules.Offered{a, b}, want: "a b"},
			{devices: []rules.Offered{b}, leave: everything, want: "a! b", why: map[string]string{"a": "no longer offered"}},
			{devices: []rules.Offered{b}, leave: 1, want: "a! b"},
			{devices: []rules.Offered{b}, leave: 2, want: "b"},
		},
		"back before it leaves": {
			{devices: []rules.Offered{a, b}, want: "a b"},
			{devices: []rules.Offered{b}, want: "a! b"},
			{devices: []rules.Offered{a, b}, leave: everything, want: "a b"},
			{devices: []rules.Offered{b}, leave: 2, want: "a! b"},
		},
		"known to be unhealthy before it went": {
			{devices: []rules.Offered{hot, b}, want: "a! b"},
			{devices: []rules.Offered{b}, leave: 1, want: "a! b"},
			{devices: []rules.Offered{b}, leave: 1, want: "b"},
		},
		"held": {
			{devices: []rules.Offered{a, b}, want: "a b"},
			{devices: nil, held: []*allocation.Grant{had("a", a)}, want: "a! b!"},
			{devices: nil, held: []*allocation.Grant{had("a", a)}, leave: everything, want: "a!"},
			{devices: nil, leave: everything, want: ""},
		},
		"held ID keeps its place": {
			{devices: []rules.Offered{at(a, 1, "", "")}, want: "a@1"},
			{devices: nil, want: "a!@1"},
			{devices: nil, held: []*allocation.Grant{had("a", a)}, leave: everything, want: "a!@1"},
		},
		"held and never seen": {{devices: []rules.Offered{b}, held: []*allocation.Grant{had("a", a)}, want: "a! b"}},
		"in use by the other API": {
			{devices: []rules.Offered{a, b}, elsewhere: map[string]string{"gpu-a": "c"}, want: "a! b", why: map[string]string{"a": "device gpu-a is in use by claim default/c (device gpu-a)"}},
		},
		"shareable is not held by the other API": {
			{devices: []rules.Offered{shareable}, elsewhere: map[string]string{"gpu-s": "c"}, want: "s"},
		},
		"held ID stands for another device": {
			{devices: []rules.Offered{a}, want: "a"},
			{
				devices: []rules.Offered{offer(b, "", "a")}, held: []*allocation.Grant{had("a", a)},
				want: "a!", why: map[string]string{"a": "default/train main has it as gpu-a"},
			},
			{devices: []rules.Offered{offer(b, "", "a")}, want: "a"},
		},
		"device has another ID while it is held": {
			{devices: []rules.Offered{a}, want: "a"},
			{
				devices: []rules.Offered{offer(a, "", "uuid")}, held: []*allocation.Grant{had("a", a)}, leave: everything,
				want: "a! uuid!", why: map[string]string{"uuid": "device gpu-a is in use by default/train main (device gpu-a)"},
			},
			{devices: []rules.Offered{offer(a, "", "uuid")}, leave: everything, want: "uuid"},
		},
		"device is shared while it is held": {{
			devices: []rules.Offered{offer(a, "", "a::0", "a::1")}, held: []*allocation.Grant{had("a", a)},
			want: "a! a::0! a::1!",
		}},
		"fewer shares": {{
			devices: []rules.Offered{offer(a, "", "1", "2")}, held: []*allocation.Grant{had("3", offer(a, "", "1", "2", "3"))},
			want: "1 2! 3!", why: map[string]string{"2": `default/train main has it as "3"`},
		}},
		"shares by the IDs of another plugin": {{
			devices: []rules.Offered{offer(a, "", "a::0", "a::1", "a::2", "a::3")},
			held:    []*allocation.Grant{had("a-1", offer(a, "", "a-0", "a-1")), had("a-7", offer(a, "", "a-0", "a-7")), had("a::3", offer(a, "", "a::0", "a::3"))},
			want:    "a-1! a-7! a::0 a::1! a::2! a::3",
			why:     map[string]string{"a::1": `default/train main has it as "a-1"`, "a::2": `default/train main has it as "a-7"`},
		}},
		"IDs have changed places while one is held": {{
			devices: []rules.Offered{offer(a, "", "b"), offer(b, "", "a")}, held: []*allocation.Grant{had("a", a)},
			want: "a! b!", why: map[string]string{"b": "device gpu-a is in use by default/train main (device gpu-a)"},
		}},
		"held of another resource": {{
			devices: []rules.Offered{a, b}, held: []*allocation.Grant{elsewhere(had("x", offer(a, "", "x")))},
			want: "a! b", why: map[string]string{"a": "device gpu-a is in use by default/train main (device gpu-a)"},
		}},
		"a share is held of another resource": {
			{devices: []rules.Offered{a, b}, held: []*allocation.Grant{elsewhere(had("1", offer(a, "", "1", "2")))}, want: "a! b"},
			{devices: []rules.Offered{offer(a, "", "1", "2"), b}, held: []*allocation.Grant{elsewhere(had("1", offer(a, "", "1", "2")))}, want: "1! 2! a! b"},
		},
		"shareable is held of another resource": {{
			devices: []rules.Offered{shareable}, held: []*allocation.Grant{elsewhere(had("s", shareable))}, want: "s",
		}},
		"a unit has a device that is held of another resource": {{
			devices: []rules.Offered{offer(a, "card", "c"), offer(b, "card", "c")}, held: []*allocation.Grant{elsewhere(had("b", b))}, want: "c!",
		}},
		"held whole is parted": {{
			devices: []rules.Offered{part, b}, held: []*allocation.Grant{elsewhere(had("a", a))},
			want: "b p!", why: map[string]string{"p": "device gpu-a-1 is in use by default/train main (device gpu-a)"},
		}},
		"held whole is there beside its parts": {{
			devices: []rules.Offered{a, part}, held: []*allocation.Grant{had("a", a)}, want: "a p!",
		}},
		"another part is held": {{
			devices: []rules.Offered{part}, held: []*allocation.Grant{elsewhere(had("q", another))}, want: "p",
		}},
		"no shares any more": {{
			devices: []rules.Offered{offer(a, "", "1")}, held: []*allocation.Grant{had("3", offer(a, "", "1", "2", "3"))},
			want: "1! 3!",
		}},
	}
	for name, steps := range tests {
		t.Run(name, func(t *testing.T) {
			var lists Lists
			var l *List
			for i, step := range steps {
				before := l
				in := Input{
					Snapshot: listtest.Snapshot(step.devices...), View: viewOf(StockOf(listtest.FoundDevices(step.devices), Lists{}), step.held, step.elsewhere), Now: listtest.Time, Grace: grace,
					Beliefs:  map[string]Belief{listtest.Resource: belief(before != nil && step.leave >= before.marked)},
					Withheld: step.withheld,
				}
				lists, _ = lists.Next(in)
				l = lists.lists[listtest.Resource]
				if got := kubelettest.Text(l.devices); got != step.want {
					t.Fatalf("step %d: list is %q, want %q", i, got, step.want)
				}
				for id, want := range step.why {
					if got := l.rows[id].refusalReason(); got != want {
						t.Errorf("step %d: %s: %q, want %q", i, id, got, want)
					}
				}
				if before != nil && (kubelettest.Text(before.devices) == kubelettest.Text(l.devices)) != (before.version == l.version) {
					t.Errorf("step %d: version %d after %d", i, l.version, before.version)
				}
			}
		})
	}
}

func TestListKeepsUpWithEdits(t *testing.T) {
	a := listtest.GPU("a")
	in := Input{Snapshot: listtest.Snapshot(a), View: viewOf(StockOf(nil, Lists{}), nil, nil), Now: listtest.Time, Grace: grace}
	lists, _ := Lists{}.Next(in)
	first := lists.lists[listtest.Resource]
	a.Edits.Env = []string{"NEW=1"}
	in.Snapshot = listtest.Snapshot(a)
	lists, _ = lists.Next(in)
	second := lists.lists[listtest.Resource]
	if second.version != first.version {
		t.Error("the kubelet is told what it need not know")
	}
	if got := second.rows["a"].unit.Devices[0].Edits.Env; len(got) != 1 || got[0] != "NEW=1" {
		t.Errorf("edits are %v", got)
	}
}

func TestMayLeave(t *testing.T) {
	later := func(n int) time.Time { return listtest.Time.Add(time.Duration(n) * time.Second) }
	for name, test := range map[string]struct {
		belief Belief
		now    int
		want   bool
	}{
		"too early":                   {Belief{GoneSentAt: later(0), IdleSince: later(-60), ListedAt: later(9)}, 9, false},
		"PodResources is silent":      {Belief{GoneSentAt: later(0), IdleSince: later(-60)}, 30, false},
		"Allocate was just called":    {Belief{GoneSentAt: later(0), IdleSince: later(15), ListedAt: later(20)}, 20, false},
		"asked before Allocate":       {Belief{GoneSentAt: later(0), IdleSince: later(15), ListedAt: later(14)}, 30, false},
		"asked before it was told":    {Belief{GoneSentAt: later(15), IdleSince: later(0), ListedAt: later(14)}, 30, false},
		"Allocate is in flight":       {Belief{GoneSentAt: later(0), ListedAt: later(30)}, 30, false},
		"stream is behind":            {Belief{IdleSince: later(0), ListedAt: later(30)}, 30, false},
		"nothing is in the way":       {Belief{GoneSentAt: later(0), IdleSince: later(-60), ListedAt: later(10)}, 10, true},
		"nothing is in the way later": {Belief{GoneSentAt: later(0), IdleSince: later(15), ListedAt: later(30)}, 30, true},
	} {
		if got := test.belief.mayLeave(later(test.now), grace); got != test.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// Lists are computed only after a change. A resource is removed when its list is empty and the
// kubelet has received the empty list.
func TestListsAtRest(t *testing.T) {
	in := Input{Snapshot: listtest.Snapshot(listtest.GPU("a"), listtest.GPU("b")), View: viewOf(StockOf(nil, Lists{}), nil, nil), Now: listtest.Time, Grace: grace}
	same := func(a, b Lists) bool {
		return a.lists[listtest.Resource] == b.lists[listtest.Resource] && a.lists[listtest.Resource] != nil
	}
	lists, _ := Lists{}.Next(in)
	in.Now = in.Now.Add(time.Hour)
	in.Withheld, in.Beliefs = map[string]string{}, map[string]Belief{listtest.Resource: belief(true)}
	again, _ := lists.Next(in)
	if !same(lists, again) {
		t.Error("computed anew at rest")
	}
	for name, change := range map[string]func(*Input){
		"snapshot": func(in *Input) { in.Snapshot = listtest.Snapshot(listtest.GPU("a")) },
		"view": func(in *Input) {
			in.View = viewOf(StockOf(nil, Lists{}), []*allocation.Grant{had("a", listtest.GPU("a"))}, nil)
		},
		"withheld": func(in *Input) { in.Withheld = map[string]string{"gpu-a": "moves"} },
	} {
		other := in
		change(&other)
		if next, _ := lists.Next(other); same(lists, next) {
			t.Errorf("not computed anew for another %s", name)
		}
	}
	in.Snapshot, in.Beliefs = listtest.Snapshot(), map[string]Belief{listtest.Resource: belief(false)}
	marked, _ := lists.Next(in)
	if waiting, _ := marked.Next(in); !same(marked, waiting) {
		t.Error("computed anew while an ID waits to leave")
	}
	in.Beliefs = map[string]Belief{listtest.Resource: belief(true)}
	empty, _ := marked.Next(in)
	if l := empty.lists[listtest.Resource]; l == nil || !l.Empty() {
		t.Fatalf("the kubelet is not told that nothing is left: %v", l)
	}
	in.Beliefs = nil
	if gone, _ := empty.Next(in); len(gone.lists) != 0 {
		t.Error("a resource of which nothing is left is remembered")
	}
}

func TestRefusalNamesEachDevice(t *testing.T) {
	_, err := first(listtest.Resource, listtest.GPU("a")).LookUp([]string{"x", "a", "y"})
	if err == nil || strings.Count(err.Error(), listtest.Resource) != 2 {
		t.Errorf("%v", err)
	}
}

// A container may have a device by an unlisted ID, for example in the dialect of another plugin.
func TestIDOfAnotherForm(t *testing.T) {
	devices := []rules.Offered{listtest.GPU("a")}
	lists, _ := Lists{}.Next(Input{Snapshot: listtest.Snapshot(devices...), View: viewOf(StockOf(listtest.FoundDevices(devices), Lists{}), nil, nil), Now: listtest.Time, Grace: grace})
	resource := devices[0].Offers[0].Resource
	g, ours := StockOf(listtest.FoundDevices(devices), lists).WithID(resource, devices[0].Offers[0].IDs[0]+"::1")
	if !ours || g == nil || len(g.Devices) != 1 || g.Devices[0] != devices[0].Name || g.Exclusive {
		t.Errorf("%+v, ours %t", g, ours)
	}
}

// An SR-IOV pool may exclude NUMA nodes from its list.
func TestExcludeTopology(t *testing.T) {
	d := listtest.GPU("a")
	d.Attributes.SetInt("resource.kubernetes.io/numaNode", 1)
	if got := first(listtest.Resource, d).Devices()[0].GetTopology().GetNodes(); len(got) != 1 || got[0].ID != 1 {
		t.Errorf("NUMA nodes %v; want 1", got)
	}
	d.SRIOV = &discovery.SRIOVPool{ExcludeTopology: true}
	if got := first(listtest.Resource, d).Devices()[0].Topology; got != nil {
		t.Errorf("NUMA nodes %v, though excluded", got)
	}
}

// pooled returns the device in a pool of two shares.
func pooled(d rules.Offered) rules.Offered {
	d.Offers = []discovery.Offer{{Resource: listtest.Resource, IDs: []string{"0", "1"}, Unit: listtest.Resource, Pool: true}}
	return d
}
