package driver

import (
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
)

func TestHeld(t *testing.T) {
	encoded := func(r record) *fstest.MapFile {
		data, err := r.encode()
		if err != nil {
			t.Fatal(err)
		}
		return &fstest.MapFile{Data: data}
	}
	now := record{Version: recordVersion, UID: "1", Namespace: "a", Name: "b", Boot: "now", Results: []result{
		{Device: "gpu-0", Source: "gpu-0"}, {Device: "gpu-1-share", Source: "gpu-1"}, {Device: "gpu-2", Source: "gpu-2", Admin: true},
	}}
	before := now
	before.Boot, before.Results = "before", []result{{Device: "gpu-3", Source: "gpu-3"}}
	newer := record{Version: recordVersion + 1, UID: "3", Boot: "now", Results: []result{{Device: "gpu-4"}}}
	host := fstest.MapFS{
		"claims/1.json": encoded(now), "claims/2.json": encoded(before), "claims/3.json": encoded(newer),
		"claims/.4.tmp": {Data: []byte("half of a")},
	}
	want := map[string]string{"gpu-0": "claim a/b", "gpu-1": "claim a/b", "gpu-1-share": "claim a/b", "gpu-4": "claim with UID 3"}
	held, err := Held(host, "claims", "now")
	if diff := cmp.Diff(want, held); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	if held, err := Held(host, "claims", ""); held["gpu-3"] == "" || err != nil {
		t.Errorf("where the boot is not known: %v, %v", held, err)
	}
	host["claims/5.json"] = &fstest.MapFile{Data: []byte("sha256:1\n{")}
	if held, err := Held(host, "claims", "now"); err == nil || !strings.Contains(err.Error(), "5.json") || held["gpu-0"] == "" {
		t.Errorf("with a record that is damaged: %v, %v", held, err)
	}
	if held, err := Held(fstest.MapFS{}, "claims", "now"); len(held) > 0 || err != nil {
		t.Errorf("without records: %v, %v", held, err)
	}
}

// What claims have for their containers is in use, once it is theirs.
func TestInUse(t *testing.T) {
	b := newBench(t)
	d, err := New(b.config)
	if err != nil || len(d.InUse(&discovery.Snapshot{})) > 0 {
		t.Errorf("before the records are read: %v, %v", d.InUse(&discovery.Snapshot{}), err)
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
	snapshot := b.view.Load().snapshot
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
	b.config.BootID = "boot-2"
	if used := b.restart().InUse(snapshot); len(used) > 0 {
		t.Errorf("after a reboot: %v", used)
	}
}
