package legacy

import (
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/legacy/kubelettest"
)

// step is one snapshot and the list that must follow from it.
type step struct {
	devices   []discovery.Device
	held      []*holding
	elsewhere map[string]string
	leave     int // as in situation; a version, or everything
	want      string
	why       map[string]string // by ID: what its refusal says
}

func had(id string, d discovery.Device) *holding {
	units, _ := offered(snapshot(d))
	h := newHolding(gpuResource, id, units[gpuResource][0], testTime)
	h.Container = "default/train main"
	return h
}

func TestList(t *testing.T) {
	a, b := gpu("a"), gpu("b")
	hot := sick(a, discovery.Unhealthy, "hot")
	unread := sick(a, discovery.Unknown, "cannot be read")
	told, evicting := hot, hot
	told.Health.Effect = resourceapi.DeviceTaintEffectNone
	evicting.Health.Effect = resourceapi.DeviceTaintEffectNoExecute
	shareable := gpu("s")
	shareable.Shareable = true
	part := offer(gpu("a-1"), "", "p")
	part.PartOf = &discovery.Whole{Name: "gpu-a"}
	another := offer(gpu("a-2"), "", "q")
	another.PartOf = part.PartOf
	elsewhere := func(h *holding) *holding {
		h.Resource = "example.com/other"
		return h
	}
	tests := map[string][]step{
		"topology": {{devices: []discovery.Device{at(a, 1, "", ""), at(b, -1, "", "")}, want: "a@1 b"}},
		"topology of a unit": {{devices: []discovery.Device{
			at(offer(a, "card", "c"), 1, "", ""), at(offer(b, "card", "c"), 0, "", ""),
		}, want: "c@0@1"}},
		"unhealthy and back": {
			{devices: []discovery.Device{hot}, want: "a!", why: map[string]string{"a": "hot"}},
			{devices: []discovery.Device{a}, want: "a"},
		},
		"one sick device of a unit": {{devices: []discovery.Device{
			offer(a, "card", "c"), sick(offer(b, "card", "c"), discovery.Unhealthy, "hot"),
		}, want: "c!"}},
		"unknown is unhealthy":        {{devices: []discovery.Device{unread}, want: "a!", why: map[string]string{"a": "cannot be read"}}},
		"what has no effect is heard": {{devices: []discovery.Device{told}, want: "a"}},
		"evicted in DRA":              {{devices: []discovery.Device{evicting}, want: "a!"}},
		"marked before it leaves, whatever may leave": {
			{devices: []discovery.Device{a, b}, want: "a b"},
			{devices: []discovery.Device{b}, leave: everything, want: "a! b", why: map[string]string{"a": "no longer offered"}},
			{devices: []discovery.Device{b}, leave: 1, want: "a! b"},
			{devices: []discovery.Device{b}, leave: 2, want: "b"},
		},
		"back before it leaves": {
			{devices: []discovery.Device{a, b}, want: "a b"},
			{devices: []discovery.Device{b}, want: "a! b"},
			{devices: []discovery.Device{a, b}, leave: everything, want: "a b"},
			{devices: []discovery.Device{b}, leave: 2, want: "a! b"},
		},
		"known to be unhealthy before it went": {
			{devices: []discovery.Device{hot, b}, want: "a! b"},
			{devices: []discovery.Device{b}, leave: 1, want: "a! b"},
			{devices: []discovery.Device{b}, leave: 1, want: "b"},
		},
		"held": {
			{devices: []discovery.Device{a, b}, want: "a b"},
			{devices: nil, held: []*holding{had("a", a)}, want: "a! b!"},
			{devices: nil, held: []*holding{had("a", a)}, leave: everything, want: "a!"},
			{devices: nil, leave: everything, want: ""},
		},
		"held ID keeps its place": {
			{devices: []discovery.Device{at(a, 1, "", "")}, want: "a@1"},
			{devices: nil, want: "a!@1"},
			{devices: nil, held: []*holding{had("a", a)}, leave: everything, want: "a!@1"},
		},
		"held and never seen": {{devices: []discovery.Device{b}, held: []*holding{had("a", a)}, want: "a! b"}},
		"held by the other API": {
			{devices: []discovery.Device{a, b}, elsewhere: map[string]string{"gpu-a": "claim c"}, want: "a! b", why: map[string]string{"a": "gpu-a is held by claim c"}},
		},
		"shareable is not held by the other API": {
			{devices: []discovery.Device{shareable}, elsewhere: map[string]string{"gpu-s": "claim c"}, want: "s"},
		},
		"held ID stands for another device": {
			{devices: []discovery.Device{a}, want: "a"},
			{
				devices: []discovery.Device{offer(b, "", "a")}, held: []*holding{had("a", a)},
				want: "a!", why: map[string]string{"a": "default/train main has it as gpu-a"},
			},
			{devices: []discovery.Device{offer(b, "", "a")}, want: "a"},
		},
		"device has another ID while it is held": {
			{devices: []discovery.Device{a}, want: "a"},
			{
				devices: []discovery.Device{offer(a, "", "uuid")}, held: []*holding{had("a", a)}, leave: everything,
				want: "a! uuid!", why: map[string]string{"uuid": "gpu-a is held by default/train main as a"},
			},
			{devices: []discovery.Device{offer(a, "", "uuid")}, leave: everything, want: "uuid"},
		},
		"device is shared while it is held": {{
			devices: []discovery.Device{offer(a, "", "a::0", "a::1")}, held: []*holding{had("a", a)},
			want: "a! a::0! a::1!",
		}},
		"fewer shares": {{
			devices: []discovery.Device{offer(a, "", "1", "2")}, held: []*holding{had("3", offer(a, "", "1", "2", "3"))},
			want: "1 2 3!",
		}},
		"IDs have changed places while one is held": {{
			devices: []discovery.Device{offer(a, "", "b"), offer(b, "", "a")}, held: []*holding{had("a", a)},
			want: "a! b!", why: map[string]string{"b": "gpu-a is held by default/train main as a"},
		}},
		"held of another resource": {{
			devices: []discovery.Device{a, b}, held: []*holding{elsewhere(had("x", offer(a, "", "x")))},
			want: "a! b", why: map[string]string{"a": "gpu-a is held by default/train main as example.com/other x"},
		}},
		"a share is held of another resource": {
			{devices: []discovery.Device{a, b}, held: []*holding{elsewhere(had("1", offer(a, "", "1", "2")))}, want: "a! b"},
			{devices: []discovery.Device{offer(a, "", "1", "2"), b}, held: []*holding{elsewhere(had("1", offer(a, "", "1", "2")))}, want: "1 2 a! b"},
		},
		"shareable is held of another resource": {{
			devices: []discovery.Device{shareable}, held: []*holding{elsewhere(had("s", shareable))}, want: "s",
		}},
		"a unit has a device that is held of another resource": {{
			devices: []discovery.Device{offer(a, "card", "c"), offer(b, "card", "c")}, held: []*holding{elsewhere(had("b", b))}, want: "c!",
		}},
		"held whole is parted": {{
			devices: []discovery.Device{part, b}, held: []*holding{elsewhere(had("a", a))},
			want: "b p!", why: map[string]string{"p": "gpu-a is held by default/train main as example.com/other a"},
		}},
		"held whole is there beside its parts": {{
			devices: []discovery.Device{a, part}, held: []*holding{had("a", a)}, want: "a p",
		}},
		"another part is held": {{
			devices: []discovery.Device{part}, held: []*holding{elsewhere(had("q", another))}, want: "p",
		}},
		"no shares any more": {{
			devices: []discovery.Device{offer(a, "", "1")}, held: []*holding{had("3", offer(a, "", "1", "2", "3"))},
			want: "1! 3!",
		}},
	}
	for name, steps := range tests {
		t.Run(name, func(t *testing.T) {
			var l *list
			for i, step := range steps {
				units, _ := offered(snapshot(step.devices...))
				s := situation{units: units[gpuResource], held: make(map[string]*holding), elsewhere: step.elsewhere, leave: step.leave}
				s.resource, s.taken = gpuResource, taken{holdings: step.held, present: make(map[string]bool)}
				for _, h := range step.held {
					if h.Resource == gpuResource {
						s.held[h.ID] = h
					}
				}
				for _, d := range step.devices {
					s.taken.present[d.Name] = true
				}
				before := l
				l = l.next(s)
				if got := kubelettest.Text(l.devices); got != step.want {
					t.Fatalf("step %d: list is %q, want %q", i, got, step.want)
				}
				for id, want := range step.why {
					if got := l.rows[id].refusal(); got != want {
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
	a := gpu("a")
	units, _ := offered(snapshot(a))
	first := (*list)(nil).next(situation{units: units[gpuResource]})
	a.Edits.Env = []string{"NEW=1"}
	units, _ = offered(snapshot(a))
	second := first.next(situation{units: units[gpuResource]})
	if second.version != first.version {
		t.Error("the kubelet is told what it need not know")
	}
	if got := second.rows["a"].unit.devices[0].Edits.Env; len(got) != 1 || got[0] != "NEW=1" {
		t.Errorf("edits are %v", got)
	}
}

func TestLeave(t *testing.T) {
	later := func(n int) time.Time { return testTime.Add(time.Duration(n) * time.Second) }
	s := newServer(gpuResource, 10*time.Second, nil)
	own := &stream{}
	s.list = &list{version: 3}
	s.marks = map[int]time.Time{2: later(0), 3: later(5)}
	s.streams[own] = 3
	check := func(name string, now, asked time.Time, want int) {
		t.Helper()
		if got := s.leave(now, asked); got != want {
			t.Errorf("%s: %d, want %d", name, got, want)
		}
	}
	check("too early", later(9), later(9), 0)
	check("PodResources is silent", later(30), time.Time{}, 0)
	s.lastCall = later(15)
	check("Allocate was just called", later(20), later(20), 0)
	check("PodResources was asked before Allocate", later(30), later(14), 0)
	s.inFlight = 1
	check("Allocate is in flight", later(30), later(30), 0)
	s.inFlight, s.lastCall = 0, time.Time{}
	s.streams[own] = 1
	check("stream is behind", later(30), later(30), 0)
	s.streams[own] = 3
	check("first of two", later(12), later(12), 2)
	check("both", later(30), later(30), 3)
	s.begin()()
	check("Allocate has just ended", time.Now(), time.Now(), 0)
}

func TestDone(t *testing.T) {
	now := testTime
	full := &list{version: 1, rows: map[string]row{"a": {}}}
	empty := &list{version: 2}
	own := &stream{}
	for name, test := range map[string]struct {
		list *list
		sent map[*stream]int
		mark int // seconds ago
		want bool
	}{
		"something left":              {full, map[*stream]int{own: 1}, 60, false},
		"sent":                        {empty, map[*stream]int{own: 2}, 0, true},
		"not sent":                    {empty, map[*stream]int{own: 1}, 60, false},
		"no stream yet":               {empty, nil, 1, false},
		"no stream, and none is come": {empty, nil, 60, true},
	} {
		s := newServer(gpuResource, 10*time.Second, nil)
		s.list, s.streams = test.list, test.sent
		s.marks[test.list.version] = now.Add(-time.Duration(test.mark) * time.Second)
		if got := s.done(now); got != test.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestRefusalNamesEachDevice(t *testing.T) {
	units, _ := offered(snapshot(gpu("a")))
	l := (*list)(nil).next(situation{units: units[gpuResource]})
	_, err := l.lookUp(gpuResource, []string{"x", "a", "y"})
	if err == nil || strings.Count(err.Error(), gpuResource) != 2 {
		t.Errorf("%v", err)
	}
}
