package v1alpha1

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const header = "apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\n"

func TestParseDriverConfig(t *testing.T) {
	got, err := ParseDriverConfig([]byte(header + `
mode: DRA
exclude:
- cel: "true"
resources:
- name: devices.kubevirt.io/kvm
  mode: DevicePlugin
  cel: "false"
- name: example.com/nlb0
  cel: "true"
  acceleratorFunction: d8424dc4-a4a3-c413-f89e-433683f9040b
- name: intel.com/dpdk
  cel: "true"
  sriov:
    additionalInfo: {"*": {token: 3e49019f}}
    needVhostNet: true
    excludeTopology: true
- {name: intel.com/fec, cel: "true", sriov: {}}
allocation:
- resource: nvidia.com/gpu
  policy: Spread
- resource: nvidia.com/gpu.shared
  failRequestsGreaterThanOne: true
  deviceIDStrategy: Index
  env: {NVIDIA_GDS: enabled}
overhead:
- cel: "true"
  perPod: {memory: 512Mi, hugepages-2Mi: 4Mi}
  perContainer: {cpu: 100m}
driverRoots: {nvidia: /run/nvidia/driver}
paths:
- name: example.com/serial
  kind: other
  env: {BAUD: "9600"}
  groups:
  - paths: [{path: /dev/ttyUSB*, mountPath: /dev/modem/, permissions: rw, limit: 2, optional: true}, {path: /run/x, type: Mount, readOnly: true}]
    count: 2
  - usb: [{vendor: "1a86", product: "7523", serial: A}]
    each: true
  - units: 4
    unitEnv: UNITS
`))
	if err != nil {
		t.Fatal(err)
	}
	want := &DriverConfig{
		TypeMeta: metav1.TypeMeta{APIVersion: APIVersion, Kind: KindDriverConfig},
		Mode:     ModeDRA,
		Exclude:  []Selector{{CEL: "true"}},
		Resources: []Resource{{Selector: Selector{CEL: "false"}, Name: "devices.kubevirt.io/kvm", Mode: ModeDevicePlugin}, {
			Selector: Selector{CEL: "true"}, Name: "example.com/nlb0", AcceleratorFunction: "d8424dc4-a4a3-c413-f89e-433683f9040b",
		}, {
			Selector: Selector{CEL: "true"}, Name: "intel.com/dpdk",
			SRIOV: &SRIOVPool{AdditionalInfo: map[string]map[string]string{"*": {"token": "3e49019f"}}, NeedVhostNet: true, ExcludeTopology: true},
		}, {
			Selector: Selector{CEL: "true"}, Name: "intel.com/fec", SRIOV: &SRIOVPool{},
		}},
		Allocation: []Allocation{{Resource: "nvidia.com/gpu", Policy: PolicySpread}, {
			Resource: "nvidia.com/gpu.shared", FailRequestsGreaterThanOne: true, DeviceIDStrategy: DeviceIDIndex, Env: map[string]string{"NVIDIA_GDS": "enabled"},
		}},
		Overhead: []Overhead{{
			Selector:     Selector{CEL: "true"},
			PerPod:       map[string]resource.Quantity{"memory": resource.MustParse("512Mi"), "hugepages-2Mi": resource.MustParse("4Mi")},
			PerContainer: map[string]resource.Quantity{"cpu": resource.MustParse("100m")},
		}},
		DriverRoots: map[string]string{"nvidia": "/run/nvidia/driver"},
		Paths: []PathResource{{
			Name: "example.com/serial", Kind: "other", Env: map[string]string{"BAUD": "9600"},
			Groups: []PathGroup{{
				Paths: []Path{
					{Path: "/dev/ttyUSB*", MountPath: "/dev/modem/", Permissions: "rw", Limit: 2, Optional: true},
					{Path: "/run/x", Type: PathTypeMount, ReadOnly: true},
				},
				Count: 2,
			}, {
				USB:  []USBDevice{{Vendor: "1a86", Product: "7523", Serial: "A"}},
				Each: true,
			}, {
				Units: 4, UnitEnv: "UNITS",
			}},
		}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("ParseDriverConfig (-want +got):\n%s", diff)
	}
}

func TestParseDriverConfigDefaults(t *testing.T) {
	got, err := ParseDriverConfig([]byte(header))
	if err != nil {
		t.Fatal(err)
	}
	if got.Mode != ModeAuto {
		t.Errorf("mode %q; want %q", got.Mode, ModeAuto)
	}
}

// Each error has the invalid field and the valid values.
func TestParseDriverConfigRefuses(t *testing.T) {
	tests := map[string]struct {
		text string
		want []string
	}{
		"unknown field":        {header + "modes: DRA\n", []string{"modes", "unknown field"}},
		"field twice":          {header + "mode: DRA\nmode: Auto\n", []string{"mode", "already set"}},
		"wrong case":           {header + "Mode: DRA\n", []string{"Mode", "unknown field"}},
		"two documents":        {header + "mode: DRA\n---\n" + header + "mode: Auto\n", []string{"more than one document"}},
		"other kind":           {"apiVersion: chandler.dev/v1alpha1\nkind: ClaimParameters\n", []string{"ClaimParameters", "DriverConfig"}},
		"other version":        {"apiVersion: chandler.dev/v2\nkind: DriverConfig\n", []string{"chandler.dev/v2", APIVersion}},
		"empty":                {"", []string{"kind"}},
		"no YAML":              {"{{", []string{"decode DriverConfig"}},
		"invalid YAML":         {header + "exclude: [\n", []string{"decode DriverConfig: line 3: invalid YAML: did not find expected node content"}},
		"unknown mode":         {header + "mode: Sometimes\n", []string{"mode", "Sometimes", "DevicePlugin"}},
		"no expression":        {header + "exclude: [{cel: ''}]\n", []string{"exclude[0].cel"}},
		"unqualified name":     {header + "resources: [{name: gpu, cel: 'true'}]\n", []string{"resources[0].name", "gpu", "example.com/gpu"}},
		"name of Kubernetes":   {header + "resources: [{name: x.kubernetes.io/gpu, cel: 'true'}]\n", []string{"resources[0].name", "Kubernetes' own"}},
		"name that is none":    {header + "resources: [{name: example.com/ä, cel: 'true'}]\n", []string{"resources[0].name"}},
		"resource mode":        {header + "resources: [{name: example.com/a, cel: 'true', mode: x}]\n", []string{"resources[0].mode"}},
		"shared twice over":    {header + "sharing: [{cel: 'true', replicas: 2, unit: 1Gi, resource: a.b/c}]\n", []string{"sharing[0]", "either replicas or unit"}},
		"not shared at all":    {header + "sharing: [{cel: 'true'}]\n", []string{"sharing[0]", "either replicas or unit"}},
		"no shares":            {header + "sharing: [{cel: 'true', replicas: -1}]\n", []string{"sharing[0]", "replicas"}},
		"unit of nothing":      {header + "sharing: [{cel: 'true', unit: 0, resource: a.b/c}]\n", []string{"sharing[0]", "unit"}},
		"half a unit":          {header + "sharing: [{cel: 'true', unit: 500m, resource: a.b/c}]\n", []string{"sharing[0]", "whole number"}},
		"unit without name":    {header + "sharing: [{cel: 'true', unit: 1Gi}]\n", []string{"sharing[0]", "resource"}},
		"pool without name":    {header + "sharing: [{cel: 'true', replicas: 2, pool: true}]\n", []string{"sharing[0]", "pool"}},
		"shared, no cel":       {header + "sharing: [{replicas: 2}]\n", []string{"sharing[0].cel"}},
		"capacity of count":    {header + "sharing: [{cel: 'true', replicas: 2, capacity: memory}]\n", []string{"sharing[0]", "capacity"}},
		"resource function":    {header + "resources: [{name: example.com/a, cel: 'true', acceleratorFunction: nlb0}]\n", []string{"resources[0]", "acceleratorFunction", "nlb0"}},
		"unknown policy":       {header + "allocation: [{resource: a.b/c, policy: Best}]\n", []string{"allocation[0]", "policy", "Best", "Aligned"}},
		"allocation of none":   {header + "allocation: [{policy: Packed}]\n", []string{"allocation[0]", "resource"}},
		"allocation twice":     {header + "allocation: [{resource: a.b/c}, {resource: a.b/c}]\n", []string{"allocation[1].resource", "a.b/c", "another"}},
		"unknown ID":           {header + "allocation: [{resource: a.b/c, deviceIDStrategy: index}]\n", []string{"deviceIDStrategy", "index", "Index"}},
		"no variable":          {header + "allocation: [{resource: a.b/c, env: {a-b: c}}]\n", []string{"allocation[0]", "env", "a-b"}},
		"no attribute":         {header + "allocation: [{resource: a.b/c, matchAttributes: [profile, a b]}]\n", []string{"allocation[0]", "matchAttributes[1]", "a b", "profile"}},
		"unknown list":         {header + "allocation: [{resource: a.b/c, deviceListStrategy: [EnvVar, envvar]}]\n", []string{"deviceListStrategy[1]", "envvar", "CDIDevices"}},
		"reclaim, no cel":      {header + "reclaim: [{reset: Function}]\n", []string{"reclaim[0].cel"}},
		"reclaim, reset":       {header + "reclaim: [{cel: 'true', reset: Bus}]\n", []string{"reclaim[0]", `reset: is "Bus"; want None or Function`}},
		"reclaim, no reset":    {header + "reclaim: [{cel: 'true', resetMethods: [flr]}]\n", []string{"reclaim[0]", "resetMethods: go with reset: Function"}},
		"reclaim, method":      {header + "reclaim: [{cel: 'true', reset: Function, resetMethods: [flr, ../bus]}]\n", []string{"resetMethods[1]"}},
		"reclaim, twice":       {header + "reclaim: [{cel: 'true', reset: Function, resetMethods: [flr, flr]}]\n", []string{"resetMethods[1]", "each once"}},
		"overhead of nothing":  {header + "overhead: [{cel: 'true'}]\n", []string{"overhead[0]", "perPod"}},
		"overhead, no cel":     {header + "overhead: [{perPod: {cpu: 1}}]\n", []string{"overhead[0].cel"}},
		"overhead, other":      {header + "overhead: [{cel: 'true', perPod: {nvidia.com/gpu: 1}}]\n", []string{"overhead[0]", "perPod[nvidia.com/gpu]", "cpu, memory or"}},
		"overhead, negative":   {header + "overhead: [{cel: 'true', perContainer: {memory: -1}}]\n", []string{"perContainer[memory]", "is -1"}},
		"overhead, no amount":  {header + "overhead: [{cel: 'true', perPod: {memory: 0}}]\n", []string{"perPod[memory]", "above 0"}},
		"overhead, half bytes": {header + "overhead: [{cel: 'true', perPod: {memory: 500m}}]\n", []string{"perPod[memory]", "multiple of 1"}},
		"overhead, fine CPU":   {header + "overhead: [{cel: 'true', perPod: {cpu: 100u}}]\n", []string{"perPod[cpu]", "multiple of 1m"}},
		"overhead, too much":   {header + "overhead: [{cel: 'true', perPod: {memory: 9Ei}}]\n", []string{"perPod[memory]"}},
		"overhead, part pages": {header + "overhead: [{cel: 'true', perPod: {hugepages-2Mi: 3Mi}}]\n", []string{"perPod[hugepages-2Mi]", "multiple of 2Mi"}},
		"overhead, no pages":   {header + "overhead: [{cel: 'true', perPod: {hugepages-: 3Mi, hugepages-0: 1Mi, hugepages-x: 1, hugepages-1m: 1}}]\n", []string{"perPod[hugepages-]", "perPod[hugepages-0]", "perPod[hugepages-x]", "perPod[hugepages-1m]"}},
		"relative root":        {header + "driverRoots: {nvidia: run/nvidia}\n", []string{"driverRoots[nvidia]", "absolute"}},
		"root that escapes":    {header + "driverRoots: {nvidia: /run/../etc}\n", []string{"driverRoots[nvidia]"}},
		"paths twice":          {header + "paths: [{name: a.b/c, groups: [{paths: [{path: /dev/a}]}]}, {name: a.b/c, groups: [{paths: [{path: /dev/a}]}]}]\n", []string{"paths[1].name"}},
		"paths without groups": {header + "paths: [{name: a.b/c}]\n", []string{"paths[0]", "groups"}},
		"paths and USB":        {header + "paths: [{name: a.b/c, groups: [{paths: [{path: /dev/a}], usb: [{vendor: a, product: b}]}]}]\n", []string{"paths[0]", "groups[0]", "either"}},
		"paths, much":          {header + "paths: [{name: a, kind: x, env: {1: a}, groups: [{each: true, count: -1, paths: [{path: dev, mountPath: x, limit: -1, permissions: rx}]}]}]\n", []string{"name: is", "kind: is", "env:", "each:", "count:", "path: is", "mountPath:", "limit:", "permissions:"}},
		"units, much":          {header + "paths: [{name: a.b/c, groups: [{units: 1025, count: 2, unitEnv: a-b}]}]\n", []string{"units: is 1025", "in place of count", "unitEnv: is"}},
		"shares of two units":  {header + "sharing: [{cel: a, unit: 1Gi, resource: a.b/c}, {cel: b, unit: 2Gi, resource: a.b/c}]\n", []string{"sharing[1].resource", "sharing[0]"}},
		"of two capacities":    {header + "sharing: [{cel: a, unit: 1, resource: a.b/c}, {cel: b, unit: 1, capacity: cores, resource: a.b/c}]\n", []string{"sharing[1].resource", "sharing[0]"}},
		"unit and replicas":    {header + "sharing: [{cel: a, unit: 1Gi, resource: a.b/c}, {cel: b, replicas: 2, resource: a.b/c}]\n", []string{"sharing[1].resource", "sharing[0]"}},
		"two pools":            {header + "sharing: [{cel: a, pool: true, replicas: 3, resource: a.b/c}, {cel: b, pool: true, replicas: 2, resource: a.b/c}]\n", []string{"sharing[1].resource", "sharing[0]"}},
		"share and device":     {header + "sharing: [{cel: a, replicas: 3, resource: a.b/c}]\nresources: [{cel: b, name: a.b/c}]\n", []string{"resources[0].name", "sharing[0]", "same cel"}},
		"name of paths":        {header + "resources: [{cel: b, name: a.b/c}]\npaths: [{name: a.b/c, groups: [{units: 2}]}]\n", []string{"resources[0].name", "paths[0].name"}},
		"share of paths":       {header + "sharing: [{cel: b, replicas: 2, resource: a.b/c}]\npaths: [{name: a.b/c, groups: [{units: 2}]}]\n", []string{"sharing[0].resource", "paths[0].name"}},
		"units twice":          {header + "paths: [{name: a.b/c, groups: [{units: 2}, {units: 3}]}]\n", []string{"groups[1].units: groups[0] has units"}},
		"units of none":        {header + "paths: [{name: a.b/c, groups: [{paths: [{path: /dev/a}], unitEnv: A}]}]\n", []string{"unitEnv: is"}},
		"path pattern":         {header + "paths: [{name: a.b/c, groups: [{paths: [{path: '/dev/[', type: File}]}]}]\n", []string{"paths[0].path: is", "syntax", "type: is"}},
		"path that escapes":    {header + "paths: [{name: a.b/c, groups: [{paths: [{path: /dev/../etc, readOnly: true}]}]}]\n", []string{"clean", "readOnly"}},
		"mount permissions":    {header + "paths: [{name: a.b/c, groups: [{paths: [{path: /run, type: Mount, permissions: r}]}]}]\n", []string{"permissions: is for"}},
		"USB ID unquoted":      {header + "paths: [{name: a.b/c, groups: [{usb: [{vendor: 1209, product: xyz}]}]}]\n", []string{"vendor"}},
		"USB ID that is none":  {header + "paths: [{name: a.b/c, groups: [{usb: [{vendor: '1209', product: xyz}]}]}]\n", []string{"usb[0]", "hexadecimal"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := ParseDriverConfig([]byte(test.text))
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error does not name %q: %v", want, err)
				}
			}
		})
	}
}

// A name may occur twice if both entries have the same meaning.
func TestParseDriverConfigNames(t *testing.T) {
	for name, text := range map[string]string{
		"one unit":         "sharing: [{cel: a, unit: 1Gi, resource: a.b/c}, {cel: b, unit: 1024Mi, capacity: memory, resource: a.b/c}]\n",
		"more shares":      "sharing: [{cel: a, replicas: 2, resource: a.b/c}, {cel: b, replicas: 4, resource: a.b/c}]\n",
		"names of devices": "sharing: [{cel: a, replicas: 2}, {cel: b, replicas: 4}]\n",
		"mode of shares":   "sharing: [{cel: a, pool: true, replicas: 2, resource: a.b/c}]\nresources: [{cel: a, name: a.b/c, mode: DRA}]\n",
		"mode of paths":    "resources: [{cel: 'device.attributes[\"chandler.dev\"].resource == \"a.b/c\"', name: a.b/c, mode: DRA}]\npaths: [{name: a.b/c, groups: [{units: 2}]}]\n",
		"two modes":        "resources: [{cel: a, name: a.b/c}, {cel: b, name: a.b/c, mode: DRA}]\n",
	} {
		if _, err := ParseDriverConfig([]byte(header + text)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestParseClaimParameters(t *testing.T) {
	data, err := os.ReadFile("testdata/claimparameters.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var tests []struct {
		Name, Parameters, Refused string
		AtPrepare                 bool
	}
	if err := yaml.UnmarshalStrict(data, &tests); err != nil {
		t.Fatal(err)
	}
	for _, test := range tests {
		t.Run(test.Name, func(t *testing.T) {
			_, err := ParseClaimParameters([]byte(test.Parameters))
			if (err == nil) != (test.Refused == "") || err != nil && !strings.Contains(err.Error(), test.Refused) {
				t.Errorf("error %v; want one that names %q", err, test.Refused)
			}
		})
	}
}

// A text that is not an object cannot come from the API server, and is refused too.
func TestParseClaimParametersRefusesWhatIsNoObject(t *testing.T) {
	for _, text := range []string{"", "null", "[]", `"x"`, "{", "{}{}"} {
		if _, err := ParseClaimParameters([]byte(text)); err == nil {
			t.Errorf("%q is accepted", text)
		}
	}
}

// Decoding any text ends with a value or an error.
func FuzzParseDriverConfig(f *testing.F) {
	f.Add([]byte(header + "mode: DRA\nresources:\n- {name: a.b/c, cel: 'true'}\n"))
	f.Add([]byte(header + "paths:\n- {name: a.b/c, groups: [{paths: [{path: '/dev/[a-c]*', type: Mount}]}]}\n"))
	f.Add([]byte("{"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if config, err := ParseDriverConfig(data); err == nil && config.Validate() != nil {
			t.Errorf("accepted, and yet not valid: %v", config.Validate())
		}
	})
}

// TestRenamed expects previous names of fields and kinds to be refused with the present name.
func TestRenamed(t *testing.T) {
	texts := make(map[string]string)
	for previous, name := range Renamed {
		texts[previous+": []\n"] = fmt.Sprintf("%s: the field was renamed to %q", previous, name)
	}
	for previous, name := range RenamedKinds {
		want := fmt.Sprintf("%q was renamed to %q", previous, name)
		texts["paths: [{name: a.b/c, kind: "+previous+", groups: [{count: 1, paths: [{path: /dev/a}]}]}]\n"] = "paths[0].kind: " + want
		for _, expression := range []string{
			`device.attributes["chandler.dev"].kind == "` + previous + `"`,
			`device.attributes["chandler.dev"].?kind.orValue("") != "` + previous + `"`,
			`device.attributes['chandler.dev'].kind=='` + previous + `'`,
		} {
			texts["exclude:\n- cel: >-\n    "+expression+"\n"] = "exclude[0].cel: kind " + want
		}
		family := "exclude:\n- cel: >-\n    device.attributes[\"chandler.dev\"].family == \"" + previous + "\"\n"
		if _, err := ParseDriverConfig([]byte(header + family)); err != nil {
			t.Errorf("%s: %v", family, err)
		}
	}
	for text, want := range texts {
		if _, err := ParseDriverConfig([]byte(header + text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", text, err, want)
		}
	}
}
