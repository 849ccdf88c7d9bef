package validation

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/kubernetes/pkg/features"

	dra "chandler.dev/driver/features"
)

// concerned are the unlocked feature gates that decide whether a server keeps, drops or rejects
// content of a slice.
var concerned = []featuregate.Feature{
	features.DRAConsumableCapacity,
	features.DRADeviceBindingConditions,
	features.DRADeviceCompatibilityGroups,
	features.DRADeviceTaints,
	features.DRAFractionalCapacityRange,
	features.DRAListTypeAttributes,
	features.DRANodeAllocatableResources,
	features.DRAOptionalNodeOperations,
	features.DRAPartitionableDevices,
	features.DRAPartitionableDevicesType,
}

// gates holds the state of feature gates.
type gates map[featuregate.Feature]bool

// combinations returns every combination of gates that a server can start with.
func combinations() (all []gates) {
	dependencies := utilfeature.DefaultFeatureGate.Dependencies()
	for i := range 1 << len(concerned) {
		g := make(gates)
		for j, gate := range concerned {
			g[gate] = i&(1<<j) > 0
		}
		// No part of a slice depends on this gate, but the gate for the type of partitions requires
		// it.
		g[features.DRAResourcePoolStatus] = g[features.DRAPartitionableDevicesType]
		if !slices.ContainsFunc(concerned, func(gate featuregate.Feature) bool {
			return g[gate] && slices.ContainsFunc(dependencies[gate], func(needed featuregate.Feature) bool {
				on, set := g[needed]
				return set && !on
			})
		}) {
			all = append(all, g)
		}
	}
	return all
}

// String lists the enabled gates.
func (g gates) String() string {
	var on []string
	for _, gate := range slices.Sorted(maps.Keys(g)) {
		if g[gate] {
			on = append(on, strings.TrimPrefix(string(gate), "DRA"))
		}
	}
	return fmt.Sprintf("with %v", on)
}

// set sets the gates of this process for a test, which must not be parallel.
func (g gates) set(t *testing.T) {
	t.Helper()
	featuregatetesting.SetFeatureGatesDuringTest(t, utilfeature.DefaultFeatureGate, featuregatetesting.FeatureOverrides(g))
}

// TestDefaultFeatures compares the features of a server with default gates with Default for the
// newest version.
func TestDefaultFeatures(t *testing.T) {
	byDefault := make(gates)
	for _, gate := range concerned {
		byDefault[gate] = utilfeature.DefaultFeatureGate.Enabled(gate)
	}
	want, err := dra.Default(dra.Newest)
	if err != nil {
		t.Fatal(err)
	}
	if kept := negotiate(t, byDefault); kept != want {
		t.Errorf("the server keeps %+v, and Default says %+v", kept, want)
	}
}
