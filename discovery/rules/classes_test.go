package rules

import (
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
)

func TestFamiliesWithoutClass(t *testing.T) {
	class := func(expressions ...string) (c resourceapi.DeviceClass) {
		for _, e := range expressions {
			c.Spec.Selectors = append(c.Spec.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: e}})
		}
		return c
	}
	device := func(name, family, kind string) Offered {
		attributes := discovery.Attributes{"chandler.dev/family": {StringValue: &family}, "chandler.dev/kind": {StringValue: &kind}}
		return Offered{Device: discovery.Device{Name: name, Family: family, Attributes: attributes}}
	}
	const ofKind, ofFamily = `device.attributes["chandler.dev"].kind == "gpu"`, `device.attributes["chandler.dev"].family == "dlb"`
	devices := []Offered{device("a", "nvidia", "gpu"), device("b", "sgx", "other"), device("c", "dlb", "other"), device("d", "sgx", "other")}
	for name, test := range map[string]struct {
		classes []resourceapi.DeviceClass
		want    []string
	}{
		"no class":               {nil, []string{"dlb", "nvidia", "sgx"}},
		"kind and family":        {[]resourceapi.DeviceClass{class(ofKind), class(ofFamily)}, []string{"sgx"}},
		"both selectors":         {[]resourceapi.DeviceClass{class(ofKind, ofFamily)}, []string{"dlb", "nvidia", "sgx"}},
		"invalid and failing":    {[]resourceapi.DeviceClass{class("("), class(`device.attributes["chandler.dev"].missing == "x"`), class(ofKind)}, []string{"dlb", "sgx"}},
		"class of all devices":   {[]resourceapi.DeviceClass{class()}, nil},
		"class of other drivers": {[]resourceapi.DeviceClass{class(`device.driver == "example.com"`)}, []string{"dlb", "nvidia", "sgx"}},
	} {
		if got := FamiliesWithoutClass(test.classes, devices); !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}
