// Package selectors says how to mend DeviceClasses that are missing, and the expressions of
// classes and claims that fail. It is pure, and evaluates no expression itself.
package selectors

import (
	"fmt"
	"regexp"
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
	return fmt.Sprintf("in place of %s write %s.orValue(%s)", from, to, value)
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

// MendMissingClass returns the commands that help where a DeviceClass is missing.
func MendMissingClass(class string) []string {
	commands := []string{"kubectl get deviceclasses   # shows the names that there are"}
	if strings.HasSuffix(class, "."+discovery.Domain) {
		commands = append(commands, "helm upgrade chandler deployments/helm/chandler --namespace chandler --reuse-values --set deviceClasses.enabled=true")
	}
	return commands
}
