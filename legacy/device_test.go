package legacy

import (
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/legacy/list/listtest"
)

// host returns the host of a snapshot.
func host(s *rules.Snapshot) *discovery.Snapshot {
	return &discovery.Snapshot{Devices: listtest.Found(s.Devices)}
}
