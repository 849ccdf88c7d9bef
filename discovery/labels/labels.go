// Package labels computes node labels from the offered devices of a node, and formats them as a
// feature file for Node Feature Discovery. The package is pure and depends on no vendor: families
// define their labels as [discovery.Labels].
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

// counts lists the numbers of devices of each family: the ones that can be allocated, and all.
var counts = []discovery.Labels{
	{Where: map[string]string{"usable": "true"}, Set: map[string]string{discovery.Domain + "/{family}.count": "{silicon}"}},
	{Set: map[string]string{discovery.Domain + "/{family}.total": "{silicon}"}},
}

// models lists the labels of the accelerators of each family.
var models = []discovery.Labels{
	{
		Where: accelerators,
		If:    discovery.Agreed,
		Set: map[string]string{
			discovery.Domain + "/{family}.model":  "{model}",
			discovery.Domain + "/{family}.memory": "{memory.Mi}",
		},
	},
}

var accelerators = map[string]string{"kind": "!other"}

// NodeLabels returns the node labels of the devices in a snapshot. The error lists the values of
// devices that are invalid in label names; their labels are left out.
func NodeLabels(s *rules.Snapshot, families []*discovery.Family) (map[string]string, error) {
	all := make(map[string]string)
	var errs []error
	for _, f := range families {
		var devices []device
		for i := range s.Devices {
			if d := &s.Devices[i]; d.Family == f.Name {
				devices = append(devices, device{d.PhysicalName(), wordsOf(d)})
			}
		}
		add := func(l discovery.Labels, devices []device) {
			for name, value := range labelsOf(l, devices) {
				if err := discovery.CheckLabel(name, value); err != nil {
					errs = append(errs, err)
					continue
				}
				all[name] = value
			}
		}
		for _, l := range counts {
			add(l, countedOf(devices))
		}
		for _, l := range slices.Concat(models, f.Labels) {
			add(l, devices)
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return all, errors.Join(errs...)
}

// countedOf returns the devices for counts: the accelerators of a family without its other devices,
// such as channels between GPUs, or all devices if the family has no accelerators.
func countedOf(devices []device) []device {
	main := slices.DeleteFunc(slices.Clone(devices), func(d device) bool { return !d.has(accelerators) })
	if len(main) == 0 {
		return devices
	}
	return main
}

// device contains the data of a device for labels.
type device struct {
	silicon string
	words   map[string]string
}

// These words have values only once the devices of a label are known.
const (
	counting        = "count"
	countingSilicon = "silicon"
)

// labelValue is a label with its devices.
type labelValue struct {
	name, value string // value still contains the counting words
	devices     int
	silicon     map[string]bool
}

// labelsOf returns the labels of the devices.
func labelsOf(l discovery.Labels, devices []device) map[string]string {
	devices = slices.DeleteFunc(slices.Clone(devices), func(d device) bool { return !d.has(l.Where) })
	if l.Main != "" {
		devices = mainOf(l.Main, devices)
	}
	labels := make(map[string]string)
	for _, name := range slices.Sorted(maps.Keys(l.Set)) {
		made := labelValues(name, l.Set[name], cmp.Or(l.Space, "-"), devices)
		if l.If == discovery.Agreed && len(made) > 1 || l.If == discovery.Disputed && len(made) == 1 {
			continue
		}
		// Process the label with the most physical devices last; among equals, the first wins.
		slices.Reverse(made)
		slices.SortStableFunc(made, func(a, b *labelValue) int { return cmp.Compare(len(a.silicon), len(b.silicon)) })
		for _, s := range made {
			labels[s.name] = s.finishValue()
		}
	}
	return labels
}

// has reports whether the device matches all conditions.
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

// mainOf returns the devices with the value of a word that most physical devices have.
func mainOf(word string, devices []device) []device {
	var main *labelValue
	for _, s := range labelValues("", "{"+word+"}", "-", devices) {
		if main == nil || len(s.silicon) > len(main.silicon) {
			main = s
		}
	}
	return slices.DeleteFunc(devices, func(d device) bool {
		value, ok := d.fillWords("{"+word+"}", fitLabel("-"))
		return !ok || value != main.value
	})
}

// labelValues returns the labels of the devices for a name and a value, in the order of the
// devices.
func labelValues(name, value, space string, devices []device) []*labelValue {
	var made []*labelValue
	for _, d := range devices {
		n, hasName := d.fillWords(name, fitLabel(space))
		v, hasValue := d.fillWords(value, fitLabel(space))
		if !hasName || !hasValue {
			continue
		}
		i := slices.IndexFunc(made, func(s *labelValue) bool { return s.name == n && s.value == v })
		if i < 0 {
			i, made = len(made), append(made, &labelValue{name: n, value: v, silicon: make(map[string]bool)})
		}
		made[i].devices++
		made[i].silicon[d.silicon] = true
	}
	return made
}

// fillWords replaces the words in a text by the values of the device. It returns false if the
// device lacks a value. Counting words remain.
func (d device) fillWords(text string, fit func(string) string) (string, bool) {
	words, _ := discovery.LabelWords(text) // validated with the family
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

// finishValue returns the value with its counts, as a valid label value.
func (s *labelValue) finishValue() string {
	value := strings.NewReplacer(
		"{"+counting+"}", strconv.Itoa(s.devices),
		"{"+countingSilicon+"}", strconv.Itoa(len(s.silicon)),
	).Replace(s.value)
	return trimLabel(value)
}

// fitLabel returns a function that removes invalid characters from a text.
func fitLabel(space string) func(string) string {
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

// trimLabel shortens a text to the maximum length, with a valid beginning and end.
func trimLabel(text string) string {
	if len(text) > validation.LabelValueMaxLength {
		text = text[:validation.LabelValueMaxLength]
	}
	return strings.Trim(text, "-_.")
}

// isPlain reports whether a label may begin with the character.
func isPlain(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9'
}
