// Package labels makes the labels of a node of the devices that are offered there, and
// writes them as a feature file of Node Feature Discovery. It is pure and knows no vendor:
// families say what labels there are, as [discovery.Labels].
package labels

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// own are Chandler's labels of each family. Other devices of a family than its
// accelerators, such as channels between GPUs, count only where it has nothing else.
var own = []discovery.Labels{
	{Set: map[string]string{count: "{silicon}"}},
	{Where: accelerators, Set: map[string]string{count: "{silicon}"}},
	{
		Where: accelerators,
		If:    discovery.Agreed,
		Set: map[string]string{
			discovery.Domain + "/{family}.model":  "{model}",
			discovery.Domain + "/{family}.memory": "{memory.Mi}",
		},
	},
}

const count = discovery.Domain + "/{family}.count"

var accelerators = map[string]string{"kind": "!other"}

// Of returns the labels that the devices of a snapshot give their node. The error is what
// devices say that cannot be the name of a label; there is no such label.
func Of(s *rules.Snapshot, families []*discovery.Family) (map[string]string, error) {
	all := make(map[string]string)
	var errs []error
	for _, f := range families {
		var devices []device
		for i := range s.Devices {
			if d := &s.Devices[i]; d.Family == f.Name {
				devices = append(devices, device{d.Silicon(), wordsOf(d)})
			}
		}
		for _, l := range slices.Concat(own, f.Labels) {
			for name, value := range labelsOf(l, devices) {
				if err := discovery.CheckLabel(name, value); err != nil {
					errs = append(errs, err)
					continue
				}
				all[name] = value
			}
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return all, errors.Join(errs...)
}

// device is what labels are made of.
type device struct {
	silicon string
	words   map[string]string
}

// counting are the words that are known once it is known which devices make a label.
const (
	counting        = "count"
	countingSilicon = "silicon"
)

// said is a label that devices make, and how many do.
type said struct {
	name, value string // in value, the words that count are still words
	devices     int
	silicon     map[string]bool
}

// labelsOf returns the labels that devices make.
func labelsOf(l discovery.Labels, devices []device) map[string]string {
	devices = slices.DeleteFunc(slices.Clone(devices), func(d device) bool { return !d.has(l.Where) })
	if l.Main != "" {
		devices = mainOf(l.Main, devices)
	}
	labels := make(map[string]string)
	for _, name := range slices.Sorted(maps.Keys(l.Set)) {
		made := sayings(name, l.Set[name], cmp.Or(l.Space, "-"), devices)
		if l.If == discovery.Agreed && len(made) > 1 || l.If == discovery.Disputed && len(made) == 1 {
			continue
		}
		// The one that most silicon makes is last, and the first of equals.
		slices.Reverse(made)
		slices.SortStableFunc(made, func(a, b *said) int { return cmp.Compare(len(a.silicon), len(b.silicon)) })
		for _, s := range made {
			labels[s.name] = s.finished()
		}
	}
	return labels
}

// has reports whether the device has what is listed.
func (d device) has(where map[string]string) bool {
	for word, want := range where {
		if other, not := strings.CutPrefix(want, "!"); not {
			if d.words[word] == other {
				return false
			}
		} else if d.words[word] != want {
			return false
		}
	}
	return true
}

// mainOf returns the devices that have what most silicon has by a word.
func mainOf(word string, devices []device) []device {
	var main *said
	for _, s := range sayings("", "{"+word+"}", "-", devices) {
		if main == nil || len(s.silicon) > len(main.silicon) {
			main = s
		}
	}
	return slices.DeleteFunc(devices, func(d device) bool {
		value, ok := d.fill("{"+word+"}", fitted("-"))
		return !ok || value != main.value
	})
}

// sayings returns the labels that devices make of a name and a value, in the order of the
// devices.
func sayings(name, value, space string, devices []device) []*said {
	var made []*said
	for _, d := range devices {
		n, hasName := d.fill(name, fitted(space))
		v, hasValue := d.fill(value, fitted(space))
		if !hasName || !hasValue {
			continue
		}
		i := slices.IndexFunc(made, func(s *said) bool { return s.name == n && s.value == v })
		if i < 0 {
			i, made = len(made), append(made, &said{name: n, value: v, silicon: make(map[string]bool)})
		}
		made[i].devices++
		made[i].silicon[d.silicon] = true
	}
	return made
}

// fill puts what the device has in the place of words. It reports false if the device
// lacks one. Words that count stay.
func (d device) fill(text string, fit func(string) string) (string, bool) {
	words, _ := discovery.Words(text) // checked with the family
	for _, word := range words {
		if word == counting || word == countingSilicon {
			continue
		}
		value := fit(d.words[word])
		if value == "" {
			return "", false
		}
		text = strings.ReplaceAll(text, "{"+word+"}", value)
	}
	return text, true
}

// finished returns the value with its counts, as a label can have it.
func (s *said) finished() string {
	value := strings.NewReplacer(
		"{"+counting+"}", strconv.Itoa(s.devices),
		"{"+countingSilicon+"}", strconv.Itoa(len(s.silicon)),
	).Replace(s.value)
	return trimmed(value)
}

// fitted returns what makes text consist of what labels can have.
func fitted(space string) func(string) string {
	return func(text string) string {
		text = strings.Map(func(r rune) rune {
			if r == ' ' || isPlain(r) || strings.ContainsRune("-_.", r) {
				return r
			}
			return -1
		}, text)
		return strings.Trim(strings.Join(strings.Fields(text), space), "-_.")
	}
}

// trimmed returns text that is not too long, and begins and ends as a value must.
func trimmed(text string) string {
	if len(text) > validation.LabelValueMaxLength {
		text = text[:validation.LabelValueMaxLength]
	}
	return strings.Trim(text, "-_.")
}

// isPlain reports whether a label may begin with the character.
func isPlain(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9'
}
