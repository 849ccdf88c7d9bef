package tenstorrent_test

import (
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/tenstorrent"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/scan"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, tenstorrent.Family) }

func TestGrant(t *testing.T) {
	chip := func(path string) discovery.Device {
		return discovery.Device{Edits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: path, HostPath: path}}}}
	}
	got := tenstorrent.Family.Grant([]discovery.Device{chip("/dev/tenstorrent/10"), {}, chip("/dev/tenstorrent/2")}, discovery.Grant{}).Env
	if len(got) != 1 || got[0] != "TT_VISIBLE_DEVICES=10,2" {
		t.Errorf("got %q; want the numbers in the order given", got)
	}
	if got := tenstorrent.Family.Grant([]discovery.Device{{}}, discovery.Grant{}).Env; len(got) > 0 {
		t.Errorf("without nodes: got %q", got)
	}
}

// The Identity of a chip is its own number, or the board's number if the chip has none. While the
// chip's number is unreadable, the Identity is empty.
func TestIdentity(t *testing.T) {
	const function, chip = "sys/devices/pci0000:00/0000:03:00.0", "sys/devices/pci0000:00/0000:03:00.0/tenstorrent/tenstorrent!0/"
	for entry, want := range map[string]string{
		"-- " + chip + "tt_asic_id --\n9A33C0714F20BE11\n":   "9A33C0714F20BE11",
		"-- " + chip + "tt_asic_id --\n0000000000000000\n":   "0100014411704012",
		"-- " + chip + "tt_asic_id --\nhalf\n":               "",
		"-- " + chip + "tt_asic_id ! no data available --\n": "",
	} {
		host, err := recorded.Parse([]byte("-- sys/bus/pci/devices/0000:03:00.0 -> ../../../devices/pci0000:00/0000:03:00.0 --\n" +
			"-- " + function + "/vendor --\n0x1e52\n-- " + function + "/device --\n0xb140\n-- " + function + "/class --\n0x120000\n" +
			"-- " + function + "/driver -> ../../../bus/pci/drivers/tenstorrent --\n-- " + chip + "tt_serial --\n0100014411704012\n" + entry + "-- end --\n"))
		if err != nil {
			t.Fatal(err)
		}
		snapshot := scan.ReadHost(&discovery.Host{FS: host.FS()}, []*discovery.Family{tenstorrent.Family})
		if len(snapshot.Devices) != 1 || snapshot.Devices[0].Identity != want || (len(snapshot.Problems) > 0) != (want == "") {
			t.Errorf("%s: %+v, problems %v; want the identity %q", entry, snapshot.Devices, snapshot.Problems, want)
		}
	}
}
