package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// parametersPolicy is the name of the policy in deployments/admission.yaml.
const parametersPolicy = "parameters.chandler.dev"

// TestAdmissionOfParameters applies invalid parameters in every object that can hold them. By
// deployments/admission.yaml, the API server must refuse the parameters that Prepare and "chandler
// validate" refuse, and name the error.
func TestAdmissionOfParameters(t *testing.T) {
	policyWorks(t)
	for _, test := range parametersTests(t) {
		if test.AtPrepare {
			continue
		}
		for kind, manifest := range withParameters("admission-test", test.Parameters) {
			t.Run(test.Name+"/"+kind, func(t *testing.T) {
				err := kube.DryRun(within(t), manifest)
				if meta.IsNoMatchError(err) {
					t.Skip("this server does not serve that version")
				}
				if test.Refused == "" && err != nil {
					t.Error(err)
				}
				if test.Refused != "" && (err == nil || !containsAll(err.Error(), []string{parametersPolicy, test.Refused})) {
					t.Errorf("the answer is %v; want one that names %q", err, test.Refused)
				}
				if out, validErr := project.Validate(within(t), manifest); (validErr == nil) != (err == nil) {
					t.Errorf("the API server says %v, and chandler validate: %v\n%s", err, validErr, out)
				}
			})
		}
	}
}

// TestAdmissionOfOthersParameters expects the policy to ignore parameters of other drivers.
func TestAdmissionOfOthersParameters(t *testing.T) {
	policyWorks(t)
	for kind, manifest := range withParameters("admission-test", `{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}`) {
		err := kube.DryRun(within(t), strings.ReplaceAll(manifest, "chandler.dev", "gpu.nvidia.com"))
		if err != nil && !meta.IsNoMatchError(err) {
			t.Errorf("%s: %v", kind, err)
		}
	}
}

// TestAdmissionOfAnOlderClass changes an invalid class that is older than the policy. Labels,
// deletion and valid parameters are allowed; other invalid parameters are refused.
func TestAdmissionOfAnOlderClass(t *testing.T) {
	binding := policyWorks(t)
	bad := withParameters("admission-older", `{"kind": "GpuConfig"}`)["v1 class"]
	ctx := within(t)
	if err := kube.Delete(ctx, binding); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := kube.Apply(within(t), binding); err != nil {
			t.Error(err)
		}
	})
	until(t, "the policy to be unbound", func(ctx context.Context) error { return kube.DryRun(ctx, bad) })
	apply(t, bad)
	if err := kube.Apply(ctx, binding); err != nil {
		t.Fatal(err)
	}
	policyWorks(t)
	if err := kube.Apply(ctx, strings.Replace(bad, "metadata: {", "metadata: {labels: {a: b}, ", 1)); err != nil {
		t.Errorf("a label: %v", err)
	}
	if err := kube.Apply(ctx, strings.Replace(bad, "GpuConfig", "NicConfig", 1)); err == nil || !strings.Contains(err.Error(), parametersPolicy) {
		t.Errorf("other bad parameters: %v", err)
	}
	good := withParameters("admission-older", `{"apiVersion": "chandler.dev/v1alpha1", "kind": "ClaimParameters"}`)["v1 class"]
	if err := kube.Apply(ctx, good); err != nil {
		t.Errorf("good parameters: %v", err)
	}
}

// policyWorks waits until the API server enforces the policy, and checks that the types in the
// policy's expressions agree. It returns the manifest of the policy's binding.
func policyWorks(t *testing.T) (binding string) {
	t.Helper()
	until(t, "the policy to be in force", func(ctx context.Context) error {
		err := kube.DryRun(ctx, withParameters("admission-test", `{"kind": "GpuConfig"}`)["v1 class"])
		if err == nil {
			return errors.New("a DeviceClass with unknown parameters would be created")
		}
		if !strings.Contains(err.Error(), parametersPolicy) {
			return err
		}
		policy, err := kube.AdmissionregistrationV1().ValidatingAdmissionPolicies().Get(ctx, parametersPolicy, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if policy.Status.ObservedGeneration < policy.Generation || policy.Status.TypeChecking == nil {
			return errors.New("its types were not checked yet")
		}
		if warnings := policy.Status.TypeChecking.ExpressionWarnings; len(warnings) > 0 {
			t.Errorf("warnings: %v", warnings)
		}
		return nil
	})
	data, err := os.ReadFile(project.Manifest("admission.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	_, binding, _ = strings.Cut(string(data), "\n---\n")
	return binding
}

type parametersTest struct {
	Name, Parameters, Refused string
	AtPrepare                 bool
}

// parametersTests returns the table of test cases for Prepare.
func parametersTests(t *testing.T) (tests []parametersTest) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(project.Dir, "api/v1alpha1/testdata/claimparameters.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(data, &tests); err != nil {
		t.Fatal(err)
	}
	return tests
}

// withParameters returns the objects that can hold parameters, in every API version.
func withParameters(name, parameters string) map[string]string {
	parameters = strings.ReplaceAll(parameters, `\/`, "/") // valid in JSON, invalid in YAML
	config := fmt.Sprintf("[{opaque: {driver: chandler.dev, parameters: %s}}]", parameters)
	manifests := make(map[string]string)
	for version, request := range map[string]string{
		"v1":      "{name: a, exactly: {deviceClassName: x}}",
		"v1beta2": "{name: a, exactly: {deviceClassName: x}}",
		"v1beta1": "{name: a, deviceClassName: x}",
	} {
		header := fmt.Sprintf("apiVersion: resource.k8s.io/%s\nmetadata: {name: %s}\n", version, name)
		devices := fmt.Sprintf("{devices: {requests: [%s], config: %s}}", request, config)
		manifests[version+" claim"] = header + "kind: ResourceClaim\nspec: " + devices
		manifests[version+" template"] = header + "kind: ResourceClaimTemplate\nspec: {spec: " + devices + "}"
		manifests[version+" class"] = header + "kind: DeviceClass\nspec: {config: " + config + "}"
	}
	return manifests
}
