package legacy

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list/listtest"
)

// A physical device is offered in two granularities. An allocation of one makes the other
// Unhealthy, and Allocate refuses it.
func TestTwoGranularities(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := New(configFor(k))
	// "w" and "v" are whole devices. IDs that begin with "x" are their cores, two each.
	publish(p, listtest.Snapshot(append(listtest.Parts("gpu-w", 2, map[string]int64{"w": 2, "xw0": 1, "xw1": 1}), listtest.Parts("gpu-v", 2, map[string]int64{"v": 2, "xv0": 1, "xv1": 1})...)...))
	run(t, p)
	wholes, cores := k.AwaitPlugin(listtest.Resource, 1), k.AwaitPlugin(listtest.OtherResource, 1)
	wholes.AwaitList(t, "v w")
	cores.AwaitList(t, "xv0 xv1 xw0 xw1")
	if _, err := wholes.AllocateIDs("w"); err != nil {
		t.Fatal(err)
	}
	k.HoldIDs("train", listtest.Resource, "w")
	cores.AwaitList(t, "xv0 xv1 xw0! xw1!")
	if _, err := cores.AllocateIDs("xw1"); err == nil || !strings.Contains(err.Error(), "(device gpu-w)") {
		t.Errorf("a core of a device that is held: %v", err)
	}
	if _, err := cores.AllocateIDs("xv1"); err != nil {
		t.Fatal(err)
	}
	k.HoldIDs("infer", listtest.OtherResource, "xv1")
	wholes.AwaitList(t, "v! w")
	cores.AwaitList(t, "xv0 xv1 xw0! xw1!")
	if _, err := wholes.AllocateIDs("v"); err == nil || !strings.Contains(err.Error(), "(device gpu-xv1)") {
		t.Errorf("a device of which a core is held: %v", err)
	}
	for silicon, pod := range map[string]string{"gpu-w": "default/train main", "gpu-v": "default/infer main"} {
		kubelettest.EventuallyTrue(t, func() bool { who, _ := holder(p, silicon); return who == pod }, func() string { return silicon + " is not confirmed" })
	}
	k.HoldIDs("train", listtest.Resource)
	k.HoldIDs("infer", listtest.OtherResource)
	wholes.AwaitList(t, "v w")
	cores.AwaitList(t, "xv0 xv1 xw0 xw1")
}

// A virtual machine requests two functions of one IOMMU group as two resources. The kubelet
// allocates them one after another and does not name the pod. So the second one is allocated only
// while exactly one starting pod requests both.
func TestTwoResourcesOfOneGroup(t *testing.T) {
	for _, both := range []bool{true, false} {
		k := kubelettest.New(t)
		k.Start()
		config := configFor(k)
		var asked []string
		config.AsksForBoth = func(_ context.Context, resource, other string) (bool, error) {
			asked = append(asked, resource+" and "+other)
			return both, nil
		}
		p := New(config)
		devices := listtest.Parts("iommu-group-3", 1, map[string]int64{"g": 1, "xaudio": 1})
		for i := range devices {
			one := map[string]resource.Quantity{discovery.GroupCounter: resource.MustParse("1")}
			devices[i].PartOf, devices[i].Takes = &discovery.Silicon{Name: "iommu-group-3", Counters: one}, one
		}
		publish(p, listtest.Snapshot(devices...))
		run(t, p)
		gpu, audio := k.AwaitPlugin(listtest.Resource, 1), k.AwaitPlugin(listtest.OtherResource, 1)
		gpu.AwaitList(t, "g")
		audio.AwaitList(t, "xaudio")
		if _, err := gpu.AllocateIDs("g"); err != nil {
			t.Fatal(err)
		}
		_, err := audio.AllocateIDs("xaudio")
		if (err == nil) != both {
			t.Errorf("both %t: the second function: %v", both, err)
		}
		if len(asked) != 1 || asked[0] != listtest.Resource+" and "+listtest.OtherResource {
			t.Errorf("asked %q", asked)
		}
	}
}

// The kubelet may allocate an ID for a while after the ID was withdrawn. A device that the agent has
// returned to its own driver in that time is refused, and nothing remains allocated.
func TestNoLongerConfigured(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	var returned atomic.Bool
	config.CheckConfigured = func(d *rules.Offered) error {
		if d.Name != "gpu-a" || returned.Load() {
			return errors.New("bound to nvme")
		}
		return nil
	}
	p := New(config)
	publish(p, listtest.Snapshot(listtest.GPU("a")))
	run(t, p)
	plugin := k.AwaitPlugin(listtest.Resource, 1)
	plugin.AwaitList(t, "a")
	returned.Store(true)
	if _, err := plugin.AllocateIDs("a"); err == nil || !strings.Contains(err.Error(), "device gpu-a: bound to nvme") {
		t.Errorf("a device that is returned to its driver: %v", err)
	}
	if who, has := holder(p, "gpu-a"); has {
		t.Errorf("%s has the device", who)
	}
	returned.Store(false)
	if _, err := plugin.AllocateIDs("a"); err != nil {
		t.Error(err)
	}
}
