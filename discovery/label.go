package discovery

import (
	"errors"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Labels says, as data, which labels devices give their node. Package labels makes
// labels of it.
//
// Names and values are texts with words in braces, such as "{model}", which stand for
// what a device has by that word. A device that lacks one of the words gives the node no
// such label. The words are:
//
//   - the names of attributes; those of versions also with .major, .minor and .patch;
//   - the names of capacities; also with .Mi and .Gi, in these units, rounded;
//   - the keys of [Device.Facts], which come before attributes of the same name;
//   - family; resource, the first classic name that the device is offered by;
//   - replicas, how many containers may have the device; shared, whether that is more than
//     one; renamed, whether the administrator gave it a name that no plugin has for it;
//   - count and silicon, only in values: how many devices, and how many pieces of silicon,
//     give the node the same label.
//
// If several Labels make a label of one name, the last one's is the label.
type Labels struct {
	// Where lists what a device must have, by words: "" is nothing, and "!gpu" anything
	// but "gpu". A device that has it all counts.
	Where map[string]string

	// Main is a word. If it is set, only the devices count that have what most silicon has
	// by it: the most frequent model of a host that has several.
	Main string

	If Agreement

	// Set has values by names of labels. If devices differ in a value, the label has the
	// one that most silicon has.
	Set map[string]string

	// Space is what takes the place of white space. Other characters that a label
	// cannot have are left out. It is "-" if empty.
	Space string
}

// Agreement says whether labels depend on what devices have in common.
type Agreement string

// The agreements.
const (
	Always   Agreement = ""
	Agreed   Agreement = "agreed"   // there is a label if all that count make the same
	Disputed Agreement = "disputed" // there are labels if not all that count make the same
)

// Words returns the words of a name or value of a label, in order. The error is a brace
// without its other.
func Words(text string) ([]string, error) {
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

// reservedNamespaces end the domains of labels in which Node Feature Discovery makes none.
const reservedNamespaces = "kubernetes.io"

// openNamespaces end the domains of these in which it does.
var openNamespaces = []string{"feature.node.kubernetes.io", "profile.node.kubernetes.io"}

// CheckLabel reports what is wrong with a label, nil if a node can have it and Node Feature
// Discovery makes it: since 0.13 it takes any domain but kubernetes.io and what is below,
// other than its own (Node labels in its customization guide).
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

// validate reports what is wrong with labels whatever devices have. A word is taken to be
// one letter.
func (l *Labels) validate() []error {
	var errs []error
	for name, value := range l.Set {
		for _, text := range []string{name, value} {
			if _, err := Words(text); err != nil {
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
