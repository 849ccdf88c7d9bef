package ledger

import (
	"fmt"
	"testing"
	"time"

	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// A container may have thousands of shares of a device. The cost must be proportional to their
// number. The test counts allocations, because time measurements are unreliable.
func TestManyShares(t *testing.T) {
	allocations := func(shares int) float64 {
		return testing.AllocsPerRun(1, func() {
			k := newKubelet(t, Config{}, "gpu-0")
			ids := []string{"ours/mem"}
			var grants []*allocation.Grant
			for i := range shares {
				id := fmt.Sprintf("gpu-0-_-%d", i)
				ids = append(ids, id)
				grants = append(grants, &allocation.Grant{Resource: "ours/mem", ID: id, Devices: []string{"gpu-0"}, Silicon: []string{"gpu-0"}, Form: "memory by 1Mi", Since: time.Now(), Nodes: exclusion.NodesOf("gpu-0", k.stock)})
			}
			if err := k.Grants.AllocateIDs(k.stock, grants); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond)
			k.says(podsSay(true, map[string][]string{"train main": ids}))
			k.check("given", "DRA", "gpu-0", train)
			k.says(podsSay(true, nil))
			if err := k.Grants.EndGrants(k.View(k.stock).Grants()); err != nil {
				t.Fatal(err)
			}
			k.check("ended", "DRA", "gpu-0", "")
		})
	}
	if small, big := allocations(200), allocations(800); big > 6*small {
		t.Errorf("%.0f allocations for 200 shares, %.0f for 800", small, big)
	}
}
