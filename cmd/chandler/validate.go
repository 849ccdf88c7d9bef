package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
)

func newValidateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "validate FILE...",
		Short: "Check configurations, claims and device classes before they are used",
		Long: `Check what is written for Chandler, with the code that the agent checks it with.
Files are YAML or JSON, with any number of documents; - is standard input. It
needs no cluster. What is checked:

  DriverConfig, ProvisionConfig, ClaimParameters
      fields, values, and that expressions compile
  ConfigMap
      the configurations of Chandler that it holds
  ResourceClaim, ResourceClaimTemplate, DeviceClass
      fields, that selectors compile, and parameters for chandler.dev
  DeviceClass
      that no two of the files have one extendedResourceName (a warning)
  Pod, and whatever has a template for pods
      that the claims which containers name are claims of the pod

Other objects are named, and not checked. The exit code is 0 without errors;
warnings do not count.`,
		Example: `  chandler validate config.yaml
  chandler validate deployments/*.yaml my-classes.yaml
  kubectl get deviceclasses -o yaml | chandler validate -`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return validateFiles(cmd.InOrStdin(), cmd.OutOrStdout(), args)
		},
	}
}

// validateFiles checks files and prints what it found in them. It goes on after
// an error, so that all are seen at once.
func validateFiles(in io.Reader, out io.Writer, files []string) error {
	v := newValidator()
	for _, file := range files {
		data, err := readInput(in, file)
		if err != nil {
			v.report(place{file: file}, severityError, err)
			continue
		}
		v.file(file, string(data))
	}
	v.sharedNames()
	counts := make(map[severity]int)
	for _, f := range v.findings {
		fmt.Fprintln(out, f)
		counts[f.severity]++
	}
	fmt.Fprintf(out, "%s checked: %s, %s\n", number(v.checked, "object"), number(counts[severityError], "error"), number(counts[severityWarning], "warning"))
	if counts[severityError] > 0 {
		return errors.New(number(counts[severityError], "error"))
	}
	return nil
}

func readInput(in io.Reader, file string) ([]byte, error) {
	if file == "-" {
		return io.ReadAll(in)
	}
	return os.ReadFile(file)
}

func number(n int, of string) string {
	if n == 1 {
		return "1 " + of
	}
	return fmt.Sprintf("%d %ss", n, of)
}

// A severity says what a finding means: only errors make validate fail.
type severity string

const (
	severityError   severity = "error"
	severityWarning severity = "warning"
	severityNote    severity = "note"
)

// A place is where something is written.
type place struct {
	file   string
	line   int    // at which the document begins, 0 for the file as a whole
	object string // DeviceClass gpu.example.com
	path   string // spec.config[0]
}

// at returns the place of a field below the place.
func (p place) at(path string) place {
	if p.path != "" && !strings.HasPrefix(path, "[") {
		p.path += "."
	}
	p.path += path
	return p
}

// A finding is what validate says of a place.
type finding struct {
	place
	severity severity
	text     string
}

func (f finding) String() string {
	out := f.file
	if f.line > 0 {
		out = fmt.Sprintf("%s:%d", f.file, f.line)
	}
	for _, part := range []string{string(f.severity), f.object, f.path, strings.TrimSpace(f.text)} {
		if part != "" {
			out += ": " + part
		}
	}
	return strings.ReplaceAll(out, "\n", "\n    ")
}

// A validator collects what is found in files.
type validator struct {
	decoder  runtime.Decoder
	findings []finding
	checked  int
	classes  map[string][]namedClass // by extended resource name
}

func newValidator() *validator {
	return &validator{
		decoder: serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer(),
		classes: make(map[string][]namedClass),
	}
}

// report adds a finding for each of the errors that err joins.
func (v *validator) report(at place, s severity, err error) {
	for _, err := range apart(err) {
		v.findings = append(v.findings, finding{at, s, err.Error()})
	}
}

// apart returns the errors that err joins, without what is said before all of
// them, or else err itself.
func apart(err error) []error {
	var joined interface{ Unwrap() []error }
	if !errors.As(err, &joined) {
		return []error{err}
	}
	var all []error
	for _, err := range joined.Unwrap() {
		all = append(all, placed(err)...)
	}
	return all
}

// placed returns the errors that err joins, each behind what is said before them,
// which is where they are.
func placed(err error) []error {
	inner := errors.Unwrap(err)
	if inner == nil {
		return apart(err)
	}
	before, ok := strings.CutSuffix(err.Error(), inner.Error())
	parts := placed(inner)
	if !ok || len(parts) == 1 {
		return []error{err}
	}
	for i, part := range parts {
		parts[i] = fmt.Errorf("%s%w", before, part)
	}
	return parts
}

func (v *validator) errorf(at place, format string, args ...any) {
	v.report(at, severityError, fmt.Errorf(format, args...))
}

func (v *validator) notef(at place, format string, args ...any) {
	v.report(at, severityNote, fmt.Errorf(format, args...))
}

// separator begins a document of YAML.
var separator = regexp.MustCompile(`(?m)^---(?:[ \t\r]|$)`)

// file checks the documents of a file. They are told apart here, since a reader
// of YAML stops at the end of the first.
func (v *validator) file(name, text string) {
	line, before := 1, v.checked+len(v.findings)
	for _, document := range separator.Split(text, -1) {
		v.document(place{file: name, line: line + blankLines(document)}, document)
		line += strings.Count(document, "\n")
	}
	if v.checked+len(v.findings) == before {
		v.notef(place{file: name}, "has no objects")
	}
}

// blankLines counts the lines before the first that says something.
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
