package importer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// YAML returns the configuration and the objects, with the notes as comments at the beginning.
func (r *Result) YAML() ([]byte, error) {
	out := bytes.NewBufferString(r.head())
	provision, err := r.provisionComment()
	if err != nil {
		return nil, err
	}
	config, err := r.ConfigYAML()
	if err != nil {
		return nil, err
	}
	out.WriteString(provision)
	out.Write(config)
	for i, o := range r.objects {
		if i > 0 || config != nil {
			out.WriteString("---\n")
		}
		fmt.Fprintf(out, "# %s\n", strings.TrimSpace(o.from.origin()))
		text, err := textOf(o.node)
		if err != nil {
			return nil, err
		}
		out.WriteString(text)
	}
	return out.Bytes(), nil
}

// ConfigYAML returns the configuration alone, nil if there is none.
func (r *Result) ConfigYAML() ([]byte, error) {
	if r.Config == nil {
		return nil, nil
	}
	root, err := nodeOf(r.Config)
	if err != nil {
		return nil, err
	}
	r.addSources(root)
	config, err := textOf(root)
	return []byte(config), err
}

// nodeOf returns an object as YAML in block style.
func nodeOf(object any) (*yaml.Node, error) {
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
	blockStyle(root)
	orderFields(root)
	return root, nil
}

func textOf(root *yaml.Node) (string, error) {
	var out strings.Builder
	writer := yaml.NewEncoder(&out)
	writer.SetIndent(2)
	writer.CompactSeqIndent()
	err := writer.Encode(root)
	return out.String(), cmp.Or(err, writer.Close())
}

// provisionComment returns the configuration for "chandler provision" as a comment, "" if there is
// nothing to do.
func (r *Result) provisionComment() (string, error) {
	if len(r.Provision.Functions) == 0 {
		return "", nil
	}
	root, err := nodeOf(r.Provision)
	if err != nil {
		return "", err
	}
	config, err := textOf(root)
	var out strings.Builder
	out.WriteString("#\n# Write these lines to provision.yaml, and run \"chandler provision --config provision.yaml\" at each boot of the nodes:\n")
	for line := range strings.Lines(config) {
		out.WriteString("#   " + line)
	}
	return out.String(), err
}

// head returns the comment at the beginning of the file.
func (r *Result) head() string {
	var out strings.Builder
	fmt.Fprintf(&out, "# Imported: %s.\n", strings.Join(r.Formats, "; "))
	if r.Config != nil {
		out.WriteString("# mode DevicePlugin keeps pods on the API, the names and the IDs that they have now.\n")
	}
	if len(r.objects) > 0 {
		out.WriteString("# Claims get devices from nodes with mode DRA.\n")
	}
	for _, part := range []struct {
		title string
		pods  bool
	}{
		{"NOT carried over; pods get something else", true},
		{"Not carried over, or with something left to do; pods get the same", false},
	} {
		notes := slices.DeleteFunc(slices.Clone(r.Notes), func(n Note) bool { return n.Pods != part.pods })
		if len(notes) == 0 {
			continue
		}
		fmt.Fprintf(&out, "#\n# %s:\n", part.title)
		for _, n := range notes {
			fmt.Fprintf(&out, "# - %s\n", n)
		}
	}
	return out.String()
}

// blockStyle selects the block style for objects and lists, and quotes for strings only where
// needed: by YAML 1.2, and where YAML 1.1, by which the agent reads the file, has a boolean.
func blockStyle(node *yaml.Node) {
	node.Style = 0
	if node.ShortTag() == "!!str" && slices.Contains([]string{"y", "n", "yes", "no", "on", "off"}, strings.ToLower(node.Value)) {
		node.Style = yaml.DoubleQuotedStyle
	}
	for _, child := range node.Content {
		blockStyle(child)
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

// addSources adds a comment above each list entry with the entry's source.
func (r *Result) addSources(root *yaml.Node) {
	for i := 0; i+1 < len(root.Content); i += 2 {
		origins := r.origins[root.Content[i].Value]
		for j, entry := range root.Content[i+1].Content {
			if root.Content[i+1].Kind == yaml.SequenceNode && j < len(origins) && origins[j] != "" {
				entry.HeadComment = origins[j]
			}
		}
	}
}
