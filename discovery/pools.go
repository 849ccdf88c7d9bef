package discovery

import (
	"slices"
	"strings"
)

// A node has up to two pools of ResourceSlices: the main pool with the name of the node, and a pool
// for all other devices, such as network adapters and /dev/kvm. Cluster Autoscaler takes the highest
// share of allocated devices among the pools of a node for its utilization
// (CalculateDynamicResourceUtilization in simulator/dynamicresources/utils), so unused adapters do not
// make a node with busy GPUs look idle. The scheduler evaluates a request for each free device until
// one matches. Since 1.37 the allocators for partitions and capacities sort the pools of a node by
// name, so a request for a GPU does not cost the evaluation of adapters (sortPoolsByID in
// structured/internal/*/pools_*.go of k8s.io/dynamic-resource-allocation). A slash cannot be in the
// name of a node, but in the name of a pool (validatePoolName in pkg/apis/resource/validation of
// Kubernetes 1.34 to 1.37).
const otherPool = "/other"

// mainKinds lists the kinds of devices in the main pool.
var mainKinds = []string{"gpu", "npu"}

// InMainPool reports whether the kind of the device belongs to the main pool of a node.
func (d *Device) InMainPool() bool { return slices.Contains(mainKinds, d.Attributes.String("kind")) }

// PoolName returns the name of a pool of a node.
func PoolName(node string, main bool) string {
	if main {
		return node
	}
	return node + otherPool
}

// NodeOfPool returns the node of a pool of this driver.
func NodeOfPool(pool string) string { return strings.TrimSuffix(pool, otherPool) }

// IsPoolOf reports whether a pool of this driver is one of the node's pools.
func IsPoolOf(node, pool string) bool {
	return pool == PoolName(node, true) || pool == PoolName(node, false)
}
