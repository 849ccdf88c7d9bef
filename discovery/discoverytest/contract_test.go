package discoverytest

import (
	"io/fs"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// counter counts the errors of a test that is expected to fail.
type counter struct {
	testing.TB

	errors int
}

func (c *counter) Helper()               {}
func (c *counter) Errorf(string, ...any) { c.errors++ }

// A family that reads through a link breaks the contract, unless the link belongs to a class.
func TestCheckLinks(t *testing.T) {
	tree := (&Tree{root: newDirectory("", fs.ModeDir|0o755, nil)}).
		WithFile("sys/devices/x/misc/kvm/dev", []byte("10:232\n")).WithFile("sys/devices/x/vendor", []byte("0x1\n")).
		WithLink("sys/devices/x/misc/kvm/device", "../..").WithLink("sys/class/misc/kvm", "../../devices/x/misc/kvm")
	for file, want := range map[string]int{"dev": 0, "device": 0, "device/vendor": 1} {
		f := &discovery.Family{Name: "one", Always: true, Describe: func(host *discovery.Host, _ []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
			_, _ = sysfs.At(host.FS, "sys/devices/x/misc/kvm").Text(file)
			_, _ = sysfs.At(host.FS, "sys/class/misc/kvm").Text("dev")
			return nil, nil
		}}
		found := &counter{TB: t}
		checkLinks(found, &discovery.Host{FS: tree}, f)
		if found.errors != want {
			t.Errorf("%s: %d errors, want %d", file, found.errors, want)
		}
	}
}

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
		"shareable":     {"/dev/card", func(d *discovery.Device) { d.Shareable = true }, 0},
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
