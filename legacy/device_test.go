package legacy

import (
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/legacy/list/listtest"
)

const (
	gpuResource    = listtest.Resource
	otherResource  = listtest.OtherResource
	memoryResource = listtest.MemoryResource
)

var (
	testTime = listtest.Time
	gpu      = listtest.GPU
	sick     = listtest.Sick
	snapshot = listtest.Snapshot
	found    = listtest.Found
	inUnits  = listtest.InUnits
	units    = listtest.Units
	silicon  = listtest.Parts
)

// host returns the host of a snapshot.
func host(s *rules.Snapshot) *discovery.Snapshot {
	return &discovery.Snapshot{Devices: found(s.Devices)}
}
