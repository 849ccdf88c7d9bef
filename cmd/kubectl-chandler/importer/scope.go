package importer

import (
	"maps"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// findObjects stores the names of the DaemonSets in a document, the ConfigMaps, and how the NVIDIA
// plugin selects a configuration for nodes without a label.
func (im *importer) findObjects(v source.Value) {
	for _, item := range v.At("items").ListItems() {
		im.findObjects(item)
	}
	name := v.At("metadata", "name").Text()
	switch v.At("kind").Text() {
	case "DaemonSet":
		im.workloads[v.At("metadata", "namespace").Text()+"/"+name] = true
	case "ConfigMap":
		data := v.At("data")
		if _, ambiguous := im.configMaps[name]; ambiguous {
			data = source.Value{}
		}
		im.configMaps[name] = data
	}
	for _, c := range containersOf(podOf(v)) {
		if c.names("config-manager") {
			if im.byDefault.Text() == "" {
				im.byDefault = c.env["DEFAULT_CONFIG"]
			}
			if strategies := c.env["FALLBACK_STRATEGIES"]; !strategies.IsNull() {
				im.fallbacks = strategies
			}
		}
		for _, object := range c.sources {
			im.variableMaps[object.At("configMapRef", "name").Text()] = true
		}
		for _, from := range c.references {
			im.variableMaps[from.At("configMapKeyRef", "name").Text()] = true
		}
	}
}

// findScopes stores the nodes of the plugins in a document, so that they are known before the first
// configuration file is read.
func (im *importer) findScopes(v source.Value) {
	for _, item := range v.At("items").ListItems() {
		im.findScopes(item)
	}
	pod := podOf(v)
	if !runsOnNodes(v) || !pod.HasAny("containers", "initContainers") {
		return
	}
	for _, c := range containersOf(pod) {
		if f := im.runsIn(c); f != nil && !f.scoped && (f.companion == nil || !f.companion(c)) && !im.workloads[ownerOf(v)] {
			f.scoped, f.scope = true, im.placement(pod, nil)
		}
	}
}

// runsOnNodes reports whether an object runs a pod on each selected node, unlike the Deployment of a
// scheduler or a webhook.
func runsOnNodes(v source.Value) bool {
	kind := v.At("kind").Text()
	return kind == "DaemonSet" || kind == "Pod"
}

// ownerOf returns the DaemonSet that owns a pod, namespace/name.
func ownerOf(v source.Value) string {
	for _, owner := range v.At("metadata", "ownerReferences").ListItems() {
		if owner.At("kind").Text() == "DaemonSet" {
			return v.At("metadata", "namespace").Text() + "/" + owner.At("name").Text()
		}
	}
	return ""
}

// placementOf returns the part of an operator's object or of Helm values that selects the nodes of a
// plugin, and whether there is one.
func placementOf(v source.Value) (source.Value, bool) {
	switch kind, plugin := v.At("kind").Text(), v.At("devicePlugin"); {
	case strings.HasSuffix(kind, "DevicePlugin"), kind == "DeviceConfig", kind == "NicClusterPolicy":
		return v.At("spec"), true
	case kind == "KubeVirt", kind == "HyperConverged":
		pod := v.At("spec", "workloads", "nodePlacement")
		if !pod.IsPresent() {
			pod = v.At("spec", "deployment", "nodePlacements", "workload") // HyperConverged v1
		}
		return pod, pod.IsPresent()
	case kind == "" && plugin.HasAny(nodeSelectorsOfHAMi...):
		return plugin, true
	case kind == "" && v.At(rocmSelector).IsMap():
		return v, v.At(rocmSelector + "_enabled").IsTrue()
	case kind == "" && !v.At("apiVersion").IsPresent() && v.HasAny("nodeSelector", "affinity"):
		return v, true
	}
	return source.Value{}, false
}

// nodeSelectorsOfHAMi are the node selectors in the section devicePlugin of HAMi's values, in the
// chart's present and former spelling.
var nodeSelectorsOfHAMi = []string{"nvidiaNodeSelector", "nvidianodeSelector"}

// rocmSelector is the node selector in the values of the AMD GPU chart.
const rocmSelector = "node_selector"

// nodeSelectors are the names of node selectors: those of pods, of a DeviceConfig, and of the values of
// the AMD GPU and HAMi charts.
var nodeSelectors = append([]string{"nodeSelector", "selector", rocmSelector}, nodeSelectorsOfHAMi...)

// placementFields returns the fields of an operator's object or of Helm values that select nodes.
func placementFields(v source.Value) (fields []source.Value) {
	pod, ok := placementOf(v)
	if !ok {
		return nil
	}
	for name, field := range pod.Fields() {
		if name == "affinity" || name == "nodeAffinity" || slices.Contains(nodeSelectors, name) {
			fields = append(fields, field)
		}
	}
	return fields
}

// formatOn returns the format of a plugin on some nodes. Objects of a plugin on different nodes have
// settings of their own.
func (im *importer) formatOn(f *format, scope []*v1alpha1.Nodes) *format {
	if !f.scoped {
		f.scoped, f.scope = true, scope
	}
	same := func(other *format) bool { return other.name == f.name && reflect.DeepEqual(other.scope, scope) }
	if i := slices.IndexFunc(im.formats, same); i >= 0 {
		return im.formats[i]
	}
	formats := newFormats(im)
	created := formats[slices.IndexFunc(formats, func(other *format) bool { return other.name == f.name })]
	created.scoped, created.scope = true, scope
	im.formats = append(im.formats, created)
	return created
}

// placement returns the nodes that the nodeName, the nodeSelector and the required node affinity of a
// pod select: those of any of the terms, or all nodes without a term. The labels are those of a chart's
// default node selector, which the nodeSelector changes.
func (im *importer) placement(pod source.Value, labels map[string]string) (terms []*v1alpha1.Nodes) {
	selected := &v1alpha1.Nodes{MatchLabels: maps.Clone(labels)}
	if name := pod.At("nodeName").Text(); name != "" {
		selected.Names = []string{name}
	}
	var nodeSelector source.Value
	for _, name := range nodeSelectors {
		if field := pod.At(name); field.IsPresent() && !nodeSelector.IsPresent() {
			nodeSelector = field
		}
	}
	for name, label := range nodeSelector.Fields() {
		switch {
		case name == osLabel && label.Text() == "linux": // all nodes of the agent
		case label.IsNull():
			delete(selected.MatchLabels, name)
		default:
			if selected.MatchLabels == nil {
				selected.MatchLabels = make(map[string]string)
			}
			selected.MatchLabels[name] = label.Text()
		}
	}
	if len(selected.MatchLabels) == 0 {
		selected.MatchLabels = nil
	}
	affinity := pod.At("affinity", "nodeAffinity")
	if !affinity.IsPresent() {
		affinity = pod.At("nodeAffinity") // of a NicClusterPolicy
	}
	required := affinity.At("requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
	for _, item := range required.ListItems() {
		if term, ok := intersect(selected, im.affinityTerm(item)); ok {
			terms = append(terms, term)
		}
	}
	if len(required.ListItems()) == 0 {
		terms = []*v1alpha1.Nodes{selected}
	}
	if slices.ContainsFunc(terms, func(n *v1alpha1.Nodes) bool { return reflect.DeepEqual(n, &v1alpha1.Nodes{}) }) {
		return nil // all nodes
	}
	return terms
}

// osLabel is the label with the operating system of a node.
const osLabel = "kubernetes.io/os"

// affinityTerm returns the nodes of a term of a node affinity.
func (im *importer) affinityTerm(v source.Value) *v1alpha1.Nodes {
	nodes := &v1alpha1.Nodes{}
	for _, field := range v.At("matchFields").ListItems() {
		if field.At("key").Text() == "metadata.name" && field.At("operator").Text() == "In" {
			nodes.Names = append(nodes.Names, field.At("values").ListTexts()...)
		}
	}
	for _, e := range v.At("matchExpressions").ListItems() {
		operator := metav1.LabelSelectorOperator(e.At("operator").Text())
		switch operator {
		case metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn, metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist:
			if key, values := e.At("key").Text(), e.At("values").ListTexts(); key != osLabel {
				nodes.MatchExpressions = append(nodes.MatchExpressions, metav1.LabelSelectorRequirement{Key: key, Operator: operator, Values: values})
			}
		default:
			im.notePodChange(e, "is a condition that entries cannot have, so they apply to more nodes")
		}
	}
	return nodes
}

// intersect returns the nodes that both a and b select, and whether there can be any. A nil value
// selects all nodes.
func intersect(a, b *v1alpha1.Nodes) (*v1alpha1.Nodes, bool) {
	if a == nil || b == nil || reflect.DeepEqual(a, b) {
		if a == nil {
			a = b
		}
		return a, true
	}
	both := &v1alpha1.Nodes{Names: slices.Clone(a.Names)}
	switch {
	case len(a.Names) == 0:
		both.Names = slices.Clone(b.Names)
	case len(b.Names) > 0:
		both.Names = slices.DeleteFunc(both.Names, func(name string) bool { return !slices.Contains(b.Names, name) })
		if len(both.Names) == 0 {
			return nil, false
		}
	}
	for _, labels := range []map[string]string{a.MatchLabels, b.MatchLabels} {
		for name, text := range labels {
			if before, ok := both.MatchLabels[name]; ok && before != text {
				return nil, false
			}
			if both.MatchLabels == nil {
				both.MatchLabels = make(map[string]string)
			}
			both.MatchLabels[name] = text
		}
	}
	both.MatchExpressions = slices.Concat(a.MatchExpressions, b.MatchExpressions)
	return both, true
}

// nodesOf returns the nodes of an entry with the given source, one value for each entry to write. A
// nil value stands for all nodes.
func (im *importer) nodesOf(from source.Value) []*v1alpha1.Nodes {
	nodes := im.nodes
	if nodes == nil {
		nodes = from.Nodes
	}
	if im.current == nil || len(im.current.scope) == 0 {
		return []*v1alpha1.Nodes{nodes}
	}
	var all []*v1alpha1.Nodes
	for _, term := range im.current.scope {
		if both, ok := intersect(nodes, term); ok {
			all = append(all, both)
		}
	}
	return all
}
