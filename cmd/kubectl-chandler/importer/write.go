package importer

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/cmd/kubectl-chandler/importer/notes"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
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
		fmt.Fprintf(out, "# %s\n", strings.TrimSpace(o.From.Origin()))
		text, err := yamlnode.Text(o.Node)
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
	root, err := yamlnode.FromObject(r.Config)
	if err != nil {
		return nil, err
	}
	r.addSources(root)
	config, err := yamlnode.Text(root)
	return []byte(config), err
}

// provisionComment returns the configuration for "chandler provision" as a comment, "" if there is
// nothing to do.
func (r *Result) provisionComment() (string, error) {
	if len(r.Provision.Functions) == 0 {
		return "", nil
	}
	root, err := yamlnode.FromObject(r.Provision)
	if err != nil {
		return "", err
	}
	config, err := yamlnode.Text(root)
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
		listed := slices.DeleteFunc(slices.Clone(r.Notes), func(n notes.Note) bool { return n.Pods != part.pods })
		if len(listed) == 0 {
			continue
		}
		fmt.Fprintf(&out, "#\n# %s:\n", part.title)
		for _, n := range listed {
			fmt.Fprintf(&out, "# - %s\n", n)
		}
	}
	return out.String()
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
