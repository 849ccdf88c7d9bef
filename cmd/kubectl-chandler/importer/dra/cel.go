package dra

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/google/cel-go/common"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/parser"

	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/replaced"
	"chandler.dev/cmd/kubectl-chandler/validation"
)

// A celTranslation is the translation of one CEL expression of another DRA driver.
type celTranslation struct {
	factory ast.ExprFactory
	vars    map[string]celTerm // the variables of cel.bind
	remarks []string
	errs    []error
	driver  bool // the expression compares device.driver
}

// A celTerm is a translated part of an expression.
type celTerm struct {
	expr ast.Expr

	maps     *replaced.Driver // the term is the map of the driver's attributes, or capacities
	capacity bool             // maps holds capacities
	driver   bool             // the term is device.driver
	values   func(string) (string, bool)
	source   string // the attribute that needs values
}

// isPlain reports whether any expression can contain the term.
func (t celTerm) isPlain() bool { return t.maps == nil && !t.driver && t.values == nil }

// translateCEL returns an expression for the devices of Chandler, with remarks about it. The error
// joins one error for each part without a counterpart.
func translateCEL(text string) (string, *celTranslation, error) {
	expr, info, err := parseCEL(text)
	if err != nil {
		return "", nil, err
	}
	t := &celTranslation{factory: ast.NewExprFactory(), vars: make(map[string]celTerm)}
	out := t.plain(expr)
	if err := errors.Join(t.errs...); err != nil {
		return "", t, err
	}
	written, err := parser.Unparse(out, info)
	if err != nil {
		return "", t, fmt.Errorf("write expression: %w", err)
	}
	return written, t, nil
}

// maxExpressionDepth is the maximum depth of an expression.
const maxExpressionDepth = 100

// parseCEL parses an expression without expanding macros, so that the expression can be written
// again.
func parseCEL(text string) (ast.Expr, *ast.SourceInfo, error) {
	p, err := parser.NewParser(parser.EnableOptionalSyntax(true), parser.MaxRecursionDepth(maxExpressionDepth))
	if err != nil {
		return nil, nil, err
	}
	parsed, problems := p.Parse(common.NewTextSource(text))
	if len(problems.GetErrors()) > 0 {
		return nil, nil, fmt.Errorf("is not a CEL expression: %s", problems.GetErrors()[0].Message)
	}
	return parsed.Expr(), parsed.SourceInfo(), nil
}

// lose notes a part of the expression without a counterpart.
func (t *celTranslation) lose(format string, args ...any) {
	err := fmt.Errorf(format, args...)
	if !slices.ContainsFunc(t.errs, func(other error) bool { return other.Error() == err.Error() }) {
		t.errs = append(t.errs, err)
	}
}

// written returns the expression of a text that this package writes.
func (t *celTranslation) written(text string) ast.Expr {
	expr, _, err := parseCEL(text)
	if err != nil {
		t.lose("%w", err)
		return t.factory.NewUnspecifiedExpr(0)
	}
	return expr
}

// plain translates an expression whose value is used as it is.
func (t *celTranslation) plain(e ast.Expr) ast.Expr {
	term := t.term(e)
	switch {
	case term.maps != nil:
		t.lose("the map of all attributes or capacities of %s is used in a way that cannot be translated", term.maps.Name)
	case term.driver:
		t.lose("device.driver is used in a way that cannot be translated")
	case term.values != nil:
		t.lose("%s has other values in Chandler, and is used in a way that cannot be translated", term.source)
	}
	return term.expr
}

func (t *celTranslation) plains(es []ast.Expr) []ast.Expr {
	out := make([]ast.Expr, len(es))
	for i, e := range es {
		out[i] = t.plain(e)
	}
	return out
}

// stringLiteral returns the value of a string literal.
func stringLiteral(e ast.Expr) (string, bool) {
	if e.Kind() != ast.LiteralKind {
		return "", false
	}
	s, ok := e.AsLiteral().(types.String)
	return string(s), ok
}

// isDeviceField reports whether an expression is a field of the variable device.
func isDeviceField(e ast.Expr, field string) bool {
	if e.Kind() != ast.SelectKind {
		return false
	}
	s := e.AsSelect()
	return s.FieldName() == field && s.Operand().Kind() == ast.IdentKind && s.Operand().AsIdent() == "device"
}

// term translates a part of an expression.
func (t *celTranslation) term(e ast.Expr) celTerm {
	switch e.Kind() {
	case ast.LiteralKind:
		if text, ok := stringLiteral(e); ok && replaced.DriverOf(text) != nil {
			t.lose("the name %s is used in a way that cannot be translated", text)
		}
	case ast.IdentKind:
		if bound, ok := t.vars[e.AsIdent()]; ok {
			return bound
		}
	case ast.SelectKind:
		return t.selection(e)
	case ast.CallKind:
		return t.call(e)
	case ast.ListKind:
		list := e.AsList()
		return celTerm{expr: t.factory.NewList(0, t.plains(list.Elements()), list.OptionalIndices())}
	case ast.MapKind, ast.StructKind, ast.ComprehensionKind, ast.UnspecifiedExprKind:
		t.lose("maps and messages are not translated")
	}
	return celTerm{expr: e}
}

func (t *celTranslation) selection(e ast.Expr) celTerm {
	if isDeviceField(e, "driver") {
		return celTerm{expr: e, driver: true}
	}
	s := e.AsSelect()
	if isDeviceField(e, "attributes") || isDeviceField(e, "capacity") {
		return celTerm{expr: e}
	}
	operand := t.term(s.Operand())
	if operand.maps != nil {
		return t.field(operand, s.FieldName(), false)
	}
	if !operand.isPlain() {
		t.plain(s.Operand())
	}
	return celTerm{expr: t.factory.NewSelect(0, operand.expr, s.FieldName())}
}

// field returns the counterpart of an attribute or a capacity.
func (t *celTranslation) field(of celTerm, name string, optional bool) celTerm {
	d := of.maps
	if of.capacity {
		own, ok := d.Capacities[name]
		if !ok {
			t.lose("the capacity %s of %s has no counterpart", name, d.Name)
			return celTerm{expr: t.factory.NewUnspecifiedExpr(0)}
		}
		return celTerm{expr: t.written(celPath("capacity", own, optional))}
	}
	a, ok := d.Attributes[name]
	switch {
	case !ok:
		t.lose("the attribute %s of %s has no counterpart", name, d.Name)
		return celTerm{expr: t.factory.NewUnspecifiedExpr(0)}
	case a.Matches:
		t.lose("the attribute %s of %s has other values in Chandler; only constraints with it are translated", name, d.Name)
	case a.CEL != "" && optional:
		return celTerm{expr: t.written("optional.of(" + a.CEL + ")")}
	case a.CEL != "":
		return celTerm{expr: t.written(a.CEL)}
	}
	if a.Remark != "" {
		t.remarks = append(t.remarks, a.Remark)
	}
	missing := a.Missing
	if remark := validation.PublicationNote(a.Name); remark != "" {
		t.remarks, missing = append(t.remarks, remark), true
	}
	path := celPath("attributes", a.Name, optional || missing)
	if missing && !optional {
		path += `.orValue("")`
	}
	return celTerm{expr: t.written(path), values: a.Values, source: name}
}

// celPath returns the CEL path of an attribute or a capacity of Chandler.
func celPath(list, name string, optional bool) string {
	domain, local, ok := strings.Cut(name, "/")
	if !ok {
		domain, local = "chandler.dev", name
	}
	if optional {
		local = "?" + local
	}
	return "device." + list + "[" + expression.Quote(domain) + "]." + local
}

func (t *celTranslation) call(e ast.Expr) celTerm {
	c := e.AsCall()
	args := c.Args()
	switch name := c.FunctionName(); {
	case c.IsMemberFunction():
		return t.member(c)
	case (name == operators.Index || name == operators.OptIndex || name == operators.OptSelect) && len(args) == 2:
		return t.index(c)
	case (name == operators.Equals || name == operators.NotEquals) && len(args) == 2:
		left, right := args[0], args[1]
		if _, ok := stringLiteral(left); ok {
			left, right = right, left
		}
		return t.comparison(name, left, []ast.Expr{right}, right, false)
	case name == operators.In && len(args) == 2:
		return t.membership(args[0], args[1])
	case name == "has" && len(args) == 1:
		field := t.term(args[0])
		if field.maps != nil || field.driver || field.expr.Kind() != ast.SelectKind {
			t.lose("has() is used in a way that cannot be translated")
		}
		return celTerm{expr: t.factory.NewCall(0, name, field.expr)}
	default:
		return celTerm{expr: t.factory.NewCall(0, name, t.plains(args)...)}
	}
}

// index translates device.attributes["domain"], and a name in such a map.
func (t *celTranslation) index(c ast.CallExpr) celTerm {
	args := c.Args()
	optional := c.FunctionName() != operators.Index
	name, isText := stringLiteral(args[1])
	capacity := isDeviceField(args[0], "capacity")
	if capacity || isDeviceField(args[0], "attributes") {
		if d := replaced.DriverOf(name); isText && d != nil {
			return celTerm{expr: args[0], maps: d, capacity: capacity}
		}
	}
	operand := t.term(args[0])
	if operand.maps != nil && isText {
		return t.field(operand, name, optional)
	}
	if !operand.isPlain() {
		t.plain(args[0])
	}
	key := args[1]
	if !isText || c.FunctionName() != operators.OptSelect {
		key = t.plain(key)
	}
	return celTerm{expr: t.factory.NewCall(0, c.FunctionName(), operand.expr, key)}
}

// comparison translates a comparison of a term with values. other is the other side, which contains
// the values.
func (t *celTranslation) comparison(operator string, left ast.Expr, values []ast.Expr, other ast.Expr, list bool) celTerm {
	term := t.term(left)
	if term.driver {
		return t.drivers(operator, term.expr, values, other)
	}
	if term.values == nil {
		if !term.isPlain() {
			t.plain(left)
		}
		right := t.plain(other)
		return celTerm{expr: t.factory.NewCall(0, operator, term.expr, right)}
	}
	var out []ast.Expr
	for _, value := range values {
		text, ok := stringLiteral(value)
		if !ok {
			t.lose("%s has other values in Chandler, and is not compared with a literal", term.source)
			return term
		}
		own, ok := term.values(text)
		if !ok {
			t.lose("the value %q of %s has no counterpart", text, term.source)
		}
		out = append(out, t.factory.NewLiteral(0, types.String(own)))
	}
	right := t.factory.NewList(0, out, nil)
	if !list {
		right = out[0]
	}
	return celTerm{expr: t.factory.NewCall(0, operator, term.expr, right)}
}

// drivers translates a comparison of device.driver. The devices of one driver are the devices of
// some families of Chandler.
func (t *celTranslation) drivers(operator string, left ast.Expr, values []ast.Expr, other ast.Expr) celTerm {
	var parts []string
	known := false
	for _, value := range values {
		text, ok := stringLiteral(value)
		if !ok {
			t.lose("device.driver is not compared with a literal")
			return celTerm{expr: left}
		}
		part := "device.driver == " + expression.Quote(text)
		if d := replaced.DriverOf(text); d != nil {
			if d.Unserved != "" {
				t.lose("devices of %s: %s", d.Name, d.Unserved)
				continue
			}
			part = `device.driver == "chandler.dev" && ` + d.Devices
			known, t.driver = true, true
		}
		parts = append(parts, part)
	}
	if !known { // a driver that Chandler does not replace
		return celTerm{expr: t.factory.NewCall(0, operator, left, other)}
	}
	condition := expression.AnyOf(parts)
	if operator == operators.NotEquals {
		condition = "!(" + condition + ")"
	}
	return celTerm{expr: t.written(condition)}
}

// membership translates the operator in.
func (t *celTranslation) membership(left, right ast.Expr) celTerm {
	if right.Kind() == ast.ListKind && len(right.AsList().OptionalIndices()) == 0 {
		return t.comparison(operators.In, left, right.AsList().Elements(), right, true)
	}
	name, isText := stringLiteral(left)
	of := t.term(right)
	if of.maps == nil || !isText {
		return celTerm{expr: t.factory.NewCall(0, operators.In, t.plain(left), t.plain(right))}
	}
	field := t.field(of, name, true)
	return celTerm{expr: t.factory.NewMemberCall(0, "hasValue", field.expr)}
}

// member translates a call such as value.startsWith("x") or cel.bind(name, value, expression).
func (t *celTranslation) member(c ast.CallExpr) celTerm {
	args := c.Args()
	if c.FunctionName() == "bind" && c.Target().Kind() == ast.IdentKind && c.Target().AsIdent() == "cel" && len(args) == 3 && args[0].Kind() == ast.IdentKind {
		return t.bind(c)
	}
	target := t.term(c.Target())
	switch {
	case target.values != nil && c.FunctionName() == "orValue" && len(args) == 1:
		text, ok := stringLiteral(args[0])
		own, known := target.values(text)
		if !ok || !known {
			t.lose("the default of %s has no counterpart", target.source)
			return target
		}
		target.expr = t.factory.NewMemberCall(0, "orValue", target.expr, t.factory.NewLiteral(0, types.String(own)))
		return target
	case target.values != nil && c.FunctionName() == "hasValue":
		target.values = nil
	case !target.isPlain():
		t.plain(c.Target())
	}
	return celTerm{expr: t.factory.NewMemberCall(0, c.FunctionName(), target.expr, t.plains(args)...)}
}

// bind translates cel.bind. A variable for the attributes of a driver is replaced by its value,
// because their counterparts have several domains.
func (t *celTranslation) bind(c ast.CallExpr) celTerm {
	args := c.Args()
	name := args[0].AsIdent()
	bound := t.term(args[1])
	before := maps.Clone(t.vars)
	defer func() { t.vars = before }()
	if bound.maps != nil {
		t.vars[name] = bound
		return t.term(args[2])
	}
	value := bound.expr
	bound.expr = args[0]
	t.vars[name] = bound
	body := t.term(args[2])
	body.expr = t.factory.NewMemberCall(0, "bind", c.Target(), args[0], value, body.expr)
	return body
}
