package tenstorrent_test

import (
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/tenstorrent"
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
