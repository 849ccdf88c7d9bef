package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"

	"chandler.dev/internal/inventory"
)

func newValidateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "validate FILE|DIRECTORY...",
		Short: "Check configurations, claims and device classes before they are used",
		Long: `Check configurations, claims and classes with the same code as the agent. Files are
YAML or JSON with any number of documents; - is standard input, and a directory stands
for all such files below it. The command needs no cluster. It checks:

  DriverConfig, ProvisionConfig, ClaimParameters
      fields, values, that expressions compile, and that no entry repeats the
      expression of a previous one (a warning)
  ConfigMap
      the configurations of Chandler in it
  ResourceClaim, ResourceClaimTemplate, DeviceClass
      fields, that selectors compile, and parameters for chandler.dev
  DeviceClass
      that no two files have the same extendedResourceName (a warning)
  Pod, and objects with a pod template
      that containers refer to claims of the pod

Other objects are listed, and not checked. The exit code is 0 without errors;
warnings do not change it.`,
		Example: `  chandler validate config.yaml
  chandler validate deployments my-classes.yaml
  kubectl get deviceclasses -o yaml | chandler validate -`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return validateFiles(cmd.InOrStdin(), cmd.OutOrStdout(), args)
		},
	}
}

// validateFiles checks files and prints its findings. It continues after an error, so that a single
// run finds all errors.
func validateFiles(in io.Reader, out io.Writer, files []string) error {
	v := newValidator()
	for _, file := range files {
		v.named(in, file)
	}
	v.sharedNames()
	counts := make(map[severity]int)
	for _, f := range v.findings {
		fmt.Fprintln(out, f)
		counts[f.severity]++
	}
	fmt.Fprintf(out, "%s checked: %s, %s\n", inventory.Plural(v.checked, "object"), inventory.Plural(counts[severityError], "error"), inventory.Plural(counts[severityWarning], "warning"))
	if counts[severityError] > 0 {
		return errors.New(inventory.Plural(counts[severityError], "error"))
	}
	return nil
}

// named checks a file, or all files of a directory.
func (v *validator) named(in io.Reader, name string) {
	files, err := filesOf(name)
	if err != nil {
		v.report(place{file: name}, severityError, err)
	}
	for _, file := range files {
		data, err := readInput(in, file)
		if err != nil {
			v.report(place{file: file}, severityError, err)
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

func readInput(in io.Reader, file string) ([]byte, error) {
	if file == "-" {
		return io.ReadAll(in)
	}
	return os.ReadFile(file)
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
	checked  int
	found    bool                    // the file was found in a directory, not named
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
		v.findings = append(v.findings, finding{at.of(err.Error()), s, err.Error()})
	}
}

// apart returns the errors that err joins, without their common prefix. If err joins no errors, it
// returns err.
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

// placed returns the errors that err joins, each with the common prefix, which contains their
// place.
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

// separator matches the beginning of a YAML document.
var separator = regexp.MustCompile(`(?m)^---(?:[ \t\r]|$)`)

// file checks the documents of a file. It splits them itself, because a YAML reader stops after the
// first error.
func (v *validator) file(name, text string) {
	line, before := 1, v.checked+len(v.findings)
	for _, document := range separator.Split(text, -1) {
		v.document(placeOf(name, line, document), document)
		line += strings.Count(document, "\n")
	}
	if v.checked+len(v.findings) == before {
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
