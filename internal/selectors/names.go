package selectors

import (
	"maps"
	"slices"

	"github.com/google/cel-go/common"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/parser"
)

// The maps of the variable device.
const (
	Attributes = "attributes"
	Capacity   = "capacity"
)

// A Name is a name in a map of the variable device, as in device.attributes["example.com"].model.
type Name struct {
	Map    string // Attributes or Capacity
	Domain string
	Local  string
}

// ReadNames returns the names that a CEL expression reads or looks for in the maps of the variable
// device, and its string literals, both in order and each once. It returns none if the expression is
// invalid.
func ReadNames(expression string) (names []Name, literals []string) {
	// Without macros, cel.bind and has remain calls, which are simpler to examine.
	p, err := parser.NewParser(parser.EnableOptionalSyntax(true))
	if err != nil {
		return nil, nil
	}
	parsed, problems := p.Parse(common.NewTextSource(expression))
	if len(problems.GetErrors()) > 0 {
		return nil, nil
	}
	r := &nameReader{vars: make(map[string]deviceMap)}
	r.visit(parsed.Expr())
	return r.names, r.literals
}

// A deviceMap is device.attributes or device.capacity, or the part for a domain.
type deviceMap struct {
	name   string // "" for another value
	domain string // "" for all domains
}

// A nameReader collects the names and the literals of an expression.
type nameReader struct {
	vars     map[string]deviceMap // the variables of cel.bind
	names    []Name
	literals []string
}

func (r *nameReader) visit(e ast.Expr) {
	switch e.Kind() {
	case ast.LiteralKind:
		if text, ok := e.AsLiteral().(types.String); ok && !slices.Contains(r.literals, string(text)) {
			r.literals = append(r.literals, string(text))
		}
	case ast.SelectKind, ast.CallKind:
		if value, key, ok := lookup(e); ok {
			r.addName(value, key)
		}
		if e.Kind() == ast.SelectKind {
			r.visit(e.AsSelect().Operand())
			return
		}
		r.visitCall(e.AsCall())
	case ast.ListKind:
		for _, element := range e.AsList().Elements() {
			r.visit(element)
		}
	case ast.MapKind:
		for _, entry := range e.AsMap().Entries() {
			r.visit(entry.AsMapEntry().Key())
			r.visit(entry.AsMapEntry().Value())
		}
	}
}

func (r *nameReader) visitCall(c ast.CallExpr) {
	if c.IsMemberFunction() {
		r.visit(c.Target())
	}
	args := c.Args()
	if c.IsMemberFunction() && c.FunctionName() == "bind" && len(args) == 3 && args[0].Kind() == ast.IdentKind {
		r.visit(args[1])
		before := maps.Clone(r.vars)
		r.vars[args[0].AsIdent()] = r.mapOf(args[1])
		r.visit(args[2])
		r.vars = before
		return
	}
	for _, arg := range args {
		r.visit(arg)
	}
}

// addName adds a name that is read from a value, if the value is a map of the device.
func (r *nameReader) addName(value ast.Expr, key string) {
	if m := r.mapOf(value); m.name != "" && m.domain != "" {
		if name := (Name{m.name, m.domain, key}); !slices.Contains(r.names, name) {
			r.names = append(r.names, name)
		}
	}
}

// mapOf returns the map of the device that an expression is.
func (r *nameReader) mapOf(e ast.Expr) deviceMap {
	if e.Kind() == ast.IdentKind {
		return r.vars[e.AsIdent()]
	}
	value, key, ok := lookup(e)
	switch {
	case !ok || e.Kind() == ast.CallKind && e.AsCall().FunctionName() == operators.In:
		return deviceMap{}
	case value.Kind() == ast.IdentKind && value.AsIdent() == "device" && (key == Attributes || key == Capacity):
		return deviceMap{name: key}
	}
	if m := r.mapOf(value); m.name != "" && m.domain == "" {
		return deviceMap{m.name, key}
	}
	return deviceMap{}
}

// lookup returns the parts of value.key, value["key"], their optional forms, and "key" in value.
func lookup(e ast.Expr) (value ast.Expr, key string, ok bool) {
	switch e.Kind() {
	case ast.SelectKind:
		return e.AsSelect().Operand(), e.AsSelect().FieldName(), true
	case ast.CallKind:
		args := e.AsCall().Args()
		if len(args) != 2 {
			return nil, "", false
		}
		value, literal := args[0], args[1]
		switch e.AsCall().FunctionName() {
		case operators.In:
			value, literal = literal, value
		case operators.Index, operators.OptIndex, operators.OptSelect:
		default:
			return nil, "", false
		}
		if literal.Kind() == ast.LiteralKind {
			text, ok := literal.AsLiteral().(types.String)
			return value, string(text), ok
		}
	}
	return nil, "", false
}
