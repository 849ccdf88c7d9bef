package agent

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/podevents"
)

// Allocated devices of both APIs are reported with their present health, and missing devices with
// the configured effect. A claim may have a device whose place another device has taken.
func TestDevicesInUse(t *testing.T) {
	sick := discovery.Health{Status: discovery.Unhealthy, Reason: "sick"}
	settled := &discovery.Snapshot{Devices: []discovery.Device{{Name: "a"}, {Name: "b", Health: sick, Attributes: discovery.Attributes{}}}}
	settled.Devices[1].Attributes.SetString("model", "MI300X")
	gone := discovery.GoneHealth(resourceapi.DeviceTaintEffectNoExecute)
	earlier := gone
	earlier.Since = metav1.Unix(1, 0)
	settled.Gone = map[string]discovery.Health{"e": earlier}
	swapped := gone
	swapped.Reason = "device b was swapped"
	one, since, admin, working := claimOf("claim", "c", "b", "b"), claimOf("since", "b"), claimOf("admin", "a"), claimOf("working", "a")
	admin.Results[0].Admin, working.Configuring = true, true
	entries := []allocation.Entry{one, since, admin, working, grantOf("train", "a", "b"), grantOf("train", "b", "d"), grantOf("train", "e"), &allocation.Grant{ID: "new", Devices: []string{"a"}}}
	// Two cards with exchanged device nodes. Card g is unreadable.
	now := &rules.Snapshot{}
	for name, node := range map[string]string{"f": "/dev/1", "g": "/dev/0"} {
		d := discovery.Device{Name: name, Edits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: node, Major: 226, Minor: 1}}}}
		now.Devices = append(now.Devices, rules.Offered{Device: d})
		settled.Devices = append(settled.Devices, d)
	}
	slices.SortFunc(now.Devices, func(a, b rules.Offered) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(settled.Devices, func(a, b discovery.Device) int { return strings.Compare(a.Name, b.Name) })
	unread := discovery.Health{Status: discovery.Unknown}
	settled.Devices[3].Health = unread
	for name, node := range map[string]string{"f": "/dev/0", "g": "/dev/1"} {
		g := grantOf("train", name)
		g.Nodes = []allocation.Node{{Path: node, Major: 226, Minor: 8}}
		entries = append(entries, g)
	}
	renumbered := gone
	renumbered.Reason = "device f has other nodes: it was given as /dev/0 and is /dev/1 (226:1) now; /dev/0 is device g now"
	view := ledger.ViewOf(&exclusion.Present{Snapshot: now}, entries...)
	got := devicesInUse(settled, gone.Effect, view, func(c *allocation.Claim, r *allocation.Result) discovery.Health {
		return map[string]discovery.Health{"claim b": swapped, "claim c": gone, "since b": sick}[c.Name+" "+r.Source]
	})
	of := func(name string) []types.NamespacedName { return []types.NamespacedName{{Namespace: "n", Name: name}} }
	want := []podevents.Device{
		{Name: "a", Pods: of("train")},
		{Name: "b", Health: swapped, Claims: of("claim")},
		{Name: "b", Model: "MI300X", Health: sick, Claims: of("since"), Pods: of("train")},
		{Name: "c", Health: gone, Claims: of("claim")},
		{Name: "d", Health: gone, Pods: of("train")},
		{Name: "e", Health: earlier, Pods: of("train")},
		{Name: "f", Health: renumbered, Pods: of("train")},
		{Name: "g", Health: unread, Pods: of("train")},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// claimOf returns a claim with devices.
func claimOf(name string, devices ...string) *allocation.Claim {
	c := &allocation.Claim{UID: types.UID(name), Namespace: "n", Name: name}
	for _, device := range devices {
		c.Results = append(c.Results, allocation.Result{Source: device, Silicon: device, Whole: true})
	}
	return c
}

// grantOf returns the allocation of devices to a pod by the device plugin API.
func grantOf(pod string, devices ...string) *allocation.Grant {
	return &allocation.Grant{Resource: "example.com/gpu", ID: devices[0], Devices: devices, Silicon: devices, Exclusive: true, Container: "n/" + pod + " main"}
}
