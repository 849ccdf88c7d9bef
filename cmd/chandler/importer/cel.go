package importer

import (
	"strconv"
	"strings"
)

// attributes is where expressions find what discovery says of a device.
const attributes = `device.attributes["chandler.dev"].`

// Attributes that every device of the families has that are asked for them.
const (
	familyAttribute = attributes + "family"
	kindAttribute   = attributes + "kind"
)

// text returns an attribute that a device need not have.
func text(name string) string { return attributes + "?" + name + `.orValue("")` }

// number returns a number that a device need not have.
func number(name string) string { return attributes + "?" + name + ".orValue(-1)" }

// busID is the PCI address.
const busID = `device.attributes["resource.kubernetes.io"].?pciBusID.orValue("")`

// bound returns an expression in which the attributes have a short name, if it
// reads more than two.
func bound(cel string) string {
	if strings.Count(cel, attributes) < 3 {
		return cel
	}
	return "cel.bind(a, " + strings.TrimSuffix(attributes, ".") + ", " + strings.ReplaceAll(cel, attributes, "a.") + ")"
}

// oneOf returns an expression for an attribute with one of the values.
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

// all returns an expression for what all of the expressions hold for.
func all(expressions []string) string { return join(expressions, " && ", " || ") }

// anyOf returns an expression for what one of the expressions holds for.
func anyOf(expressions []string) string { return join(expressions, " || ", " && ") }

// join joins expressions, with brackets around those with the other operator.
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
