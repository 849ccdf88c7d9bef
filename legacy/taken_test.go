package legacy

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
)

// A device and what is made of it are not handed out together where they
// compete, whichever of them is held.
func TestWholeAndParts(t *testing.T) {
	counters := map[string]resource.Quantity{"mediated": resource.MustParse("2")}
	for name, silicon := range map[string]*discovery.Whole{"compete": {Name: "gpu-a", Counters: counters}, "do not compete": {Name: "gpu-a"}} {
		t.Run(name, func(t *testing.T) {
			whole, part, other := gpu("a"), gpu("b"), gpu("c")
			part.PartOf, other.PartOf = silicon, silicon
			if len(silicon.Counters) > 0 {
				whole.PartOf = silicon
			}
			unitOf := func(d discovery.Device) *unit { return (*unit)(nil).with(d, d.Offers[0]) }
			present := taken{present: map[string]bool{"gpu-a": true, "gpu-b": true, "gpu-c": true}}
			overlap := func(held, wanted discovery.Device) bool {
				return present.overlap(newHolding(gpuResource, held.Offers[0].IDs[0], unitOf(held), time.Time{}), unitOf(wanted)) != ""
			}
			competes := len(silicon.Counters) > 0
			if got := overlap(whole, part); got != competes {
				t.Errorf("part while the whole is held: refused %t", got)
			}
			if got := overlap(part, whole); got != competes {
				t.Errorf("whole while a part is held: refused %t", got)
			}
			if overlap(part, other) || !overlap(part, part) {
				t.Error("parts: refused while another is held, or given out twice")
			}
		})
	}
}
