package importer

import (
	"maps"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/api/v1alpha1"
)

// findObjects stores the names of the DaemonSets in a document, the ConfigMaps, and how the NVIDIA
// plugin selects a configuration for nodes without a label.
func (im *importer) findObjects(v value) {
	for _, item := range v.at("items").items() {
		im.findObjects(item)
	}
	name := v.at("metadata", "name").text()
	switch v.at("kind").text() {
	case "DaemonSet":
		im.workloads[v.at("metadata", "namespace").text()+"/"+name] = true
	case "ConfigMap":
		data := v.at("data")
		if _, ambiguous := im.configMaps[name]; ambiguous {
			data = value{}
		}
		im.configMaps[name] = data
	}
	for _, c := range containersOf(podOf(v)) {
		if c.names("config-manager") {
			if im.byDefault.text() == "" {
				im.byDefault = c.env["DEFAULT_CONFIG"]
			}
			if strategies := c.env["FALLBACK_STRATEGIES"]; !strategies.isNull() {
				im.fallbacks = strategies
			}
		}
		for _, source := range c.sources {
			im.variableMaps[source.at("configMapRef", "name").text()] = true
		}
		for _, from := range c.references {
			im.variableMaps[from.at("configMapKeyRef", "name").text()] = true
		}
	}
}

// findScopes stores the nodes of the plugins in a document, so that they are known before the first
// configuration file is read.
func (im *importer) findScopes(v value) {
	for _, item := range v.at("items").items() {
		im.findScopes(item)
	}
	pod := podOf(v)
	if !runsOnNodes(v) || !pod.hasAny("containers", "initContainers") {
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
func runsOnNodes(v value) bool {
	kind := v.at("kind").text()
	return kind == "DaemonSet" || kind == "Pod"
}

// ownerOf returns the DaemonSet that owns a pod, namespace/name.
func ownerOf(v value) string {
	for _, owner := range v.at("metadata", "ownerReferences").items() {
		if owner.at("kind").text() == "DaemonSet" {
			return v.at("metadata", "namespace").text() + "/" + owner.at("name").text()
		}
	}
	return ""
}

// placementOf returns the part of an operator's object or of Helm values that selects the nodes of a
// plugin, and whether there is one.
func placementOf(v value) (value, bool) {
	switch kind, plugin := v.at("kind").text(), v.at("devicePlugin"); {
	case strings.HasSuffix(kind, "DevicePlugin"), kind == "DeviceConfig", kind == "NicClusterPolicy":
		return v.at("spec"), true
	case kind == "KubeVirt", kind == "HyperConverged":
		pod := v.at("spec", "workloads", "nodePlacement")
		if !pod.isPresent() {
			pod = v.at("spec", "deployment", "nodePlacements", "workload") // HyperConverged v1
		}
		return pod, pod.isPresent()
	case kind == "" && plugin.hasAny(nodeSelectorsOfHAMi...):
		return plugin, true
	case kind == "" && v.at(rocmSelector).isMap():
		return v, v.at(rocmSelector + "_enabled").is()
	case kind == "" && !v.at("apiVersion").isPresent() && v.hasAny("nodeSelector", "affinity"):
		return v, true
	}
	return value{}, false
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
func placementFields(v value) (fields []value) {
	pod, ok := placementOf(v)
	if !ok {
		return nil
	}
	for name, field := range pod.fields() {
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
func (im *importer) placement(pod value, labels map[string]string) (terms []*v1alpha1.Nodes) {
	selected := &v1alpha1.Nodes{MatchLabels: maps.Clone(labels)}
	if name := pod.at("nodeName").text(); name != "" {
		selected.Names = []string{name}
	}
	var nodeSelector value
	for _, name := range nodeSelectors {
		if field := pod.at(name); field.isPresent() && !nodeSelector.isPresent() {
			nodeSelector = field
		}
	}
	for name, label := range nodeSelector.fields() {
		switch {
		case name == osLabel && label.text() == "linux": // all nodes of the agent
		case label.isNull():
			delete(selected.MatchLabels, name)
		default:
			if selected.MatchLabels == nil {
				selected.MatchLabels = make(map[string]string)
			}
			selected.MatchLabels[name] = label.text()
		}
	}
	if len(selected.MatchLabels) == 0 {
		selected.MatchLabels = nil
	}
	affinity := pod.at("affinity", "nodeAffinity")
	if !affinity.isPresent() {
		affinity = pod.at("nodeAffinity") // of a NicClusterPolicy
	}
	required := affinity.at("requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
	for _, item := range required.items() {
		if term, ok := intersect(selected, im.affinityTerm(item)); ok {
			terms = append(terms, term)
		}
	}
	if len(required.items()) == 0 {
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
func (im *importer) affinityTerm(v value) *v1alpha1.Nodes {
	nodes := &v1alpha1.Nodes{}
	for _, field := range v.at("matchFields").items() {
		if field.at("key").text() == "metadata.name" && field.at("operator").text() == "In" {
			nodes.Names = append(nodes.Names, field.at("values").texts()...)
		}
	}
	for _, e := range v.at("matchExpressions").items() {
		operator := metav1.LabelSelectorOperator(e.at("operator").text())
		switch operator {
		case metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn, metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist:
			if key, values := e.at("key").text(), e.at("values").texts(); key != osLabel {
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
func (im *importer) nodesOf(from value) []*v1alpha1.Nodes {
	nodes := im.nodes
	if nodes == nil {
		nodes = from.nodes
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
