package discoverytest

import (
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/internal/docs"
)

// published are the attributes that devices have in addition to the vocabulary, with their types.
var published = map[resourceapi.QualifiedName]string{
	standard + "pciBusID": "string",
	standard + "pcieRoot": "string",
	standard + "numaNode": "int",
}

// attributeRow matches a row with an attribute's name, type and example.
var attributeRow = regexp.MustCompile("(?m)^\\| `([^`]+)`( \\\\\\*)? \\| (string|int|bool|version) \\| `([^`]+)` \\| ")

// The page of attributes has each attribute once, with its type, and an example of that type.
func TestDocsOfAttributes(t *testing.T) {
	page, err := docs.Read("../..", "../../docs/attributes.md")
	if err != nil {
		t.Fatal(err)
	}
	want := maps.Clone(discovery.Vocabulary)
	maps.Copy(want, published)
	maps.Copy(want, discovery.DerivedAttributes)
	got := make(map[resourceapi.QualifiedName]string)
	for _, row := range attributeRow.FindAllStringSubmatch(page.Text, -1) {
		name, kind, example := resourceapi.QualifiedName(row[1]), row[3], row[4]
		if got[name] != "" {
			t.Errorf("%s has two rows", name)
		}
		got[name] = kind
		if optional := slices.Contains(discovery.OptionalAttributes, name); optional != (row[2] != "") {
			t.Errorf("%s has an asterisk: %t; want %t", name, row[2] != "", optional)
		}
		if err := checkAttribute(name, exampleOf(kind, example)); err != nil && discovery.Vocabulary[name] != "" {
			t.Errorf("example of %s: %v", name, err)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("attributes of docs/attributes.md (-code +page):\n%s", diff)
	}
}

// capacityRow matches a row with a capacity's name and example.
var capacityRow = regexp.MustCompile("(?m)^\\| `(\\w+)` \\| `[^`]+` \\| ")

// The page of attributes has each capacity once.
func TestDocsOfCapacities(t *testing.T) {
	page, err := docs.Read("../..", "../../docs/attributes.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(page.Text, "\n## Capacities\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var got []resourceapi.QualifiedName
	for _, row := range capacityRow.FindAllStringSubmatch(section, -1) {
		got = append(got, resourceapi.QualifiedName(row[1]))
	}
	if diff := cmp.Diff(discovery.Capacities, got); diff != "" {
		t.Errorf("capacities of docs/attributes.md (-code +page):\n%s", diff)
	}
}

// exampleOf returns an attribute with the value that text represents, none if text has another
// type.
func exampleOf(kind, text string) (a discovery.Attribute) {
	switch kind {
	case "string":
		a.StringValue = &text
	case "version":
		if strings.Count(text, ".") == 2 {
			a.VersionValue = &text
		}
	case "int":
		if value, err := strconv.ParseInt(text, 10, 64); err == nil {
			a.IntValue = &value
		}
	case "bool":
		if value, err := strconv.ParseBool(text); err == nil {
			a.BoolValue = &value
		}
	}
	return a
}
