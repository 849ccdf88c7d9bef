package nvidia_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/discovery/scan"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, nvidia.Family) }

// offered returns the IDs of a recorded host's devices by extended resource, under the given rules.
func offered(t *testing.T, host string, wanted rules.Rules) map[string][]string {
	t.Helper()
	snapshot := wanted.ApplyTo(scan.ReadHost(discoverytest.ReadHost(t, "testdata/"+host), []*discovery.Family{nvidia.Family}))
	ids := make(map[string][]string)
	for _, d := range snapshot.Devices {
		for _, offer := range d.Offers {
			ids[offer.Resource] = append(ids[offer.Resource], offer.IDs...)
		}
	}
	return ids
}

// Each profile has a name of its own. An instance is offered as a GPU only if the administrator
// configures it.
func TestMIGStrategies(t *testing.T) {
	mixed := offered(t, "a100-single.host", rules.Rules{})
	if names := slices.Collect(maps.Keys(mixed)); !slices.Equal(names, []string{"nvidia.com/mig-2g.10gb"}) || len(mixed[names[0]]) != 5 {
		t.Errorf("mixed: %v", mixed)
	}
	single := offered(t, "a100-single.host", rules.Rules{Resources: []rules.Resource{{
		Selector: rulestest.CompileSelector(t, `device.attributes["chandler.dev"].?profile.orValue("") == "2g.10gb"`), Name: "nvidia.com/gpu",
	}}})
	if diff := cmp.Diff(map[string][]string{"nvidia.com/gpu": mixed["nvidia.com/mig-2g.10gb"]}, single); diff != "" {
		t.Errorf("single (-mixed +single):\n%s", diff)
	}
}

// Shares have the same IDs as in the replaced plugin.
func TestShares(t *testing.T) {
	shared := rules.Rules{Sharing: []rules.Share{{Selector: rulestest.CompileSelector(t, "true"), Replicas: 2}}}
	got := offered(t, "gke.host", shared)["nvidia.com/gpu"]
	want := []string{"nvidia0/vgpu0", "nvidia0/vgpu1", "nvidia1/gi1/vgpu0", "nvidia1/gi1/vgpu1", "nvidia1/gi2/vgpu0", "nvidia1/gi2/vgpu1"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("GKE (-want +got):\n%s", diff)
	}
	got = offered(t, "a100-root.host", shared)["nvidia.com/gpu"]
	want = []string{"GPU-c1a07f20-33d5-71be-5f08-9ad4e2b61070::0", "GPU-c1a07f20-33d5-71be-5f08-9ad4e2b61070::1"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
