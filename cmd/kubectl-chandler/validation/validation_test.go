package validation

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// validate returns the output of validate for a text.
func validate(text string) (string, error) {
	var out strings.Builder
	err := Files(strings.NewReader(text), &out, []string{"-"})
	return out.String(), err
}

// checkFiles returns the output of validate for files.
func checkFiles(names ...string) (string, error) {
	var out strings.Builder
	err := Files(nil, &out, names)
	return out.String(), err
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// header returns the beginning of a configuration.
func header() string { return "apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\n" }

// withParameters returns objects with parameters, in all served versions, by version and path of
// the parameters.
func withParameters(parameters string) map[string]string {
	const opaque = `config: [{opaque: {driver: gpu.nvidia.com, parameters: {}}}, {opaque: {driver: chandler.dev, parameters: %s}}]`
	config := fmt.Sprintf(opaque, parameters)
	objects := make(map[string]string)
	for _, version := range []string{"v1", "v1beta2", "v1beta1"} {
		header := "apiVersion: resource.k8s.io/" + version + "\nmetadata: {name: x}\n"
		objects[version+"/spec.devices.config[1].opaque.parameters"] = header + "kind: ResourceClaim\nspec: {devices: {" + config + "}}\n"
		objects[version+"/spec.spec.devices.config[1].opaque.parameters"] = header + "kind: ResourceClaimTemplate\nspec: {spec: {devices: {" + config + "}}}\n"
		objects[version+"/spec.config[1].opaque.parameters"] = header + "kind: DeviceClass\nspec: {" + config + "}\n"
	}
	return objects
}

// validate refuses the same parameters of a claim, a template or a class as Prepare, and reports
// their place.
func TestValidateParameters(t *testing.T) {
	for _, test := range parametersTests(t) {
		if test.AtPrepare {
			continue // the YAML decoder refuses these first
		}
		for name, text := range withParameters(strings.ReplaceAll(test.Parameters, `\/`, "/")) {
			_, path, _ := strings.Cut(name, "/")
			out, err := validate(text)
			if (err != nil) != (test.Refused != "") || err != nil && (!strings.Contains(out, path) || !strings.Contains(out, test.Refused)) {
				t.Errorf("%s, %s: %v\n%s", test.Name, name, err, out)
			}
		}
		out, err := validate(strings.ReplaceAll(test.Parameters, `\/`, "/"))
		if strings.Contains(test.Parameters, `"chandler.dev`) && strings.Contains(test.Parameters, `"ClaimParameters"`) && (err != nil) != (test.Refused != "") {
			t.Errorf("%s, alone: %v\n%s", test.Name, err, out)
		}
	}
}

// entries returns two entries of config with parameters for some requests.
func entries(of ...string) string {
	entry := func(requests, parameters string) string {
		return "    - {requests: " + requests + ", opaque: {driver: chandler.dev, parameters: {apiVersion: chandler.dev/v1alpha1, kind: ClaimParameters, " + parameters + "}}}\n"
	}
	return "    config:\n" + entry(of[0], of[1]) + entry(of[2], of[3])
}

func TestValidate(t *testing.T) {
	const class = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: %s}\nspec: {extendedResourceName: %s}\n---\n"
	const claim = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: c}\nspec:\n  devices:\n"
	const requests = "    requests:\n    - {name: a, firstAvailable: [{name: large, deviceClassName: x}, {name: small, deviceClassName: x}]}\n    - {name: ab, exactly: {deviceClassName: x}}\n"
	const mpsClass = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: x}\nspec:\n  config:\n  - opaque: {driver: chandler.dev, parameters: {apiVersion: chandler.dev/v1alpha1, kind: ClaimParameters, mps: {}}}\n"
	const pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: "
	tests := map[string]struct {
		text   string
		prints []string
		fails  bool
	}{
		"configuration": {
			header(), []string{"1 object checked: 0 errors, 0 warnings"}, false,
		},
		"expressions of a configuration": {
			header() + "exclude: [{cel: 'device.'}]\nresources: [{name: a.b/c, cel: '1'}]\noverhead: [{cel: 'x', perPod: {cpu: 1}}]\ndriverRoots: {nobody: /x}\n",
			[]string{"-:6: error: DriverConfig: driverRoots[nobody]: no family uses this root; want one of fpga-intel, nvidia, nvidia-mps, solarflare, vpu", "-:3: error: DriverConfig: exclude[0].cel: ", "-:4: error: DriverConfig: resources[0].cel: ", "error: DriverConfig: overhead[0].cel: ", "4 errors"}, true,
		},
		"entries that never count": {
			header() + "sharing:\n- {cel: 'true', replicas: 2, nodes: {names: [a]}}\n- {cel: 'true', replicas: 3}\n- {cel: 'true', replicas: 4, nodes: {names: [b]}}\nresources:\n- {name: a.b/c, cel: 'true'}\n- {name: a.b/c, cel: 'false'}\n",
			[]string{"-:6: warning: DriverConfig: sharing[2].cel: is that of sharing[1], and the first", "1 object checked: 0 errors, 1 warning\n"}, false,
		},
		"places in paths": {
			header() + "paths: [{name: a.b/c, groups: [{paths: [{path: /dev/a}, {path: dev/b, permissions: xyz}]}, {count: -1, paths: [{path: /dev/a}]}]}]\n",
			[]string{
				`-:3: error: DriverConfig: paths[0].groups[0].paths[1].path: is "dev/b"`, `-:3: error: DriverConfig: paths[0].groups[0].paths[1].permissions: is "xyz"`,
				"-:3: error: DriverConfig: paths[0].groups[1].count: is -1", "3 errors",
			}, true,
		},
		"one place in paths": {
			header() + "paths: [{name: a.b/c, groups: [{paths: [{path: /dev/a, permissions: xyz}]}]}]\n",
			[]string{`-:3: error: DriverConfig: paths[0].groups[0].paths[0].permissions: is "xyz"`, "1 error,"}, true,
		},
		"field of a configuration": {
			header() + "modes: DRA\n", []string{`unknown field "modes"`}, true,
		},
		"line of a renamed field": {
			header() + "\nhandover: []\n", []string{`-:4: error: DriverConfig: handover: the field was renamed to "reclaim"`}, true,
		},
		"what is to be provisioned": {
			"apiVersion: chandler.dev/v1alpha1\nkind: ProvisionConfig\nfunctions: [{cel: 'device.', driver: vfio-pci}]\n", []string{"ProvisionConfig: functions[0].cel: "}, true,
		},
		"lines of a ProvisionConfig": {
			"apiVersion: chandler.dev/v1alpha1\nkind: ProvisionConfig\nfunctions:\n- cel: 'true'\n  virtualFunctions:\n    driver: vfio-pci\n    count: -1\n",
			[]string{"-:7: error: ProvisionConfig: functions[0].virtualFunctions.count: is -1; want 1 to 65535\n"}, true,
		},
		"kind of our own that there is not": {
			"apiVersion: chandler.dev/v1alpha1\nkind: DriverConfgi\n", []string{`is kind "DriverConfgi"`, "DriverConfig"}, true,
		},
		"configuration in a ConfigMap": {
			"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  readme: Hello.\n  config.yaml: |\n    apiVersion: chandler.dev/v1alpha1\n    kind: DriverConfig\n    mode: Sometimes\n",
			[]string{`-:9: error: ConfigMap c: data[config.yaml]: mode: is "Sometimes"`, "1 object checked"}, true,
		},
		"configuration that is no YAML": {
			"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  config.yaml: |\n    apiVersion: chandler.dev/v1alpha1\n    kind: [\n",
			[]string{"data[config.yaml]: "}, true,
		},
		"ConfigMap of others": {
			"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: b}\n", []string{"note: not checked, since they contain nothing for Chandler: 1 ConfigMap\n"}, true,
		},
		"many others": {
			header() + strings.Repeat("---\napiVersion: v1\nkind: Service\nmetadata: {name: s}\n", 3) + "---\napiVersion: v1\nkind: Secret\nmetadata: {name: s}\n",
			[]string{"note: not checked, since they contain nothing for Chandler: 1 Secret, 3 Service\n1 object checked"}, false,
		},
		"attributes and classes of others": {
			claim + "    requests:\n    - name: a\n      exactly:\n        deviceClassName: gpu.nvidia.com\n        selectors:\n" +
				"        - cel: {expression: 'device.attributes[\"chandler.dev\"].vendr == \"nvidia\" && device.attributes[\"chandler.dev\"].model == \"x\"'}\n" +
				"        - cel: {expression: 'device.attributes[\"chandler.dev\"][?\"colour\"].orValue(\"\") == \"\"'}\n",
			[]string{
				"-:9: warning: ResourceClaim c: spec.devices.requests[0].exactly.deviceClassName: gpu.nvidia.com is the class of a driver that Chandler replaces; the class of Chandler is nvidia.chandler.dev",
				"cel.expression: no device has the attribute vendr; the nearest name is vendor", "no device has the attribute colour\n", "0 errors, 3 warnings",
			}, false,
		},
		"attributes in the wrong domain": {
			claim + "    requests:\n    - name: a\n      exactly:\n        deviceClassName: gpu.chandler.dev\n        selectors:\n" +
				"        - cel: {expression: 'device.attributes[\"resource.kubernetes.io\"].vendor == \"amd\"'}\n" +
				"        - cel: {expression: 'device.attributes[\"chandler.de\"].family == \"x\"'}\n" +
				"        - cel: {expression: 'device.attributes[\"example.com\"].family == \"x\"'}\n",
			[]string{
				"no device has the attribute resource.kubernetes.io/vendor; the nearest name is vendor\n",
				"no device has the attribute chandler.de/family; the nearest name is family\n", "0 errors, 2 warnings",
			}, false,
		},
		"a class of TPUs of another driver": {
			claim + "    requests:\n    - name: a\n      exactly: {deviceClassName: tpu.google.com}\n",
			[]string{"tpu.google.com is the class of a driver that Chandler replaces; the class of Chandler is tpu.chandler.dev"}, false,
		},
		"attributes that are not published by default": {
			claim + "    requests:\n    - name: a\n      exactly:\n        deviceClassName: gpu.chandler.dev\n        selectors:\n" +
				"        - cel: {expression: 'device.attributes[\"chandler.dev\"].?serial.orValue(\"\") == \"1\"'}\n" +
				"    constraints: [{matchAttribute: chandler.dev/group4}, {matchAttribute: chandler.dev/group5}]\n",
			[]string{
				"cel.expression: ResourceSlices have the attribute serial only if the agent's configuration has attributes: [serial]",
				"constraints[0].matchAttribute: ResourceSlices have the attribute group4 only if the agent's configuration has attributes: [group4]",
				"constraints[1].matchAttribute: no device has the attribute group5; the nearest name is group2", "0 errors, 1 warning",
			}, false,
		},
		"names in a configuration": {
			header() + "sharing:\n- cel: 'device.attributes[\"chandler.dev\"].vendr == \"nvidia\"'\n  replicas: 10\n- cel: 'cel.bind(a, device.attributes[\"chandler.dev\"], a.vendor == \"amd\" && a.?modl.orValue(\"\") == \"\")'\n  resource: a.b/c\n  unit: 1Gi\n  capacity: memroy\n" +
				"onDemand:\n  mps:\n  - cel: '\"famly\" in device.attributes[\"chandler.dev\"] && device.capacity[\"chandler.dev\"].coers.isGreaterThan(quantity(\"1\"))'\n" +
				"exclude:\n- cel: device.attributes[\"chandler.dev\"].?group2.orValue(\"\") == \"x\"\n- cel: device.attributes[\"chandler.dev\"].?serial.orValue(\"\") == \"x\"\n- cel: device.driver == \"gpu.nvidia.com\"\n",
			[]string{
				"-:4: warning: DriverConfig: sharing[0].cel: no device has the attribute vendr; the nearest name is vendor\n",
				"-:6: warning: DriverConfig: sharing[1].cel: no device has the attribute modl; the nearest name is model\n",
				"-:9: warning: DriverConfig: sharing[1].capacity: no device has the capacity memroy; the nearest name is memory\n",
				"onDemand.mps[0].cel: no device has the attribute famly; the nearest name is family\n",
				"onDemand.mps[0].cel: no device has the capacity coers; the nearest name is cores\n",
				"exclude[0].cel: only ResourceSlices have the attribute group2, so that a configuration cannot select devices by it\n",
				"exclude[2].cel: gpu.nvidia.com is a driver that Chandler replaces; kubectl chandler import translates objects for it\n",
				"0 errors, 7 warnings\n",
			}, false,
		},
		"names in a ProvisionConfig": {
			"apiVersion: chandler.dev/v1alpha1\nkind: ProvisionConfig\nfunctions: [{cel: 'device.attributes[\"chandler.dev\"].modl == \"x\"', driver: vfio-pci}]\n",
			[]string{"-:3: warning: ProvisionConfig: functions[0].cel: no device has the attribute modl; the nearest name is model\n"}, false,
		},
		"names in a claim": {
			claim + "    requests:\n    - name: a\n      exactly:\n        deviceClassName: amdgpu.chandler.dev\n        selectors:\n" +
				"        - cel: {expression: '\"famly\" in device.attributes[\"chandler.dev\"] && device.capacity[\"chandler.dev\"].memry.isGreaterThan(quantity(\"1\"))'}\n" +
				"        - cel: {expression: 'cel.bind(a, device.attributes[\"chandler.dev\"], a.vendorr == \"amd\")'}\n" +
				"    constraints: [{matchAttribute: chandler.dev/numNode}, {distinctAttribute: chandler.dev/numaNode}, {matchAttribute: resource.kubernetes.io/pcieRot}, {matchAttribute: resource.kubernetes.io/other}, {matchAttribute: example.com/numNode}, {matchAttribute: resource.kubernetes.io/pcieRoot}]\n",
			[]string{
				"no device has the attribute famly; the nearest name is family\n", "no device has the capacity memry; the nearest name is memory\n", "no device has the attribute vendorr; the nearest name is vendor\n",
				"constraints[0].matchAttribute: no device has the attribute numNode; the nearest name is resource.kubernetes.io/numaNode\n",
				"constraints[1].distinctAttribute: no device has the attribute numaNode; the nearest name is resource.kubernetes.io/numaNode\n",
				"constraints[2].matchAttribute: no device has the attribute resource.kubernetes.io/pcieRot; the nearest name is resource.kubernetes.io/pcieRoot\n",
				"0 errors, 6 warnings\n",
			}, false,
		},
		"drivers that Chandler replaces": {
			claim + requests + "    constraints: [{matchAttribute: gpu.nvidia.com/parentUUID}]\n    config: [{opaque: {driver: gpu.nvidia.com, parameters: {}}}, {opaque: {driver: other.example.com, parameters: {}}}]\n---\n" +
				"apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: d}\nspec: {selectors: [{cel: {expression: device.driver == 'gpu.nvidia.com'}}]}\n",
			[]string{
				"ResourceClaim c: spec.devices.config[0].opaque.driver: gpu.nvidia.com is a driver that Chandler replaces; kubectl chandler import translates objects for it\n",
				"spec.devices.constraints[0].matchAttribute: gpu.nvidia.com is a driver", "DeviceClass d: spec.selectors[0].cel.expression: gpu.nvidia.com is a driver", "0 errors, 3 warnings\n",
			}, false,
		},
		"classes of Intel GPUs": {
			claim + "    requests: [{name: a, exactly: {deviceClassName: gpu.intel.com}}, {name: b, exactly: {deviceClassName: gpu-vfio.intel.com}}]\n",
			[]string{
				"the class of Chandler is gpu.chandler.dev with the selector device.attributes[\"chandler.dev\"].family == \"intelgpu\"\n",
				"the class of Chandler is gpu.chandler.dev with the selector device.attributes[\"chandler.dev\"].family == \"intelgpu\" and the parameter driver: vfio\n",
			}, false,
		},
		"others": {
			"# Says nothing.\n---\n\napiVersion: v1\nkind: Service\nmetadata: {name: s}\n", []string{"note: not checked, since they contain nothing for Chandler: 1 Service\n"}, true,
		},
		"lines of a ConfigMap that is written otherwise": {
			"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  config.yaml: \"apiVersion: chandler.dev/v1alpha1\\nkind: DriverConfig\\nmode: Sometimes\\n\"\n",
			[]string{`-:5: error: ConfigMap c: data[config.yaml]: mode: is "Sometimes"`}, true,
		},
		"lines of parameters": {
			"# A class.\n---\n\napiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: c}\nspec:\n  config:\n  - opaque:\n      driver: chandler.dev\n      parameters:\n" +
				"        apiVersion: chandler.dev/v1alpha1\n        kind: ClaimParameters\n        environment:\n          GOOD: a\n          BAD-NAME: b\n          EMPTY: ''\n        computePercentage: 0\n",
			[]string{
				`-:14: error: DeviceClass c: spec.config[0].opaque.parameters: environment: "BAD-NAME"`,
				`-:17: error: DeviceClass c: spec.config[0].opaque.parameters: environment[EMPTY]: `,
				`-:18: error: DeviceClass c: spec.config[0].opaque.parameters: computePercentage: is 0`, "3 errors",
			}, true,
		},
		"variable that no family takes": {
			"apiVersion: chandler.dev/v1alpha1\nkind: ClaimParameters\nenvironment:\n  HSA_XNACK: '1'\n  HSA_XNAK: '1'\n",
			[]string{"-:5: warning: ClaimParameters: environment[HSA_XNAK]: no device takes it", "1 object checked: 0 errors, 1 warning"}, false,
		},
		"lines of unknown fields": {
			"apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: c}\nspec:\n  selector: []\n  config:\n  - opaque:\n      driver: chandler.dev\n      parameters:\n" +
				"        apiVersion: chandler.dev/v1alpha1\n        kind: ClaimParameters\n        variables: {}\n",
			[]string{`-:5: error: DeviceClass c: unknown field "spec.selector"`, `-:12: error: DeviceClass c: spec.config[0].opaque.parameters: `, `unknown field "variables"`, "2 errors"}, true,
		},
		"lines of a list": {
			"apiVersion: v1\nkind: List\nitems:\n- apiVersion: chandler.dev/v1alpha1\n  kind: ClaimParameters\n- &same\n  apiVersion: chandler.dev/v1alpha1\n  kind: ClaimParameters\n  interfaceName: lo\n- *same\n",
			[]string{"-:9: error: ClaimParameters: items[1]: interfaceName: ", "-:9: error: ClaimParameters: items[2]: interfaceName: "}, true,
		},
		"selectors of a class": {
			"apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: c}\nspec: {selectors: [{cel: {expression: 'true'}}, {cel: {expression: 'device.driver'}}]}\n",
			[]string{"error: DeviceClass c: spec.selectors[1].cel.expression: "}, true,
		},
		"selectors of a claim": {
			"apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: c}\nspec: {devices: {requests: [{name: a, exactly: {deviceClassName: x, selectors: [{cel: {expression: 'devise'}}]}}]}}\n",
			[]string{"ResourceClaim c: spec.devices.requests[0].exactly.selectors[0].cel.expression: "}, true,
		},
		"memory of a claim": {
			"apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: c}\nspec: {devices: {requests: [{name: a, exactly: {deviceClassName: x, capacity: {requests: {memory: 1Gi}},\n" +
				"  selectors: [{cel: {expression: 'device.capacity[\"chandler.dev\"].memory.isGreaterThan(quantity(\"1Gi\"))'}}]}}]}}\n",
			[]string{
				"ResourceClaim c: spec.devices.requests[0].exactly.capacity.requests.memory: the memory of NVIDIA GPUs is not known without NVML",
				"ResourceClaim c: spec.devices.requests[0].exactly.selectors[0].cel.expression: the memory of NVIDIA GPUs is not known without NVML; in the chart, nvml.enabled adds it", "0 warnings",
			}, false,
		},
		"selectors of an old claim": {
			"apiVersion: resource.k8s.io/v1beta1\nkind: ResourceClaim\nmetadata: {name: c}\nspec: {devices: {requests: [{name: a, deviceClassName: x, selectors: [{cel: {expression: 'devise'}}]}]}}\n",
			[]string{"ResourceClaim c: spec.devices.requests[0].selectors[0].cel.expression: "}, true,
		},
		"field of a claim": {
			"apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: c}\nspec: {devices: {requests: [{name: a, deviceClassName: x}]}}\n",
			[]string{`unknown field "spec.devices.requests[0].deviceClassName"`}, true,
		},
		"version of a claim": {
			"apiVersion: resource.k8s.io/v2\nkind: ResourceClaim\nmetadata: {name: c}\n", []string{`"resource.k8s.io/v2", which is unknown`}, true,
		},
		"class of one name with another": {
			fmt.Sprintf(class+class+class, "a", "example.com/gpu", "b", "example.com/gpu", "c", "example.com/other"),
			[]string{"-:9: warning: DeviceClass b: spec.extendedResourceName: is example.com/gpu, as in DeviceClass a (-:4)", "3 objects checked: 0 errors, 1 warning\n"}, false,
		},
		"one class twice": {
			fmt.Sprintf(class+class, "a", "example.com/gpu", "a", "example.com/gpu"), []string{"0 warnings"}, false,
		},
		"classes as kubectl prints them": {
			`{"apiVersion":"v1","kind":"List","items":[` +
				`{"apiVersion":"resource.k8s.io/v1","kind":"DeviceClass","metadata":{"name":"a"},"spec":{"extendedResourceName":"a.b/c"}},` +
				`{"apiVersion":"resource.k8s.io/v1","kind":"DeviceClass","metadata":{"name":"b"},"spec":{"extendedResourceName":"a.b/c"}}]}`,
			[]string{"-:1: warning: DeviceClass b: items[1].spec.extendedResourceName: "}, false,
		},
		"claims of a pod": {
			pod + "{resourceClaims: [{name: gpu}], initContainers: [{name: i, resources: {claims: [{name: gpu}, {name: nic}]}}], containers: [{name: c, resources: {claims: [{name: gpus}]}}]}\n",
			[]string{`Pod p: spec.initContainers[0].resources.claims[1].name: is "nic"`, `Pod p: spec.containers[0].resources.claims[0].name: is "gpus"`, "2 errors"}, true,
		},
		"claims of a job's pods": {
			"apiVersion: batch/v1\nkind: CronJob\nmetadata: {name: j}\nspec: {jobTemplate: {spec: {template: {spec: {containers: [{name: c, resources: {claims: [{name: gpu}]}}]}}}}}\n",
			[]string{"CronJob j: spec.jobTemplate.spec.template.spec.containers[0].resources.claims[0].name: "}, true,
		},
		"pod that is none": {
			pod + "{containers: none}\n", []string{"error: Pod p: "}, true,
		},
		"separator with a comment": {
			header() + "--- # another\n" + header() + "mode: Never\n", []string{"-:6: error: DriverConfig: mode: ", "2 objects checked"}, true,
		},
		"field twice": {header() + "mode: DRA\nmode: DRA\n", []string{`-:4: error: invalid YAML: key "mode" already set`}, true},
		"text for a number": {
			claim + "    requests:\n    - name: a\n      exactly: {deviceClassName: c}\n    - name: b\n      exactly:\n        count: two\n",
			[]string{"-:11: error: ResourceClaim c: spec.devices.requests[1].exactly.count: is a string; want an integer\n"}, true,
		},
		"text for a number in a configuration": {
			header() + "sharing:\n- cel: 'true'\n  replicas: two\n", []string{"-:5: error: DriverConfig: sharing[0].replicas: is a string; want an integer\n"}, true,
		},
		"invalid YAML in the second document": {
			header() + "---\nkind: X\n a: b\n", []string{"-:5: error: invalid YAML: mapping values are not allowed in this context\n"}, true,
		},
		"invalid YAML without a line": {
			"\na: *x\n", []string{"-:2: error: invalid YAML: unknown anchor 'x' referenced\n"}, true,
		},
		"two strings for one field": {
			header() + "sharing:\n- cel: \"a\" \"b\"\n", []string{"-:4: error: invalid YAML: did not find expected key\n"}, true,
		},
		"alias without an anchor in the second document": {
			header() + "---\nkind: X\na:\n- *x\n", []string{"-:6: error: invalid YAML: unknown anchor 'x' referenced\n"}, true,
		},
		"string without an end": {
			header() + "sharing:\n- cel: \"a\n  replicas: 2\n", []string{"-:4: error: invalid YAML: found unexpected end of stream\n"}, true,
		},
		"alias without an anchor in a ConfigMap": {
			"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: m}\ndata:\n  config.yaml: |\n    apiVersion: chandler.dev/v1alpha1\n    kind: DriverConfig\n    mode: *x\n",
			[]string{"-:8: error: ConfigMap m: data[config.yaml]: invalid YAML: unknown anchor 'x' referenced\n"}, true,
		},
		"invalid YAML in a ConfigMap": {
			"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: m}\ndata:\n  config.yaml: |\n    apiVersion: chandler.dev/v1alpha1\n    kind: DriverConfig\n    mode: [\n",
			[]string{"-:8: error: ConfigMap m: data[config.yaml]: invalid YAML: did not find expected node content\n"}, true,
		},
		"invalid YAML in a quoted string": {
			"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: m}\ndata:\n  config.yaml: \"apiVersion: chandler.dev/v1alpha1\\nkind: DriverConfig\\nmode: [\"\n",
			[]string{"-:5: error: ConfigMap m: data[config.yaml]: invalid YAML: "}, true,
		},
		"MPS and time slice of one request": {
			claim + entries("[a]", "timeSlice: Short", "[b, a]", "mps: {}"),
			[]string{"-:8: error: ResourceClaim c: spec.devices.config[1].opaque.parameters: mps: cannot be combined with timeSlice of another entry of config for the same request\n"}, true,
		},
		"vfio with another parameter": {
			claim + requests + entries("[a]", "driver: vfio, interfaceName: net1", "[ab]", "driver: vfio"),
			[]string{"-:10: error: ResourceClaim c: spec.devices.config[0].opaque.parameters: driver: cannot be combined with interfaceName\n"}, true,
		},
		"vfio with a parameter of another entry": {
			claim + entries("[a]", "driver: vfio", "[]", "interfaceName: net1"),
			[]string{"config[1].opaque.parameters: interfaceName: cannot be combined with driver of another entry of config for the same request\n"}, true,
		},
		"vfio and a parameter of another request": {
			claim + requests + entries("[a]", "driver: vfio", "[ab]", "interfaceName: net1"), []string{"0 errors"}, false,
		},
		"line of a parameter that cannot be combined": {
			"apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: x}\nspec:\n  config:\n  - opaque:\n      driver: chandler.dev\n      parameters:\n" +
				"        apiVersion: chandler.dev/v1alpha1\n        kind: ClaimParameters\n        interfaceName: net1\n        driver: vfio\n",
			[]string{"-:12: error: DeviceClass x: spec.config[0].opaque.parameters: driver: cannot be combined with interfaceName\n"}, true,
		},
		"MPS of all requests": {
			claim + entries("[]", "mps: {}", "[a/large]", "timeSlice: Short"), []string{"timeSlice: cannot be combined with mps"}, true,
		},
		"MPS of an alternative": {
			claim + entries("[a]", "mps: {}", "[a/large]", "timeSlice: Short"), []string{"timeSlice: cannot be combined with mps"}, true,
		},
		"MPS and time slice of two requests": {
			claim + requests + entries("[a]", "mps: {}", "[ab]", "timeSlice: Short"),
			[]string{"-:11: error: ResourceClaim c: spec.devices.config[1].opaque.parameters: mps and timeSlice: requests a and ab have them; only one request of a claim can, for any number of devices\n", "1 error,"}, true,
		},
		"MPS of all of two requests": {
			claim + requests + entries("[]", "mps: {}", "[ab]", "interfaceName: net1"), []string{"spec.devices.config[0].opaque.parameters: mps and timeSlice: requests a and ab have them", "1 error,"}, true,
		},
		"MPS of a request and an alternative": {
			claim + requests + entries("[a/large]", "mps: {}", "[ab]", "mps: {}"), []string{"warning: ResourceClaim c: spec.devices.config[0].opaque.parameters: mps and timeSlice: requests ab and a/large have them", "0 errors, 1 warning\n"}, false,
		},
		"MPS of two alternatives": {
			claim + requests + entries("[a/large]", "mps: {}", "[a/small]", "timeSlice: Long"), []string{"0 errors, 0 warnings\n"}, false,
		},
		"MPS by a DeviceClass of two requests": {
			claim + requests + "---\n" + mpsClass,
			[]string{"-:7: error: ResourceClaim c: spec.devices.requests[0].firstAvailable[0].deviceClassName: mps and timeSlice: requests ab and a/large have them, by DeviceClass x; only one request", "2 objects checked: "}, true,
		},
		"MPS by a DeviceClass of two requests in v1beta1": {
			strings.Replace(claim, "/v1\n", "/v1beta1\n", 1) + "    requests: [{name: a, deviceClassName: x}, {name: b, deviceClassName: x}]\n---\n" + mpsClass,
			[]string{"-:6: error: ResourceClaim c: spec.devices.requests[1].deviceClassName: mps and timeSlice: requests a and b have them, by DeviceClass x"}, true,
		},
		"MPS by a DeviceClass and by the claim": {
			mpsClass + "---\n" + claim + "    requests: [{name: a, exactly: {deviceClassName: x}}, {name: b, exactly: {deviceClassName: z}}]\n" + entries("[b]", "mps: {}", "[b]", "interfaceName: net1"),
			[]string{"error: ResourceClaim c: spec.devices.config[0].opaque.parameters: mps and timeSlice: requests a and b have them; only one request"}, true,
		},
		"MPS by a DeviceClass of one request": {
			mpsClass + "---\n" + claim + "    requests: [{name: a, exactly: {deviceClassName: x}}, {name: b, exactly: {deviceClassName: z}}]\n", []string{"0 errors, 0 warnings\n"}, false,
		},
		"MPS by a DeviceClass and a time slice by the claim": {
			claim + "    requests: [{name: a, exactly: {deviceClassName: x}}]\n" + entries("[]", "timeSlice: Short", "[]", "interfaceName: net1") + "---\n" + mpsClass,
			[]string{"config[0].opaque.parameters: timeSlice: cannot be combined with mps of DeviceClass x for the same request\n", "1 error,"}, true,
		},
		"requests that the claim does not have": {
			claim + requests + "    constraints: [{requests: [a, b], matchAttribute: resource.kubernetes.io/pcieRoot}]\n" + entries("[a/huge]", "mps: {}", "[ab]", "interfaceName: net1"),
			[]string{`spec.devices.constraints[0].requests[1]: is "b", which is none of the claim's requests`, `spec.devices.config[0].requests[0]: is "a/huge", which is none`, "2 errors,"}, true,
		},
		"no object":       {"- a\n", []string{"is not an object"}, true},
		"no kind":         {"spec: {}\n", []string{"no kind"}, true},
		"nothing":         {"# Only words.\n---\n", []string{"note: has no objects"}, true},
		"entries of none": {"apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: c}\nspec: {config: [1, {opaque: 2}]}\n", []string{"error: DeviceClass c: "}, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			out, err := validate(test.text)
			if (err != nil) != test.fails {
				t.Errorf("error %v", err)
			}
			for _, want := range test.prints {
				if !strings.Contains(out, want) {
					t.Errorf("does not print %q:\n%s", want, out)
				}
			}
		})
	}
}

// Files without an object for Chandler are an error, so the output does not end with "0 errors".
func TestValidateNothing(t *testing.T) {
	for name, text := range map[string]string{"empty": "", "words": "# Only words.\n", "another kind": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n"} {
		out, err := validate(text)
		if err == nil || err.Error() != "no object was checked: the files contain nothing for Chandler" || strings.Contains(out, "error") {
			t.Errorf("%s: error %v, printed %q", name, err, out)
		}
	}
}

// The note about NVML is for requests that may select NVIDIA GPUs.
func TestValidateMemory(t *testing.T) {
	const text = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: c}\nspec: {devices: {requests: [{name: a, exactly: {deviceClassName: %s, selectors: [%s], capacity: {requests: {memory: 1Gi}}}}]}}\n"
	const memory = `{cel: {expression: 'device.capacity["chandler.dev"].memory.isGreaterThan(quantity("1Gi"))'}}`
	const amd = `{cel: {expression: 'device.attributes["chandler.dev"].family == "amdgpu"'}}`
	for _, test := range []struct {
		class, selectors string
		notes            int
	}{
		{"gpu.chandler.dev", memory, 2},
		{"nvidia.chandler.dev", memory, 2},
		{"gpu.nvidia.com", memory, 2},
		{"example.com", memory, 2},
		{"example.com", memory + ", " + amd, 0},
		{"gpu.intel.com", memory, 0},
		{"gpu.amd.com", memory, 0},
		{"intelgpu.chandler.dev", memory, 0},
	} {
		out, err := validate(fmt.Sprintf(text, test.class, test.selectors))
		if got := strings.Count(out, "without NVML"); err != nil || got != test.notes {
			t.Errorf("%s, %s: %v, %d notes, want %d:\n%s", test.class, test.selectors, err, got, test.notes, out)
		}
	}
}

// All shipped objects are valid, except patches, which are not objects.
func TestValidateShipped(t *testing.T) {
	files, err := filepath.Glob("../../../deployments/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	examples, err := filepath.Glob("../../../deployments/examples/*.yaml")
	if err != nil || len(files) == 0 || len(examples) == 0 {
		t.Fatalf("found %q, %q, %v", files, examples, err)
	}
	var shipped []string
	for _, file := range append(files, examples...) {
		if !strings.HasSuffix(file, "-patch.yaml") {
			shipped = append(shipped, file)
		}
	}
	if out, err := checkFiles(shipped...); err != nil || !strings.Contains(out, ": 0 errors, 0 warnings\n") {
		t.Error(out)
	}
}

// Files are checked together, and an unreadable file does not hide the others.
func TestValidateFiles(t *testing.T) {
	dir := t.TempDir()
	good, bad, missing := filepath.Join(dir, "good.yaml"), filepath.Join(dir, "bad.yaml"), filepath.Join(dir, "missing.yaml")
	write(t, good, header())
	write(t, bad, header()+"mode: Never\n")
	out, err := checkFiles(missing, good, bad)
	if err == nil || !strings.Contains(err.Error(), "2 errors") {
		t.Errorf("error %v", err)
	}
	for _, want := range []string{missing + ": error: ", bad + ":3: error: DriverConfig: mode"} {
		if !strings.Contains(out, want) {
			t.Errorf("does not print %q:\n%s", want, out)
		}
	}
}

// A directory stands for the files below it that may contain objects. Other files are ignored.
func TestValidateDirectory(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "below"), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "a.yaml"), header()+"---\n"+header()+"mode: Never\n")
	write(t, filepath.Join(dir, "below", "b.json"), `{"apiVersion": "chandler.dev/v1alpha1", "kind": "ClaimParameters", "computePercentage": 500}`)
	write(t, filepath.Join(dir, "below", "c-patch.yml"), "spec: {template: {}}\n")
	write(t, filepath.Join(dir, "README.md"), "{{")
	if err := os.MkdirAll(filepath.Join(dir, "chart", "templates"), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "chart", "Chart.yaml"), "name: chart\n")
	write(t, filepath.Join(dir, "chart", "templates", "a.yaml"), "{{")
	out, err := checkFiles(dir)
	if err == nil {
		t.Error("no error")
	}
	for _, want := range []string{
		filepath.Join(dir, "a.yaml") + ":6: error: DriverConfig: mode: ",
		filepath.Join(dir, "below", "b.json") + ":1: error: ClaimParameters: computePercentage: is 500",
		filepath.Join(dir, "below", "c-patch.yml") + ":1: note: is not checked: has neither",
		"3 objects checked: 2 errors, 0 warnings",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("does not print %q:\n%s", want, out)
		}
	}
	if out, err := checkFiles(filepath.Join(dir, "below", "c-patch.yml")); err == nil {
		t.Errorf("a file that was named and has no object:\n%s", out)
	}
	if out, err := checkFiles(t.TempDir()); err == nil || !strings.Contains(out, "has no files that end in .yaml") {
		t.Errorf("an empty directory: %v\n%s", err, out)
	}
}

// The check of any text ends without a panic.
func FuzzValidate(f *testing.F) {
	for _, file := range []string{"config.yaml", "examples/fpga-function.yaml", "examples/gpu-pair.yaml"} {
		data, err := os.ReadFile("../../../deployments/" + file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(data))
	}
	for _, text := range withParameters(`{"kind": 1}`) {
		f.Add(text)
	}
	f.Fuzz(func(_ *testing.T, text string) {
		_ = Files(strings.NewReader(text), io.Discard, []string{"-"})
	})
}

// The nodes of entries are checked, with the line of the entry.
func TestValidateNodes(t *testing.T) {
	printed, err := validate(header() + `exclude:
- cel: "true"
  nodes:
    names: [a, "B c"]
allocation:
- resource: a.b/c
- resource: a.b/c
  nodes: {matchLabels: {a: b}}
`)
	for _, want := range []string{`:6: error: DriverConfig: exclude[0].nodes.names[1]: is "B c"`, ":9: error: DriverConfig: allocation[1].resource: is \"a.b/c\", as another's is"} {
		if err == nil || !strings.Contains(printed, want) {
			t.Errorf("no %q in\n%s", want, printed)
		}
	}
}

// validate refuses what the API server refuses, and reports it in the order of the lines.
func TestValidateAsTheServer(t *testing.T) {
	const claim = `apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: c}
spec:
  devices:
    requests:
    - {name: a, exactly: {}}
    - {name: a, exactly: {deviceClassName: gpu.chandler.dev, count: -1}}
    - {name: A_b, exactly: {deviceClassName: gpu.chandler.dev, allocationMode: Some}}
    - {name: none}
    - name: first
      firstAvailable:
      - {name: x, deviceClassName: gpu.chandler.dev, allocationMode: All, count: 2}
      - {name: x, deviceClassName: gpu.chandler.dev, selectors: [{cel: {expression: 'device.driver == "chandler.de"'}}]}
    constraints:
    - {requests: [a, first/x], matchAttribute: numaNode}
    - {requests: [b]}
`
	want := `-:7: error: ResourceClaim c: spec.devices.requests[0].exactly: has no deviceClassName
-:8: error: ResourceClaim c: spec.devices.requests[1].name: is "a", as that of an earlier request
-:8: error: ResourceClaim c: spec.devices.requests[1].exactly.count: is -1; must be greater than zero
-:9: error: ResourceClaim c: spec.devices.requests[2].exactly.allocationMode: Unsupported value: "Some": supported values: "All", "ExactCount"
-:9: error: ResourceClaim c: spec.devices.requests[2].name: is "A_b"; a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
-:10: error: ResourceClaim c: spec.devices.requests[3]: has both exactly and firstAvailable, or neither; want one of them
-:13: error: ResourceClaim c: spec.devices.requests[4].firstAvailable[0].count: is 2; must be unset with allocationMode All
-:14: error: ResourceClaim c: spec.devices.requests[4].firstAvailable[1].name: is "x", as that of an earlier request
-:14: warning: ResourceClaim c: spec.devices.requests[4].firstAvailable[1].selectors[0].cel.expression: no driver has the name chandler.de; the nearest name is chandler.dev
-:16: error: ResourceClaim c: spec.devices.constraints[0].matchAttribute: Invalid value: "numaNode": a fully qualified name must be a domain and a name separated by a slash
-:17: error: ResourceClaim c: spec.devices.constraints[1]: has neither matchAttribute nor distinctAttribute
-:17: error: ResourceClaim c: spec.devices.constraints[1].requests[0]: is "b", which is none of the claim's requests
1 object checked: 11 errors, 1 warning
`
	out, err := validate(claim)
	if diff := cmp.Diff(want, out); diff != "" || err == nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}
