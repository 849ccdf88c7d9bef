package docs

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the sections of pages that come from the code")

// The reference of configuration keys matches the comments of the types.
func TestDocsOfKeys(t *testing.T) {
	var tables strings.Builder
	for _, kind := range []string{"DriverConfig", "ClaimParameters", "ProvisionConfig"} {
		text, err := Keys(filepath.Join(root, "api/v1alpha1"), kind)
		if err != nil {
			t.Fatal(err)
		}
		tables.WriteString(text)
	}
	CompareSection(t, filepath.Join(root, "docs/configuration.md"), "keys", tables.String()+"\n", *update)
}

// Every type and field with a comment has a row in the reference.
func TestKeys(t *testing.T) {
	dir := t.TempDir()
	source := `package p

// Config is what [Inner] says. Field counts.
type Config struct {
	Type ` + "`json:\",inline\"`" + `

	// Field is what USB says:
	//	field: a | b
	Field map[string]Inner ` + "`json:\"field,omitempty\"`" + `

	// Both are one.
	A []Mode ` + "`json:\"a\"`" + `
	B []Mode ` + "`json:\"b\"`" + `
	C string
}

// Type is embedded.
type Type struct {
	Size *resource.Quantity ` + "`json:\"size\"`" + ` // how much
}

// Inner is inside.
type Inner struct {
	Again *Inner ` + "`json:\"again\"`" + ` // once more
}

// Mode is one of two.
type Mode string

const (
	ModeA Mode = "A" // the first
	// ModeB is the second.
	ModeB Mode = "B"
)
`
	if err := os.WriteFile(filepath.Join(dir, "p.go"), []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := Keys(dir, "Config")
	if err != nil {
		t.Fatal(err)
	}
	want := `
### Config

Config is what Inner says. ` + "`field`" + ` counts.

| key | type | |
|---|---|---|
| ` + "`size`" + ` | quantity | how much |
| ` + "`field`" + ` | map to [Inner](#inner) | ` + "`field` is what USB says: `field: a \\| b`" + ` |
| ` + "`a`, `b`" + ` | list of ` + "`A`, `B`" + ` | Both are one. |

### Inner

Inner is inside.

| key | type | |
|---|---|---|
| ` + "`again`" + ` | [Inner](#inner) | once more |

### Mode

Mode is one of two.

| value | |
|---|---|
| ` + "`A`" + ` | the first |
| ` + "`B`" + ` | is the second. |
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if _, err := Keys(dir, "Mode"); err == nil {
		t.Error("a type without fields has a reference")
	}
}
