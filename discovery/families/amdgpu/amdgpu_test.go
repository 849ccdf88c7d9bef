package amdgpu_test

import (
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/amdgpu"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/scan"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, amdgpu.Family) }

// The Identity of a GPU is its UUID, or its serial number if the GPU has no UUID. While the UUID is
// unreadable, the Identity is empty.
func TestIdentity(t *testing.T) {
	const function = "sys/devices/pci0000:00/0000:03:00.0"
	for entry, want := range map[string]string{
		"-- " + function + "/unique_id --\n10ea7f1dcbdd38ec\n":       "10ea7f1dcbdd38ec",
		"-- " + function + "/product_name --\nInstinct\n":            "PCB-1",
		"-- " + function + "/unique_id ! input/output error --\n":    "",
		"-- " + function + "/product_name ! input/output error --\n": "",
	} {
		host, err := recorded.Parse([]byte("-- sys/bus/pci/devices/0000:03:00.0 -> ../../../devices/pci0000:00/0000:03:00.0 --\n" +
			"-- " + function + "/vendor --\n0x1002\n-- " + function + "/device --\n0x740f\n-- " + function + "/class --\n0x038000\n" +
			"-- " + function + "/driver -> ../../../bus/pci/drivers/amdgpu --\n-- " + function + "/serial_number --\nPCB-1\n" + entry + "-- end --\n"))
		if err != nil {
			t.Fatal(err)
		}
		snapshot := scan.ReadHost(&discovery.Host{FS: host.FS()}, []*discovery.Family{amdgpu.Family})
		if len(snapshot.Devices) != 1 || snapshot.Devices[0].Identity != want || (len(snapshot.Problems) > 0) != (want == "") {
			t.Errorf("%s: %+v, problems %v; want the identity %q", entry, snapshot.Devices, snapshot.Problems, want)
		}
	}
}
