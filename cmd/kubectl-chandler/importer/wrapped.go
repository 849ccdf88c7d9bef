package importer

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
)

// values returns the Helm values in an object of Flux, Argo CD or k3s, or the values that a Helm
// command line sets.
func (im *importer) values(v source.Value) (source.Value, bool) {
	for _, at := range [][]string{
		{"spec", "values"},                         // HelmRelease
		{"spec", "valuesContent"},                  // HelmChart, HelmChartConfig
		{"spec", "source", "helm", "valuesObject"}, // Application
		{"spec", "source", "helm", "values"},
		{"valuesInline"},
	} {
		inside, err := source.ParseEmbedded(v.At(at...))
		if err == nil && inside.IsMap() {
			im.Chart = chartOf(v)
			return inside, true
		}
	}
	if parameters := v.At("spec", "source", "helm", "parameters"); parameters.IsList() {
		im.Chart = chartOf(v)
		set := source.Value{Node: yamlnode.NewObject(parameters.Node.Line), File: v.File, Above: v.Above}
		for _, p := range parameters.ListItems() {
			assignField(set.Node, p.At("name").Text(), p.At("value").Node)
		}
		return set, true
	}
	return im.helmValues(v)
}

// chartOf returns the name of the chart that an object deploys.
func chartOf(v source.Value) string {
	for _, at := range [][]string{
		{"spec", "chart", "spec", "chart"},
		{"spec", "chartRef", "name"},
		{"spec", "source", "chart"},
		{"spec", "chart"},
	} {
		if name := v.At(at...).Text(); name != "" {
			return name
		}
	}
	return ""
}

// helmValues returns the values that a Helm command line sets.
func (im *importer) helmValues(v source.Value) (source.Value, bool) {
	args := v.At(source.ArgsField).ListItems()
	if len(args) == 0 || args[0].Text() != "helm" || v.HasAny("image", "name") {
		return source.Value{}, false
	}
	set := source.Value{Node: yamlnode.NewObject(args[0].Node.Line), File: v.File, Above: v.Above}
	for _, arg := range source.SplitArguments(args[1:], func(name string) bool { return slices.Contains(aloneOfHelm, name) }) {
		switch arg.Name {
		case "set", "set-string", "set-json":
			for one := range strings.SplitSeq(arg.Value.Node.Value, ",") {
				if name, said, ok := strings.Cut(one, "="); ok {
					assignField(set.Node, name, yamlnode.NewScalar(said, arg.Value.Node.Line))
				}
			}
		case "f", "values":
			im.Notes.AddRemark(arg.Value, "import that file too, if it is not among the files")
		case "set-file":
			im.Notes.AddPodChange(arg.Value, "the file is not among the imported files; import it too")
		case "":
			if strings.Contains(arg.Value.Text(), "/") {
				im.Chart = arg.Value.Text()
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
		in.Content = append(in.Content, yamlnode.NewScalar(name, to.Line), to)
		return
	}
	inner := (source.Value{Node: in}).At(name).Node
	if inner == nil || inner.Kind != yaml.MappingNode {
		inner = yamlnode.NewObject(to.Line)
		in.Content = append(in.Content, yamlnode.NewScalar(name, to.Line), inner)
	}
	assignField(inner, rest, to)
}

// maxNested is the maximum depth of a configuration in another object.
const maxNested = 8

// readNested reads the configurations inside an object, such as the values of an umbrella chart or
// a NicClusterPolicy, and returns their paths.
func (im *importer) readNested(v source.Value, depth int) (found []string) {
	if depth > maxNested {
		return nil
	}
	if pod, ok := plugin.PlacementOf(v); ok {
		before, terms := im.around, im.placement(pod, nil)
		im.around = &terms
		defer func() { im.around = before }()
	}
	for _, part := range parts(v) {
		if name := part.FieldName(); depth == 0 && v.Has("kind") && (name == "metadata" || name == "status") {
			continue // these can repeat the rest
		}
		inside := part
		if part.IsText() {
			if !strings.ContainsAny(part.Node.Value, "\n{") {
				continue
			}
			text, err := source.ParseEmbedded(part)
			if err != nil || text.IsText() {
				continue
			}
			inside = text
		}
		if onlyVersion(inside) && !part.IsText() {
			continue // many objects have a version
		}
		if f := im.recogniseFormat(inside); f != nil {
			im.readDocument(f, inside)
			found = append(found, inside.Path)
			continue
		}
		if inside.HasAny(source.ArgsField, "command", "image") && im.importContainer(plugin.ContainerOf(inside)) {
			found = append(found, inside.Path)
		}
		if inside.IsList() && slices.ContainsFunc(inside.ListItems(), func(v source.Value) bool { return strings.HasPrefix(v.Text(), "-") }) {
			if im.importContainer(plugin.Container{Args: inside.ListItems(), Env: make(map[string]source.Value)}) {
				found = append(found, inside.Path)
			}
			continue
		}
		found = append(found, im.readNested(inside, depth+1)...)
	}
	return found
}

// parts returns the parts of an object or a list.
func parts(v source.Value) []source.Value {
	if v.IsList() {
		return v.ListItems()
	}
	var fields []source.Value
	for _, field := range v.Fields() {
		fields = append(fields, field)
	}
	return fields
}

// onlyVersion reports whether the only field of an object is its version.
func onlyVersion(v source.Value) bool {
	return v.IsMap() && len(v.Node.Content) == 2 && v.Has("version")
}

// patchedContainer returns a container with the arguments and environment variables of a JSON
// patch.
func patchedContainer(v source.Value) (plugin.Container, bool) {
	c := plugin.Container{Env: make(map[string]source.Value)}
	for _, operation := range v.ListItems() {
		at := operation.At("path").Text()
		if !operation.Has("op") || at == "" {
			return c, false
		}
		said := operation.At("value")
		switch {
		case strings.Contains(at, "/args") || strings.Contains(at, "/command"):
			for _, arg := range said.ListItems() {
				if arg.IsText() {
					c.Args = append(c.Args, arg)
				}
			}
		case strings.HasSuffix(at, "/env"):
			c.SetEnv(said)
		case strings.Contains(at, "/env/") && said.IsMap(): // one variable
			said.Node = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Line: said.Node.Line, Content: []*yaml.Node{said.Node}}
			c.SetEnv(said)
		}
	}
	return c, len(c.Args)+len(c.Env) > 0
}
