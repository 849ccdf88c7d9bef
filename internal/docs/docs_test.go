package docs

import (
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const root = "../.."

// Each link of a page leads to a file of the project, and each fragment to a heading.
func TestLinks(t *testing.T) {
	pages, err := All(root)
	if err != nil {
		t.Fatal(err)
	}
	anchors := make(map[string]map[string]bool)
	for _, page := range pages {
		anchors[page.Path] = page.Anchors()
	}
	for _, page := range pages {
		for _, link := range page.Links() {
			if strings.Contains(link, "://") {
				continue
			}
			file, fragment, _ := strings.Cut(link, "#")
			target := page.Path
			if file != "" {
				target = path.Join(path.Dir(page.Path), file)
			}
			if _, err := os.Stat(filepath.Join(root, target)); err != nil {
				t.Errorf("%s: link %s: %v", page.Path, link, err)
			} else if fragment != "" && !anchors[target][fragment] {
				t.Errorf("%s: link %s: no such heading in %s", page.Path, link, target)
			}
		}
	}
}

// The index links to every page except those of single codes, which have an index of their
// own. The site's navigation has the same pages.
func TestIndexIsComplete(t *testing.T) {
	index, err := Read(root, root+"/docs/index.md")
	if err != nil {
		t.Fatal(err)
	}
	linked := make(map[string]bool)
	for _, link := range index.Links() {
		file, _, _ := strings.Cut(link, "#")
		linked[path.Join("docs", file)] = true
	}
	pages, err := All(root)
	if err != nil {
		t.Fatal(err)
	}
	site, err := os.ReadFile(root + "/mkdocs.yml")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		if path.Dir(page.Path) != "docs" && path.Dir(page.Path) != "docs/families" {
			continue
		}
		if !strings.Contains(string(site), " "+page.Path+"\n") {
			t.Errorf("mkdocs.yml does not have %s", page.Path)
		}
		if !linked[page.Path] && page.Path != index.Path {
			t.Errorf("docs/index.md does not link to %s", page.Path)
		}
	}
}

// No page is empty, as after a faulty merge.
func TestPagesHaveText(t *testing.T) {
	pages, err := All(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		if len(page.Text) < 200 || !strings.HasPrefix(page.Text, "# ") {
			t.Errorf("%s has no title or no text", page.Path)
		}
	}
}

func TestREADMEIsShort(t *testing.T) {
	page, err := Read(root, root+"/README.md")
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(page.Text, "\n"); lines > 150 {
		t.Errorf("README.md has %d lines, more than 150", lines)
	}
}

func TestPage(t *testing.T) {
	page := Page{Text: "# A `name` of [it](x.md#y)\n\n- item\n\n  ```yaml\n  a:\n    b: 1 # no heading\n  ```\n\n```\n## none [none](none)\n```\n## Twice\n## Twice\n"}
	want := []Block{{Line: 6, Lang: "yaml", Text: "a:\n  b: 1 # no heading\n"}, {Line: 11, Text: "## none [none](none)\n"}}
	if diff := cmp.Diff(want, page.Blocks()); diff != "" {
		t.Errorf("blocks (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"x.md#y"}, page.Links()); diff != "" {
		t.Errorf("links (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"a-name-of-it", "twice", "twice-1"}, slices.Sorted(maps.Keys(page.Anchors()))); diff != "" {
		t.Errorf("anchors (-want +got):\n%s", diff)
	}
}

func TestReplace(t *testing.T) {
	got, err := Replace("a\n<!-- begin x: by y -->\nold\n<!-- end x -->\nb\n", "x", "new\n")
	if want := "a\n<!-- begin x: by y -->\nnew\n<!-- end x -->\nb\n"; err != nil || got != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
	for _, text := range []string{"", "<!-- begin x -->\n", "<!-- end x -->\n<!-- begin x -->\n", "<!-- begin x <!-- end x -->"} {
		if _, err := Replace(text, "x", "new\n"); err == nil {
			t.Errorf("%q has a section", text)
		}
	}
}
