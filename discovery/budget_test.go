package discovery

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
)

func amounts(memory, engines int64) map[string]resource.Quantity {
	return map[string]resource.Quantity{"memory": *resource.NewQuantity(memory, resource.DecimalSI), "engines": *resource.NewQuantity(engines, resource.DecimalSI)}
}

// The parts of a physical device share one budget, and the device's counters stay the same.
func TestBudgets(t *testing.T) {
	whole := &Silicon{Name: "gpu", Counters: amounts(8, 2)}
	left := make(Budgets)
	if short := left.BudgetOf(&Device{Name: "gpu-a", PartOf: whole}).TakeAmounts(amounts(5, 1)); short != "" {
		t.Error(short)
	}
	budget := left.BudgetOf(&Device{Name: "gpu-b", PartOf: whole})
	for _, c := range []struct {
		memory, engines int64
		suffices        bool
	}{{3, 1, true}, {4, 1, false}, {3, 2, false}, {0, 0, true}} {
		if got := budget.SufficesFor(amounts(c.memory, c.engines)); got != c.suffices {
			t.Errorf("%d and %d: %t", c.memory, c.engines, got)
		}
	}
	if total := whole.Counters["memory"]; total.Value() != 8 {
		t.Errorf("the counters of the device have changed to %s", total.String())
	}
}

// TakeAmounts takes more than there is, and returns the first shortage. A name without a total never
// suffices, and TakeAmounts ignores the name.
func TestBudgetShort(t *testing.T) {
	b := NewBudget(amounts(8, 2))
	if short := b.TakeAmounts(amounts(9, 3)); short != "engines" {
		t.Errorf("short of %q", short)
	}
	if short := b.TakeAmounts(amounts(0, 0)); short != "engines" {
		t.Errorf("short of %q after a shortage", short)
	}
	other := map[string]resource.Quantity{"lanes": resource.MustParse("1")}
	if b.SufficesFor(other) || b.TakeAmounts(other) != "" || len(b) != 2 {
		t.Errorf("a name without a total: %v", b)
	}
}
