package discovery

import (
	"errors"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Labels describes as data which labels the devices give their node. Package labels computes the
// labels.
//
// Names and values are texts with words in braces, such as "{model}". A word stands for a property
// of the device. A device without a value for a word does not contribute to the label. The words
// are:
//
//   - the names of attributes; those of versions also with .major, .minor and .patch;
//   - the names of capacities; also with .Mi and .Gi, in these units, rounded;
//   - the keys of [Device.Facts], which take precedence over attributes of the same name;
//   - family; resource, the first extended resource name of the device;
//   - replicas, how many containers may share the device; shared, whether that is more than one;
//     renamed, whether the administrator gave the device a resource name that no plugin uses;
//   - count and silicon, only in values: how many devices, and how many physical devices,
//     give the node the same label.
//
// If several Labels set the same label, the last one wins.
type Labels struct {
	// Where lists the properties that a device must have, by word: "" requires that the property is
	// absent, and "!gpu" any value except "gpu". A device must match all of them.
	Where map[string]string

	// Main is a word. If it is set, only those devices count whose value of the word is the most
	// frequent, by physical devices: the most frequent model of a host with several models.
	Main string

	If Agreement

	// Set maps names of labels to values. If devices differ in a value, the label gets the value of
	// the most physical devices.
	Set map[string]string

	// Space replaces white space in values, "-" if empty. Other characters that are invalid in labels
	// are removed.
	Space string
}

// Agreement makes labels depend on whether the devices have the same value.
type Agreement string

// The agreements.
const (
	Always   Agreement = ""
	Agreed   Agreement = "agreed"   // the label is set if all matching devices produce the same value
	Disputed Agreement = "disputed" // the labels are set if the matching devices produce different values
)

// LabelWords returns the words of a label's name or value, in order. An unbalanced brace is an
// error.
func LabelWords(text string) ([]string, error) {
	var words []string
	for {
		before, after, opened := strings.Cut(text, "{")
		if strings.Contains(before, "}") {
			return nil, errors.New("} without {")
		}
		if !opened {
			return words, nil
		}
		word, rest, closed := strings.Cut(after, "}")
		if !closed || word == "" || strings.Contains(word, "{") {
			return nil, errors.New("{ without a word and }")
		}
		words, text = append(words, word), rest
	}
}

// reservedNamespaces is the suffix of label domains without labels by Node Feature Discovery.
const reservedNamespaces = "kubernetes.io"

// openNamespaces are the exceptions: suffixes of label domains below reservedNamespaces with labels
// by Node Feature Discovery.
var openNamespaces = []string{"feature.node.kubernetes.io", "profile.node.kubernetes.io"}

// CheckLabel returns an error unless the label is valid for a node and Node Feature Discovery
// creates it. Since 0.13 Node Feature Discovery accepts any domain except kubernetes.io and its
// subdomains, other than its own domains (Node labels in its customization guide).
func CheckLabel(name, value string) error {
	if messages := validation.IsQualifiedName(name); len(messages) > 0 {
		return fmt.Errorf("label %q: %s", name, strings.Join(messages, "; "))
	}
	domain, _, found := strings.Cut(name, "/")
	if !found {
		return fmt.Errorf("label %q: has no domain", name)
	}
	below := func(parent string) bool { return domain == parent || strings.HasSuffix(domain, "."+parent) }
	if below(reservedNamespaces) && !below(openNamespaces[0]) && !below(openNamespaces[1]) {
		return fmt.Errorf("label %q: domain %s is Kubernetes' own", name, domain)
	}
	if messages := validation.IsValidLabelValue(value); len(messages) > 0 {
		return fmt.Errorf("label %s: value %q: %s", name, value, strings.Join(messages, "; "))
	}
	return nil
}

// validate checks the labels independently of any device. Each word is replaced by one letter.
func (l *Labels) validate() []error {
	var errs []error
	for name, value := range l.Set {
		for _, text := range []string{name, value} {
			if _, err := LabelWords(text); err != nil {
				errs = append(errs, fmt.Errorf("label %s: %q: %w", name, text, err))
			}
		}
		if len(errs) > 0 {
			continue
		}
		if err := CheckLabel(oneLetter(name), oneLetter(value)); err != nil {
			errs = append(errs, err)
		}
	}
	if len(l.Set) == 0 {
		errs = append(errs, errors.New("labels: none are set"))
	}
	return errs
}

func oneLetter(text string) string {
	for {
		before, after, found := strings.Cut(text, "{")
		if !found {
			return text
		}
		_, rest, _ := strings.Cut(after, "}")
		text = before + "x" + rest
	}
}
