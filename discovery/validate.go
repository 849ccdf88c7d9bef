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

// Validate returns an error if the device could not be published in a ResourceSlice or passed to a
// container runtime.
func (d *Device) Validate() error {
	var errs []error
	if !plainLabel(d.Name) {
		for _, message := range validation.IsDNS1123Label(d.Name) {
			errs = append(errs, fmt.Errorf("name %q: %s", d.Name, message))
		}
	}
	if n := len(d.Attributes) + len(d.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		errs = append(errs, fmt.Errorf("%d attributes and capacities, at most %d", n, resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice))
	}
	errs = append(errs, inOrder("attribute", d.Attributes, func(name resourceapi.QualifiedName, a Attribute) error {
		return validateAttribute(name, a.ForSlice())
	})...)
	errs = append(errs, inOrder("list", d.Lists, validateAttribute)...)
	errs = append(errs, inOrder("capacity", d.Capacity, func(name resourceapi.QualifiedName, _ resourceapi.DeviceCapacity) error {
		return validateName(name)
	})...)
	if err := d.Creation.validate(d); err != nil {
		errs = append(errs, err)
	}
	for _, offer := range d.PluginOffers {
		domain, name, _ := strings.Cut(offer.Resource, "/")
		if offer.Resource == AnyName || plainDomain(domain) && (plainLabel(name) || name == AnyName) {
			continue
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

func validateAttribute(name resourceapi.QualifiedName, a resourceapi.DeviceAttribute) error {
	return errors.Join(validateName(name), validateValue(a))
}

// inOrder returns the errors of the entries of a map, sorted by name. Only the invalid entries are
// sorted: usually there are none, and every scan calls inOrder.
func inOrder[V any](what string, entries map[resourceapi.QualifiedName]V, check func(resourceapi.QualifiedName, V) error) []error {
	var wrong map[resourceapi.QualifiedName]error
	for name, value := range entries {
		if err := check(name, value); err != nil {
			if wrong == nil {
				wrong = make(map[resourceapi.QualifiedName]error)
			}
			wrong[name] = fmt.Errorf("%s %s: %w", what, name, err)
		}
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(wrong)) {
		errs = append(errs, wrong[name])
	}
	return errs
}

// validateName returns an error if the API server would reject an attribute or capacity of the
// name, and with it all devices of the slice. See [resourceapi.QualifiedName] for the rules.
func validateName(name resourceapi.QualifiedName) error {
	domain, id, qualified := strings.Cut(string(name), "/")
	if !qualified {
		domain, id = Domain, string(name)
	}
	if plainDomain(domain) && plainWord(id) {
		return nil
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

// The functions below accept only names of common forms, and Kubernetes accepts all such names. The
// Kubernetes functions match regular expressions, which would take most of the time of a scan, so
// they check only the other names.

// plainLabel reports whether a name is a DNS label: "pci-0000-19-00-0".
func plainLabel(name string) bool {
	for i := range len(name) {
		c := name[i]
		letter := 'a' <= c && c <= 'z' || '0' <= c && c <= '9'
		if !letter && (c != '-' || i == 0 || i == len(name)-1) {
			return false
		}
	}
	return 0 < len(name) && len(name) <= validation.DNS1123LabelMaxLength
}

// plainDomain reports whether a name consists of DNS labels and has up to 63 bytes: "example.com".
func plainDomain(name string) bool {
	for label := range strings.SplitSeq(name, ".") {
		if !plainLabel(label) {
			return false
		}
	}
	return len(name) <= resourceapi.DeviceMaxDomainLength
}

// plainWord reports whether a name consists of ASCII letters: "pciVendor".
func plainWord(name string) bool {
	for i := range len(name) {
		if c := name[i] | 0x20; c < 'a' || 'z' < c {
			return false
		}
	}
	return 0 < len(name) && len(name) <= resourceapi.DeviceMaxIDLength
}

// semanticVersion matches the versions of semver.org 2.0.0.
var semanticVersion = regexp.MustCompile(`^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?$`)

// validateValue returns an error if the API server would reject an attribute.
func validateValue(a resourceapi.DeviceAttribute) error {
	values := 0
	for _, has := range []bool{a.IntValue != nil, a.BoolValue != nil, a.StringValue != nil, a.VersionValue != nil, a.IntValues != nil, a.BoolValues != nil, a.StringValues != nil, a.VersionValues != nil} {
		if has {
			values++
		}
	}
	if values != 1 {
		return fmt.Errorf("%d values, must be one", values)
	}
	texts, versions := a.StringValues, a.VersionValues
	if a.StringValue != nil {
		texts = []string{*a.StringValue}
	}
	if a.VersionValue != nil {
		versions = []string{*a.VersionValue}
	}
	for _, text := range slices.Concat(texts, versions) {
		switch {
		case len(text) > resourceapi.DeviceAttributeMaxValueLength:
			return fmt.Errorf("longer than %d bytes", resourceapi.DeviceAttributeMaxValueLength)
		case !utf8.ValidString(text):
			return errors.New("not UTF-8")
		}
	}
	if slices.ContainsFunc(versions, func(version string) bool { return !semanticVersion.MatchString(version) }) {
		return errors.New("no semantic version")
	}
	return nil
}
