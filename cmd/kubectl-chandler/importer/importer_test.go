package importer

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/validation"
	"chandler.dev/discovery/rules"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// read imports files, and fails the test if the result is not a valid configuration.
func read(t testing.TB, options Options, files ...File) (*Result, string, error) {
	t.Helper()
	result, err := Import(files, options)
	if err != nil {
		return nil, "", err
	}
	data, err := result.YAML()
	if err != nil {
		t.Fatalf("write: %v", err)
	}
	for _, o := range result.objects {
		text, err := yaml.Marshal(o.Node)
		if err == nil {
			err = validation.CheckObject(text)
		}
		if err != nil {
			t.Fatalf("read what was written: %v\n%s", err, text)
		}
	}
	if result.Config == nil {
		return result, string(data), nil
	}
	written, err := result.ConfigYAML()
	if err != nil {
		t.Fatalf("write: %v", err)
	}
	config, err := v1alpha1.ParseDriverConfig(written)
	if err != nil {
		t.Fatalf("read what was written: %v\n%s", err, written)
	}
	var expressions []string
	if len(result.Provision.Functions) > 0 {
		provision, err := json.Marshal(result.Provision)
		if err == nil {
			_, err = v1alpha1.ParseProvisionConfig(provision)
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range result.Provision.Functions {
			expressions = append(expressions, f.CEL)
		}
	}
	for _, e := range config.Exclude {
		expressions = append(expressions, e.CEL)
	}
	for _, e := range config.Sharing {
		expressions = append(expressions, e.CEL)
	}
	for _, e := range config.Resources {
		expressions = append(expressions, e.CEL)
	}
	for _, e := range expressions {
		if _, err := rules.Compile(e); err != nil {
			t.Fatal(err)
		}
	}
	return result, string(data), nil
}

// TestGolden imports each file of testdata, and each folder as one import.
func TestGolden(t *testing.T) {
	entries, err := os.ReadDir("testdata")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasSuffix(name, ".golden") || name == "fuzz" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			got := "error: "
			files := filesOf(t, filepath.Join("testdata", name))
			result, out, err := read(t, Options{}, files...)
			if err != nil {
				got += err.Error() + "\n"
			} else {
				checkSources(t, result, files)
				got = fmt.Sprintf("%s# %d change what pods get\n", out, result.ChangedPods())
			}
			golden := filepath.Join("testdata", name+".golden")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// checkSources checks that each entry of the configuration has a source in the imported files: an entry
// that no file contains is never added.
func checkSources(t *testing.T, result *Result, files []File) {
	t.Helper()
	text, err := result.ConfigYAML()
	if err != nil || text == nil {
		return
	}
	var root yaml.Node
	if err := yaml.Unmarshal(text, &root); err != nil {
		t.Fatal(err)
	}
	object := root.Content[0]
	for i := 0; i < len(object.Content); i += 2 {
		key, list := object.Content[i].Value, object.Content[i+1]
		if list.Kind != yaml.SequenceNode {
			continue
		}
		for n, entry := range list.Content {
			if err := findSource(entry.HeadComment, files); err != nil {
				t.Errorf("%s[%d]: %v", key, n, err)
			}
		}
	}
}

var (
	sourceLine = regexp.MustCompile(`^# (.+?):([0-9]+)(?: (.*))?$`)
	lastName   = regexp.MustCompile(`[A-Za-z_-]+$`)
)

// findSource returns an error if the comment of an entry does not name a line of a file with the name of
// the setting. The first field of an object, and the value of an argument, may be up to two lines further.
func findSource(comment string, files []File) error {
	found := sourceLine.FindStringSubmatch(strings.SplitN(comment, "\n", 2)[0])
	if found == nil {
		return fmt.Errorf("no source in %q", comment)
	}
	number, _ := strconv.Atoi(found[2])
	for _, file := range files {
		if file.Name != found[1] {
			continue
		}
		lines := strings.Split("\n"+string(file.Data), "\n")
		if number < 1 || number >= len(lines) {
			return fmt.Errorf("%s has no line %d", file.Name, number)
		}
		setting, _, _ := strings.Cut(found[3], ": ")
		name := strings.TrimLeft(lastName.FindString(setting), "-")
		if !strings.Contains(strings.Join(lines[max(0, number-2):number+1], "\n"), name) {
			return fmt.Errorf("%s: line %d has no %q: %s", comment, number, name, lines[number])
		}
		return nil
	}
	return fmt.Errorf("%q is not the name of a file", found[1])
}

// filesOf returns a file, or the files of a folder, with their base names.
func filesOf(t testing.TB, name string) []File {
	t.Helper()
	names := []string{name}
	if info, err := os.Stat(name); err != nil {
		t.Fatal(err)
	} else if info.IsDir() {
		if names, err = filepath.Glob(filepath.Join(name, "*")); err != nil {
			t.Fatal(err)
		}
	}
	var files []File
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, File{Name: filepath.Base(name), Data: data})
	}
	return files
}

// TestSamples imports sample configurations that are not part of this repository: the folder in
// CHANDLER_CONFIGS has a folder for each plugin.
func TestSamples(t *testing.T) {
	dir := os.Getenv("CHANDLER_CONFIGS")
	if dir == "" {
		t.Skip("CHANDLER_CONFIGS names no folder")
	}
	samples, err := filepath.Glob(filepath.Join(dir, "*", "*"))
	if err != nil || len(samples) == 0 {
		t.Fatalf("no samples in %s: %v", dir, err)
	}
	for _, sample := range samples {
		t.Run(strings.TrimPrefix(sample, dir), func(t *testing.T) {
			files := filesOf(t, sample)
			result, out, err := read(t, Options{}, files...)
			if err != nil {
				t.Fatal(err)
			}
			checkSources(t, result, files)
			t.Logf("%d change what pods get\n%s", result.ChangedPods(), out)
		})
	}
}

// The output stays small, whatever aliases and counts a file contains.
func TestImportIsBounded(t *testing.T) {
	bomb := "a: &a [x, x, x, x, x, x, x, x]\n"
	for i := range 9 {
		bomb += fmt.Sprintf("%c: &%c [*%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c]\n", 'b'+i, 'b'+i, 'a'+i, 'a'+i, 'a'+i, 'a'+i, 'a'+i, 'a'+i, 'a'+i, 'a'+i)
	}
	many := "resourceList:\n"
	for i := range 500 {
		many += fmt.Sprintf("- {resourceName: r%d, selectors: {vendors: [\"8086\"]}}\n", i)
	}
	for name, text := range map[string]string{
		"aliases":  bomb,
		"depth":    strings.Repeat("[", 10_000),
		"brackets": strings.Repeat("{\"a\":", 10_000),
		"pools":    many,
		"devices":  strings.Repeat("--device a,/dev/b\n", 1000),
		"comments": strings.Repeat("/*", 10_000),
	} {
		t.Run(name, func(t *testing.T) {
			if _, out, err := read(t, Options{}, File{name, []byte(text)}); err == nil && len(out) > 10<<20 {
				t.Errorf("%d bytes", len(out))
			}
		})
	}
}

// If each node has a configuration of its own, --named imports a single one.
func TestNamed(t *testing.T) {
	for _, test := range []struct {
		file, named, want string
		changed           int // notes about the other configurations, which are not imported
	}{
		{"nvidia-labels.yaml", "mps", "replicas: 4", 3},
		{"sriovdp-nodes", "node-2", "openshift.io/b", 2},
	} {
		result, out, err := read(t, Options{Named: test.named}, filesOf(t, filepath.Join("testdata", test.file))...)
		if err != nil || !strings.Contains(out, test.want) || strings.Contains(out, "nodes:") || result.ChangedPods() != test.changed {
			t.Errorf("%s: %v\n%s", test.file, err, out)
		}
	}
	if _, _, err := read(t, Options{Named: "other"}, filesOf(t, "testdata/squat.args")...); err == nil || !strings.Contains(err.Error(), `no configuration is called "other"; the files contain no configurations with names`) {
		t.Errorf("a name where there are none: %v", err)
	}
	for _, file := range []string{"nvidia-labels.yaml", "sriovdp-nodes"} {
		if _, _, err := read(t, Options{Named: "other"}, filesOf(t, filepath.Join("testdata", file))...); err == nil || !strings.Contains(err.Error(), `no configuration is called "other"; there are `) {
			t.Errorf("%s: a name that none has: %v", file, err)
		}
	}
}
