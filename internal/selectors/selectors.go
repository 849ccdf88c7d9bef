// Package selectors suggests repairs for missing DeviceClasses and for failing CEL expressions
// of classes and claims. Its functions are pure and evaluate no expressions.
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

// lackedKey matches the error of an expression that reads a missing key of a map
// (interpreter/attributes.go of github.com/google/cel-go 0.29, resolutionError).
var lackedKey = regexp.MustCompile(`no such key: (\w+)`)

// HelmUpgrade is the command that changes values of the chart, by flags that follow it, and keeps
// the others.
const HelmUpgrade = "helm upgrade chandler deployments/helm/chandler --namespace chandler --reset-then-reuse-values"

// RepairClass returns the commands that repair a DeviceClass with an expression that fails for
// some device. If a device lacks a key read by the expression, the commands name the key and
// an expression that reads the key safely. A class of a Helm release is repaired by Helm, whose next
// upgrade would otherwise conflict with the change or undo it.
func RepairClass(class *resourceapi.DeviceClass, failed error, devices []resourceapi.Device) []string {
	repair := RepairExpression(class.Spec.Selectors, failed, devices)
	release, namespace := class.Annotations["meta.helm.sh/release-name"], class.Annotations["meta.helm.sh/release-namespace"]
	switch {
	case release == "":
		return []string{"kubectl edit deviceclass " + class.Name + "   # " + repair}
	case strings.HasSuffix(class.Name, "."+discovery.Domain):
		return []string{HelmUpgrade + "   # restores the expression of the chart"}
	}
	return []string{fmt.Sprintf("helm get values %s --namespace %s --all   # change the class in the chart or in its values: %s", release, namespace, repair)}
}

// RepairExpression suggests a change after which the selectors do not fail.
func RepairExpression(selectors []resourceapi.DeviceSelector, failed error, devices []resourceapi.Device) string {
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
	if meant := NearestWord(key, keys(devices)); meant != "" {
		mend = fmt.Sprintf("no device has %s: is %s meant? If not, %s", key, meant, mend)
	}
	return mend
}

// zero returns a CEL value of the attribute's type, according to the devices with that
// attribute.
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

// WhoseClass returns a sentence about the likely origin of a missing DeviceClass.
func WhoseClass(class string) string {
	if strings.HasSuffix(class, "."+discovery.Domain) {
		return "It is Chandler's by its name."
	}
	return "By its name it is none of Chandler's, which end in ." + discovery.Domain + ": the chart of another driver may have to bring it, or you have to write it."
}

// keys returns the names of the devices' attributes and capacities, without domains.
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

// RepairMissingClass returns the commands for a missing DeviceClass. A class with a similar name was
// probably intended; otherwise the classes may not be installed.
func RepairMissingClass(class string, there []string) []string {
	commands := []string{"kubectl get deviceclasses   # shows the names that there are"}
	if meant := NearestWord(class, there); meant != "" {
		return append([]string{"kubectl get deviceclass " + meant + "   # is this one meant?"}, commands...)
	}
	if strings.HasSuffix(class, "."+discovery.Domain) {
		commands = append(commands, HelmUpgrade+" --set deviceClasses.enabled=true")
	}
	return commands
}

// fromNVML matches the names of a capacity and an attribute that NVIDIA GPUs have only with NVML,
// where CEL expressions read them.
var fromNVML = regexp.MustCompile(`(?:\.\??|\[\??["'])(memory|architecture)\b`)

// familyOrVendor matches a comparison of the family or vendor in a CEL expression.
var familyOrVendor = regexp.MustCompile(`\.\??(?:family|vendor)(?:\.orValue\([^)]*\))? == ["']([\w-]+)["']`)

// NameFromNVML returns the first name in a CEL expression that an NVIDIA GPU has only if the agent
// uses NVML, "" if there is none or if the expression selects only other families or vendors.
func NameFromNVML(expression string) string {
	found := fromNVML.FindStringSubmatch(expression)
	if found == nil || !MayBeNVIDIA(expression) {
		return ""
	}
	return found[1]
}

// MayBeNVIDIA reports whether an NVIDIA GPU may be among the devices of a CEL expression: it compares
// the family and the vendor with no value, or also with nvidia.
func MayBeNVIDIA(expression string) bool {
	selected := familyOrVendor.FindAllStringSubmatch(expression, -1)
	return len(selected) == 0 || slices.ContainsFunc(selected, func(match []string) bool { return match[1] == "nvidia" })
}

// InstallNVML is the command that makes the agents use NVML.
const InstallNVML = HelmUpgrade + " --set nvml.enabled=true"

// mistakes is the maximum edit distance between a misspelled word and the intended word.
const mistakes = 2

// NearestWord returns the correct spelling of a misspelled word: the nearest of words, or the first
// in order among equally near ones. It returns "" if no word is near or if the word is correct.
func NearestWord(word string, words []string) (nearest string) {
	best := min(mistakes, (len(word)+1)/3) + 1
	for _, other := range slices.Sorted(slices.Values(words)) {
		if d := editDistance(word, other); d == 0 {
			return ""
		} else if d < best {
			best, nearest = d, other
		}
	}
	return nearest
}

// editDistance returns the number of letters to add, remove or change to turn one word into the
// other (Levenshtein).
func editDistance(a, b string) int {
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
