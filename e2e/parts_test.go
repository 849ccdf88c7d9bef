package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"chandler.dev/e2e/chandler"
)

// The number of the node's NPUs that are not in reset, and the number of cores of each.
const (
	npus       = 3
	coresOfNPU = 4
)

// TestWholeOrParts allocates a device either as a whole or in partitions, never both. If the API
// server does not support counters, only whole devices may be published.
func TestWholeOrParts(t *testing.T) {
	parts := 0
	if has(t, "DRAPartitionableDevices") {
		parts = npus * coresOfNPU
	}
	until(t, fmt.Sprintf("%d NPUs and %d cores to be offered", npus, parts), func(ctx context.Context) error {
		wholes, cores, err := offeredNPUs(ctx)
		if err == nil && (wholes != npus || cores != parts) {
			err = fmt.Errorf("there are %d and %d", wholes, cores)
		}
		return err
	})
	all := npuPod("all", "neuron.chandler.dev", npus, "true")
	if parts == 0 {
		core := npuPod("core", "neuron-core.chandler.dev", 1, "true")
		apply(t, core)
		waits(t, "core")
		apply(t, all)
		running(t, "all")
		return
	}
	core := func(name string) string {
		return npuPod(name, "neuron-core.chandler.dev", 1, `device.attributes["chandler.dev"].parent == "neuron0"`)
	}
	for i := range coresOfNPU {
		name := fmt.Sprintf("core-%d", i)
		apply(t, core(name))
		running(t, name)
	}
	apply(t, core("one-too-many"))
	waits(t, "one-too-many")
	remove(t, core("one-too-many"))
	for i := range coresOfNPU - 1 {
		remove(t, core(fmt.Sprintf("core-%d", i)))
	}
	apply(t, all)
	waits(t, "all")
	remove(t, core(fmt.Sprintf("core-%d", coresOfNPU-1)))
	running(t, "all")
	apply(t, core("core"))
	waits(t, "core")
	remove(t, all)
	running(t, "core")
	remove(t, core("core"))
	nothingHeld(t)
}

// offeredNPUs counts the published NPUs and cores without a taint.
func offeredNPUs(ctx context.Context) (wholes, cores int, err error) {
	devices, err := chandler.Devices(ctx, kube)
	for name, device := range devices {
		if family := device.Attributes["family"].StringValue; family == nil || *family != "neuron" || len(device.Taints) > 0 {
			continue
		}
		if strings.Contains(name, "-core-") {
			cores++
		} else {
			wholes++
		}
	}
	return wholes, cores, err
}

// npuPod returns a pod and its claim for NPUs or cores. The pod runs until it is deleted.
func npuPod(name, class string, count int, cel string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %[1]s}
spec:
  devices:
    requests:
    - name: npu
      exactly:
        deviceClassName: %[2]s
        count: %[3]d
        selectors:
        - cel: {expression: '%[4]s'}
---
%[5]s
  resourceClaims: [{name: npu, resourceClaimName: %[1]s}]
`, name, class, count, cel, strings.TrimSpace(probePod(name, "[env, devices, wait]", "claims: [{name: npu}]")))
}
