package source

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"chandler.dev/internal/yamlerror"
)

// Parse returns the documents of a file: YAML, JSON with or without comments, arguments, or
// environment variables.
func Parse(file string, data []byte) ([]Value, error) {
	text, err := decodeText(data)
	if err != nil {
		return nil, err
	}
	if strings.TrimSpace(text) == "" {
		return nil, errors.New("is empty")
	}
	if looksLikeArguments(text) {
		return []Value{argumentsOf(file, text)}, nil
	}
	if looksLikeVariables(text) {
		return []Value{variablesOf(file, text)}, nil
	}
	nodes, err := parseNodes(text)
	if err != nil {
		return nil, err
	}
	if len(nodes) == 0 {
		return nil, errors.New("contains only empty documents or comments")
	}
	var documents []Value
	for _, node := range nodes {
		documents = append(documents, Value{Node: node, File: file})
	}
	return documents, nil
}

// ParseEmbedded parses a file in a string value, such as in a ConfigMap. A value that is not a string is
// returned unchanged.
func ParseEmbedded(v Value) (Value, error) {
	if !v.IsText() {
		return v, nil
	}
	inside := Value{File: v.File, Above: -1, Path: v.Path, Nodes: v.Nodes}
	quoted := false // the lines of the string differ from those of its value
	switch {
	case v.Above < 0:
	case v.Node.Style&yaml.LiteralStyle != 0:
		inside.Above = v.Above + v.Node.Line // the text starts below the line with |
	case v.Node.Column == 0: // an argument starts on its own line
		inside.Above = v.Above + v.Node.Line - 1
	default:
		inside.Above, quoted = v.Above, true
	}
	nodes, err := parseNodes(v.Node.Value)
	if syntax := (*Error)(nil); errors.As(err, &syntax) {
		switch {
		case inside.Above < 0:
			syntax.Line = 0
		case quoted:
			syntax.Line = v.Line()
		case syntax.Line > 0:
			syntax.Line += inside.Above
		}
	}
	if err != nil {
		return Value{}, err
	}
	if len(nodes) == 0 {
		return Value{}, errors.New("is empty")
	}
	if inside.Node = nodes[0]; quoted {
		setLine(inside.Node, v.Node.Line)
	}
	return inside, nil
}

// A Error is an error at a place in a file.
type Error struct {
	file    string
	Line    int    // in the file, 0 if unknown
	path    string // of a field, or ""
	Message string
}

// Error returns the place as FILE:LINE, like the notes of a [Result] and the findings of validate.
func (e *Error) Error() string {
	place := e.file
	switch {
	case e.Line > 0 && e.file == "": // in a note, which has the file
		place = fmt.Sprintf("line %d", e.Line)
	case e.Line > 0:
		place = fmt.Sprintf("%s:%d", e.file, e.Line)
	}
	parts := slices.DeleteFunc([]string{place, e.path, e.Message}, func(part string) bool { return part == "" })
	return strings.Join(parts, ": ")
}

// PlaceErrors returns the errors that err joins, each with the file.
func PlaceErrors(file string, err error) (errs []error) {
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		for _, err := range joined.Unwrap() {
			errs = append(errs, PlaceErrors(file, err)...)
		}
		return errs
	}
	if placed := (*Error)(nil); errors.As(err, &placed) {
		placed.file = file
		return []error{placed}
	}
	return []error{fmt.Errorf("%s: %w", file, err)}
}

// ErrorInField returns an error with the path of its field.
func ErrorInField(path string, err error) error {
	if placed := (*Error)(nil); errors.As(err, &placed) {
		placed.path = path
		return placed
	}
	return fmt.Errorf("%s: %w", path, err)
}

// setLine sets the line of a node and of all nodes below it.
func setLine(node *yaml.Node, line int) {
	node.Line = line
	for _, child := range node.Content {
		setLine(child, line)
	}
}

// decodeText returns a text as UTF-8, without a byte order mark and with Unix line ends.
func decodeText(data []byte) (string, error) {
	switch {
	case bytes.HasPrefix(data, []byte("\xff\xfe")), bytes.HasPrefix(data, []byte("\xfe\xff")):
		units := make([]uint16, 0, len(data)/2)
		for i := 2; i+1 < len(data); i += 2 {
			if data[0] == 0xff {
				units = append(units, uint16(data[i])|uint16(data[i+1])<<8)
			} else {
				units = append(units, uint16(data[i+1])|uint16(data[i])<<8)
			}
		}
		data = []byte(string(utf16.Decode(units)))
	default:
		data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	}
	if !utf8.Valid(data) || bytes.ContainsRune(data, 0) {
		return "", errors.New("is not a text file")
	}
	return strings.ReplaceAll(strings.ReplaceAll(string(data), "\r\n", "\n"), "\r", "\n"), nil
}

// action matches an action of a Go template in a chart.
var action = regexp.MustCompile(`\{\{-?\s*(?:[.$"(]|/\*|[a-zA-Z]+\b)`)

// errTemplate is the error for a chart template that Helm has not rendered.
func errTemplate(line int) error {
	return &Error{Line: line, Message: "is a Helm template, and not YAML; import the output of \"helm template\", or the values file"}
}

// templateLine returns the line of the first action outside of comments, 0 if there is none.
func templateLine(text string) int {
	line := 0
	for l := range strings.Lines(text) {
		line++
		if !strings.HasPrefix(strings.TrimSpace(l), "#") && action.MatchString(l) {
			return line
		}
	}
	return 0
}

// parseNodes returns the non-empty documents of YAML or JSON.
func parseNodes(text string) ([]*yaml.Node, error) {
	nodes, err := parseYAML(text)
	if err == nil {
		return nodes, nil
	}
	if line := templateLine(text); line > 0 {
		return nil, errTemplate(line)
	}
	if omission.MatchString(text) {
		if nodes, err := parseYAML(omission.ReplaceAllString(text, "")); err == nil {
			return nodes, nil
		}
	}
	if plain, ok := plainJSON(text); ok {
		nodes, jsonErr := parseYAML(plain)
		if jsonErr == nil {
			return nodes, nil
		}
		if node, ok := parseJSON(plain); ok {
			return []*yaml.Node{node}, nil
		}
		return nil, cmp.Or(errJSON(plain), jsonErr)
	}
	return nil, err
}

// errYAML returns the error for a text that the YAML decoder rejects with err.
func errYAML(text string, err error) error {
	line, message := yamlerror.Find(text)
	if message == "" { // valid for yaml/v2
		message = strings.TrimPrefix(err.Error(), "yaml: ")
	}
	return &Error{Line: line, Message: "invalid YAML: " + message}
}

// errJSON returns an error with the line of the first JSON syntax error, nil if the text is valid.
func errJSON(text string) error {
	var content any
	err := json.Unmarshal([]byte(text), &content)
	if wrong := (*json.SyntaxError)(nil); errors.As(err, &wrong) {
		line := 1 + strings.Count(text[:min(len(text), max(0, int(wrong.Offset)-1))], "\n")
		return &Error{Line: line, Message: "invalid JSON: " + err.Error()}
	}
	return err
}

// omission matches a line with an ellipsis, as documentation uses it.
var omission = regexp.MustCompile(`(?m)^[ \t]+(?:\.\.\.+|…)[ \t]*$`)

func parseYAML(text string) (nodes []*yaml.Node, err error) {
	decoder := yaml.NewDecoder(strings.NewReader(text))
	budget := maxAliased
	for {
		var document yaml.Node
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			return nodes, nil
		}
		if err != nil {
			return nil, errYAML(text, err)
		}
		node, err := resolveAliases(&document, &budget, false, 0)
		if err != nil {
			return nil, err
		}
		if node.Kind == yaml.DocumentNode && len(node.Content) == 1 && node.Content[0].Tag != "!!null" {
			nodes = append(nodes, node.Content[0])
		}
	}
}

// parseJSON parses JSON that the YAML parser rejects, such as some escapes.
func parseJSON(text string) (*yaml.Node, bool) {
	var content any
	if json.Unmarshal([]byte(text), &content) != nil {
		return nil, false
	}
	data, err := yaml.Marshal(content)
	if err != nil {
		return nil, false
	}
	nodes, err := parseYAML(string(data))
	if err != nil || len(nodes) != 1 {
		return nil, false
	}
	return nodes[0], true
}

// plainJSON removes comments and trailing commas from text that looks like JSON, and replaces tabs
// between tokens. Line numbers stay the same.
func plainJSON(text string) (string, bool) {
	var out strings.Builder
	started := false
	for i := 0; i < len(text); {
		rest := text[i:]
		switch c := text[i]; {
		case c == '"':
			n := quotedLength(rest)
			out.WriteString(rest[:n])
			i += n
		case strings.HasPrefix(rest, "//"), c == '#':
			n := strings.IndexByte(rest, '\n')
			if n < 0 {
				n = len(rest)
			}
			i += n
		case strings.HasPrefix(rest, "/*"):
			n := strings.Index(rest, "*/")
			if n < 0 {
				return "", false
			}
			out.WriteString(strings.Repeat("\n", strings.Count(rest[:n], "\n")))
			i += n + 2
		case c == '\t':
			out.WriteByte(' ')
			i++
		default:
			if !started && c != ' ' && c != '\n' {
				if c != '{' && c != '[' {
					return "", false
				}
				started = true
			}
			out.WriteByte(c)
			i++
		}
	}
	return trailingComma(out.String()), started
}

// quotedLength returns the length of the quoted string at the beginning of a text.
func quotedLength(text string) int {
	for i := 1; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return len(text)
}

// trailingComma removes commas before closing brackets, and after the last one.
func trailingComma(text string) string {
	out := []byte(text)
	comma := -1
	for i := 0; i < len(out); i++ {
		switch c := out[i]; c {
		case '"':
			i += quotedLength(text[i:]) - 1
			comma = -1
		case ',':
			comma = i
		case '}', ']':
			if comma >= 0 {
				out[comma] = ' '
			}
			comma = -1
		case ' ', '\n':
		default:
			comma = -1
		}
	}
	return string(out)
}
