package discovery_test

import (
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
)

// Each type of attribute is published, and is read from a published one without a change.
func TestAttributesPublished(t *testing.T) {
	a := discovery.Attributes{}
	a.SetString("kind", "gpu")
	a.SetInt("index", 3)
	a.SetBool("defaultRoute", false)
	a.SetVersion("driverVersion", "550.120")
	want := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"kind": {StringValue: new("gpu")}, "index": {IntValue: new(int64(3))},
		"defaultRoute": {BoolValue: new(false)}, "driverVersion": {VersionValue: new("550.120.0")},
	}
	if diff := cmp.Diff(want, a.ForSlice()); diff != "" {
		t.Errorf("published (-want +got):\n%s", diff)
	}
	for name, value := range want {
		if got := discovery.AttributeOf(value); !cmp.Equal(got, a[name]) {
			t.Errorf("%s: got %+v, want %+v", name, got, a[name])
		}
	}
}

// Attributes take most of the memory of thousands of devices.
func TestSizeOfAttribute(t *testing.T) {
	if got := unsafe.Sizeof(discovery.Attribute{}); got > 32 {
		t.Errorf("an attribute takes %d bytes, want 32", got)
	}
}

func TestSetters(t *testing.T) {
	a := discovery.Attributes{}
	a.SetString("model", strings.Repeat("é", 40)+" ")
	if got := a.String("model"); got != strings.Repeat("é", 32) {
		t.Errorf("cut to %q", got)
	}
	a.SetString("serial", "")
	if _, ok := a["serial"]; ok {
		t.Error("an empty string is published")
	}
	for text, want := range map[string]string{
		"6.8.5": "6.8.5", "535.104.05": "535.104.5", "550.120": "550.120.0", "550.90.07-custom": "", "1.2.3.4": "", "": "", "12": "", "N/A": "",
	} {
		a := discovery.Attributes{}
		a.SetVersion("driverVersion", text)
		got := ""
		if v := a["driverVersion"].VersionValue; v != nil {
			got = *v
		}
		if got != want {
			t.Errorf("version %q: %q, want %q", text, got, want)
		}
	}
}

// The list contains names that are too long for a string.
func TestSetNames(t *testing.T) {
	long := []string{strings.Repeat("a", 40), strings.Repeat("b", 40)}
	tests := map[string]struct {
		names []string
		text  *string
		list  []string
	}{
		"none":     {},
		"one":      {names: []string{"a"}, text: new("a")},
		"two":      {names: []string{"a", "b"}, text: new("a,b"), list: []string{"a", "b"}},
		"too long": {names: long, list: long},
		"one is":   {names: []string{"a", strings.Repeat("b", 65)}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			d := discovery.Device{Name: "d", Attributes: discovery.Attributes{}}
			d.SetNames("linkedTo", test.names)
			if diff := cmp.Diff(test.text, d.Attributes["linkedTo"].StringValue); diff != "" {
				t.Errorf("string (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.list, d.Lists["linkedTo"].StringValues); diff != "" {
				t.Errorf("list (-want +got):\n%s", diff)
			}
			want := test.names
			if test.text == nil && test.list == nil {
				want = nil
			}
			if diff := cmp.Diff(want, d.Names("linkedTo")); diff != "" {
				t.Errorf("names (-want +got):\n%s", diff)
			}
		})
	}
}

// FuzzVersion checks that every published version is a semantic version.
func FuzzVersion(f *testing.F) {
	for _, seed := range []string{"535.104.05", "550.120", "6.8.5-custom", "1.2.3.4", "..", "999999999.999999999.999999999", "1.2\n"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		d := discovery.Device{Name: "a", Attributes: discovery.Attributes{}}
		d.Attributes.SetVersion("driverVersion", text)
		d.Attributes.SetString("model", text)
		if err := d.Validate(); err != nil {
			t.Error(err)
		}
	})
}
