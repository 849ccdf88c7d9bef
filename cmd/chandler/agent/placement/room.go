package placement

import (
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// crowdedDevices returns the devices of the device plugin API that do not fit, and so are not
// created. Partitions of one physical device may overlap, and the configuration may list more
// partitions than fit. Existing devices take precedence, then devices in the order of their names,
// so that the result is stable.
func crowdedDevices(devices []rules.Offered) map[string]bool {
	left := make(discovery.Budgets)
	without := make(map[string]bool)
	for _, there := range []bool{true, false} {
		for i := range devices {
			d := &devices[i]
			if len(d.Offers) == 0 || d.PartOf == nil || len(d.Takes) == 0 || (d.Creation == nil) != there {
				continue
			}
			budget := left.BudgetOf(&d.Device)
			if !there && !budget.SufficesFor(d.Takes) {
				without[d.Name] = true
				continue
			}
			budget.TakeAmounts(d.Takes)
		}
	}
	return without
}
