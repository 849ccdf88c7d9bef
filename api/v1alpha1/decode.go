package v1alpha1

import (
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"chandler.dev/internal/pattern"
	"chandler.dev/internal/yamlerror"

	"chandler.dev/internal/jsonerror"
)

// ParseDriverConfig decodes and validates a configuration file in YAML or JSON. Fields unknown to
// [DriverConfig] are errors, so that a misspelt field is not taken for a missing one.
func ParseDriverConfig(data []byte) (*DriverConfig, error) {
	config := &DriverConfig{}
	if err := decode(data, KindDriverConfig, &config.TypeMeta, config); err != nil {
		return nil, err
	}
	if config.Mode == "" {
		config.Mode = ModeAuto
	}
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", KindDriverConfig, err)
	}
	return config, nil
}

// ParseProvisionConfig decodes and validates the configuration of "chandler provision" in YAML or
// JSON, as strictly as [ParseDriverConfig].
func ParseProvisionConfig(data []byte) (*ProvisionConfig, error) {
	config := &ProvisionConfig{}
	if err := decode(data, KindProvisionConfig, &config.TypeMeta, config); err != nil {
		return nil, err
	}
	config.setDefaults()
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", KindProvisionConfig, err)
	}
	return config, nil
}

// ParseClaimParameters decodes and validates the opaque parameters of a claim in JSON. Other kinds,
// and fields unknown to [ClaimParameters], are errors.
func ParseClaimParameters(data []byte) (*ClaimParameters, error) {
	parameters := &ClaimParameters{}
	if err := json.UnmarshalCaseSensitivePreserveInts(data, &parameters.TypeMeta); err != nil {
		return nil, fmt.Errorf("decode %s: %w", KindClaimParameters, jsonerror.Describe(data, err))
	}
	if err := checkKind(KindClaimParameters, &parameters.TypeMeta); err != nil {
		return nil, err
	}
	if err := decodeStrict(data, parameters); err != nil {
		return nil, fmt.Errorf("decode %s: %w", KindClaimParameters, err)
	}
	if err := parameters.Validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", KindClaimParameters, err)
	}
	return parameters, nil
}

// manyDocuments matches a separator before another document.
var manyDocuments = pattern.Lazy(`(?m)\A\s*[^-\s#][\s\S]*^---[ \t]*$[\s]*[^\s#]`)

// decode reads the type first, so that the error for another kind names the kind, and not an
// unknown field.
func decode(data []byte, kind string, meta *metav1.TypeMeta, into any) error {
	if err := yaml.Unmarshal(data, meta); err != nil {
		if line, cause := yamlerror.Find(string(data)); line > 0 {
			return fmt.Errorf("decode %s: line %d: invalid YAML: %s", kind, line, cause)
		}
		return fmt.Errorf("decode %s: %w", kind, err)
	}
	if err := checkKind(kind, meta); err != nil {
		return err
	}
	if manyDocuments().Match(data) {
		return fmt.Errorf("decode %s: more than one document", kind)
	}
	object, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return fmt.Errorf("decode %s: %w", kind, err)
	}
	if err := decodeStrict(object, into); err != nil {
		return fmt.Errorf("decode %s: %w", kind, err)
	}
	return nil
}

func checkKind(kind string, meta *metav1.TypeMeta) error {
	if meta.APIVersion == APIVersion && meta.Kind == kind {
		return nil
	}
	return fmt.Errorf("decode %s: is apiVersion %q, kind %q; want apiVersion %q, kind %q",
		kind, meta.APIVersion, meta.Kind, APIVersion, kind)
}

// decodeStrict decodes JSON as the API server does: field names are case-sensitive, and unknown or
// duplicate fields are errors.
func decodeStrict(data []byte, into any) error {
	strict, err := json.UnmarshalStrict(data, into)
	if _, is := into.(*DriverConfig); is {
		for i := range strict {
			strict[i] = withPresentName(strict[i])
		}
	}
	return errors.Join(append(strict, jsonerror.Describe(data, err))...)
}

// Validate returns all errors of the configuration, for all nodes. It does not compile expressions.
func (c *DriverConfig) Validate() error {
	var errs []error
	check := func(path string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
	}
	selects := func(list string, i int, s Selector) {
		check(fmt.Sprintf("%s[%d].cel", list, i), validateCEL(s.CEL))
		check(fmt.Sprintf("%s[%d]", list, i), s.Nodes.validate())
	}
	check("mode", c.Mode.validate())
	check("hooks", c.Hooks.validate())
	for i, selector := range c.Exclude {
		selects("exclude", i, selector)
	}
	for i, sharing := range c.Sharing {
		selects("sharing", i, sharing.Selector)
		check(fmt.Sprintf("sharing[%d]", i), sharing.validate())
	}
	for i, resource := range c.Resources {
		selects("resources", i, resource.Selector)
		check(fmt.Sprintf("resources[%d].name", i), validateResourceName(resource.Name))
		check(fmt.Sprintf("resources[%d].mode", i), resource.Mode.validateAPI())
		check(fmt.Sprintf("resources[%d]", i), validateAcceleratorFunction(resource.AcceleratorFunction))
		check(fmt.Sprintf("resources[%d]", i), resource.Driver.validate())
		if resource.Driver != "" && resource.AcceleratorFunction != "" {
			check(fmt.Sprintf("resources[%d]", i), errors.New("driver: cannot be combined with acceleratorFunction"))
		}
	}
	for i := range c.Passthrough {
		selects("passthrough", i, c.Passthrough[i].Selector)
		check(fmt.Sprintf("passthrough[%d]", i), c.Passthrough[i].validate())
	}
	for i := range c.Reclaim {
		selects("reclaim", i, c.Reclaim[i].Selector)
		check(fmt.Sprintf("reclaim[%d]", i), c.Reclaim[i].validate())
	}
	check("onDemand", c.OnDemand.validate())
	for i := range c.OnDemand.VirtualFunctions {
		selects("onDemand.virtualFunctions", i, c.OnDemand.VirtualFunctions[i].Selector)
		check(fmt.Sprintf("onDemand.virtualFunctions[%d]", i), c.OnDemand.VirtualFunctions[i].validate())
	}
	for i := range c.OnDemand.Partitions {
		selects("onDemand.partitions", i, c.OnDemand.Partitions[i])
	}
	for i := range c.OnDemand.MPS {
		selects("onDemand.mps", i, c.OnDemand.MPS[i])
	}
	for i := range c.OnDemand.TimeSlices {
		selects("onDemand.timeSlices", i, c.OnDemand.TimeSlices[i])
	}
	allocated := make(named)
	for i := range c.Allocation {
		a := &c.Allocation[i]
		if allocated.isHidden(a.Resource, a.Nodes) {
			check(fmt.Sprintf("allocation[%d].resource", i), fmt.Errorf("is %q, as another's is", a.Resource))
		}
		check(fmt.Sprintf("allocation[%d]", i), a.Nodes.validate())
		check(fmt.Sprintf("allocation[%d]", i), a.validate())
	}
	for i, overhead := range c.Overhead {
		selects("overhead", i, overhead.Selector)
		check(fmt.Sprintf("overhead[%d]", i), overhead.validate())
	}
	for family, root := range c.DriverRoots {
		check(fmt.Sprintf("driverRoots[%s]", family), validateRoot(root))
	}
	for condition, effect := range c.Health.Severity {
		check(fmt.Sprintf("health.severity[%s]", condition), effect.validate())
	}
	offered := make(named)
	for i := range c.Paths {
		resource := &c.Paths[i]
		if offered.isHidden(resource.Name, resource.Nodes) {
			check(fmt.Sprintf("paths[%d].name", i), fmt.Errorf("is %q, as another's is", resource.Name))
		}
		check(fmt.Sprintf("paths[%d]", i), resource.Nodes.validate())
		check(fmt.Sprintf("paths[%d]", i), resource.validate())
	}
	return errors.Join(append(errs, c.validateNames(surelyTogether)...)...)
}

// Validate returns all errors of the parameters.
func (p *ClaimParameters) Validate() error {
	return errors.Join(
		validateInterfaceName(p.InterfaceName),
		validateAcceleratorFunction(p.AcceleratorFunction),
		p.Driver.validate(),
		validateEnvironment(p.Environment),
		validateComputePercentage(p.ComputePercentage),
		p.MPS.validate(),
		p.validateTimeSlice(),
	)
}
