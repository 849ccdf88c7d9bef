package ledger

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/stocktest"
)

// inGroup returns a PCI function of IOMMU group 3. Its description is that of a function whose
// group has a member under vfio.
func inGroup(name string) rules.Offered {
	one := map[string]resource.Quantity{"group": resource.MustParse("1")}
	return rules.Offered{Device: discovery.Device{Name: name, Takes: one, PartOf: &discovery.Silicon{Name: "iommu-group-3", Counters: one}}}
}

// alone returns a PCI function as a physical device of its own.
func alone(name string) rules.Offered { return rules.Offered{Device: discovery.Device{Name: name}} }

// Allocation considers both the physical device in a claim's record and the present device.
// Functions of an IOMMU group become a single physical device, or separate devices, while claims
// have the functions.
func TestSiliconChangesUnderClaim(t *testing.T) {
	for name, test := range map[string]struct {
		before, now stocktest.Stock
		blocked     bool
	}{
		"functions become one silicon": {stocktest.New(alone("f0")), stocktest.New(inGroup("f0"), inGroup("f1")), true},
		"functions become separate":    {stocktest.New(inGroup("f0"), inGroup("f1")), stocktest.New(alone("f0"), alone("f1")), false},
		"the silicon stays":            {stocktest.New(inGroup("f0"), inGroup("f1")), stocktest.New(inGroup("f0"), inGroup("f1")), true},
		"another group":                {stocktest.New(alone("f0")), stocktest.New(alone("f0"), inGroup("f1"), inGroup("f2")), false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.mustGive(stocktest.Claim("pod", test.before["f0"]), test.before)
			err := b.AllocateClaim(stocktest.Claim("vm", test.now["f1"]), allocation.Allocated, test.now)
			if (err != nil) != test.blocked {
				t.Errorf("claim vm: %v, want blocked: %t", err, test.blocked)
			}
			if again := b.AllocateClaim(stocktest.Claim("pod", test.now["f0"]), allocation.Allocated, test.now); err != nil && again != nil {
				t.Errorf("claim pod once more: %v", again)
			}
		})
	}
}
