package importer

import (
	"strconv"
	"strings"
)

// attributes is the CEL path of Chandler's device attributes.
const attributes = `device.attributes["chandler.dev"].`

// Attributes that every device of the importable families has.
const (
	familyAttribute = attributes + "family"
	kindAttribute   = attributes + "kind"
)

// text returns the CEL expression of an optional string attribute.
func text(name string) string { return attributes + "?" + name + `.orValue("")` }

// optionalInteger returns the CEL expression of an optional integer attribute.
func optionalInteger(name string) string { return attributes + "?" + name + ".orValue(-1)" }

// busID is the CEL expression of the PCI address.
const busID = `device.attributes["resource.kubernetes.io"].?pciBusID.orValue("")`

// bindDomain shortens an expression that reads more than two attributes: cel.bind gives their
// domain a short name.
func bindDomain(cel string) string {
	if strings.Count(cel, attributes) < 3 {
		return cel
	}
	return "cel.bind(a, " + strings.TrimSuffix(attributes, ".") + ", " + strings.ReplaceAll(cel, attributes, "a.") + ")"
}

// oneOf returns an expression that holds if an attribute has one of the values.
func oneOf(attribute string, values []string) string {
	if len(values) == 1 {
		return attribute + " == " + quote(values[0])
	}
	quoted := make([]string, len(values))
	for i, v := range values {
		quoted[i] = quote(v)
	}
	return attribute + " in [" + strings.Join(quoted, ", ") + "]"
}

func quote(text string) string { return strconv.QuoteToASCII(text) }

// all returns an expression that holds if all of the expressions hold.
func all(expressions []string) string { return join(expressions, " && ", " || ") }

// anyOf returns an expression that holds if any of the expressions holds.
func anyOf(expressions []string) string { return join(expressions, " || ", " && ") }

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
