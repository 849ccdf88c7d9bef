// Package source parses the files of an import to values: YAML, JSON, arguments and environment variables.
// Each value knows its file, line and path, for messages. The package opens no file, and is independent
// of device plugins.
package source

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
)

// A Value is a YAML or JSON node or an argument, with its place. The zero value stands for an
// absent value.
type Value struct {
	Node  *yaml.Node // without aliases and merges
	File  string
	Above int    // number of lines in the file before the node's text, -1 if unknown
	Path  string // such as data[config.json].resourceList[0]

	// Nodes are the nodes of the cluster to which the value applies, nil for all nodes.
	Nodes *v1alpha1.Nodes
}

// IsPresent reports whether the value is present, even if null.
func (v Value) IsPresent() bool { return v.Node != nil }

// IsNull reports whether the value is absent or null.
func (v Value) IsNull() bool { return v.Node == nil || v.Node.Tag == "!!null" }

// IsMap reports whether the value is an object.
func (v Value) IsMap() bool { return v.Node != nil && v.Node.Kind == yaml.MappingNode }

// IsList reports whether the value is a list.
func (v Value) IsList() bool { return v.Node != nil && v.Node.Kind == yaml.SequenceNode }

// IsText reports whether the value is a scalar other than null.
func (v Value) IsText() bool { return v.Node != nil && v.Node.Kind == yaml.ScalarNode && !v.IsNull() }

// TypeName returns the type of a value, with an article.
func (v Value) TypeName() string {
	switch {
	case v.IsNull():
		return "null"
	case v.IsMap():
		return "an object"
	case v.IsList():
		return "a list"
	case v.Node.Tag == "!!int", v.Node.Tag == "!!float":
		return "a number"
	case v.Node.Tag == "!!bool":
		return "a boolean"
	}
	return "a string"
}

// Line returns the line in the file, 0 if unknown.
func (v Value) Line() int {
	if v.Node == nil || v.Above < 0 || v.Node.Line == 0 {
		return 0
	}
	return v.Above + v.Node.Line
}

// Origin returns the place of the value, for messages.
func (v Value) Origin() string {
	place := OneLine(v.File)
	if line := v.Line(); line > 0 {
		place += ":" + strconv.Itoa(line)
	}
	return strings.TrimSpace(place + " " + OneLine(v.Path))
}

// WithText returns another text at the value's place, such as when the value itself is too long to quote.
func (v Value) WithText(text string) Value {
	line := 0
	if v.Node != nil {
		line = v.Node.Line
	}
	v.Node = yamlnode.NewScalar(text, line)
	return v
}

// child returns a value that is part of this value.
func (v Value) child(name string, node *yaml.Node) Value {
	if v.Path != "" && !strings.HasPrefix(name, "[") {
		name = "." + name
	}
	return Value{node, v.File, v.Above, v.Path + name, v.Nodes}
}

// At returns the value at a path of fields, an absent value if there is none.
func (v Value) At(names ...string) Value {
	for _, name := range names {
		found := Value{File: v.File, Above: v.Above, Path: v.Path, Nodes: v.Nodes}
		for key, field := range v.Fields() {
			if key == name {
				found = field
			}
		}
		v = found
	}
	return v
}

// RespellFields returns an object whose field names have the given spelling where they differ only in
// case: Go's encoding/json accepts both.
func (v Value) RespellFields(names ...string) Value {
	if !v.IsMap() {
		return v
	}
	out := *v.Node
	out.Content = slices.Clone(out.Content)
	for i := 0; i < len(out.Content); i += 2 {
		is := func(name string) bool { return strings.EqualFold(name, out.Content[i].Value) }
		if j := slices.IndexFunc(names, is); j >= 0 {
			out.Content[i] = yamlnode.NewScalar(names[j], out.Content[i].Line)
		}
	}
	v.Node = &out
	return v
}

// Has reports whether all of the fields are present.
func (v Value) Has(names ...string) bool {
	for _, name := range names {
		if !v.At(name).IsPresent() {
			return false
		}
	}
	return true
}

// HasAny reports whether any of the fields is present.
func (v Value) HasAny(names ...string) bool {
	for _, name := range names {
		if v.At(name).IsPresent() {
			return true
		}
	}
	return false
}

// Fields returns the fields of an object in order. If a name occurs twice, the last field wins.
func (v Value) Fields() iter.Seq2[string, Value] {
	return func(yield func(string, Value) bool) {
		if !v.IsMap() {
			return
		}
		for i := 0; i+1 < len(v.Node.Content); i += 2 {
			name := v.Node.Content[i].Value
			if !yield(name, v.FieldValue(name, v.Node.Content[i+1])) {
				return
			}
		}
	}
}

// FieldValue returns the value of a field of this object.
func (v Value) FieldValue(name string, node *yaml.Node) Value {
	return v.child(fieldPath(name), node)
}

// fieldPath returns the name of a field for use in a path.
func fieldPath(name string) string {
	if strings.ContainsAny(name, ".[] ") {
		return "[" + name + "]"
	}
	return name
}

// FieldName returns the name of the field that holds the value.
func (v Value) FieldName() string {
	if inside, ok := strings.CutSuffix(v.Path, "]"); ok {
		return inside[strings.LastIndex(inside, "[")+1:]
	}
	return v.Path[strings.LastIndex(v.Path, ".")+1:]
}

// FieldsExcept returns the fields of an object that are not in the list.
func (v Value) FieldsExcept(known ...string) (fields []Value) {
	for name, field := range v.Fields() {
		if !slices.Contains(known, name) {
			fields = append(fields, field)
		}
	}
	return fields
}

// OrPlaceOf returns the value if it is present, and otherwise the place of another value.
func (v Value) OrPlaceOf(other Value) Value {
	if v.IsPresent() {
		return v
	}
	return other.WithText("")
}

// FieldsWithText returns the names of the fields with at least one scalar.
func (v Value) FieldsWithText() (names []string) {
	for name, field := range v.Fields() {
		if len(field.ListTexts()) > 0 {
			names = append(names, name)
		}
	}
	return names
}

// ListItems returns the items of a list. A single value is a list of itself, as in Go libraries that
// accept both.
func (v Value) ListItems() []Value {
	if v.IsNull() {
		return nil
	}
	if !v.IsList() {
		return []Value{v}
	}
	items := make([]Value, len(v.Node.Content))
	for i, node := range v.Node.Content {
		items[i] = v.child(fmt.Sprintf("[%d]", i), node)
	}
	return items
}

// Text returns the text of a scalar, "" for other values.
func (v Value) Text() string {
	if !v.IsText() {
		return ""
	}
	return strings.TrimSpace(v.Node.Value)
}

// ListTexts returns the non-empty scalars of a list.
func (v Value) ListTexts() []string {
	var texts []string
	for _, item := range v.ListItems() {
		if text := item.Text(); text != "" {
			texts = append(texts, text)
		}
	}
	return texts
}

// AsInteger returns an integer, which may be quoted.
func (v Value) AsInteger() (int, bool) {
	n, err := strconv.Atoi(v.Text())
	return n, err == nil
}

// AsBoolean returns a boolean, which may be quoted, and whether the value is one.
func (v Value) AsBoolean() (truth, ok bool) {
	switch strings.ToLower(v.Text()) {
	case "yes", "on":
		return true, true
	case "no", "off":
		return false, true
	}
	truth, err := strconv.ParseBool(strings.ToLower(v.Text()))
	return truth, err == nil
}

// IsQuoted reports whether the value is a string in quotes, and so no number and no boolean.
func (v Value) IsQuoted() bool {
	return v.IsText() && v.Node.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle) != 0
}

// IsTrue reports whether the value is true.
func (v Value) IsTrue() bool {
	truth, _ := v.AsBoolean()
	return truth
}

// Short returns the value's text, shortened for a note.
func (v Value) Short() string {
	if v.IsNull() {
		return ""
	}
	if v.IsText() {
		return cut(v.Node.Value)
	}
	if len(v.Node.Content) == 0 {
		return ""
	}
	data, err := yaml.Marshal(flowStyle(v.Node, new(int)))
	if err != nil {
		return ""
	}
	return cut(string(data))
}

// cut returns the beginning of a text.
func cut(text string) string {
	text = OneLine(text)
	if runes := []rune(text); len(runes) > maxQuoted {
		return string(runes[:maxQuoted]) + "…"
	}
	return text
}

// flowStyle returns the first nodes of a value without comments, in YAML's flow style.
func flowStyle(node *yaml.Node, count *int) *yaml.Node {
	out := &yaml.Node{Kind: node.Kind, Tag: node.Tag, Value: node.Value}
	if node.Kind != yaml.ScalarNode {
		out.Style = yaml.FlowStyle
	} else {
		out.Value = cut(node.Value)
	}
	for _, child := range node.Content {
		if *count++; *count > maxQuoted && len(out.Content)%2 == 0 {
			break
		}
		out.Content = append(out.Content, flowStyle(child, count))
	}
	return out
}

// Limits on the nodes that aliases expand to, and on the depth of a document.
const (
	maxAliased = 20_000
	maxDepth   = 100
)

var errAliases = errors.New("the document is too large or too deep after its aliases are resolved")

// resolveAliases returns a copy of a node with aliases expanded and merges (<<) applied. budget is
// the number of nodes that aliases may still expand to.
func resolveAliases(node *yaml.Node, budget *int, aliased bool, depth int) (*yaml.Node, error) {
	if aliased {
		*budget--
	}
	if *budget < 0 || depth > maxDepth {
		return nil, errAliases
	}
	if node.Kind == yaml.AliasNode {
		return resolveAliases(node.Alias, budget, true, depth+1)
	}
	out := &yaml.Node{Kind: node.Kind, Tag: node.ShortTag(), Value: node.Value, Style: node.Style, Line: node.Line, Column: node.Column}
	var merged []*yaml.Node
	for i, child := range node.Content {
		if node.Kind == yaml.MappingNode && i%2 == 0 && child.Kind != yaml.ScalarNode && child.Kind != yaml.AliasNode {
			return nil, &Error{Line: child.Line, Message: "invalid YAML: the name of a field is not a string"}
		}
		copied, err := resolveAliases(child, budget, aliased, depth+1)
		if err != nil {
			return nil, err
		}
		if node.Kind == yaml.MappingNode && i%2 == 1 && node.Content[i-1].ShortTag() == "!!merge" {
			out.Content = out.Content[:len(out.Content)-1]
			merged = append(merged, copied)
			continue
		}
		out.Content = append(out.Content, copied)
	}
	for _, from := range merged {
		yamlnode.MergeFields(out, from)
	}
	return out, nil
}

// maxQuoted is the number of characters that a note quotes.
const maxQuoted = 100

// OneLine returns text in a form that fits into a comment.
func OneLine(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, text)
}
