package main

import (
	"strings"
	"testing"
)

const testList = `# A comment.
figure persons 1 0 count
word persons somebody|nobody

figure pronouns - 10 per100
word pronouns it|that
`

func parseTestList(t *testing.T) []*figure {
	t.Helper()
	figures, err := parseFigures(testList)
	if err != nil {
		t.Fatal(err)
	}
	return figures
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
	if _, err := parseFigures(wordList); err != nil {
		t.Error(err)
	}
	for list, want := range map[string]string{
		"figure persons 1 count":                      "words.txt:1: ",
		"figure persons 1 x count":                    "words.txt:1: ",
		"figure persons 1 2 count":                    "figure persons has no words",
		"\nword persons nobody":                       `words.txt:2: no figure is named "persons"`,
		"figure persons 1 2 count\nword persons (":    "words.txt:2: ",
		"figure persons 1 2 count\nnumber persons 12": `words.txt:2: unknown directive "number"`,
	} {
		if _, err := parseFigures(list); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", list, err, want)
		}
	}
}
