package v1alpha1

import (
	"maps"
	"math"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func (o *Overhead) validate(at *field.Path) field.ErrorList {
	errs := o.Selector.validate(at)
	if len(o.PerPod) == 0 && len(o.PerContainer) == 0 {
		errs = append(errs, InvalidField(at, "want perPod, perContainer or both")...)
	}
	return slices.Concat(errs, validateAmounts(o.PerPod, at.Child("perPod")), validateAmounts(o.PerContainer, at.Child("perContainer")))
}

func validateAmounts(amounts map[string]resource.Quantity, at *field.Path) (errs field.ErrorList) {
	for _, name := range slices.Sorted(maps.Keys(amounts)) {
		errs = append(errs, validateAmount(name, amounts[name], at.Key(name))...)
	}
	return errs
}

// hugePages is the prefix of the resource names of huge pages.
const hugePages = "hugepages-"

// validateAmount checks an amount as the API server does for containers: names are those of
// resources with kubelet cgroups (IsNodeAllocatableResourceName in pkg/apis/core/helper), CPU is in
// thousandths and huge pages are whole.
func validateAmount(name string, amount resource.Quantity, at *field.Path) field.ErrorList {
	unit := resource.MustParse("1")
	size, huge := strings.CutPrefix(name, hugePages)
	switch {
	case huge:
		var err error
		if unit, err = resource.ParseQuantity(size); err != nil || unit.Sign() <= 0 || !isMultiple(unit, resource.MustParse("1")) {
			return InvalidField(at, "no size of pages; want one such as %s2Mi", hugePages)
		}
	case name == "cpu":
		unit = resource.MustParse("1m")
	case name != "memory":
		return InvalidField(at, "is not of the node itself; want cpu, memory or %s<size>", hugePages)
	}
	if amount.Sign() <= 0 || !isMultiple(amount, unit) {
		return InvalidField(at, "is %s; want a multiple of %s above 0", amount.String(), unit.String())
	}
	return nil
}

// isMultiple reports whether an amount is a whole number of units, and small enough for the
// calculation.
func isMultiple(amount, unit resource.Quantity) bool {
	if amount.CmpInt64(math.MaxInt64/1000) > 0 || amount.Cmp(*resource.NewMilliQuantity(amount.MilliValue(), amount.Format)) != 0 {
		return false
	}
	return amount.MilliValue()%unit.MilliValue() == 0
}
