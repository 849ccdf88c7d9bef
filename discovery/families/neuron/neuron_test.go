package neuron_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/neuron"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, neuron.Family) }

// The device plugin API offers whole devices, and cores if the administrator configures them.
func TestGranularity(t *testing.T) {
	snapshot := scan.ReadHost(discoverytest.ReadHost(t, "testdata/inf1.host"), []*discovery.Family{neuron.Family})
	cores, err := rules.Compile(`device.attributes["chandler.dev"].family == "neuron" && device.attributes["chandler.dev"].?function.orValue("") == "partition"`)
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		wanted rules.Rules
		want   map[string]string // IDs by resource
	}{
		"by default": {rules.Rules{}, map[string]string{"aws.amazon.com/neuron": "0 1 2 3"}},
		"where cores are named": {
			rules.Rules{Resources: []rules.Resource{{Selector: cores, Name: "aws.amazon.com/neuroncore"}}},
			map[string]string{"aws.amazon.com/neuron": "0 1 2 3", "aws.amazon.com/neuroncore": "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := make(map[string]string)
			for _, d := range test.wanted.ApplyTo(snapshot).Devices {
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

// Cores keep the serial number of their device while it is unreadable, so a swap is detected.
func TestIdentityOfCores(t *testing.T) {
	host := discoverytest.ReadHost(t, "testdata/trn2.host")
	families := []*discovery.Family{neuron.Family}
	last := scan.RescanHost(host, families, nil)
	overlay := hostfs.NewOverlay(host.FS)
	overlay.Set("sys/devices/virtual/neuron_device/neuron1/info/serial_number", []byte("no\x00text"))
	unread := &discovery.Host{FS: overlay, Roots: host.Roots}
	before, after := last.Snapshot(), scan.RescanHost(unread, families, last).Snapshot()
	for _, name := range []string{"neuron1", "neuron1-core-0", "neuron1-core-3"} {
		was, known := before.Lookup(name)
		is, there := after.Lookup(name)
		if !known || was.Identity == "" || !there || is.Identity != was.Identity || is.Health.Status != discovery.Unknown {
			t.Errorf("%s: identity %q, there %v, health %v; want %q and that its health is not known", name, is.Identity, there, is.Health, was.Identity)
		}
	}
	if other, _ := after.Lookup("neuron2-core-0"); other.Health.Status != discovery.Healthy {
		t.Errorf("neuron2-core-0: %v", other.Health)
	}
}
