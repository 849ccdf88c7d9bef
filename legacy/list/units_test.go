package list

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/legacy/list/listtest"
)

func TestOffered(t *testing.T) {
	shared := offer(listtest.GPU("s"), "", "s::10", "s::9", "s::9")
	shared.Offers = append(shared.Offers, discovery.Offer{Resource: "example.com/monitoring", IDs: []string{"all"}})
	offers := BuildOffers(listtest.Snapshot(
		offer(listtest.GPU("chip0"), "card7", "card7"),
		offer(listtest.GPU("chip1"), "card7", "card7"),
		shared,
		offer(listtest.GPU("thief"), "", "card7", "t"),
		offer(listtest.GPU("unknown"), ""),
	))
	got := make(map[string][]string)
	for resource, list := range offers.Units {
		for _, u := range list {
			got[resource] = append(got[resource], strings.Join(u.IDs, ",")+" = "+strings.Join(u.DeviceNames(), ","))
		}
	}
	want := map[string][]string{
		listtest.Resource:        {"card7 = gpu-chip0,gpu-chip1", "s::9,s::10 = gpu-s", "t = gpu-thief"},
		"example.com/monitoring": {"all = gpu-s"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if len(offers.Problems) != 1 || offers.Problems[0].Error() != `gpu-thief: resource example.com/gpu: ID "card7": stands for card7 already` {
		t.Errorf("problems: %v", offers.Problems)
	}
}

func TestCheckResource(t *testing.T) {
	for name, valid := range map[string]bool{
		"example.com/gpu":                               true,
		"devices.kubevirt.io/kvm":                       true,
		"gpu.intel.com/i915_monitoring":                 true,
		"gpu":                                           false,
		"kubernetes.io/gpu":                             false,
		"x.kubernetes.io/gpu":                           false,
		"requests.example.com/gpu":                      false,
		"example.com/sym;dc":                            false,
		"example.com/region-":                           false,
		"example.com/" + strings.Repeat("g", 64):        false,
		strings.Repeat("long.", 49) + "example.com/gpu": false, // too long only with the quota's prefix
	} {
		if err := checkResource(name); (err == nil) != valid {
			t.Errorf("%s: %v", name, err)
		}
	}
}
