package main

import (
	"bufio"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write usual.txt")

const testList = `# A comment.
figure persons 1 0 count
word persons somebody|nobody

figure pronouns - 10 per100
word pronouns it|that
`

func parseTestList(t *testing.T) []*figure {
	t.Helper()
	limits, err := parseLimits(testList)
	if err != nil {
		t.Fatal(err)
	}
	return limits.figures
}

func TestCount(t *testing.T) {
	source := []byte(`// Package p has nobody. It
// counts that.
package p

//go:embed nobody.txt
var s = "nobody" // Somebody's.

/*
  nobody here
*/
`)
	texts, err := commentTexts("p.go", source)
	if err != nil {
		t.Fatal(err)
	}
	texts = append(texts, pageTexts("p.md", "Ask nobody, `somebody` or it.\n```sh\nnobody\n```\nThe end.\n")...)
	figures := parseTestList(t)
	for _, c := range []struct {
		figure   int
		comments bool
		want     float64
	}{
		{0, true, 3},
		{0, false, 1},
		{1, true, 100 * 2. / 10}, // 10 words: the directive and the string are no prose
		{1, false, 100 * 1. / 6},
	} {
		if got := figures[c.figure].count(texts, c.comments); got != c.want {
			t.Errorf("%s, comments %v: %v occurrences, want %v", figures[c.figure].name, c.comments, got, c.want)
		}
	}
}

func TestExceeded(t *testing.T) {
	texts := []text{
		{file: "a/p.md", line: 1, words: "nobody and somebody"},
		{file: "a/p.go", line: 2, comment: true, words: "that and it"},
	}
	var out strings.Builder
	got := strings.Join(printFigures(&out, parseTestList(t), texts), ", ")
	if want := "persons in pages, pronouns in comments"; got != want {
		t.Errorf("exceeded: %s, want %s\n%s", got, want, &out)
	}
	out.Reset()
	if err := printPlaces(&out, parseTestList(t), texts, "persons"); err != nil {
		t.Fatal(err)
	}
	if want := "a/p.md:1: nobody and somebody\n"; out.String() != want {
		t.Errorf("places: %q, want %q", &out, want)
	}
}

func TestWordList(t *testing.T) {
	if _, err := parseLimits(wordList); err != nil {
		t.Error(err)
	}
	for list, want := range map[string]string{
		"figure persons 1 count":                      "words.txt:1: ",
		"figure persons 1 x count":                    "words.txt:1: ",
		"figure persons 1 2 count":                    "figure persons has no words",
		"\nword persons nobody":                       `words.txt:2: no figure is named "persons"`,
		"figure persons 1 2 count\nword persons (":    "words.txt:2: ",
		"figure persons 1 2 count\nnumber persons 12": `words.txt:2: unknown directive "number"`,
		"names few": "words.txt:1: ",
	} {
		if _, err := parseLimits(list); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", list, err, want)
		}
	}
}

func TestNames(t *testing.T) {
	source := []byte(`package p

type Saver interface{ Keep() }

func (*T) Keep()      {} // of an interface
func (*T) Mend()      {}
func (*G[K]) Settle() {}
func (*T) mend()      {} // not exported
func (*T) KeepFile()  {}
func keep()           {}
func Claims()         {} // a noun
func Close()          {} // usual
func main()           {}
`)
	interfaces := make(map[string]bool)
	funcs, err := funcsOf("p.go", source, interfaces)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	printNames(&out, countedNames(funcs, interfaces))
	if want := "p.go:6: T.Mend\np.go:7: G.Settle\np.go:10: keep\n"; out.String() != want {
		t.Errorf("names:\n%swant:\n%s", &out, want)
	}
	for file, want := range map[string]bool{
		"driver/claim.go":                   true,
		"driver/claim_test.go":              false,
		"discovery/scan.go":                 true,
		"discovery/families/npu/devices.go": false,
		"e2e/cluster.go":                    false,
		"docs/index.md":                     false,
	} {
		if got := isCounted(file); got != want {
			t.Errorf("%s counted: %v, want %v", file, got, want)
		}
	}
}

// TestUsualNames compares usual.txt with the list of the installed Go, where there is one. A
// newer Go may have more names.
func TestUsualNames(t *testing.T) {
	listed := parseWords(usualNames)
	names := apiNames(t)
	if len(names) == 0 {
		t.Skip("this Go has no directory api")
	}
	if *update {
		writeUsual(t, names)
		return
	}
	for name := range listed {
		if !names[name] {
			t.Errorf("usual.txt: %s is no name of the standard library", name)
		}
	}
}

// apiNames returns the single-word functions and methods of the standard library.
func apiNames(t *testing.T) map[string]bool {
	t.Helper()
	names := make(map[string]bool)
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Skipf("go env GOROOT: %v", err)
	}
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(root)), "api", "go1*.txt"))
	if err != nil {
		t.Fatal(err)
	}
	declared := regexp.MustCompile(`^pkg [^,]+, (?:func|method \([^)]*\)) ([A-Z][a-z0-9]*|[A-Z]+)[(\[]`)
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for lines := bufio.NewScanner(strings.NewReader(string(data))); lines.Scan(); {
			found := declared.FindStringSubmatch(lines.Text())
			if found != nil && !strings.HasPrefix(lines.Text(), "pkg syscall") {
				names[strings.ToLower(found[1])] = true
			}
		}
	}
	return names
}

func writeUsual(t *testing.T, names map[string]bool) {
	t.Helper()
	var text strings.Builder
	for line := range strings.Lines(usualNames) {
		if strings.HasPrefix(line, "#") {
			text.WriteString(line)
		}
	}
	column := 0
	text.WriteString("\n")
	for i, name := range slices.Sorted(maps.Keys(names)) {
		switch {
		case i > 0 && column+1+len(name) > 100:
			text.WriteString("\n")
			column = 0
		case i > 0:
			text.WriteString(" ")
			column++
		}
		text.WriteString(name)
		column += len(name)
	}
	text.WriteString("\n")
	if err := os.WriteFile("usual.txt", []byte(text.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestFindOversized(t *testing.T) {
	t.Chdir(t.TempDir())
	var files []string
	add := func(file, source string) {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(source), 0o600); err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	for i := range maxFiles + 1 {
		add(fmt.Sprintf("many/file%d.go", i), "package many\n")
	}
	long := strings.Repeat("\n", maxLines)
	add("long/long.go", "package long\n"+long)
	add("long/long_test.go", "package long\n"+long)
	add("allowed/allowed.go", "package allowed"+long)
	add("e2e/long.go", "package e2e\n"+long)
	add("wide/wide.go", "package wide\n"+strings.Repeat("func (*T) m() {}\n", maxMethods+1)+strings.Repeat("func (U) m() {}\n", maxMethods))
	got, err := findOversized(files)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"long: 3001 lines, more than 3000", "many: 26 files, more than 25", "wide: type T: 41 methods, more than 40"}
	if !slices.Equal(got, want) {
		t.Errorf("too large: %q, want %q", got, want)
	}
}
