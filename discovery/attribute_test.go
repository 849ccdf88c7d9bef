package discovery_test

import (
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
