package legacy

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
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
	h := newHoldings(t)
	one := had("a", gpu("a"))
	one.Container, one.Since = "", after(10)
	h.take([]*holding{one})
	check := func(name string, at int, listed map[key]string, holder string, want bool) {
		t.Helper()
		h.observe(after(at), listed, 10*time.Second)
		got, held := h.holder("gpu-a")
		if held != want || got != holder {
			t.Errorf("%s: held %t by %q", name, held, got)
		}
	}
	starting := "a container that the kubelet is starting"
	check("answer of before the grant", 9, listed, starting, true)
	check("not listed yet", 11, map[key]string{}, starting, true)
	check("never listed", 3600, map[key]string{}, starting, true)
	check("listed", 3601, listed, "default/train main", true)
	check("left out once", 3602, map[key]string{}, "default/train main", true)
	check("no answer", 3650, nil, "default/train main", true)
	check("there again", 3651, listed, "default/train main", true)
	check("left out", 3652, map[key]string{}, "default/train main", true)
	check("left out a little longer", 3660, map[key]string{}, "default/train main", true)
	check("left out for long", 3662, map[key]string{}, "", false)
}

func TestGrantUndone(t *testing.T) {
	h := newHoldings(t)
	before := had("a", gpu("a"))
	if err := h.grant([]*holding{before}, func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	again := had("a", gpu("a"))
	refused := errors.New("refused")
	err := h.grant([]*holding{again, had("b", gpu("b")), again}, func() error {
		if _, held := h.holder("gpu-b"); !held {
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
	if err := h.grant([]*holding{had("a", gpu("a"))}, func() error { return nil }); err != nil {
		t.Error(err)
	}
	if err := h.load(); err != nil || len(h.of(gpuResource)) != 1 {
		t.Errorf("%v: %v", err, h.of(gpuResource))
	}
}
