package discovery

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/util/validation"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Validate reports why the device could not be published in a ResourceSlice,
// or handed to a container runtime, nil if it can.
func (d *Device) Validate() error {
	var errs []error
	for _, message := range validation.IsDNS1123Label(d.Name) {
		errs = append(errs, fmt.Errorf("name %q: %s", d.Name, message))
	}
	if n := len(d.Attributes) + len(d.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		errs = append(errs, fmt.Errorf("%d attributes and capacities, at most %d", n, resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice))
	}
	for _, name := range slices.Sorted(maps.Keys(d.Attributes)) {
		if err := errors.Join(validateName(name), validateValue(d.Attributes[name])); err != nil {
			errs = append(errs, fmt.Errorf("attribute %s: %w", name, err))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.Lists)) {
		if err := errors.Join(validateName(name), validateValue(d.Lists[name])); err != nil {
			errs = append(errs, fmt.Errorf("list %s: %w", name, err))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.Capacity)) {
		if err := validateName(name); err != nil {
			errs = append(errs, fmt.Errorf("capacity %s: %w", name, err))
		}
	}
	for _, offer := range d.Offers {
		if offer.Resource == "" {
			continue // until the administrator names it
		}
		for _, message := range content.IsLabelKey(offer.Resource) {
			errs = append(errs, fmt.Errorf("resource name %q: %s", offer.Resource, message))
		}
	}
	for _, one := range []specs.ContainerEdits{d.Edits, d.SharedEdits} {
		edits := cdi.ContainerEdits{ContainerEdits: &one}
		if err := edits.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("container edits: %w", err))
		}
	}
	return errors.Join(errs...)
}

// validateName reports why the API server would refuse an attribute or a
// capacity of that name, and all devices of the slice with it. The rules are
// those of [resourceapi.QualifiedName].
func validateName(name resourceapi.QualifiedName) error {
	domain, id, qualified := strings.Cut(string(name), "/")
	if !qualified {
		domain, id = Domain, string(name)
	}
	messages := slices.Concat(content.IsCIdentifier(id), content.IsDNS1123Subdomain(domain))
	if len(id) > resourceapi.DeviceMaxIDLength || len(domain) > resourceapi.DeviceMaxDomainLength {
		messages = append(messages, "too long")
	}
	if len(messages) > 0 {
		return fmt.Errorf("no name of an attribute: %s", strings.Join(messages, "; "))
	}
	return nil
}

// semanticVersion matches versions as semver.org has them, at 2.0.0.
var semanticVersion = regexp.MustCompile(`^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?$`)

// validateValue reports why the API server would refuse an attribute.
func validateValue(a resourceapi.DeviceAttribute) error {
	texts := slices.Concat(a.StringValues, a.VersionValues)
	versions := slices.Clone(a.VersionValues)
	values := 0
	for _, has := range []bool{a.IntValue != nil, a.BoolValue != nil, a.StringValue != nil, a.VersionValue != nil, a.IntValues != nil, a.BoolValues != nil, a.StringValues != nil, a.VersionValues != nil} {
		if has {
			values++
		}
	}
	if a.StringValue != nil {
		texts = append(texts, *a.StringValue)
	}
	if a.VersionValue != nil {
		texts, versions = append(texts, *a.VersionValue), append(versions, *a.VersionValue)
	}
	switch {
	case values != 1:
		return fmt.Errorf("%d values, must be one", values)
	case slices.ContainsFunc(texts, func(text string) bool { return len(text) > resourceapi.DeviceAttributeMaxValueLength }):
		return fmt.Errorf("longer than %d bytes", resourceapi.DeviceAttributeMaxValueLength)
	case slices.ContainsFunc(texts, func(text string) bool { return !utf8.ValidString(text) }):
		return errors.New("not UTF-8")
	case slices.ContainsFunc(versions, func(version string) bool { return !semanticVersion.MatchString(version) }):
		return errors.New("no semantic version")
	}
	return nil
}
