package main

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// figure is a habit that is counted, with its limits.
type figure struct {
	name            string
	pages, comments float64 // limits; negative if there is none
	per100          bool    // limits are occurrences per 100 words
	pattern         *regexp.Regexp
}

// limits are the contents of a word list.
type limits struct {
	figures []*figure
	names   int // the most single-word names of Go; see [countedNames]
}

// parseLimits returns the limits of a word list; see words.txt for its form.
func parseLimits(list string) (*limits, error) {
	l := &limits{}
	lines := bufio.NewScanner(strings.NewReader(list))
	for number := 1; lines.Scan(); number++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := l.parseLine(line); err != nil {
			return nil, fmt.Errorf("words.txt:%d: %w", number, err)
		}
	}
	for _, f := range l.figures {
		if f.pattern == nil {
			return nil, fmt.Errorf("words.txt: figure %s has no words", f.name)
		}
	}
	return l, nil
}

func (l *limits) parseLine(line string) error {
	directive, rest, _ := strings.Cut(line, " ")
	switch directive {
	case "figure":
		fields := strings.Fields(rest)
		if len(fields) != 4 || fields[3] != "count" && fields[3] != "per100" {
			return fmt.Errorf("%q is not: figure NAME PAGES COMMENTS count|per100", line)
		}
		pages, err := parseLimit(fields[1])
		if err != nil {
			return err
		}
		comments, err := parseLimit(fields[2])
		if err != nil {
			return err
		}
		l.figures = append(l.figures, &figure{name: fields[0], pages: pages, comments: comments, per100: fields[3] == "per100"})
		return nil
	case "word":
		name, pattern, _ := strings.Cut(rest, " ")
		i := slices.IndexFunc(l.figures, func(f *figure) bool { return f.name == name })
		if i < 0 {
			return fmt.Errorf("no figure is named %q", name)
		}
		compiled, err := regexp.Compile(`(?i)\b(?:` + pattern + `)\b`)
		if err != nil {
			return err
		}
		l.figures[i].pattern = compiled
		return nil
	case "names":
		limit, err := strconv.Atoi(rest)
		l.names = limit
		return err
	}
	return fmt.Errorf("unknown directive %q", directive)
}

func parseLimit(field string) (float64, error) {
	if field == "-" {
		return -1, nil
	}
	return strconv.ParseFloat(field, 64)
}

// word matches one word of prose.
var word = regexp.MustCompile(`[A-Za-z][A-Za-z'’-]*`)

// count returns the occurrences of a figure in pages or comments, as many as there are
// or per 100 words.
func (f *figure) count(texts []text, comments bool) float64 {
	found, words := 0, 0
	for _, t := range texts {
		if t.comment != comments {
			continue
		}
		found += len(f.pattern.FindAllString(t.words, -1))
		words += len(word.FindAllString(t.words, -1))
	}
	if !f.per100 {
		return float64(found)
	}
	return 100 * float64(found) / float64(max(words, 1))
}

// printFigures prints one line for each figure, and returns those above their limits.
func printFigures(out io.Writer, figures []*figure, texts []text) (exceeded []string) {
	fmt.Fprintf(out, "%-12s %18s %18s\n", "", "pages (limit)", "comments (limit)")
	for _, f := range figures {
		pages, comments := f.count(texts, false), f.count(texts, true)
		fmt.Fprintf(out, "%-12s %18s %18s\n", f.name, f.format(pages, f.pages), f.format(comments, f.comments))
		if f.pages >= 0 && pages > f.pages {
			exceeded = append(exceeded, f.name+" in pages")
		}
		if f.comments >= 0 && comments > f.comments {
			exceeded = append(exceeded, f.name+" in comments")
		}
	}
	return exceeded
}

func (f *figure) format(value, limit float64) string {
	digits := 0
	if f.per100 {
		digits = 1
	}
	if limit < 0 {
		return fmt.Sprintf("%.*f (-)", digits, value)
	}
	return fmt.Sprintf("%.*f (%.*f)", digits, value, digits, limit)
}

// printFolders prints the figures of the comments and pages of each folder.
func printFolders(out io.Writer, figures []*figure, texts []text) {
	folders := make(map[string][]text)
	for _, t := range texts {
		folders[path.Dir(t.file)] = append(folders[path.Dir(t.file)], t)
	}
	for _, folder := range slices.Sorted(maps.Keys(folders)) {
		fmt.Fprint(out, folder)
		for _, f := range figures {
			fmt.Fprintf(out, "  %s %s/%s", f.name, f.format(f.count(folders[folder], false), -1), f.format(f.count(folders[folder], true), -1))
		}
		fmt.Fprintln(out)
	}
}

// printPlaces prints each line in which a figure occurs.
func printPlaces(out io.Writer, figures []*figure, texts []text, name string) error {
	i := slices.IndexFunc(figures, func(f *figure) bool { return f.name == name })
	if i < 0 {
		return fmt.Errorf("no figure is named %q", name)
	}
	for _, t := range texts {
		if figures[i].pattern.MatchString(t.words) {
			fmt.Fprintf(out, "%s:%d: %s\n", t.file, t.line, strings.TrimSpace(t.words))
		}
	}
	return nil
}
