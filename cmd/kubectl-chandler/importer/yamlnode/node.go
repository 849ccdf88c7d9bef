// Package yamlnode creates, changes and writes YAML nodes.
package yamlnode

import (
	"bytes"
	"cmp"
	"encoding/json"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// NewScalar returns a string.
func NewScalar(text string, line int) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text, Line: line}
}

// NewObject returns a mapping node of alternating names and nodes.
func NewObject(line int, fields ...any) *yaml.Node {
	out := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Line: line}
	for i := 0; i+1 < len(fields); i += 2 {
		name, _ := fields[i].(string)
		node, _ := fields[i+1].(*yaml.Node)
		if node == nil {
			node = &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null"}
		}
		out.Content = append(out.Content, NewScalar(name, line), node)
	}
	return out
}

// SetField sets a field of an object.
func SetField(node *yaml.Node, name string, field *yaml.Node) {
	if node == nil || node.Kind != yaml.MappingNode {
		return
	}
	RemoveField(node, name)
	node.Content = append(node.Content, NewScalar(name, node.Line), field)
}

// RemoveField removes a field of an object.
func RemoveField(node *yaml.Node, name string) {
	if node == nil || node.Kind != yaml.MappingNode {
		return
	}
	for i := 0; i+1 < len(node.Content); {
		if node.Content[i].Value == name {
			node.Content = slices.Delete(node.Content, i, i+2)
			continue
		}
		i += 2
	}
}

// Clone returns a copy of a node and all of its children.
func Clone(node *yaml.Node) *yaml.Node {
	if node == nil {
		return nil
	}
	out := *node
	out.Content = make([]*yaml.Node, len(node.Content))
	for i, child := range node.Content {
		out.Content[i] = Clone(child)
	}
	return &out
}

// MergeFields adds the fields that the object does not have yet.
func MergeFields(into, from *yaml.Node) {
	if from == nil {
		return
	}
	if from.Kind == yaml.SequenceNode {
		for _, one := range from.Content {
			MergeFields(into, one)
		}
		return
	}
	if from.Kind != yaml.MappingNode {
		return
	}
	for i := 0; i+1 < len(from.Content); i += 2 {
		if !hasField(into, from.Content[i].Value) {
			into.Content = append(into.Content, from.Content[i], from.Content[i+1])
		}
	}
}

// FromObject returns an object as YAML in block style.
func FromObject(object any) (*yaml.Node, error) {
	var plain bytes.Buffer
	encoder := json.NewEncoder(&plain)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(object); err != nil {
		return nil, err
	}
	var document yaml.Node
	if err := yaml.Unmarshal(plain.Bytes(), &document); err != nil {
		return nil, err
	}
	root := document.Content[0]
	SetBlockStyle(root)
	orderFields(root)
	return root, nil
}

// Text returns a node as YAML.
func Text(root *yaml.Node) (string, error) {
	var out strings.Builder
	writer := yaml.NewEncoder(&out)
	writer.SetIndent(2)
	writer.CompactSeqIndent()
	err := writer.Encode(root)
	return out.String(), cmp.Or(err, writer.Close())
}

// SetBlockStyle selects the block style for objects and lists, and quotes for strings only where
// needed: by YAML 1.2, and where YAML 1.1, by which the agent reads the file, has a boolean.
func SetBlockStyle(node *yaml.Node) {
	node.Style = 0
	if node.ShortTag() == "!!str" && slices.Contains([]string{"y", "n", "yes", "no", "on", "off"}, strings.ToLower(node.Value)) {
		node.Style = yaml.DoubleQuotedStyle
	}
	for _, child := range node.Content {
		SetBlockStyle(child)
	}
}

// first lists the fields at the beginning of an object.
var first = []string{"apiVersion", "kind", "mode", "name", "resource", "cel"}

// orderFields moves the identifying fields of an object to its beginning.
func orderFields(node *yaml.Node) {
	for _, child := range node.Content {
		orderFields(child)
	}
	if node.Kind != yaml.MappingNode {
		return
	}
	var fields []*yaml.Node
	for _, name := range first {
		for i := 0; i+1 < len(node.Content); i += 2 {
			if node.Content[i].Value == name {
				fields = append(fields, node.Content[i], node.Content[i+1])
			}
		}
	}
	for i := 0; i+1 < len(node.Content); i += 2 {
		if !slices.Contains(first, node.Content[i].Value) {
			fields = append(fields, node.Content[i], node.Content[i+1])
		}
	}
	node.Content = fields
}

// hasField reports whether an object has a field.
func hasField(node *yaml.Node, name string) bool {
	for i := 0; i+1 < len(node.Content); i += 2 {
		if node.Content[i].Value == name {
			return true
		}
	}
	return false
}
