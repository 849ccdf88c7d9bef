package validation

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	kubernetes "k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apiserver/pkg/cel/environment"
	strictjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"chandler.dev/api/v1alpha1"
)

// oldestServer is the first version that serves ValidatingAdmissionPolicies by default.
var oldestServer = kubernetes.MajorMinor(1, 30)

// A policy is a compiled ValidatingAdmissionPolicy.
type policy struct {
	conditions, variables []program
	validations           []rule
}

type program struct {
	name string
	cel.Program
}

type rule struct {
	program
	message func(input map[string]any) string
}

// shippedPolicy compiles deployments/admission.yaml as an API server does.
func shippedPolicy(t testing.TB) *policy {
	t.Helper()
	data, err := os.ReadFile("../../../deployments/admission.yaml")
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := bytes.Cut(data, []byte("\n---\n"))
	var object admissionv1.ValidatingAdmissionPolicy
	if err := yaml.UnmarshalStrict(first, &object); err != nil {
		t.Fatal(err)
	}
	set, err := environment.MustBaseEnvSet(oldestServer).Extend(environment.VersionedOptions{
		IntroducedVersion: kubernetes.MajorMinor(1, 0),
		EnvOptions: []cel.EnvOption{
			cel.Variable("object", cel.DynType),
			cel.Variable("oldObject", cel.DynType),
			cel.Variable("variables", cel.DynType),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	env := set.NewExpressionsEnv()
	compile := func(name, expression string) program {
		t.Helper()
		ast, issues := env.Compile(expression)
		if issues.Err() != nil {
			t.Fatalf("%s: %v", name, issues.Err())
		}
		compiled, err := env.Program(ast)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return program{name, compiled}
	}
	p := &policy{}
	for _, condition := range object.Spec.MatchConditions {
		p.conditions = append(p.conditions, compile(condition.Name, condition.Expression))
	}
	for _, variable := range object.Spec.Variables {
		p.variables = append(p.variables, compile(variable.Name, variable.Expression))
	}
	for i, v := range object.Spec.Validations {
		name := fmt.Sprintf("validations[%d]", i)
		compiled := rule{program: compile(name, v.Expression), message: func(map[string]any) string { return v.Message }}
		if v.MessageExpression != "" {
			message := compile(name, v.MessageExpression)
			compiled.message = func(input map[string]any) string {
				text, _, err := message.Eval(input)
				return fmt.Sprint(text, err)
			}
		}
		p.validations = append(p.validations, compiled)
	}
	return p
}

// refuses returns the policy's reason for refusing an object, "" if the policy allows the object.
func (p *policy) refuses(object, oldObject any) (string, error) {
	variables := make(map[string]any)
	input := map[string]any{"object": object, "oldObject": oldObject, "variables": variables}
	for _, condition := range p.conditions {
		holds, _, err := condition.Eval(input)
		if err != nil {
			return "", fmt.Errorf("%s: %w", condition.name, err)
		}
		if holds != types.True {
			return "", nil
		}
	}
	for _, variable := range p.variables {
		value, _, err := variable.Eval(input)
		if err != nil {
			return "", fmt.Errorf("%s: %w", variable.name, err)
		}
		variables[variable.name] = value
	}
	for _, v := range p.validations {
		holds, _, err := v.Eval(input)
		if err != nil {
			return "", fmt.Errorf("%s: %w", v.name, err)
		}
		if holds != types.True {
			return v.message(input), nil
		}
	}
	return "", nil
}

// object replaces PARAMETERS in JSON and decodes the result.
func object(t testing.TB, text, parameters string) (object map[string]any) {
	t.Helper()
	// Like the API server, which distinguishes integers from other numbers.
	if err := strictjson.UnmarshalCaseSensitivePreserveInts([]byte(strings.ReplaceAll(text, "PARAMETERS", parameters)), &object); err != nil {
		t.Fatal(err)
	}
	return object
}

// configured contains the objects with room for parameters.
var configured = map[string]string{
	"claim":    `{"kind":"ResourceClaim","spec":{"devices":{"requests":[{"name":"a"}],"config":[{"requests":["a"],"opaque":{"driver":"chandler.dev","parameters":PARAMETERS}}]}}}`,
	"template": `{"kind":"ResourceClaimTemplate","spec":{"metadata":{},"spec":{"devices":{"config":[{"opaque":{"driver":"chandler.dev","parameters":PARAMETERS}}]}}}}`,
	"class":    `{"kind":"DeviceClass","spec":{"selectors":[],"config":[{"opaque":{"driver":"chandler.dev","parameters":PARAMETERS}}]}}`,
	"second":   `{"kind":"DeviceClass","spec":{"config":[{"opaque":{"driver":"gpu.nvidia.com","parameters":{"a":1}}},{"opaque":{"driver":"chandler.dev","parameters":PARAMETERS}}]}}`,
}

type parametersTest struct {
	Name, Parameters, Refused string
	AtPrepare                 bool
}

// parametersTests returns the test cases for both Prepare and the policy.
func parametersTests(t testing.TB) (tests []parametersTest) {
	t.Helper()
	data, err := os.ReadFile("../../../api/v1alpha1/testdata/claimparameters.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(data, &tests); err != nil {
		t.Fatal(err)
	}
	return tests
}

// The policy refuses the same parameters as Prepare, with a reason that names the same field.
func TestAdmissionPolicy(t *testing.T) {
	p := shippedPolicy(t)
	for _, test := range parametersTests(t) {
		for name, text := range configured {
			t.Run(test.Name+"/"+name, func(t *testing.T) {
				reason, err := p.refuses(object(t, text, test.Parameters), nil)
				if err != nil {
					t.Fatal(err)
				}
				if want := test.Refused != "" && !test.AtPrepare; (reason != "") != want || want && !strings.Contains(reason, test.Refused) {
					t.Errorf("refused for %q; want a reason that names %q", reason, test.Refused)
				}
			})
		}
	}
}

// The policy ignores objects without parameters for this driver, and updates that do not change the
// spec.
func TestAdmissionPolicyLetsThrough(t *testing.T) {
	p := shippedPolicy(t)
	const bad = `{"kind":"GpuConfig"}`
	for name, text := range configured {
		others := object(t, strings.ReplaceAll(text, "chandler.dev", "gpu.nvidia.com"), bad)
		if reason, err := p.refuses(others, nil); reason != "" || err != nil {
			t.Errorf("%s of another driver: %q, %v", name, reason, err)
		}
		same := object(t, text, bad)
		if reason, err := p.refuses(same, same); reason != "" || err != nil {
			t.Errorf("%s that is as it was: %q, %v", name, reason, err)
		}
		if reason, err := p.refuses(same, object(t, text, "{}")); reason == "" || err != nil {
			t.Errorf("%s whose parameters change: %q, %v", name, reason, err)
		}
	}
	for _, text := range []string{`{"spec":{}}`, `{"spec":{"devices":{}}}`, `{"spec":{"spec":{"devices":{}}}}`, `{"spec":{"config":[{}]}}`} {
		if reason, err := p.refuses(object(t, text, ""), nil); reason != "" || err != nil {
			t.Errorf("%s: %q, %v", text, reason, err)
		}
	}
}

// The policy covers every parameter.
func TestAdmissionPolicyKnowsAllParameters(t *testing.T) {
	fields := map[string]any{}
	for field := range reflect.TypeFor[v1alpha1.ClaimParameters]().Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name != "" {
			fields[name] = nil
		}
	}
	fields["apiVersion"], fields["kind"] = v1alpha1.APIVersion, v1alpha1.KindClaimParameters
	parameters, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	reason, err := shippedPolicy(t).refuses(object(t, configured["class"], string(parameters)), nil)
	if reason != "" || err != nil {
		t.Errorf("%s: %q, %v", parameters, reason, err)
	}
}

// For every object, the policy and Prepare agree.
func FuzzAdmissionPolicy(f *testing.F) {
	for _, test := range parametersTests(f) {
		f.Add(test.Parameters)
	}
	p := shippedPolicy(f)
	f.Fuzz(func(t *testing.T, text string) {
		parameters := make(map[string]any)
		if strict, err := strictjson.UnmarshalStrict([]byte(text), &parameters); err != nil || len(strict) > 0 || parameters == nil {
			t.Skip("no object, or with a field twice, which the policy cannot see")
		}
		reason, err := p.refuses(object(t, configured["class"], text), nil)
		if err != nil {
			t.Fatalf("the policy cannot judge %q: %v", slices.Sorted(maps.Keys(parameters)), err)
		}
		_, refused := v1alpha1.ParseClaimParameters([]byte(text))
		if diff := cmp.Diff(refused != nil, reason != ""); diff != "" {
			t.Errorf("Prepare says %v, the policy %q", refused, reason)
		}
	})
}
