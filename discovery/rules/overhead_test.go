package rules

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
)

func TestRulesChargeOverhead(t *testing.T) {
	memory := func(amount string) HostResources {
		return HostResources{corev1.ResourceMemory: resourceapi.NodeAllocatableOverhead{PerPod: new(resource.MustParse(amount))}}
	}
	rules := &Rules{
		Overhead: []Overhead{
			{selector(t, `device.attributes["chandler.dev"].vendor == "amd"`), memory("1Gi")},
			{selector(t, `device.attributes["chandler.dev"].kind == "gpu"`), memory("512Mi")},
		},
		Sharing: []Share{{Selector: selector(t, `device.attributes["chandler.dev"].vendor == "amd"`), Replicas: 4}},
	}
	odd := gpu("c", "acme", 0)
	odd.Attributes.SetString("kind", "other")
	bare := discovery.Device{Name: "d"}
	got := rules.ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{gpu("a", "amd", 1<<30), gpu("b", "nvidia", 0), odd, bare}})
	var overheads []HostResources
	for _, d := range got.Devices {
		overheads = append(overheads, d.Overhead)
	}
	if diff := cmp.Diff([]HostResources{memory("1Gi"), memory("512Mi"), nil, nil}, overheads); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if len(got.Problems) == 0 || got.Problems[0].Device != "d" {
		t.Errorf("a device without the attributes: %v", got.Problems)
	}
	text, err := json.Marshal(got.Devices[0])
	if err != nil || !strings.Contains(string(text), `"overhead":{"memory":{"perPod":"1Gi"}}`) {
		t.Errorf("%s, %v", text, err)
	}
}
