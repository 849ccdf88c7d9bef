package pool

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
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
		{"gpu-memory.yaml", h100, false},
		{"gpu-memory.yaml", mi210, true},
	} {
		t.Run(test.example+" on "+test.host, func(t *testing.T) {
			host := discoverytest.ReadHost(t, filepath.Join("../../discovery/families", test.host))
			snapshot := (&rules.Rules{}).ApplyTo(discovery.Scan(host, families.All))
			made, problems := BuildPool(Input{Snapshot: snapshot, Features: features.All()})
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
		if e := request.Exactly; e.AllocationMode == "" {
			e.AllocationMode, e.Count = resourceapi.DeviceAllocationModeExactCount, max(e.Count, 1)
		}
	}
	return spec
}
