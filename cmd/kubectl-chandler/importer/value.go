package importer

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/api/v1alpha1"
)

// A value is a YAML or JSON node or an argument, with its place. The zero value stands for an
// absent value.
type value struct {
	node  *yaml.Node // without aliases and merges
	file  string
	above int    // number of lines in the file before the node's text, -1 if unknown
	path  string // such as data[config.json].resourceList[0]

	// nodes are the nodes to which the value applies, nil for all nodes.
	nodes *v1alpha1.Nodes
}

// isPresent reports whether the value is present, even if null.
func (v value) isPresent() bool { return v.node != nil }

// isNull reports whether the value is absent or null.
func (v value) isNull() bool { return v.node == nil || v.node.Tag == "!!null" }

func (v value) isMap() bool  { return v.node != nil && v.node.Kind == yaml.MappingNode }
func (v value) isList() bool { return v.node != nil && v.node.Kind == yaml.SequenceNode }
func (v value) isText() bool { return v.node != nil && v.node.Kind == yaml.ScalarNode && !v.isNull() }

// typeName returns the type of a value, with an article.
func (v value) typeName() string {
	switch {
	case v.isNull():
		return "null"
	case v.isMap():
		return "an object"
	case v.isList():
		return "a list"
	case v.node.Tag == "!!int", v.node.Tag == "!!float":
		return "a number"
	case v.node.Tag == "!!bool":
		return "a boolean"
	}
	return "a string"
}

// line returns the line in the file, 0 if unknown.
func (v value) line() int {
	if v.node == nil || v.above < 0 || v.node.Line == 0 {
		return 0
	}
	return v.above + v.node.Line
}

// origin returns the place of the value, for messages.
func (v value) origin() string {
	place := oneLine(v.file)
	if line := v.line(); line > 0 {
		place += ":" + strconv.Itoa(line)
	}
	return strings.TrimSpace(place + " " + oneLine(v.path))
}

// as returns another text at the value's place, such as when the value itself is too long to quote.
func (v value) as(text string) value {
	line := 0
	if v.node != nil {
		line = v.node.Line
	}
	v.node = newScalar(text, line)
	return v
}

// child returns a value that is part of this value.
func (v value) child(name string, node *yaml.Node) value {
	if v.path != "" && !strings.HasPrefix(name, "[") {
		name = "." + name
	}
	return value{node, v.file, v.above, v.path + name, v.nodes}
}

// at returns the value at a path of fields, an absent value if there is none.
func (v value) at(names ...string) value {
	for _, name := range names {
		found := value{file: v.file, above: v.above, path: v.path, nodes: v.nodes}
		for key, field := range v.fields() {
			if key == name {
				found = field
			}
		}
		v = found
	}
	return v
}

// respell returns an object whose field names have the given spelling where they differ only in
// case: Go's encoding/json accepts both.
func (v value) respell(names ...string) value {
	if !v.isMap() {
		return v
	}
	out := *v.node
	out.Content = slices.Clone(out.Content)
	for i := 0; i < len(out.Content); i += 2 {
		is := func(name string) bool { return strings.EqualFold(name, out.Content[i].Value) }
		if j := slices.IndexFunc(names, is); j >= 0 {
			out.Content[i] = newScalar(names[j], out.Content[i].Line)
		}
	}
	v.node = &out
	return v
}

// has reports whether all of the fields are present.
func (v value) has(names ...string) bool {
	for _, name := range names {
		if !v.at(name).isPresent() {
			return false
		}
	}
	return true
}

// hasAny reports whether any of the fields is present.
func (v value) hasAny(names ...string) bool {
	for _, name := range names {
		if v.at(name).isPresent() {
			return true
		}
	}
	return false
}

// fields returns the fields of an object in order. If a name occurs twice, the last field wins.
func (v value) fields() iter.Seq2[string, value] {
	return func(yield func(string, value) bool) {
		if !v.isMap() {
			return
		}
		for i := 0; i+1 < len(v.node.Content); i += 2 {
			name := v.node.Content[i].Value
			if !yield(name, v.child(fieldPath(name), v.node.Content[i+1])) {
				return
			}
		}
	}
}

// fieldPath returns the name of a field for use in a path.
func fieldPath(name string) string {
	if strings.ContainsAny(name, ".[] ") {
		return "[" + name + "]"
	}
	return name
}

// fieldsWith returns the names of the fields with at least one scalar.
func (v value) fieldsWith() (names []string) {
	for name, field := range v.fields() {
		if len(field.texts()) > 0 {
			names = append(names, name)
		}
	}
	return names
}

// items returns the items of a list. A single value is a list of itself, as in Go libraries that
// accept both.
func (v value) items() []value {
	if v.isNull() {
		return nil
	}
	if !v.isList() {
		return []value{v}
	}
	items := make([]value, len(v.node.Content))
	for i, node := range v.node.Content {
		items[i] = v.child(fmt.Sprintf("[%d]", i), node)
	}
	return items
}

// text returns the text of a scalar, "" for other values.
func (v value) text() string {
	if !v.isText() {
		return ""
	}
	return strings.TrimSpace(v.node.Value)
}

// texts returns the non-empty scalars of a list.
func (v value) texts() []string {
	var texts []string
	for _, item := range v.items() {
		if text := item.text(); text != "" {
			texts = append(texts, text)
		}
	}
	return texts
}

// number returns an integer, which may be quoted.
func (v value) number() (int, bool) {
	n, err := strconv.Atoi(v.text())
	return n, err == nil
}

// boolean returns a boolean, which may be quoted, and whether the value is one.
func (v value) boolean() (truth, ok bool) {
	switch strings.ToLower(v.text()) {
	case "yes", "on":
		return true, true
	case "no", "off":
		return false, true
	}
	truth, err := strconv.ParseBool(strings.ToLower(v.text()))
	return truth, err == nil
}

// isQuoted reports whether the value is a string in quotes, and so no number and no boolean.
func (v value) isQuoted() bool {
	return v.isText() && v.node.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle) != 0
}

// is reports whether the value is true.
func (v value) is() bool {
	truth, _ := v.boolean()
	return truth
}

// short returns the value's text, shortened for a note.
func (v value) short() string {
	if v.isNull() {
		return ""
	}
	if v.isText() {
		return cut(v.node.Value)
	}
	if len(v.node.Content) == 0 {
		return ""
	}
	data, err := yaml.Marshal(flowStyle(v.node, new(int)))
	if err != nil {
		return ""
	}
	return cut(string(data))
}

// cut returns the beginning of a text.
func cut(text string) string {
	text = oneLine(text)
	if runes := []rune(text); len(runes) > maxSaid {
		return string(runes[:maxSaid]) + "…"
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
		if *count++; *count > maxSaid && len(out.Content)%2 == 0 {
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
			return nil, &fileError{line: child.Line, message: "invalid YAML: the name of a field is not a string"}
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
		mergeFields(out, from)
	}
	return out, nil
}

// mergeFields adds the fields that the object does not have yet.
func mergeFields(into, from *yaml.Node) {
	if from == nil {
		return
	}
	if from.Kind == yaml.SequenceNode {
		for _, one := range from.Content {
			mergeFields(into, one)
		}
		return
	}
	if from.Kind != yaml.MappingNode {
		return
	}
	for i := 0; i+1 < len(from.Content); i += 2 {
		if !(value{node: into}).has(from.Content[i].Value) {
			into.Content = append(into.Content, from.Content[i], from.Content[i+1])
		}
	}
}
