// Package validation checks files with objects for Chandler before they are used, with the code
// that the agent checks them with.
package validation

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"

	"chandler.dev/internal/command"
	"chandler.dev/internal/inventory"
)

// Files checks files and prints its findings. It continues after an error, so that a single
// run finds all errors.
func Files(in io.Reader, out io.Writer, files []string) error {
	v := newValidator()
	for _, file := range files {
		v.named(in, file)
	}
	v.checkClaims()
	v.sharedNames()
	slices.SortStableFunc(v.findings, func(a, b finding) int {
		return cmp.Or(cmp.Compare(slices.Index(v.files, a.file), slices.Index(v.files, b.file)), cmp.Compare(a.line, b.line))
	})
	counts := make(map[severity]int)
	for _, f := range v.findings {
		fmt.Fprintln(out, f)
		counts[f.severity]++
	}
	if note := v.otherKinds(); note != "" {
		fmt.Fprintln(out, note)
	}
	if v.checked == 0 && counts[severityError] == 0 {
		return errors.New("no object was checked: the files contain nothing for Chandler")
	}
	fmt.Fprintf(out, "%s checked: %s, %s\n", inventory.CountNoun(v.checked, "object"), inventory.CountNoun(counts[severityError], "error"), inventory.CountNoun(counts[severityWarning], "warning"))
	if counts[severityError] > 0 {
		return errors.New(inventory.CountNoun(counts[severityError], "error"))
	}
	return nil
}

// CheckObject checks a single object in YAML. The error joins its errors; warnings and notes are left out.
func CheckObject(data []byte) error {
	v := newValidator()
	v.checkDocument(place{}, string(data))
	v.checkClaims()
	var errs []error
	for _, f := range v.findings {
		if f.severity == severityError {
			errs = append(errs, errors.New(strings.Join(strings.Fields(f.path+" "+f.text), " ")))
		}
	}
	return errors.Join(errs...)
}

// otherKinds returns a note about the objects that are not checked, "" if there are none.
func (v *validator) otherKinds() string {
	var kinds []string
	for _, kind := range slices.Sorted(maps.Keys(v.others)) {
		kinds = append(kinds, fmt.Sprintf("%d %s", v.others[kind], kind))
	}
	if len(kinds) == 0 {
		return ""
	}
	return "note: not checked, since they contain nothing for Chandler: " + strings.Join(kinds, ", ")
}

// named checks a file, or all files of a directory.
func (v *validator) named(in io.Reader, name string) {
	files, err := filesOf(name)
	if err != nil {
		v.addFindings(place{file: name}, severityError, err)
	}
	for _, file := range files {
		v.files = append(v.files, file)
		data, err := command.ReadInput(in, file)
		if err != nil {
			v.addFindings(place{file: file}, severityError, err)
			continue
		}
		v.found = file != name
		v.file(file, string(data))
	}
}

// filesOf returns the YAML and JSON files below a directory, in order. If name is not a directory,
// it returns the name. It returns an error for unreadable files and directories, together with the
// other files.
func filesOf(name string) ([]string, error) {
	if info, err := os.Stat(name); name == "-" || err != nil || !info.IsDir() {
		return []string{name}, nil
	}
	var files []string
	var errs []error
	err := filepath.WalkDir(name, func(file string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			errs = append(errs, err)
		case entry.IsDir() && isChart(file):
			return fs.SkipDir
		case !entry.IsDir() && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(file)):
			files = append(files, file)
		}
		return nil
	})
	if errs = append(errs, err); len(files) == 0 {
		errs = append(errs, errors.New("has no files that end in .yaml, .yml or .json"))
	}
	return files, errors.Join(errs...)
}

// isChart reports whether a directory is a Helm chart, whose templates are not objects until Helm
// renders them.
func isChart(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "Chart.yaml"))
	return err == nil
}

// A severity is the importance of a finding. Only errors make validate fail.
type severity string

const (
	severityError   severity = "error"
	severityWarning severity = "warning"
	severityNote    severity = "note"
)

// A finding is a message about a place in a file.
type finding struct {
	place
	severity severity
	text     string
}

func (f finding) String() string {
	parts := []string{f.place.String(), string(f.severity), f.object, f.path, strings.TrimSpace(f.text)}
	out := strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), ": ")
	return strings.ReplaceAll(out, "\n", "\n    ")
}

// A validator collects findings.
type validator struct {
	decoder  runtime.Decoder
	findings []finding
	files    []string // in the order in which they were checked
	checked  int
	found    bool                    // the file was found in a directory, not named
	classes  map[string][]namedClass // by extended resource name
	others   map[string]int          // number of objects that are not checked, by kind

	classConfigs map[string][]configEntry // by DeviceClass
	claims       []claimConfig
}

func newValidator() *validator {
	return &validator{
		decoder: serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer(),
		classes: make(map[string][]namedClass),
		others:  make(map[string]int),

		classConfigs: make(map[string][]configEntry),
	}
}

// addFindings adds a finding for each of the errors that err joins, without their common prefix.
func (v *validator) addFindings(at place, s severity, err error) {
	errs := []error{err}
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		errs = joined.Unwrap()
	}
	for _, err := range errs {
		if syntax := at.ofYAML(err.Error()); syntax != nil {
			for _, f := range syntax {
				v.findings = append(v.findings, finding{f.place, s, f.text})
			}
			continue
		}
		v.findings = append(v.findings, finding{at.ofError(err), s, err.Error()})
	}
}

func (v *validator) errorf(at place, format string, args ...any) {
	v.addFindings(at, severityError, fmt.Errorf(format, args...))
}

func (v *validator) notef(at place, format string, args ...any) {
	v.addFindings(at, severityNote, fmt.Errorf(format, args...))
}

// separator matches the beginning of a YAML document.
var separator = regexp.MustCompile(`(?m)^---(?:[ \t\r]|$)`)

// file checks the documents of a file. It splits them itself, because a YAML reader stops after the
// first error.
func (v *validator) file(name, text string) {
	line, before := 1, v.checked+len(v.findings)+len(v.others)
	for _, document := range separator.Split(text, -1) {
		v.checkDocument(placeOf(name, line, document), document)
		line += strings.Count(document, "\n")
	}
	if v.checked+len(v.findings)+len(v.others) == before {
		v.notef(place{file: name}, "has no objects")
	}
}

// blankLines counts the empty lines and comments at the beginning of a document.
func blankLines(document string) int {
	count := 0
	for line := range strings.Lines(document) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "#") {
			return count
		}
		count++
	}
	return 0
}
