// Package yamlerror finds the lines of syntax errors in YAML.
package yamlerror

import (
	"errors"
	"io"
	"sort"
	"strconv"
	"strings"

	yamlv2 "go.yaml.in/yaml/v2"
	"go.yaml.in/yaml/v3"

	"chandler.dev/internal/pattern"
)

var (
	// withLine matches an error of the decoders with a line (parser.fail in decode.go of
	// go.yaml.in/yaml v2.4.4 and v3.0.5).
	withLine = pattern.Lazy(`^yaml: line (\d+): (?s:(.*))$`)

	// fromParser matches the errors of the parser (parserc.go), as opposed to those of the scanner
	// (scannerc.go). The decoders count the lines of the parser's errors from 0, and those of the
	// scanner's errors from 1.
	fromParser = pattern.Lazy(`^(?:did not find expected (?:<|node content|'-' indicator|key|',' or)|found (?:undefined tag handle|duplicate %|incompatible YAML document))`)

	// atStart matches the errors of the scanner that yaml/v2 reports at the end of a token, and
	// yaml/v3 at its start.
	atStart = pattern.Lazy(`^(?:found unexpected (?:end of stream|document indicator)|could not find expected ':')`)

	unknownAnchor = pattern.Lazy(`^yaml: unknown anchor '.*' referenced$`)
)

// Find returns the line and the message of the first syntax error in the documents of a text. The
// line is 0 if it is unknown, and the message is "" if there is no error.
func Find(text string) (line int, message string) {
	// The decoders report no line for an error in the first line. With an empty line in front there
	// is no such error.
	shifted := "\n" + text
	err := decode(yamlv2.NewDecoder(strings.NewReader(shifted)))
	if err == nil {
		return 0, ""
	}
	if unknownAnchor().MatchString(err.Error()) {
		return lineOfAlias(text, err), strings.TrimPrefix(err.Error(), "yaml: ")
	}
	found := withLine().FindStringSubmatch(err.Error())
	if found == nil {
		return 0, strings.TrimPrefix(err.Error(), "yaml: ")
	}
	if atStart().MatchString(found[2]) {
		if v3Err := decode(yaml.NewDecoder(strings.NewReader(shifted))); v3Err != nil {
			if other := withLine().FindStringSubmatch(v3Err.Error()); other != nil && other[2] == found[2] {
				found = other
			}
		}
	}
	if line, err = strconv.Atoi(found[1]); err != nil {
		return 0, found[2]
	}
	if !fromParser().MatchString(found[2]) {
		line--
	}
	last := 1 + strings.Count(strings.TrimRight(text, "\n"), "\n")
	return max(1, min(line, last)), found[2]
}

// lineOfAlias returns the line of the first alias without an anchor: the number of lines after which
// the decoder reports it.
func lineOfAlias(text string, err error) int {
	lines := strings.SplitAfter(text, "\n")
	return sort.Search(len(lines), func(n int) bool {
		part := decode(yamlv2.NewDecoder(strings.NewReader(strings.Join(lines[:n], ""))))
		return part != nil && part.Error() == err.Error()
	})
}

// decode decodes all documents, and returns the first error.
func decode(decoder interface{ Decode(any) error }) error {
	for {
		var content any
		if err := decoder.Decode(&content); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
