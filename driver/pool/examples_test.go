package pool

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/topology"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
)

// The scheduler allocates the claims of the examples on recorded hosts with the default
// configuration. A claim that selects memory gets no NVIDIA GPU without NVML.
func TestExamplesOnDefaults(t *testing.T) {
	const h100, mi210 = "nvidia/testdata/h100x8.host", "amdgpu/testdata/mi210x8.host"
	for _, test := range []struct {
		example, host string
		allocated     bool
	}{
		{"gpu-pair.yaml", h100, true},
		{"gpu-pair.yaml", mi210, true},
		{"gpu-metadata.yaml", h100, true},
		{"gpu-metadata.yaml", mi210, true},
		{"gpu-mps-claim.yaml", h100, true},
		{"gpus-aligned.yaml", h100, true},
		{"gpus-aligned.yaml", mi210, true},
		{"gpu-memory.yaml", h100, false},
		{"gpu-memory.yaml", mi210, true},
	} {
		t.Run(test.example+" on "+test.host, func(t *testing.T) {
			host := discoverytest.ReadHost(t, filepath.Join("../../discovery/families", test.host))
			snapshot := (&rules.Rules{}).ApplyTo(scan.ReadHost(host, families.All))
			made, problems := BuildPools(Input{Node: "node", Snapshot: snapshot, Features: features.All()})
			if len(problems) > 0 {
				t.Fatal(problems)
			}
			s := pooltest.NewScheduler(t, features.All()).Publish(made)
			s.Classes = shippedClasses(t)
			if _, allocated := s.AllocateClaim("uid", exampleSpec(t, test.example)); allocated != test.allocated {
				t.Errorf("allocated: %t; want %t", allocated, test.allocated)
			}
		})
	}
}

// The claim of the example gets a whole aligned group while there is one, and then other GPUs.
func TestAlignedExample(t *testing.T) {
	host := discoverytest.ReadHost(t, "../../discovery/families/amdgpu/testdata/mi210x8.host")
	settings := &rules.Rules{Attributes: []resourceapi.QualifiedName{"group4"}}
	made, _ := BuildPools(Input{Node: "node", Snapshot: settings.ApplyTo(scan.ReadHost(host, families.All)), Features: features.All()})
	members := make(map[string][]string)
	for name, d := range devicesOf(made) {
		group := *d.Attributes[topology.GroupAttribute(4)].StringValue
		members[group] = append(members[group], name)
	}
	var groups []string
	for group := range members {
		groups = append(groups, group)
	}
	if len(groups) != 2 {
		t.Fatalf("groups: %v", members)
	}
	for name, test := range map[string]struct {
		inUse []string
		want  string
	}{
		"one group is free": {[]string{groups[1]}, "gpus/together"},
		"no group is free":  {groups, "gpus/apart"},
	} {
		t.Run(name, func(t *testing.T) {
			s := pooltest.NewScheduler(t, features.All()).Publish(made)
			s.Classes = shippedClasses(t)
			others := &resourceapi.AllocationResult{}
			for _, device := range test.inUse {
				others.Devices.Results = append(others.Devices.Results, resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: discovery.Domain, Pool: "node", Device: device})
			}
			s.Claims["others"] = &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: others}}
			claim, allocated := s.AllocateClaim("uid", exampleSpec(t, "gpus-aligned.yaml"))
			if !allocated {
				t.Fatal("not allocated")
			}
			for _, r := range claim.Status.Allocation.Devices.Results {
				if r.Request != test.want || test.want == "gpus/together" && !slices.Contains(members[groups[0]], r.Device) {
					t.Errorf("%s is allocated by %s; want %s", r.Device, r.Request, test.want)
				}
			}
		})
	}
}

// documents returns the YAML documents of a file below deployments.
func documents(t *testing.T, name string) []string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("../../deployments", name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(string(data), "\n---\n")
}

func shippedClasses(t *testing.T) map[string]*resourceapi.DeviceClass {
	t.Helper()
	classes := make(map[string]*resourceapi.DeviceClass)
	for _, document := range documents(t, "examples/deviceclasses-all.yaml") {
		class := &resourceapi.DeviceClass{}
		if err := yaml.UnmarshalStrict([]byte(document), class); err != nil {
			t.Fatal(err)
		}
		classes[class.Name] = class
	}
	return classes
}

// exampleSpec returns the spec of the first claim or template of an example, with the defaults of
// the API.
func exampleSpec(t *testing.T, name string) resourceapi.ResourceClaimSpec {
	t.Helper()
	document := []byte(documents(t, filepath.Join("examples", name))[0])
	var claim resourceapi.ResourceClaim
	var template resourceapi.ResourceClaimTemplate
	err := yaml.Unmarshal(document, &claim)
	spec := claim.Spec
	if claim.Kind == "ResourceClaimTemplate" {
		err = yaml.Unmarshal(document, &template)
		spec = template.Spec.Spec
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, request := range spec.Devices.Requests {
		if e := request.Exactly; e != nil && e.AllocationMode == "" {
			e.AllocationMode, e.Count = resourceapi.DeviceAllocationModeExactCount, max(e.Count, 1)
		}
		for i := range request.FirstAvailable {
			if r := &request.FirstAvailable[i]; r.AllocationMode == "" {
				r.AllocationMode, r.Count = resourceapi.DeviceAllocationModeExactCount, max(r.Count, 1)
			}
		}
	}
	return spec
}
