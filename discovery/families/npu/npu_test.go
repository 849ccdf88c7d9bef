package npu_test

import (
	"os"
	"path/filepath"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/npu"
	"chandler.dev/discovery/scan"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, npu.Family) }

// TestLeavesAlone has entries of the class accel that do not belong to this family: the nodes of a
// Gaudi, devices of Google's driver with the same name, and an entry without hardware.
func TestLeavesAlone(t *testing.T) {
	const host = `
-- sys/class/accel/accel0 -> ../../devices/pci0000:00/0000:00:04.0/accel/accel0 --
-- sys/devices/pci0000:00/0000:00:04.0/driver -> ../../../bus/pci/drivers/habanalabs --
-- sys/devices/pci0000:00/0000:00:04.0/accel/accel0/dev --
261:0
-- sys/class/accel/accel_controlD0 -> ../../devices/virtual/accel/accel_controlD0 --
-- sys/devices/virtual/accel/accel_controlD0/dev --
506:0
-- sys/class/accel/accel1 -> ../../devices/pci0000:00/0000:00:05.0/accel/accel1 --
-- sys/devices/pci0000:00/0000:00:05.0/driver -> ../../../bus/pci/drivers/accel --
-- sys/devices/pci0000:00/0000:00:05.0/accel/accel1/dev --
245:1
-- sys/devices/pci0000:00/0000:00:05.0/accel/accel1/uevent --
MAJOR=245
MINOR=1
DEVNAME=accel1
-- sys/class/accel/accel2 -> ../../devices/virtual/accel/accel2 --
-- sys/devices/virtual/accel/accel2/dev --
261:2
-- sys/bus/pci/devices/ --
-- end --
`
	file := filepath.Join(t.TempDir(), "others.host")
	if err := os.WriteFile(file, []byte(host), 0o644); err != nil {
		t.Fatal(err)
	}
	snapshot := scan.ReadHost(discoverytest.ReadHost(t, file), []*discovery.Family{npu.Family})
	for _, d := range snapshot.Devices {
		t.Errorf("describes %s", d.Name)
	}
	for _, p := range snapshot.Problems {
		t.Error(p)
	}
}
