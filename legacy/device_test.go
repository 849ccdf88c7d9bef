package legacy

import (
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/legacy/list/listtest"
)

// host returns the snapshot of the host for a snapshot of offers.
func host(s *rules.Snapshot) *discovery.Snapshot {
	return &discovery.Snapshot{Devices: listtest.FoundDevices(s.Devices)}
}
