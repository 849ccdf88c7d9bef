package agent

import (
	"time"

	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/exclusion"
)

// PoolTemplate returns the first pools that the agent of a node publishes on a host without
// allocations, in a cluster whose API server keeps the features and serves DRA. The problems list why
// devices are left out.
func PoolTemplate(node string, found *discovery.Snapshot, settings Settings, kept features.Set) (resourceslice.DriverResources, []discovery.Problem) {
	settler := scan.Settler{Severity: settings.Severity}
	settled, _ := settler.SettleStates(found, time.Now())
	snapshot := settings.Rules.ApplyTo(settled)
	view := ledger.ViewOf(&exclusion.Present{Snapshot: snapshot})
	facts := placement.Facts{AutoMode: discovery.ModeDRA, Published: &placement.Published{}, Unknown: settings.Rules.WithheldReason()}
	placed := placement.PlaceDevices(nil, snapshot.Devices, view, facts)
	published, problems := pool.BuildPools(pool.Input{
		Node: node, Snapshot: snapshot, Withheld: placed.OfDRA(), Features: kept, GoneEffect: settings.Severity.EffectOf(discovery.ConditionGone),
	})
	return published, append(snapshot.Problems, problems...)
}
