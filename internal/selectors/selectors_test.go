package selectors_test

import (
	"errors"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/internal/selectors"
)

// A key is read as it is written in the expression, with a value of the type that other devices
// have. internal/doctor tests that the new expressions work.
func TestMendExpression(t *testing.T) {
	devices := []resourceapi.Device{{Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"cores": {IntValue: new(int64)}, "chandler.dev/driverVersion": {VersionValue: new(string)},
	}}}
	for _, test := range []struct{ expression, failed, want string }{
		{`device.attributes["chandler.dev"].cores > 2`, "no such key: cores", "in place of .cores write .?cores.orValue(0)"},
		{`device.attributes["chandler.dev"].driverVersion.isGreaterThan(semver("1.0.0"))`, "no such key: driverVersion", `in place of .driverVersion write .?driverVersion.orValue(semver("0.0.0"))`},
		{`device.attributes["chandler.dev"]['none'] == ''`, "CEL runtime error: no such key: none. consider", `in place of ['none'] write [?'none'].orValue("")`},
		{`true`, "no such overload", "write an expression that fails for no device"},
	} {
		chosen := []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: test.expression}}}
		if got := selectors.MendExpression(chosen, errors.New(test.failed), devices); got != test.want {
			t.Errorf("%s: %s, want %s", test.expression, got, test.want)
		}
	}
}

func TestMendMissingClass(t *testing.T) {
	if got := selectors.MendMissingClass("gpu.nvidia.com"); len(got) != 1 {
		t.Errorf("of another driver's class: %q", got)
	}
	if got := selectors.MendMissingClass("gpu.chandler.dev"); !slices.ContainsFunc(got, func(c string) bool { return c[:4] == "helm" }) {
		t.Errorf("of a class of the chart: %q", got)
	}
}
