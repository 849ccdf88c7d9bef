package validation

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"chandler.dev/cmd/kubectl-chandler/replaced"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/selectors"
)

// compileSelectors compiles the expressions that select devices, and warns about names that no device
// has. It searches the whole object, because each version of resource.k8s.io has them in another
// place. The parameter nvidia tells whether the request around value may select NVIDIA GPUs.
func (v *validator) compileSelectors(at place, value any, nvidia bool) {
	switch value := value.(type) {
	case []any:
		for i, item := range value {
			v.compileSelectors(at.at(fmt.Sprintf("[%d]", i)), item, nvidia)
		}
	case map[string]any:
		nvidia = nvidia && mayBeNVIDIA(value)
		for _, key := range slices.Sorted(maps.Keys(value)) {
			switch expression, is := celExpression(key, value[key]); {
			case is:
				if _, err := rules.Compile(expression); err != nil {
					v.addFindings(at.at("cel.expression"), severityError, err)
				}
				if nvidia {
					v.noteNVML(at.at("cel.expression"), selectors.NameFromNVML(expression))
				}
				v.checkNames(at.at("cel.expression"), expression, true)
			case key == "matchAttribute" || key == "distinctAttribute":
				domain, local, _ := strings.Cut(fmt.Sprint(value[key]), "/")
				v.warnReplacedDriver(at.at(key), domain)
				v.warnAttribute(at.at(key), domain, local, true)
			case key == "deviceClassName":
				v.warnReplacedClass(at.at(key), value[key])
			case key == "capacity":
				memory, _, _ := unstructured.NestedFieldNoCopy(value, key, "requests", "memory")
				if memory != nil && nvidia {
					v.noteNVML(at.at("capacity.requests.memory"), "memory")
				}
			case key != "opaque": // opaque parameters can contain anything
				v.compileSelectors(at.at(key), value[key], nvidia)
			}
		}
	}
}

// mayBeNVIDIA reports whether a request may select NVIDIA GPUs, according to its class and its
// selectors. An object that is not a request may.
func mayBeNVIDIA(request map[string]any) bool {
	class, _ := request["deviceClassName"].(string)
	own := class
	if other := replaced.Classes[class]; other.Own != "" {
		own = other.Own
	}
	if strings.HasSuffix(own, "."+discovery.Domain) && !strings.HasPrefix(own, "nvidia") && own != "gpu."+discovery.Domain || !selectors.MayBeNVIDIA(replaced.Classes[class].CEL) {
		return false
	}
	list, _ := request["selectors"].([]any)
	return !slices.ContainsFunc(list, func(item any) bool {
		selector, _ := item.(map[string]any)
		expression, is := celExpression("cel", selector["cel"])
		return is && !selectors.MayBeNVIDIA(expression)
	})
}

func celExpression(key string, value any) (string, bool) {
	cel, _ := value.(map[string]any)
	expression, is := cel["expression"].(string)
	return expression, is && key == "cel"
}

// checkConfigNames warns about names that no device has in a configuration of Chandler.
func (v *validator) checkConfigNames(at place, data []byte) {
	var content any
	if err := yaml.Unmarshal(data, &content); err == nil { // otherwise the error was reported before
		v.checkConfigValue(at, content)
	}
}

func (v *validator) checkConfigValue(at place, value any) {
	switch value := value.(type) {
	case []any:
		for i, item := range value {
			v.checkConfigValue(at.at(fmt.Sprintf("[%d]", i)), item)
		}
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(value)) {
			switch text, is := value[key].(string); {
			case is && key == "cel":
				v.checkNames(at.at(key), text, false)
			case is && key == "capacity":
				v.warnCapacity(at.at(key), text)
			case !is:
				v.checkConfigValue(at.at(key), value[key])
			}
		}
	}
}

// checkNames warns about names in an expression that no device has. The expression selects devices of
// ResourceSlices, or those that a node finds before it publishes them.
func (v *validator) checkNames(at place, expression string, published bool) {
	names, literals := selectors.ReadNames(expression)
	for _, literal := range literals {
		v.warnReplacedDriver(at, literal)
		isDomain := slices.ContainsFunc(names, func(name selectors.Name) bool { return name.Domain == literal })
		if nearest := selectors.NearestWord(literal, []string{discovery.Domain}); nearest != "" && !isDomain {
			v.addFindings(at, severityWarning, fmt.Errorf("no driver has the name %s; the nearest name is %s", literal, nearest))
		}
	}
	for _, name := range names {
		switch {
		case name.Map == selectors.Attributes:
			v.warnAttribute(at, name.Domain, name.Local, published)
		case name.Domain == discovery.Domain:
			v.warnCapacity(at, name.Local)
		}
	}
}

// warnAttribute warns about an attribute that no device has, and notes that ResourceSlices do not have
// an attribute by default. Devices may have other attributes of other domains.
func (v *validator) warnAttribute(at place, domain, local string, published bool) {
	name := domain + "/" + local
	if domain == discovery.Domain {
		name = local
	}
	_, derived := discovery.DerivedAttributes[resourceapi.QualifiedName(name)]
	switch nearest := nearestAttribute(domain, local); {
	case derived && !published:
		v.addFindings(at, severityWarning, fmt.Errorf("only ResourceSlices have the attribute %s, so that a configuration cannot select devices by it", name))
	case PublicationNote(name) != "" && !slices.Contains(discovery.ReplacedByModel, resourceapi.QualifiedName(name)) && published:
		v.notef(at, "%s", PublicationNote(name))
	case name == "type" && published:
		v.notef(at, "only an autoscaler's placeholders for devices of nodes that do not exist yet have the attribute type")
	case slices.Contains(attributeNames(), name) || domain != discovery.Domain && nearest == "":
	default:
		v.warnUnknown(at, "attribute "+name, nearest)
	}
}

// attributeNames returns the names of all attributes. Names without a domain are in Chandler's.
func attributeNames() []string {
	return append(discovery.AttributeNames(), "resource.kubernetes.io/numaNode", "resource.kubernetes.io/pciBusID", "resource.kubernetes.io/pcieRoot")
}

// domains are the domains of the attributes of devices.
var domains = []string{discovery.Domain, "resource.kubernetes.io"}

// nearestAttribute returns the attribute with the name most like a misspelled name in a domain, "" if
// no name is similar. If the domain is one of [domains], or similar to one, the attribute may be in
// another of them.
func nearestAttribute(domain, local string) string {
	known := make(map[string]string) // by name without domain
	isOurs := slices.Contains(domains, domain) || selectors.NearestWord(domain, domains) != ""
	for _, name := range attributeNames() {
		if isOurs || strings.HasPrefix(name, domain+"/") {
			known[path.Base(name)] = name
		}
	}
	if name := known[local]; name != "" {
		return name
	}
	return known[selectors.NearestWord(local, slices.Collect(maps.Keys(known)))]
}

// warnCapacity warns about a capacity of Chandler's domain that no device has.
func (v *validator) warnCapacity(at place, name string) {
	var known []string
	for _, capacity := range discovery.Capacities {
		known = append(known, string(capacity))
	}
	name = strings.TrimPrefix(name, discovery.Domain+"/")
	if !slices.Contains(known, name) {
		v.warnUnknown(at, "capacity "+name, selectors.NearestWord(name, known))
	}
}

func (v *validator) warnUnknown(at place, what, nearest string) {
	text := "no device has the " + what
	if nearest != "" {
		text += "; the nearest name is " + nearest
	}
	v.addFindings(at, severityWarning, errors.New(text))
}

// PublicationNote returns what the agent's configuration needs so that ResourceSlices have an attribute,
// or "" for attributes that they have by default.
func PublicationNote(name string) string {
	switch {
	case slices.Contains(discovery.OptionalAttributes, resourceapi.QualifiedName(name)):
		return fmt.Sprintf("ResourceSlices have the attribute %s only if the agent's configuration has attributes: [%s]", name, name)
	case slices.Contains(discovery.ReplacedByModel, resourceapi.QualifiedName(name)):
		return fmt.Sprintf("devices with a model have the attribute %s only if the agent's configuration has attributes: [%s]", name, name)
	case slices.Contains(virtualOnly, name):
		return fmt.Sprintf("virtual functions of one adapter may be one device, without the attribute %s, unless the agent's configuration has attributes: [vfIndex]", name)
	}
	return ""
}

// virtualOnly are the attributes that claims select virtual functions of an adapter by. A device for
// several functions does not have them.
var virtualOnly = []string{"ifName", "vfIndex"}

// noteNVML notes that NVIDIA GPUs have an attribute or a capacity only with NVML. The name is "" if
// there is nothing to note.
func (v *validator) noteNVML(at place, name string) {
	if name != "" {
		v.notef(at, "the %s of NVIDIA GPUs is not known without NVML; in the chart, nvml.enabled adds it", name)
	}
}
