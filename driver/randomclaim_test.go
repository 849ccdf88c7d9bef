package driver

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
)

// claimer makes claims of every form for the devices of a host, except claims with very many
// combinations for the scheduler to try.
type claimer struct {
	*rand.Rand
	devices   []rules.Offered
	published int // number of published devices
	kept      features.Set
}

func (c *claimer) oneIn(n int) bool { return c.IntN(n) == 0 }

// spec returns a claim for up to three devices.
func (c *claimer) spec() resourceapi.ResourceClaimSpec {
	var claim resourceapi.DeviceClaim
	left := 1
	switch several := c.oneIn(3); {
	case several && c.published <= 40:
		left = 3
	case several && c.published <= 250:
		left = 2
	}
	for i := 0; left > 0; i++ {
		request := resourceapi.DeviceRequest{Name: fmt.Sprint("r-", i)}
		if c.oneIn(4) {
			for j := range 2 {
				sub := c.exactly(1)
				sub.AllocationMode, sub.Count = resourceapi.DeviceAllocationModeExactCount, 1
				request.FirstAvailable = append(request.FirstAvailable, subRequest(fmt.Sprint("s-", j), sub))
			}
			left--
		} else {
			request.Exactly = c.exactly(1 + c.Int64N(int64(left)))
			left -= max(1, int(request.Exactly.Count))
		}
		claim.Requests = append(claim.Requests, request)
	}
	all := func(r resourceapi.DeviceRequest) bool {
		return r.Exactly != nil && r.Exactly.AllocationMode == resourceapi.DeviceAllocationModeAll
	}
	if c.oneIn(3) && !slices.ContainsFunc(claim.Requests, all) { // the scheduler rejects this combination
		root := resourceapi.FullyQualifiedName("resource.kubernetes.io/pcieRoot")
		claim.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &root}}
	}
	return resourceapi.ResourceClaimSpec{Devices: claim}
}

// exactly returns a request for a number of devices: any devices, one device by name, or all
// devices of a name.
func (c *claimer) exactly(count int64) *resourceapi.ExactDeviceRequest {
	r := &resourceapi.ExactDeviceRequest{DeviceClassName: "any", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}
	one := c.devices[c.IntN(len(c.devices))]
	switch c.IntN(6) {
	case 0: // some memory
		if c.kept.Sharing {
			r.Capacity = requirement("memory", 1+c.Int64N(8*gib), resource.BinarySI)
		}
	case 1: // some shares
		if c.kept.Sharing {
			r.Capacity = requirement(discovery.Shares, 1+c.Int64N(3), resource.DecimalSI)
		}
	case 2:
		r.Count, r.Selectors = 1, pooltest.ByUUID(one.Name)
	case 3:
		if count == 1 && !one.Shareable && one.Sharing == nil { // all shares of a device may be too many for a claim
			r.AllocationMode, r.Count, r.Selectors = resourceapi.DeviceAllocationModeAll, 0, pooltest.ByUUID(one.Name)
		}
	}
	if c.kept.Taints && c.oneIn(4) {
		effects := []resourceapi.DeviceTaintEffect{"", resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute}
		r.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists, Effect: effects[c.IntN(len(effects))]}}
	}
	if c.oneIn(10) {
		r.AdminAccess = new(true)
	}
	return r
}

func requirement(name resourceapi.QualifiedName, amount int64, format resource.Format) *resourceapi.CapacityRequirements {
	return &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{name: *resource.NewQuantity(amount, format)}}
}

// subRequest returns the request as an alternative of a prioritized list, without admin access.
func subRequest(name string, r *resourceapi.ExactDeviceRequest) resourceapi.DeviceSubRequest {
	return resourceapi.DeviceSubRequest{
		Name: name, DeviceClassName: r.DeviceClassName, Selectors: r.Selectors, AllocationMode: r.AllocationMode,
		Count: r.Count, Tolerations: r.Tolerations, Capacity: r.Capacity,
	}
}

// forbidden returns a text about a device of the claim that is withheld, or has a taint without a
// toleration in the claim, and "" if there is none. It checks the devices of the host and ignores
// the published slices.
func forbidden(claim *resourceapi.ResourceClaim, view *view) string {
	for _, r := range claim.Status.Allocation.Devices.Results {
		d, _ := view.Device(r.Device)
		if view.withheld[d.Silicon()] != "" {
			return d.Name + " is withheld"
		}
		taint := resourceapi.DeviceTaint{Key: "chandler.dev/" + string(d.Health.Key()), Effect: d.Health.Effect}
		tolerated := slices.ContainsFunc(r.Tolerations, func(t resourceapi.DeviceToleration) bool { return resourceclaim.ToleratesTaint(t, taint) })
		if !d.Health.IsUsable() && !tolerated {
			return fmt.Sprintf("%s is %s (%s), which the claim does not tolerate", d.Name, taint.Key, taint.Effect)
		}
	}
	return ""
}

// someClaim returns the UID of one of the claims, or "".
func (c *claimer) someClaim(claims map[types.UID]*resourceapi.ResourceClaim) types.UID {
	if len(claims) == 0 {
		return ""
	}
	return slices.Sorted(maps.Keys(claims))[c.IntN(len(claims))]
}

// recordedHosts returns the snapshots of every third recorded host, or of every tenth in short
// tests. Each family has at least three recorded hosts.
func recordedHosts(t *testing.T) (snapshots []*discovery.Snapshot) {
	t.Helper()
	files, err := filepath.Glob("../discovery/families/*/testdata/*.host")
	if err != nil || len(files) == 0 {
		t.Fatalf("no recorded hosts (%v)", err)
	}
	every := 3
	if testing.Short() {
		every = 10
	}
	for i, file := range files {
		if i%every > 0 {
			continue
		}
		snapshot := scan.ReadHost(discoverytest.ReadHost(t, file), families.All)
		for i := range snapshot.Devices {
			snapshot.Devices[i].Files = nil // the bench has no directory for them
		}
		snapshots = append(snapshots, snapshot)
	}
	return snapshots
}
