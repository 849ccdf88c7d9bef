package importer

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// values returns the Helm values in an object of Flux, Argo CD or k3s, or the values that a Helm
// command line sets.
func (im *importer) values(v value) (value, bool) {
	for _, at := range [][]string{
		{"spec", "values"},                         // HelmRelease
		{"spec", "valuesContent"},                  // HelmChart, HelmChartConfig
		{"spec", "source", "helm", "valuesObject"}, // Application
		{"spec", "source", "helm", "values"},
		{"valuesInline"},
	} {
		inside, err := embedded(v.at(at...))
		if err == nil && inside.isMap() {
			im.chart = chartOf(v)
			return inside, true
		}
	}
	if parameters := v.at("spec", "source", "helm", "parameters"); parameters.isList() {
		im.chart = chartOf(v)
		set := value{node: newObject(parameters.node.Line), file: v.file, above: v.above}
		for _, p := range parameters.items() {
			assignField(set.node, p.at("name").text(), p.at("value").node)
		}
		return set, true
	}
	return im.helmValues(v)
}

// chartOf returns the name of the chart that an object deploys.
func chartOf(v value) string {
	for _, at := range [][]string{
		{"spec", "chart", "spec", "chart"},
		{"spec", "chartRef", "name"},
		{"spec", "source", "chart"},
		{"spec", "chart"},
	} {
		if name := v.at(at...).text(); name != "" {
			return name
		}
	}
	return ""
}

// helmValues returns the values that a Helm command line sets.
func (im *importer) helmValues(v value) (value, bool) {
	args := v.at(argsField).items()
	if len(args) == 0 || args[0].text() != "helm" || v.hasAny("image", "name") {
		return value{}, false
	}
	set := value{node: newObject(args[0].node.Line), file: v.file, above: v.above}
	for _, arg := range splitArguments(args[1:], func(name string) bool { return slices.Contains(aloneOfHelm, name) }) {
		switch arg.name {
		case "set", "set-string", "set-json":
			for one := range strings.SplitSeq(arg.value.node.Value, ",") {
				if name, said, ok := strings.Cut(one, "="); ok {
					assignField(set.node, name, newScalar(said, arg.value.node.Line))
				}
			}
		case "f", "values":
			im.noteRemark(arg.value, "import that file too, if it is not among the files")
		case "set-file":
			im.notePodChange(arg.value, "the file is not among the imported files; import it too")
		case "":
			if strings.Contains(arg.value.text(), "/") {
				im.chart = arg.value.text()
			}
		}
	}
	return set, true
}

var aloneOfHelm = []string{"i", "install", "wait", "create-namespace", "generate-name", "atomic", "devel", "dry-run", "debug", "reuse-values", "reset-values", "dependency-update"}

// assignField sets a field by its dotted path, as Helm does. Indices in brackets are not supported.
func assignField(in *yaml.Node, path string, to *yaml.Node) {
	if to == nil {
		return
	}
	name, rest, deeper := strings.Cut(path, ".")
	for strings.HasSuffix(name, `\`) && deeper { // an escaped dot is part of the name
		var more string
		more, rest, deeper = strings.Cut(rest, ".")
		name = strings.TrimSuffix(name, `\`) + "." + more
	}
	if !deeper {
		in.Content = append(in.Content, newScalar(name, to.Line), to)
		return
	}
	inner := (value{node: in}).at(name).node
	if inner == nil || inner.Kind != yaml.MappingNode {
		inner = newObject(to.Line)
		in.Content = append(in.Content, newScalar(name, to.Line), inner)
	}
	assignField(inner, rest, to)
}

// maxNested is the maximum depth of a configuration in another object.
const maxNested = 8

// readNested reads the configurations inside an object, such as the values of an umbrella chart or
// a NicClusterPolicy, and returns their paths.
func (im *importer) readNested(v value, depth int) (found []string) {
	if depth > maxNested {
		return nil
	}
	if pod, ok := placementOf(v); ok {
		before, terms := im.around, im.placement(pod, nil)
		im.around = &terms
		defer func() { im.around = before }()
	}
	for _, part := range parts(v) {
		if name := nameOf(part); depth == 0 && v.has("kind") && (name == "metadata" || name == "status") {
			continue // these can repeat the rest
		}
		inside := part
		if part.isText() {
			if !strings.ContainsAny(part.node.Value, "\n{") {
				continue
			}
			text, err := embedded(part)
			if err != nil || text.isText() {
				continue
			}
			inside = text
		}
		if onlyVersion(inside) && !part.isText() {
			continue // many objects have a version
		}
		if f := im.recogniseFormat(inside); f != nil {
			im.readDocument(f, inside)
			found = append(found, inside.path)
			continue
		}
		if inside.hasAny(argsField, "command", "image") && im.importContainer(containerOf(inside)) {
			found = append(found, inside.path)
		}
		if inside.isList() && slices.ContainsFunc(inside.items(), func(v value) bool { return strings.HasPrefix(v.text(), "-") }) {
			if im.importContainer(container{args: inside.items(), env: make(map[string]value)}) {
				found = append(found, inside.path)
			}
			continue
		}
		found = append(found, im.readNested(inside, depth+1)...)
	}
	return found
}

// parts returns the parts of an object or a list.
func parts(v value) []value {
	if v.isList() {
		return v.items()
	}
	var fields []value
	for _, field := range v.fields() {
		fields = append(fields, field)
	}
	return fields
}

// onlyVersion reports whether the only field of an object is its version.
func onlyVersion(v value) bool { return v.isMap() && len(v.node.Content) == 2 && v.has("version") }

// onlyRead notes that the rest of an object was not read.
func (im *importer) onlyRead(v value, found []string) {
	slices.Sort(found)
	at := value{node: newScalar("", v.node.Line), file: v.file, above: v.above, path: v.path}
	im.noteRemark(at, "of this object only %s was read", strings.Join(found, ", "))
}

// patchedContainer returns a container with the arguments and environment variables of a JSON
// patch.
func patchedContainer(v value) (container, bool) {
	c := container{env: make(map[string]value)}
	for _, operation := range v.items() {
		at := operation.at("path").text()
		if !operation.has("op") || at == "" {
			return c, false
		}
		said := operation.at("value")
		switch {
		case strings.Contains(at, "/args") || strings.Contains(at, "/command"):
			for _, arg := range said.items() {
				if arg.isText() {
					c.args = append(c.args, arg)
				}
			}
		case strings.HasSuffix(at, "/env"):
			c.setEnv(said)
		case strings.Contains(at, "/env/") && said.isMap(): // one variable
			said.node = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Line: said.node.Line, Content: []*yaml.Node{said.node}}
			c.setEnv(said)
		}
	}
	return c, len(c.args)+len(c.env) > 0
}
