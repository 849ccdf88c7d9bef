package neuron_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/neuron"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, neuron.Family) }

// The classic API offers whole devices, and cores where the administrator asks
// for them.
func TestGranularity(t *testing.T) {
	snapshot := discovery.Scan(discoverytest.Layout(t, "testdata/inf1.host"), []*discovery.Family{neuron.Family})
	cores, err := discovery.Compile(`device.attributes["chandler.dev"].family == "neuron" && device.attributes["chandler.dev"].?function.orValue("") == "partition"`)
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		rules discovery.Rules
		want  map[string]string // IDs by resource
	}{
		"by default": {discovery.Rules{}, map[string]string{"aws.amazon.com/neuron": "0 1 2 3"}},
		"where cores are named": {
			discovery.Rules{Resources: []discovery.Resource{{Selector: cores, Name: "aws.amazon.com/neuroncore"}}},
			map[string]string{"aws.amazon.com/neuron": "0 1 2 3", "aws.amazon.com/neuroncore": "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := make(map[string]string)
			for _, d := range test.rules.Apply(snapshot).Devices {
				for _, offer := range d.Offers {
					got[offer.Resource] = strings.TrimSpace(got[offer.Resource] + " " + strings.Join(offer.IDs, " "))
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}
