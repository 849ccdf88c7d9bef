package discovery

import "k8s.io/apimachinery/pkg/api/resource"

// Budget is what is left of limited amounts, by name: of the counters of a physical device, or of the
// capacities of a shared device.
type Budget[K ~string] map[K]resource.Quantity

// NewBudget returns a budget with all of the given amounts.
func NewBudget[K ~string](all map[K]resource.Quantity) Budget[K] {
	b := make(Budget[K], len(all))
	for name, amount := range all {
		b[name] = amount.DeepCopy()
	}
	return b
}

// SufficesFor reports whether the budget has enough for the amounts. A budget has nothing of a name
// that it does not contain.
func (b Budget[K]) SufficesFor(amounts map[K]resource.Quantity) bool {
	for name, amount := range amounts {
		if left := b[name]; left.Cmp(amount) < 0 {
			return false
		}
	}
	return true
}

// TakeAmounts subtracts amounts, even if the budget has less. It returns the first name, in order, of
// which the budget had less, or "". TakeAmounts ignores names that the budget does not contain.
func (b Budget[K]) TakeAmounts(amounts map[K]resource.Quantity) (short K) {
	for name, amount := range amounts {
		left, limited := b[name]
		if !limited {
			continue
		}
		left = left.DeepCopy()
		left.Sub(amount)
		b[name] = left
		if left.Sign() < 0 && (short == "" || name < short) {
			short = name
		}
	}
	return short
}

// Budgets are the counters that are left of physical devices, by name.
type Budgets map[string]Budget[string]

// BudgetOf returns the budget of the physical device of d, whose PartOf must be set. Before the first
// call, nothing of the physical device is taken.
func (b Budgets) BudgetOf(d *Device) Budget[string] {
	if b[d.PartOf.Name] == nil {
		b[d.PartOf.Name] = NewBudget(d.PartOf.Counters)
	}
	return b[d.PartOf.Name]
}
