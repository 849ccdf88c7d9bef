package scan_test

import (
	"testing"
	"testing/fstest"

	"chandler.dev/discovery"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
)

// A device that is created during the scan is listed both as existing and as one that could be
// created. The snapshot has it as existing.
func TestScanWhileADeviceIsCreated(t *testing.T) {
	const whole = "sys/devices/pci0000:00/0000:01:00.0"
	there := discovery.Device{Name: "part", Source: whole + "/part"}
	unmade := there
	unmade.Creation = &discovery.Creation{Unit: "whole", Of: whole}
	for _, order := range [][]discovery.Device{{there, unmade}, {unmade, there}} {
		f := &discovery.Family{Name: "one", Doc: "test", Always: true,
			Describe: func(*discovery.Host, []sysfs.Device) ([]discovery.Device, []discovery.Problem) { return order, nil }}
		s := scan.ReadHost(&discovery.Host{FS: fstest.MapFS{}}, []*discovery.Family{f})
		if len(s.Problems) > 0 || len(s.Devices) != 1 || s.Devices[0].Creation != nil || s.Devices[0].Health.Status != discovery.Healthy {
			t.Errorf("devices %+v, problems %v", s.Devices, s.Problems)
		}
	}
}
