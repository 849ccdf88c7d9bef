package driver

import (
	"io/fs"
	"maps"
	"testing"
	"testing/fstest"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// TestInterfaceThatIsRenamed prepares a network function whose interface was renamed after the
// scan, as udev does shortly after a hot-plug. No container may get the interface that has the old
// name now.
func TestInterfaceThatIsRenamed(t *testing.T) {
	const source = "sys/devices/pci0000:00/0000:00:02.0"
	link := func(name, below string) fstest.MapFS {
		return fstest.MapFS{"sys/class/net/" + name: &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("../../devices/" + below + "/net/" + name)}}
	}
	function := func(name string) rules.Offered {
		d := rules.Offered{Device: discovery.Device{Name: "a", Family: "nic", Source: source, Attributes: discovery.Attributes{}}}
		d.Attributes.SetString("ifName", name)
		return d
	}
	for name, test := range map[string]struct {
		files fstest.MapFS
		want  string // the container's interface
	}{
		"as it was":                  {link("eth0", "pci0000:00/0000:00:02.0"), "eth0"},
		"of what was made of it":     {link("eth0", "pci0000:00/0000:00:02.0/virtio3"), "eth0"},
		"in its directory":           {fstest.MapFS{source + "/net/eth0/type": &fstest.MapFile{}}, "eth0"},
		"another one's by now":       {link("eth0", "pci0000:00/0000:00:03.0"), "ens2"},
		"one's with a longer path":   {link("eth0", "pci0000:00/0000:00:02.01"), "ens2"},
		"a free name":                {link("ens9", "pci0000:00/0000:00:02.0"), "ens2"},
		"a file that is no such one": {fstest.MapFS{"sys/class/net/eth0": &fstest.MapFile{}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			maps.Copy(b.host, test.files)
			b.config.Granter = func(devices []discovery.Device, _ discovery.Grant) specs.ContainerEdits {
				return specs.ContainerEdits{NetDevices: []*specs.LinuxNetDevice{{HostInterfaceName: devices[0].Attributes.String("ifName"), Name: "net1"}}}
			}
			b.config.Rescan = func() {
				maps.Copy(b.host, link("ens2", "pci0000:00/0000:00:02.0"))
				b.offers(function("ens2"))
			}
			b.restart().offers(function("eth0"))
			c := claim("c", "a")
			if test.want == "" {
				mustRefuse(t, b, c, "sys/class/net/eth0")
				return
			}
			mustPrepare(t, b, c)
			got := b.specOf(c)["chandler.dev/claim=uid-c-0-a"].NetDevices
			if len(got) != 1 || got[0].HostInterfaceName != test.want {
				t.Errorf("the container gets %+v, want %s", got, test.want)
			}
			// The interface has left the host, and the claim still has it.
			for name := range b.host {
				delete(b.host, name)
			}
			mustPrepare(t, b, c)
		})
	}
}
