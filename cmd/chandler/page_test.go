package main

import (
	"bytes"
	"fmt"
	"html"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/page"
)

// recordedHosts are those of all families.
func recordedHosts(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("../../discovery/families/*/testdata/*.host")
	if err != nil || len(files) < 100 {
		t.Fatalf("%d recorded hosts, %v", len(files), err)
	}
	return files
}

func recordedInventory(t *testing.T, file string) *inventory.Inventory {
	t.Helper()
	config, compiled, err := loadConfigHere("", v1alpha1.Node{})
	if err != nil {
		t.Fatal(err)
	}
	host, err := readRecorded(file)
	if err != nil {
		t.Fatal(err)
	}
	found := discovery.Scan(configuredHost(host.FS(), config), families.All)
	inv, err := inventoryOf(compiled.Apply(found), file)
	if err != nil {
		t.Fatal(err)
	}
	return inv
}

var (
	rowNumbers = regexp.MustCompile(`<td class="num free">(\d+)</td><td class="num">(\d+)</td>(?:<td class="num out">(\d+)</td>)?<td class="num">(\d+)</td>`)
	templates  = regexp.MustCompile(`(?s)<pre class="copy"><span>(apiVersion: .*?)</span></pre>`)
)

// TestPages renders the page of every recorded host. Each device has a link and a panel or
// a row of one, numbers add up, and each claim template is one that chandler validate
// accepts.
func TestPages(t *testing.T) {
	out := os.Getenv("PAGES") // a directory to look at them in
	validator := newValidator()
	validated := make(map[string]bool)
	for _, file := range recordedHosts(t) {
		inv := recordedInventory(t, file)
		var b bytes.Buffer
		if err := page.Render(&b, inv, page.Live{}); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		text := b.String()
		if out != "" {
			name := filepath.Base(filepath.Dir(filepath.Dir(file))) + "-" + strings.TrimSuffix(filepath.Base(file), ".host") + ".html"
			if err := os.WriteFile(filepath.Join(out, name), b.Bytes(), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for _, d := range inv.Devices {
			if !strings.Contains(text, fmt.Sprintf("id=%q", d.Name)) || !strings.Contains(text, fmt.Sprintf("href=\"#%s\"", d.Name)) {
				t.Errorf("%s: device %s has no panel or no link to it", file, d.Name)
			}
		}
		for _, row := range rowNumbers.FindAllStringSubmatch(text, -1) {
			var free, held, out, all int
			fmt.Sscan(strings.Join(row[1:3], " "), &free, &held) //nolint:errcheck // digits
			fmt.Sscan(row[3], &out)                              //nolint:errcheck // digits or nothing
			fmt.Sscan(row[4], &all)                              //nolint:errcheck // digits
			if free+held+out != all {
				t.Errorf("%s: %v do not add up", file, row[1:])
			}
		}
		for _, match := range templates.FindAllStringSubmatch(text, -1) {
			if document := html.UnescapeString(match[1]); !validated[document] {
				validated[document] = true
				validator.file(file, document)
			}
		}
		if strings.Contains(text, " style=") || regexp.MustCompile(` on[a-z]+=`).MatchString(text) || strings.Contains(text, "ZgotmplZ") {
			t.Errorf("%s: an attribute that the policy refuses", file)
		}
	}
	for _, finding := range validator.findings {
		t.Errorf("claim template: %s", finding)
	}
	if len(validated) < 30 {
		t.Errorf("only %d claim templates", len(validated))
	}
}
