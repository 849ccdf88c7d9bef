package validation

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/internal/yamlerror"
)

// A place is a place in a file.
type place struct {
	file   string
	line   int    // of the field or of its nearest known parent; 0 for the file as a whole
	object string // such as DeviceClass gpu.example.com
	path   string // such as spec.config[0]

	text  string     // the document that contains the place
	node  *yaml.Node // the field's value, nil if unknown
	above int        // number of lines in the file before the node's text, -1 if unknown
}

// placeOf returns the place of a document that begins at the given line.
func placeOf(file string, line int, document string) place {
	p := place{file: file, line: line + blankLines(document), text: document}
	p.node, p.above = parsed(document), line-1
	return p
}

// parsed returns a document with the lines of its fields, or nil if the document is not YAML, which
// the decoder reports.
func parsed(document string) *yaml.Node {
	var root yaml.Node
	if err := yaml.Unmarshal([]byte(document), &root); err != nil || len(root.Content) == 0 {
		return nil
	}
	return root.Content[0]
}

// at returns the place of a field below the place.
func (p place) at(path string) place {
	if p.path != "" && !strings.HasPrefix(path, "[") {
		p.path += "."
	}
	p.path += path
	return p.descendTo(path)
}

// descendTo returns the place with the line of a field below it. If the field is missing, the line
// is that of its nearest existing parent.
func (p place) descendTo(path string) place {
	for path != "" && p.node != nil {
		var name string
		name, path = cutName(path)
		line := 0
		if p.node, line = child(p.node, name); line > 0 {
			p.line = p.above + line
		}
	}
	return p
}

// cutName cuts the first name or index off a field path. Brackets contain an index or a map key:
// data[config.yaml].
func cutName(path string) (name, rest string) {
	if inside, ok := strings.CutPrefix(path, "["); ok {
		name, rest, _ = strings.Cut(inside, "]")
		return name, strings.TrimPrefix(rest, ".")
	}
	if i := strings.IndexAny(path, ".["); i >= 0 {
		return path[:i], strings.TrimPrefix(path[i:], ".")
	}
	return path, ""
}

// child returns the value of a field or an item and its first line, nil if there is none.
func child(n *yaml.Node, name string) (*yaml.Node, int) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == name {
				return n.Content[i+1], n.Content[i].Line
			}
		}
	case yaml.SequenceNode:
		if i, err := strconv.Atoi(name); err == nil && 0 <= i && i < len(n.Content) {
			return n.Content[i], n.Content[i].Line
		}
	}
	return nil, 0
}

// insideString returns the place of a document in a string, such as a file in a ConfigMap.
func (p place) insideString() place {
	if p.node != nil {
		p.text = p.node.Value
	}
	if p.node == nil || p.node.Kind != yaml.ScalarNode || p.node.Style&yaml.LiteralStyle == 0 {
		p.node, p.above = nil, -1 // its lines differ from those of the file
		return p
	}
	p.above += p.node.Line // the document starts below the line with |
	p.node = parsed(p.node.Value)
	return p
}

// ofError returns the place with the line of the field that an error is about, if the error has the
// field's path.
func (p place) ofError(err error) place {
	var about interface{ FieldPath() string }
	if errors.As(err, &about) {
		p.line = p.descendTo(about.FieldPath()).line
	}
	return p
}

// yamlError matches a line of the errors of the YAML decoder that are not about the syntax (TypeError
// in go.yaml.in/yaml v2 and v3), with the number of a line in the document.
var yamlError = regexp.MustCompile(`(?m)^(?:.*yaml: |\s*)line (\d+): (.*)$`)

// ofYAML returns the errors in a message of the YAML decoder with their places, nil if the message
// is another one.
func (p place) ofYAML(message string) (errors []finding) {
	if strings.Contains(message, "yaml: ") {
		if line, cause := yamlerror.Find(p.text); cause != "" {
			if line > 0 && p.above >= 0 {
				p.line = p.above + line
			}
			return []finding{{place: p, text: "invalid YAML: " + cause}}
		}
	}
	for _, found := range yamlError.FindAllStringSubmatch(message, -1) {
		at := p
		if line, err := strconv.Atoi(found[1]); err == nil && p.above >= 0 {
			at.line = p.above + line
		}
		errors = append(errors, finding{place: at, text: "invalid YAML: " + found[2]})
	}
	message = strings.TrimPrefix(message, "error converting YAML to JSON: ")
	if cause, without := strings.CutPrefix(message, "yaml: "); without && errors == nil { // an error without a line
		errors = append(errors, finding{place: p, text: "invalid YAML: " + cause})
	}
	return errors
}

func (p place) String() string {
	if p.line > 0 {
		return fmt.Sprintf("%s:%d", p.file, p.line)
	}
	return p.file
}
