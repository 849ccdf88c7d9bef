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
	if err := JoinErrors(config.Validate()); err != nil {
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
	if err := JoinErrors(config.Validate()); err != nil {
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
	if err := JoinErrors(parameters.Validate()); err != nil {
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
