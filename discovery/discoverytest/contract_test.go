package discoverytest

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// counter counts the errors of a test that is expected to fail.
type counter struct {
	testing.TB

	errors int
}

func (c *counter) Helper()               {}
func (c *counter) Errorf(string, ...any) { c.errors++ }

// If two chips of a card both have the card's node, there is an error, unless the chips compete for
// the card or the node is a common node.
func TestCheckNodes(t *testing.T) {
	card := &discovery.Silicon{Name: "card"}
	for name, test := range map[string]struct {
		node string
		with func(d *discovery.Device)
		want int
	}{
		"different silicon": {"/dev/card", func(*discovery.Device) {}, 1},
		"when shared":       {"/dev/card", func(d *discovery.Device) { d.SharedEdits, d.Edits = d.Edits, d.SharedEdits }, 1},
		"parts":             {"/dev/card", func(d *discovery.Device) { d.PartOf = card }, 1},
		"parts that compete": {"/dev/card", func(d *discovery.Device) {
			d.PartOf, d.Takes = card, map[string]resource.Quantity{"cores": resource.MustParse("1")}
		}, 0},
		"another path": {"/dev/card", func(d *discovery.Device) {
			d.Edits.DeviceNodes[0].HostPath, d.Edits.DeviceNodes[0].Major = "/dev/"+d.Name, 241
		}, 1},
		"a common node": {"/dev/card", func(d *discovery.Device) { d.CommonNodes = []string{"/dev/card"} }, 0},
		"shareable":     {"/dev/card", func(d *discovery.Device) { d.Open = true }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var snapshot discovery.Snapshot
			for _, chip := range []string{"chip-0", "chip-1"} {
				d := discovery.Device{Name: chip, Family: "one"}
				d.Edits.DeviceNodes = []*specs.DeviceNode{{Path: test.node, HostPath: test.node}}
				test.with(&d)
				snapshot.Devices = append(snapshot.Devices, d)
			}
			found := &counter{TB: t}
			CheckNodes(found, &snapshot)
			if found.errors != test.want {
				t.Errorf("%d errors, want %d", found.errors, test.want)
			}
		})
	}
}
