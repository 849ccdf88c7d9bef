// Package docs reads the project's pages: their headings, links and fenced blocks, and
// the sections that are written from the code. Tests use it to hold the pages to what
// the program does. It runs no command and asks no cluster.
package docs

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Page is a page of Markdown.
type Page struct {
	Path string // from the project's root, with slashes: "docs/health.md"
	Text string
}

// Block is a fenced block of a page.
type Block struct {
	Line int    // of its first line in the page, from 1
	Lang string // "yaml", "sh", or "" if the fence says nothing
	Text string // without the indentation that the fence has
}

// All returns the pages of the project whose root is dir: those beside the README, and
// all below docs.
func All(dir string) ([]Page, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.md"))
	if err != nil {
		return nil, err
	}
	err = filepath.WalkDir(filepath.Join(dir, "docs"), func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".md") {
			paths = append(paths, path)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	var pages []Page
	for _, path := range paths {
		page, err := Read(dir, path)
		if err != nil {
			return nil, err
		}
		pages = append(pages, page)
	}
	return pages, nil
}

// Read returns the page at path, which lies below dir.
func Read(dir, path string) (Page, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Page{}, err
	}
	name, err := filepath.Rel(dir, path)
	return Page{Path: filepath.ToSlash(name), Text: string(data)}, err
}

// Blocks returns the fenced blocks of the page, in order.
func (p Page) Blocks() []Block {
	var blocks []Block
	var open *Block
	var indent string
	number := 0
	for line := range strings.Lines(p.Text) {
		number++
		before, lang, fence := strings.Cut(strings.TrimRight(line, "\n"), "```")
		fence = fence && strings.TrimSpace(before) == ""
		switch {
		case fence && open == nil:
			indent, open = before, &Block{Line: number + 1, Lang: lang}
		case fence:
			blocks, open = append(blocks, *open), nil
		case open != nil:
			open.Text += strings.TrimPrefix(line, indent)
		}
	}
	return blocks
}

// Claim returns a claim of which text is a piece: what stands beside the requests in
// its spec, configuration or constraints.
func Claim(text string) string {
	const head = `apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: example}
spec:
  devices:
    requests:
    - {name: gpu, exactly: {deviceClassName: gpu.chandler.dev}}
    - {name: nic, exactly: {deviceClassName: rdma.chandler.dev}}
`
	return head + "    " + strings.ReplaceAll(strings.TrimSuffix(text, "\n"), "\n", "\n    ") + "\n"
}

// prose returns the page without its fenced blocks, whose lines are left empty.
func (p Page) prose() string {
	var text strings.Builder
	inside := false
	for line := range strings.Lines(p.Text) {
		fence := strings.HasPrefix(strings.TrimSpace(line), "```")
		if fence {
			inside = !inside
		}
		if fence || inside {
			line = "\n"
		}
		text.WriteString(line)
	}
	return text.String()
}

var (
	link     = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading  = regexp.MustCompile(`(?m)^#{1,6} +(.+?) *$`)
	linked   = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	unspoken = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// Links returns the targets of the page's links, as they are written.
func (p Page) Links() []string {
	var links []string
	for _, found := range link.FindAllStringSubmatch(p.prose(), -1) {
		links = append(links, found[1])
	}
	return links
}

// Anchors returns the fragments by which the page's headings are linked to, as GitHub
// makes them.
func (p Page) Anchors() map[string]bool {
	anchors := make(map[string]bool)
	for _, found := range heading.FindAllStringSubmatch(p.prose(), -1) {
		text := linked.ReplaceAllString(found[1], "$1")
		text = unspoken.ReplaceAllString(strings.ToLower(text), "")
		anchor := strings.ReplaceAll(text, " ", "-")
		for n := 1; anchors[anchor]; n++ {
			anchor = fmt.Sprintf("%s-%d", strings.ReplaceAll(text, " ", "-"), n)
		}
		anchors[anchor] = true
	}
	return anchors
}

// Replace returns a page's text with another content between the comments that begin
// and end a section: "<!-- begin NAME" and "<!-- end NAME". The rest of the first
// comment may say who writes the section.
func Replace(text, name, content string) (string, error) {
	begin := strings.Index(text, "<!-- begin "+name)
	end := strings.Index(text, "<!-- end "+name)
	if begin < 0 || end < begin {
		return "", fmt.Errorf("there is no section %s", name)
	}
	first := strings.Index(text[begin:end], "-->\n")
	if first < 0 {
		return "", fmt.Errorf("section %s: its first comment has no end", name)
	}
	return text[:begin+first+len("-->\n")] + content + text[end:], nil
}

// CompareSection fails a test if a section of the page at path is not as it should be,
// or writes it if update is true.
func CompareSection(t testing.TB, path, name, want string, update bool) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text, err := Replace(string(data), name, want)
	switch {
	case err != nil:
		t.Errorf("%s: %v", path, err)
	case text == string(data):
	case update:
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Error(err)
		}
	default:
		t.Errorf("%s: section %s is not up to date; run make docs (-page +code):\n%s", path, name, cmp.Diff(string(data), text))
	}
}
