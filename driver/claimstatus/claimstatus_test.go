package claimstatus

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The transition time of a condition is when its status changed. Devices that are not allocated to
// the claim, or no longer, get no entry.
func TestEntriesFor(t *testing.T) {
	c := &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Driver: "chandler.dev", Pool: "node", Device: "a"}}}}}}
	earlier, now := metav1.Unix(1, 0), metav1.Unix(2, 0)
	ready := deviceStatus{pool: "node", device: "a", status: metav1.ConditionTrue, reason: ReasonPrepared}
	c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: "chandler.dev", Pool: "node", Device: "a",
		Conditions: []metav1.Condition{{Type: ConditionReady, Status: metav1.ConditionTrue, Reason: ReasonPrepared, LastTransitionTime: earlier}}}}
	if _, changed := entriesFor(c, []deviceStatus{ready}, now); changed {
		t.Error("the present status counts as a change")
	}
	ready.message = "with news"
	entries, changed := entriesFor(c, []deviceStatus{ready}, now)
	if !changed || len(entries) != 1 || !entries[0].Conditions[0].LastTransitionTime.Equal(&earlier) {
		t.Errorf("another message: %v, %v", entries, changed)
	}
	ready.status = metav1.ConditionFalse
	if entries, _ = entriesFor(c, []deviceStatus{ready}, now); !entries[0].Conditions[0].LastTransitionTime.Equal(&now) {
		t.Errorf("another status: %v", entries)
	}
	ready.device = "b"
	if entries, changed = entriesFor(c, []deviceStatus{ready}, now); changed || len(entries) != 0 {
		t.Errorf("another device: %v", entries)
	}
}
