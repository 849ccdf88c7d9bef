package legacy

import (
	"strings"
	"testing"

	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list/listtest"
)

// Of two granularities of one piece of silicon, what one takes the other shows
// Unhealthy, and Allocate refuses.
func TestTwoGranularities(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := New(configFor(k))
	// "w" and "v" are whole devices, "x…" their two cores each.
	publish(p, listtest.Snapshot(append(listtest.Parts("gpu-w", 2, map[string]int64{"w": 2, "xw0": 1, "xw1": 1}), listtest.Parts("gpu-v", 2, map[string]int64{"v": 2, "xv0": 1, "xv1": 1})...)...))
	run(t, p)
	wholes, cores := k.Plugin(listtest.Resource, 1), k.Plugin(listtest.OtherResource, 1)
	wholes.Says(t, "v w")
	cores.Says(t, "xv0 xv1 xw0 xw1")
	if _, err := wholes.Allocate("w"); err != nil {
		t.Fatal(err)
	}
	k.Hold("train", listtest.Resource, "w")
	cores.Says(t, "xv0 xv1 xw0! xw1!")
	if _, err := cores.Allocate("xw1"); err == nil || !strings.Contains(err.Error(), "(device gpu-w)") {
		t.Errorf("a core of a device that is held: %v", err)
	}
	if _, err := cores.Allocate("xv1"); err != nil {
		t.Fatal(err)
	}
	k.Hold("infer", listtest.OtherResource, "xv1")
	wholes.Says(t, "v! w")
	cores.Says(t, "xv0 xv1 xw0! xw1!")
	if _, err := wholes.Allocate("v"); err == nil || !strings.Contains(err.Error(), "(device gpu-xv1)") {
		t.Errorf("a device of which a core is held: %v", err)
	}
	for silicon, pod := range map[string]string{"gpu-w": "default/train main", "gpu-v": "default/infer main"} {
		kubelettest.Eventually(t, func() bool { who, _ := holder(p, silicon); return who == pod }, func() string { return silicon + " is not confirmed" })
	}
	k.Hold("train", listtest.Resource)
	k.Hold("infer", listtest.OtherResource)
	wholes.Says(t, "v w")
	cores.Says(t, "xv0 xv1 xw0 xw1")
}
