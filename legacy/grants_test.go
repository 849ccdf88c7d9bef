package legacy

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list"
)

func newHoldings(t *testing.T) *holdings {
	t.Helper()
	h := &holdings{file: filepath.Join(t.TempDir(), "grants.json")}
	if err := h.load(); err != nil {
		t.Fatal(err)
	}
	return h
}

func after(seconds int) time.Time { return testTime.Add(time.Duration(seconds) * time.Second) }

func TestObserve(t *testing.T) {
	a := key{gpuResource, "a"}
	listed := map[key]string{a: "default/train main"}
	nothing := map[key]string{}
	h := newHoldings(t)
	one := had("a", gpu("a"))
	one.Container, one.Since = "", after(10)
	h.take([]*holding{one})
	whole := true
	check := func(name string, at int, listed map[key]string, holder string, want bool) {
		t.Helper()
		said := &listing{containers: listed, whole: whole}
		if listed == nil {
			said = nil
		}
		h.observe(after(at), said, 10*time.Second)
		got, held := h.holder("gpu-a")
		if held != want || got != holder {
			t.Errorf("%s: held %t by %q", name, held, got)
		}
	}
	starting := "a container that the kubelet is starting"
	check("answer of before the grant", 9, listed, starting, true)
	check("not listed yet", 11, nothing, starting, true)
	check("never listed", 3600, nothing, starting, true)
	check("listed", 3601, listed, "default/train main", true)
	check("left out once", 3602, nothing, "default/train main", true)
	check("no answer", 3650, nil, "default/train main", true)
	check("there again", 3651, listed, "default/train main", true)
	check("left out", 3652, nothing, "default/train main", true)
	check("left out a little longer", 3660, nothing, "default/train main", true)
	whole = false
	check("left out for long by a kubelet that does not know its pods", 3700, nothing, "default/train main", true)
	if !h.askedAt().IsZero() {
		t.Error("IDs may leave by what such a kubelet said")
	}
	whole = true
	check("left out for long", 3701, nothing, "", false)
}

func TestGrantUndone(t *testing.T) {
	h := newHoldings(t)
	before := had("a", gpu("a"))
	if _, err := h.grant([]*holding{before}, func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	again := had("a", gpu("a"))
	refused := errors.New("refused")
	_, err := h.grant([]*holding{again, had("b", gpu("b")), again}, func() error {
		if who, held := h.holder("gpu-b"); !held || who == unheard {
			t.Error("the grant cannot be seen while the other API is asked")
		}
		return refused
	})
	if !errors.Is(err, refused) || len(h.of(gpuResource)) != 1 || h.of(gpuResource)["a"] != before {
		t.Errorf("%v: %v", err, h.of(gpuResource))
	}
}

func TestGrantsThatCannotBeRead(t *testing.T) {
	h := newHoldings(t)
	if err := os.WriteFile(h.file, []byte("[{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := h.load(); err == nil {
		t.Error("no error")
	}
	if _, err := os.Stat(h.file + ".unreadable"); err != nil {
		t.Errorf("not set aside: %v", err)
	}
	if _, err := h.grant([]*holding{had("a", gpu("a"))}, func() error { return nil }); err != nil {
		t.Error(err)
	}
	if err := h.load(); err != nil || len(h.of(gpuResource)) != 1 {
		t.Errorf("%v: %v", err, h.of(gpuResource))
	}
}

func TestTemporaryFilesLeftBehind(t *testing.T) {
	k := kubelettest.New(t)
	config := configFor(k)
	left, other := filepath.Join(config.StateDir, ".grants.json.123.tmp"), filepath.Join(config.StateDir, ".other.123.tmp")
	if err := errors.Join(os.Mkdir(config.StateDir, 0o700), os.WriteFile(left, nil, 0o600), os.WriteFile(other, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	p := New(config)
	run(t, p)
	<-p.Ready()
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left behind: %v", err)
	}
	if _, err := os.Stat(other); err != nil {
		t.Errorf("not ours: %v", err)
	}
}

func TestAdoptCompletes(t *testing.T) {
	h := newHoldings(t)
	a := key{gpuResource, "a"}
	h.observe(after(0), &listing{containers: map[key]string{a: "default/train main"}, whole: true}, time.Second)
	var u *list.Unit
	ours := func(key) (*list.Unit, bool) { return u, true }
	if !h.adopt(ours) || len(h.of(gpuResource)["a"].Devices) != 0 {
		t.Fatalf("adopted %+v", h.of(gpuResource)["a"])
	}
	u = unitOf(gpu("a"))
	h.asked = time.Time{} // a device is described while the kubelet is silent
	if !h.adopt(ours) {
		t.Error("nothing to save")
	}
	one := h.of(gpuResource)["a"]
	if !slices.Equal(one.Devices, []string{"gpu-a"}) || !one.Exclusive || one.Container != "default/train main" || !one.Since.Equal(after(0)) {
		t.Errorf("completed as %+v", one)
	}
	if who, held := h.holder("gpu-a"); !held || who != "default/train main" {
		t.Errorf("held %t by %q", held, who)
	}
	if h.adopt(ours) {
		t.Error("completed again")
	}
}

func TestKnow(t *testing.T) {
	a, b, s := gpu("a"), gpu("b"), gpu("a")
	s.Name, s.Shareable = "gpu-s", true
	stem := offer(a, "", "card1-0")
	stem.Offers[0].ShareStem = "card1-"
	twice := gpu("a")
	twice.Offers = append(twice.Offers, discovery.Offer{Resource: "example.com/other", IDs: []string{"a"}})
	for name, test := range map[string]struct {
		devices   []discovery.Device
		id        string
		held      string
		exclusive bool
	}{
		"whole":                       {[]discovery.Device{a, b}, "a", "gpu-a", true},
		"share of a whole":            {[]discovery.Device{a, b}, "a::0", "gpu-a", false},
		"share by its plugin's count": {[]discovery.Device{stem, b}, "card1-2", "gpu-a", false},
		"no number after the stem":    {[]discovery.Device{stem, b}, "card1-", "", false},
		"share by our own count":      {[]discovery.Device{offer(a, "", "1", "2")}, "2", "gpu-a", false},
		"ID of two":                   {[]discovery.Device{a, offer(b, "", "a")}, "a", "gpu-a gpu-b", true},
		"two offers of one ID":        {[]discovery.Device{twice}, "a", "gpu-a", true},
		"shareable has the same ID":   {[]discovery.Device{a, s}, "a", "gpu-a", true},
		"ID of a shareable one alone": {[]discovery.Device{s}, "a", "", false},
		"unknown":                     {[]discovery.Device{a}, "x", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHoldings(t)
			h.know(test.devices)
			h.know(test.devices)
			one := recognise(h.known, &holding{Resource: "example.org/any", ID: test.id})
			if got := strings.Join(one.Silicon, " "); got != test.held || one.Exclusive != test.exclusive {
				t.Errorf("holds %q, exclusive %t", got, one.Exclusive)
			}
		})
	}
}
