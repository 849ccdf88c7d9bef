package driver

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// What claims have for their containers is in use, once it is theirs.
func TestInUse(t *testing.T) {
	b := newBench(t)
	if used := b.start().InUse(&discovery.Snapshot{}); len(used) > 0 {
		t.Errorf("before the records are read: %v", used)
	}
	b.restart().offers(gpu("a", 1), gpu("b", 2), gpu("c", 3))
	admin := claim("admin", "b")
	admin.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	for _, c := range []*resourceapi.ResourceClaim{claim("one", "a", "c"), admin} {
		if _, err := b.try(c); err != nil {
			t.Fatal(err)
		}
	}
	one := []types.NamespacedName{{Namespace: "default", Name: "one"}}
	want := []Use{{Device: "a", Claims: one}, {Device: "c", Claims: one}}
	snapshot := &discovery.Snapshot{Devices: rules.Devices(b.view.Load().snapshot.Devices)}
	if diff := cmp.Diff(want, b.InUse(snapshot)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(want, b.restart().InUse(snapshot)); diff != "" {
		t.Errorf("after a restart: %s", diff)
	}
	snapshot = &discovery.Snapshot{Devices: snapshot.Devices[:1]}
	want[1].Health = discovery.Gone(resourceapi.DeviceTaintEffectNoSchedule)
	if diff := cmp.Diff(want, b.InUse(snapshot)); diff != "" {
		t.Errorf("with one that is gone: %s", diff)
	}
	b.boot = "boot-2"
	if used := b.restart().InUse(snapshot); len(used) > 0 {
		t.Errorf("after a reboot: %v", used)
	}
}
