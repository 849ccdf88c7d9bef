package v1alpha1

import (
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"chandler.dev/internal/jsonerror"
	"chandler.dev/internal/pattern"
)

// Renamed lists previous names of the fields of a [DriverConfig], each with the present name. A
// configuration with a previous name is refused with an error that contains the present name.
var Renamed = map[string]string{
	"rebinding": "passthrough",
	"handover":  "reclaim",
	"onRequest": "onDemand",
	"roots":     "driverRoots",
}

// RenamedKinds lists previous values of the attribute "kind", each with the present value.
var RenamedKinds = map[string]string{"hypervisor": "virtualization"}

// withPresentName replaces the error for an unknown field if the field was renamed.
func withPresentName(err error) error {
	var unknown interface{ FieldPath() string }
	if !errors.As(err, &unknown) {
		return err
	}
	if name := Renamed[unknown.FieldPath()]; name != "" {
		return jsonerror.FieldError{Path: unknown.FieldPath(), Text: fmt.Sprintf("the field was renamed to %q", name)}
	}
	return err
}

// kindComparison matches a comparison of the attribute "kind" with a value.
var kindComparison = pattern.Lazy(`\bkind\s*(?:\.orValue\([^)]*\)\s*)?[!=]=\s*['"]([a-z]+)['"]`)

// validateKinds returns an error if an expression compares the attribute "kind" with a previous value,
// which no device has.
func validateKinds(expression string, at *field.Path) field.ErrorList {
	for _, found := range kindComparison().FindAllStringSubmatch(expression, -1) {
		if name := RenamedKinds[found[1]]; name != "" {
			return InvalidField(at, "kind %q was renamed to %q", found[1], name)
		}
	}
	return nil
}
