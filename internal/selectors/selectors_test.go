package selectors_test

import (
	"errors"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/internal/selectors"
)

// The suggestion has the syntax of the expression, and a value of the type in other devices.
// internal/doctor tests that the suggested expressions work.
func TestRepairExpression(t *testing.T) {
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
		if got := selectors.RepairExpression(chosen, errors.New(test.failed), devices); got != test.want {
			t.Errorf("%s: %s, want %s", test.expression, got, test.want)
		}
	}
}

// A class of a Helm release is not edited by hand.
func TestRepairClass(t *testing.T) {
	for _, test := range []struct{ name, release, want string }{
		{"firm", "", "kubectl edit deviceclass firm   # write an expression that fails for no device"},
		{"gpu.chandler.dev", "chandler", selectors.HelmUpgrade + "   # restores the expression of the chart"},
		{"firm", "classes", "helm get values classes --namespace ml --all   # change the class in the chart or in its values: write an expression that fails for no device"},
	} {
		class := &resourceapi.DeviceClass{}
		class.Name = test.name
		if test.release != "" {
			class.Annotations = map[string]string{"meta.helm.sh/release-name": test.release, "meta.helm.sh/release-namespace": "ml"}
		}
		if got := selectors.RepairClass(class, errors.New("no such overload"), nil); len(got) != 1 || got[0] != test.want {
			t.Errorf("%s of %q: %q, want %q", test.name, test.release, got, test.want)
		}
	}
}

func TestRepairMissingClass(t *testing.T) {
	if got := selectors.WhoseClass("gpu.nvidia.com"); !strings.Contains(got, "another driver") {
		t.Errorf("another driver's class: %q", got)
	}
	if got := selectors.WhoseClass("gpus.chandler.dev"); strings.Contains(got, "another driver") {
		t.Errorf("a class of ours: %q", got)
	}
	there := []string{"gpu.chandler.dev", "npu.chandler.dev", "tun.chandler.dev"}
	for class, want := range map[string]string{
		"gpu.nvidia.com":    "kubectl",
		"kvm.chandler.dev":  "kubectl helm",
		"gpus.chandler.dev": "kubectl gpu.chandler.dev kubectl",
		"pgu.chandler.dev":  "kubectl gpu.chandler.dev kubectl",
	} {
		var got []string
		for _, command := range selectors.RepairMissingClass(class, there) {
			words := strings.Fields(command)
			got = append(got, words[0])
			if strings.HasSuffix(words[3], ".chandler.dev") {
				got = append(got, words[3])
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %q, want %q", class, got, want)
		}
	}
}

func TestNear(t *testing.T) {
	words := []string{"family", "model", "memory", "numaNode"}
	for word, want := range map[string]string{
		"familly": "family", "modell": "model", "numanode": "numaNode", "memory": "", "vendor": "", "m": "", "": "",
	} {
		if got := selectors.NearestWord(word, words); got != want {
			t.Errorf("%s: %q, want %q", word, got, want)
		}
	}
}

// Other families have an architecture without NVML, such as QAT.
func TestNameFromNVML(t *testing.T) {
	for expression, want := range map[string]string{
		`device.capacity["chandler.dev"].?memory.orValue(quantity("0")).isGreaterThan(quantity("1Gi"))`:                              "memory",
		`device.capacity["chandler.dev"].memory.isGreaterThan(quantity("1Gi"))`:                                                      "memory",
		`device.attributes["chandler.dev"][?"architecture"].orValue("") == "Hopper"`:                                                 "architecture",
		`device.attributes["chandler.dev"].?memoryType.orValue("") == "memory"`:                                                      "",
		`device.attributes["chandler.dev"].kind == "gpu"`:                                                                            "",
		`device.attributes["chandler.dev"].family == "qat" && device.attributes["chandler.dev"].?architecture.orValue("") == "4xxx"`: "",
		`device.attributes["chandler.dev"].family == "nvidia" && device.attributes["chandler.dev"].architecture == "Hopper"`:         "architecture",
		`device.attributes["chandler.dev"].family == "qat" && device.attributes["chandler.dev"].architecture == "4xxx"`:              "",
		`device.attributes["chandler.dev"].?vendor.orValue("") == "intel" && device.attributes["chandler.dev"].memory > 0`:           "",
		`device.attributes["chandler.dev"].family == "nvidia" && device.attributes["chandler.dev"].architecture == "hopper"`:         "architecture",
	} {
		if got := selectors.NameFromNVML(expression); got != want {
			t.Errorf("%s: %q; want %q", expression, got, want)
		}
	}
}

// For a misspelled attribute, the suggestion is the correct spelling.
func TestMisspeltAttribute(t *testing.T) {
	devices := []resourceapi.Device{{Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"chandler.dev/family": {}}}}
	chosen := []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.attributes["chandler.dev"].familly == "amdgpu"`}}}
	want := `no device has familly: is family meant? If not, in place of .familly write .?familly.orValue("")`
	if got := selectors.RepairExpression(chosen, errors.New("no such key: familly"), devices); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
