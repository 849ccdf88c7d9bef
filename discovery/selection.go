package discovery

import (
	"errors"
	"slices"
)

// Selection is a setting of the configuration for the devices that an expression selects. If several
// selections select a device, the first one wins.
type Selection[T any] struct {
	Expression string // as in the configuration
	Selects    func(Device) (bool, error)
	Value      T // the setting
}

// FirstSelected returns the value of the first selection that selects a device, or nil. An expression
// that cannot be evaluated for the device does not select it. If no expression selects the device, the
// error joins the errors of these expressions.
func FirstSelected[T any](selections []Selection[T], d Device) (*T, error) {
	var errs []error
	for i := range selections {
		selected, err := selections[i].Selects(d)
		if err == nil && selected {
			return &selections[i].Value, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// IsSelected reports whether a selection selects a device. The error is as from [FirstSelected].
func IsSelected[T any](selections []Selection[T], d Device) (bool, error) {
	value, err := FirstSelected(selections, d)
	return value != nil, err
}

// EqualSelections reports whether two lists have the same expressions and values in the same order.
func EqualSelections[T comparable](a, b []Selection[T]) bool {
	return slices.EqualFunc(a, b, func(a, b Selection[T]) bool { return a.Expression == b.Expression && a.Value == b.Value })
}
