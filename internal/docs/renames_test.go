package docs

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var before = flag.String("before-renames", "", "a `commit` before the renames, whose expected outputs are compared")

// renames returns a section of renames.txt as pairs of previous and present texts.
func renames(t *testing.T, section string) (pairs [][2]string) {
	t.Helper()
	data, err := os.ReadFile("renames.txt")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(data), "\n## "+section+"\n")
	if !found {
		t.Fatalf("renames.txt has no section %q", section)
	}
	text, _, _ := strings.Cut(rest, "\n## ")
	for line := range strings.Lines(text) {
		if line = strings.TrimRight(line, "\n"); line == "" {
			continue
		}
		previous, present, found := strings.Cut(line, "\t")
		if !found {
			t.Fatalf("renames.txt: %q has no tab", line)
		}
		pairs = append(pairs, [2]string{previous, present})
	}
	return pairs
}

var space = regexp.MustCompile(`\s+`)

// oneSpace replaces runs of white space, as the widths of columns follow from their contents.
func oneSpace(text string) string { return space.ReplaceAllString(text, " ") }

// expectedOutput reports whether a file contains an expected output of a test.
func expectedOutput(name string) bool {
	if !strings.Contains(name, "/testdata/") || strings.HasPrefix(name, "internal/docs/") {
		return false
	}
	switch filepath.Ext(name) {
	case ".golden", ".labels", ".prom":
		return true
	case ".txt":
		return strings.Contains(name, "/kubectl/") || strings.Contains(name, "/text/") || strings.Contains(name, "/doctor/")
	}
	return strings.HasSuffix(name, ".golden.json") || name == "internal/doctor/testdata/sick.json"
}

// git runs a command of git in the repository, and skips the test without git.
func git(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", args...)
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Skipf("git %v: %v", args, err)
	}
	return string(out)
}

// TestRenames applies the list of renames to the expected outputs of an earlier commit, which then
// equal the present ones. Without a commit, the test only checks that no previous text remains.
func TestRenames(t *testing.T) {
	pairs := renames(t, "expected outputs")
	var all []string
	for _, pair := range pairs {
		all = append(all, pair[0], pair[1])
	}
	replacer := strings.NewReplacer(all...)
	used := make(map[string]bool)
	compare := func(name, text string) {
		data, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
		present := oneSpace(string(data))
		for _, pair := range pairs {
			used[pair[0]] = used[pair[0]] || strings.Contains(text, pair[0])
			if strings.Contains(present, pair[0]) && !strings.Contains(pair[1], pair[0]) {
				t.Errorf("%s: contains %q, which is now %q", name, pair[0], pair[1])
			}
		}
		if *before == "" {
			return
		}
		want := replacer.Replace(text)
		if filepath.Ext(name) == ".prom" { // sorted by labels
			present, want = sortedFields(present), sortedFields(want)
		}
		if present != want {
			i := 0
			for i < min(len(present), len(want)) && present[i] == want[i] {
				i++
			}
			t.Errorf("%s: at byte %d\n got …%s\nwant …%s", name, i, near(present, i), near(want, i))
		}
	}
	if *before == "" {
		for name := range strings.Lines(git(t, "ls-files")) {
			if name = strings.TrimSpace(name); expectedOutput(name) {
				compare(name, "")
			}
		}
		return
	}
	for name := range strings.Lines(git(t, "ls-tree", "-r", "--name-only", *before)) {
		if name = strings.TrimSpace(name); expectedOutput(name) {
			compare(name, oneSpace(git(t, "show", *before+":"+name)))
		}
	}
	for _, pair := range pairs {
		if !used[pair[0]] {
			t.Errorf("no expected output of %s contains %q", *before, pair[0])
		}
	}
}

func sortedFields(text string) string {
	return strings.Join(slices.Sorted(slices.Values(strings.Fields(text))), " ")
}

// near returns the text around a position.
func near(text string, i int) string {
	return text[max(0, i-60):min(len(text), i+120)]
}

// Renamed pages exist under their present names only.
func TestRenamedPages(t *testing.T) {
	for _, section := range []string{"pages", "manifests"} {
		for _, pair := range renames(t, section) {
			if !strings.Contains(pair[0], "/") {
				continue
			}
			if _, err := os.Stat(filepath.Join(root, pair[0])); err == nil {
				t.Errorf("%s exists", pair[0])
			}
			if _, err := os.Stat(filepath.Join(root, pair[1])); err != nil {
				t.Error(err)
			}
		}
	}
}
