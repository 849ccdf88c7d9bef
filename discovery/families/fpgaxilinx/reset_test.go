package fpgaxilinx_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/fpgaxilinx"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
)

// The stages of "xbutil reset": the driver removes its information about the card, the functions
// disappear from the bus, and return with other nodes.
func TestReset(t *testing.T) {
	const name = "pci-0000-3b-00-1"
	families := []*discovery.Family{fpgaxilinx.Family}
	var last *scan.Findings
	scan := func(edit func(line string) string) (discovery.Device, bool) {
		host := edited(t, "testdata/alveo.host", edit)
		last = scan.RescanHost(host, families, last)
		return last.Snapshot().Lookup(name)
	}
	before, found := scan(func(line string) string { return line })
	if !found || before.Health.Status != discovery.Healthy {
		t.Fatalf("before: %+v", before)
	}

	during, found := scan(func(line string) string {
		if strings.Contains(line, "3b:00.1/rom.") || strings.Contains(line, "3b:00.1/drm/") || strings.Contains(line, "renderD128") {
			return ""
		}
		return line
	})
	if !found || during.Health.Status != discovery.Unknown || during.Attributes.String("profile") != before.Attributes.String("profile") || len(during.PluginOffers) == 0 {
		t.Errorf("without shell and nodes: %+v; want the last description, of unknown health", during)
	}

	if gone, found := scan(func(line string) string {
		if strings.Contains(line, "0000:3b:00.") {
			return ""
		}
		return line
	}); found {
		t.Errorf("without the functions: %+v; want no device", gone)
	}

	after, found := scan(func(line string) string {
		return strings.NewReplacer("renderD128", "renderD140", "226:128", "226:140", "MINOR=128", "MINOR=140").Replace(line)
	})
	if !found || after.Health.Status != discovery.Healthy || after.Identity != before.Identity || after.PluginOffers[0].IDs[0] != before.PluginOffers[0].IDs[0] {
		t.Errorf("after: %+v; want the same device", after)
	}
	if node := after.Edits.DeviceNodes[1]; node.HostPath != "/dev/dri/renderD140" || node.Minor != 140 {
		t.Errorf("after: node %+v; want renderD140", node)
	}
}

// edited lays out a recorded host after passing all lines of each file, heading first, through
// edit. If a heading becomes "", the file is left out.
func edited(t *testing.T, file string, edit func(string) string) *discovery.Host {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	dropped := false
	for line := range strings.Lines(string(data)) {
		changed := edit(line)
		if strings.HasPrefix(line, "-- ") {
			dropped = changed == ""
		}
		if !dropped {
			out.WriteString(changed)
		}
	}
	name := filepath.Join(t.TempDir(), "edited.host")
	if err := os.WriteFile(name, []byte(out.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	return discoverytest.ReadHost(t, name)
}

// An alias of the plugin's ConfigMap is an entry of "resources". A U30 is one unit by its own name
// and by an alias, and two units by its shell's name.
func TestAliases(t *testing.T) {
	const shell = "amd.com/xilinx_u30_gen3x4_base_2-1626198029"
	selector, err := rules.Compile(`device.attributes["chandler.dev"].?profile.orValue("").startsWith("xilinx_u30_")`)
	if err != nil {
		t.Fatal(err)
	}
	for resource, want := range map[string]struct {
		unit string
		ids  []string
	}{
		"example.com/transcoder": {"u30-XFL1O4FJBGKB", []string{"0000:0b:00.1", "0000:0b:00.1"}},
		"amd.com/ama_u30":        {"u30-XFL1O4FJBGKB", []string{"0000:0b:00.1", "0000:0b:00.1"}},
		shell:                    {"", []string{"0000:0b:00.1", "0000:0c:00.1"}},
	} {
		wanted := &rules.Rules{Resources: []rules.Resource{{Selector: selector, Name: resource}}}
		snapshot := wanted.ApplyTo(scan.ReadHost(discoverytest.ReadHost(t, "testdata/media.host"), []*discovery.Family{fpgaxilinx.Family}))
		var ids []string
		for _, d := range snapshot.Devices {
			if len(d.Offers) == 1 && d.Offers[0].Resource == resource {
				ids = append(ids, d.Offers[0].IDs...)
				if d.Offers[0].Unit != want.unit {
					t.Errorf("%s: %s is of unit %q; want %q", resource, d.Name, d.Offers[0].Unit, want.unit)
				}
			}
		}
		if strings.Join(ids, " ") != strings.Join(want.ids, " ") {
			t.Errorf("%s: got the IDs %q; want %q", resource, ids, want.ids)
		}
	}
}

// If one FPGA of a U30 is excluded or has another name, the other FPGA is not offered as a card
// under any name.
func TestHalfACard(t *testing.T) {
	half, err := rules.Compile(`device.attributes["resource.kubernetes.io"].pciBusID == "0000:0c:00.1"`)
	if err != nil {
		t.Fatal(err)
	}
	const shell = "amd.com/xilinx_u30_gen3x4_base_2-1626198029"
	for name, test := range map[string]struct {
		wanted rules.Rules
		cards  int      // FPGAs that are offered as parts of a card
		left   []string // resources of the remaining half
	}{
		"as it is": {cards: 2},
		"excluded": {wanted: rules.Rules{Exclude: []rules.Selector{half}}},
		"renamed":  {wanted: rules.Rules{Resources: []rules.Resource{{Selector: half, Name: "example.com/half"}}}},
		"by shell": {wanted: rules.Rules{Resources: []rules.Resource{{Selector: half, Name: shell}}}, left: []string{shell}},
	} {
		snapshot := test.wanted.ApplyTo(scan.ReadHost(discoverytest.ReadHost(t, "testdata/media.host"), []*discovery.Family{fpgaxilinx.Family}))
		cards, left := 0, []string(nil)
		for _, d := range snapshot.Devices {
			for _, offer := range d.Offers {
				switch {
				case offer.Unit != "":
					cards++
				case d.Name == "pci-0000-0c-00-1":
					left = append(left, offer.Resource)
				}
			}
		}
		if cards != test.cards || strings.Join(left, " ") != strings.Join(test.left, " ") {
			t.Errorf("%s: %d FPGAs of cards, the half as %q; want %d and %q", name, cards, left, test.cards, test.left)
		}
		if said := strings.Contains(fmt.Sprint(snapshot.Problems), "is given with all of its 2 devices"); said != (test.cards == 0) {
			t.Errorf("%s: problems %v", name, snapshot.Problems)
		}
	}
}
