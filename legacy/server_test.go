package legacy

import (
	"testing"
	"time"

	"chandler.dev/internal/ledger"
	"chandler.dev/legacy/list"
	"chandler.dev/legacy/list/listtest"
)

// The Belief depends on the streams and calls.
func TestBelief(t *testing.T) {
	in := list.Input{Snapshot: gpus("a", "b"), View: ledger.ViewOf(list.StockOf(nil, list.Lists{})), Now: listtest.Time, Grace: grace}
	full, _ := list.Lists{}.Next(in)
	in.Snapshot = gpus("a")
	marked, _ := full.Next(in)
	if marked.Resources()[listtest.Resource].MarkedVersion() != 2 {
		t.Fatalf("marked in version %d", marked.Resources()[listtest.Resource].MarkedVersion())
	}

	s := newServer(listtest.Resource, grace, nil, unobserved)
	quick, slow := &stream{}, &stream{}
	told := func(name string, want bool) list.Belief {
		t.Helper()
		b := s.kubeletBelief(listtest.Time)
		if !b.ListedAt.Equal(listtest.Time) || b.GoneSentAt.IsZero() == want {
			t.Errorf("%s: %+v", name, b)
		}
		return b
	}
	s.publish(full.Resources()[listtest.Resource])
	s.enterStream(quick)
	s.enterStream(slow)
	s.noteVersion(quick, 1)
	s.noteVersion(slow, 1)
	told("nothing is marked", true)
	before := time.Now()
	s.publish(marked.Resources()[listtest.Resource])
	told("no stream has sent it", false)
	s.noteVersion(quick, 2)
	told("one stream has sent it", false)
	s.noteVersion(slow, 2)
	first := told("both have sent it", true)
	if first.GoneSentAt.Before(before) {
		t.Errorf("told at %v, before it was known", first.GoneSentAt)
	}
	another := &stream{}
	s.enterStream(another)
	told("another stream is behind", false)
	s.exit(another)
	if again := told("which has ended", true); again.GoneSentAt != first.GoneSentAt {
		t.Error("told anew")
	}

	end := s.begin()
	if b := s.kubeletBelief(listtest.Time); !b.IdleSince.IsZero() {
		t.Errorf("quiet while Allocate is in flight: %+v", b)
	}
	before = time.Now()
	end()
	if b := s.kubeletBelief(listtest.Time); b.IdleSince.Before(before) {
		t.Errorf("quiet since %v", b.IdleSince)
	}
}

func TestDone(t *testing.T) {
	in := list.Input{Snapshot: gpus("a"), View: ledger.ViewOf(list.StockOf(nil, list.Lists{})), Now: listtest.Time}
	first, _ := list.Lists{}.Next(in)
	in.Snapshot = gpus()
	marked, _ := first.Next(in)
	in.Beliefs = map[string]list.Belief{listtest.Resource: {GoneSentAt: listtest.Time.Add(-2), IdleSince: listtest.Time.Add(-2), ListedAt: listtest.Time}}
	last, _ := marked.Next(in)
	full, empty := marked.Resources()[listtest.Resource], last.Resources()[listtest.Resource]
	if full.Empty() || !empty.Empty() {
		t.Fatal("the lists are not as they should be")
	}
	now := listtest.Time
	own := &stream{}
	for name, test := range map[string]struct {
		list *list.List
		sent map[*stream]int
		made int // seconds ago
		want bool
	}{
		"something left":              {full, map[*stream]int{own: 9}, 60, false},
		"sent":                        {empty, map[*stream]int{own: empty.Version()}, 0, true},
		"not sent":                    {empty, map[*stream]int{own: empty.Version() - 1}, 60, false},
		"no stream yet":               {empty, nil, 1, false},
		"no stream, and none is come": {empty, nil, 60, true},
	} {
		s := newServer(listtest.Resource, 10*time.Second, nil, unobserved)
		s.list, s.streams = test.list, test.sent
		s.published = now.Add(-time.Duration(test.made) * time.Second)
		if got := s.done(now); got != test.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func unobserved(Operation, time.Duration, error) {}
