// Package selectors says how to mend DeviceClasses that are missing, and the expressions of
// classes and claims that fail. It is pure, and evaluates no expression itself.
package selectors

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
)

// lackedKey is the error of an expression that reads a key which a map lacks
// (interpreter/attributes.go of github.com/google/cel-go 0.29, resolutionError).
var lackedKey = regexp.MustCompile(`no such key: (\w+)`)

// MendClass returns the commands that mend a DeviceClass whose expression fails for some device.
// If the expression reads something that the device lacks, they name it, and say how to read it
// so that the expression does not fail.
func MendClass(class *resourceapi.DeviceClass, failed error, devices []resourceapi.Device) []string {
	return []string{"kubectl edit deviceclass " + class.Name + "   # " + MendExpression(class.Spec.Selectors, failed, devices)}
}

// MendExpression says how to write the selectors so that they do not fail.
func MendExpression(selectors []resourceapi.DeviceSelector, failed error, devices []resourceapi.Device) string {
	found := lackedKey.FindStringSubmatch(failed.Error())
	if found == nil {
		return "write an expression that fails for no device"
	}
	key := found[1]
	index := regexp.MustCompile(`\[(["'])` + regexp.QuoteMeta(key) + `["']\]`)
	capacity := regexp.MustCompile(`\bcapacity\[["'][^"']+["']\](\.|\[["'])` + regexp.QuoteMeta(key) + `\b`)
	from, to, value := "."+key, ".?"+key, zero(key, devices)
	for _, s := range selectors {
		if s.CEL == nil {
			continue
		}
		if by := index.FindStringSubmatch(s.CEL.Expression); by != nil {
			from, to = by[0], "[?"+strings.TrimPrefix(by[0], "[")
		}
		if capacity.MatchString(s.CEL.Expression) {
			value = `quantity("0")`
		}
	}
	mend := fmt.Sprintf("in place of %s write %s.orValue(%s)", from, to, value)
	if meant := Near(key, keys(devices)); meant != "" {
		mend = fmt.Sprintf("no device has %s: is %s meant? If not, %s", key, meant, mend)
	}
	return mend
}

// zero is a value, in CEL, of the type that an attribute has of the devices that have it.
func zero(key string, devices []resourceapi.Device) string {
	for i := range devices {
		for name, value := range devices[i].Attributes {
			if _, bare, qualified := strings.Cut(string(name), "/"); string(name) != key && (!qualified || bare != key) {
				continue
			}
			switch {
			case value.BoolValue != nil:
				return "false"
			case value.IntValue != nil:
				return "0"
			case value.VersionValue != nil:
				return `semver("0.0.0")`
			}
		}
	}
	return `""`
}

// WhoseClass says whose a DeviceClass may be that is missing.
func WhoseClass(class string) string {
	if strings.HasSuffix(class, "."+discovery.Domain) {
		return "It is Chandler's by its name."
	}
	return "By its name it is none of Chandler's, which end in ." + discovery.Domain + ": the chart of another driver may have to bring it, or you have to write it."
}

// keys returns the names, without their domains, of what devices say of themselves.
func keys(devices []resourceapi.Device) []string {
	found := make(map[string]bool)
	for _, d := range devices {
		for name := range d.Attributes {
			found[path.Base(string(name))] = true
		}
		for name := range d.Capacity {
			found[path.Base(string(name))] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// MendMissingClass returns the commands that help where a DeviceClass is missing. One of almost
// the same name is likely to be meant; without one, the classes may not be installed.
func MendMissingClass(class string, there []string) []string {
	commands := []string{"kubectl get deviceclasses   # shows the names that there are"}
	if meant := Near(class, there); meant != "" {
		return append([]string{"kubectl get deviceclass " + meant + "   # is this one meant?"}, commands...)
	}
	if strings.HasSuffix(class, "."+discovery.Domain) {
		commands = append(commands, "helm upgrade chandler deployments/helm/chandler --namespace chandler --reset-then-reuse-values --set deviceClasses.enabled=true")
	}
	return commands
}

// mistakes is how many letters a word may differ by from the one that is meant.
const mistakes = 2

// Near returns the word that another is likely to be a misspelling of: the nearest one, the first
// in order if several are. It is "" if none is near, or if the word itself is there.
func Near(word string, words []string) (nearest string) {
	best := min(mistakes, (len(word)+1)/3) + 1
	for _, other := range slices.Sorted(slices.Values(words)) {
		if d := distance(word, other); d == 0 {
			return ""
		} else if d < best {
			best, nearest = d, other
		}
	}
	return nearest
}

// distance returns how many letters must be added, left out or changed to make one word of
// another (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		corner := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := corner
			if a[i] != b[j] {
				change++
			}
			corner = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
