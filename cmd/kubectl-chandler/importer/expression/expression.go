// Package expression writes CEL expressions for the devices of Chandler.
package expression

import (
	"strconv"
	"strings"
)

// Attributes is the CEL path of Chandler's device attributes.
const Attributes = `device.attributes["chandler.dev"].`

// Attributes that every device of the importable families has.
const (
	Family = Attributes + "family"
	Kind   = Attributes + "kind"
)

// Text returns the CEL expression of an optional string attribute.
func Text(name string) string { return Attributes + "?" + name + `.orValue("")` }

// OptionalInteger returns the CEL expression of an optional integer attribute.
func OptionalInteger(name string) string { return Attributes + "?" + name + ".orValue(-1)" }

// BusID is the CEL expression of the PCI address.
const BusID = `device.attributes["resource.kubernetes.io"].?pciBusID.orValue("")`

// BindDomain shortens an expression that reads more than two attributes: cel.bind gives their
// domain a short name.
func BindDomain(cel string) string {
	if strings.Count(cel, Attributes) < 3 {
		return cel
	}
	return "cel.bind(a, " + strings.TrimSuffix(Attributes, ".") + ", " + strings.ReplaceAll(cel, Attributes, "a.") + ")"
}

// OneOf returns an expression that holds if an attribute has one of the values.
func OneOf(attribute string, values []string) string {
	if len(values) == 1 {
		return attribute + " == " + Quote(values[0])
	}
	quoted := make([]string, len(values))
	for i, v := range values {
		quoted[i] = Quote(v)
	}
	return attribute + " in [" + strings.Join(quoted, ", ") + "]"
}

// Quote returns a string literal.
func Quote(text string) string { return strconv.QuoteToASCII(text) }

// All returns an expression that holds if all of the expressions hold.
func All(expressions []string) string { return join(expressions, " && ", " || ") }

// AnyOf returns an expression that holds if any of the expressions holds.
func AnyOf(expressions []string) string { return join(expressions, " || ", " && ") }

// join joins expressions with an operator. Expressions that contain the other operator get
// parentheses.
func join(expressions []string, operator, other string) string {
	if len(expressions) == 1 {
		return expressions[0]
	}
	parts := make([]string, len(expressions))
	for i, e := range expressions {
		parts[i] = e
		if strings.Contains(e, other) {
			parts[i] = "(" + e + ")"
		}
	}
	return strings.Join(parts, operator)
}
