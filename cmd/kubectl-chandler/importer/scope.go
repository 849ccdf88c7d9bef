package importer

import (
	"maps"
	"reflect"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/draft"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
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
		if _, ambiguous := im.ConfigMaps[name]; ambiguous {
			data = source.Value{}
		}
		im.ConfigMaps[name] = data
	}
	for _, c := range containersOf(podOf(v)) {
		if c.HasName("config-manager") {
			if im.byDefault.Text() == "" {
				im.byDefault = c.Env["DEFAULT_CONFIG"]
			}
			if strategies := c.Env["FALLBACK_STRATEGIES"]; !strategies.IsNull() {
				im.fallbacks = strategies
			}
		}
		for _, object := range c.Sources {
			im.variableMaps[object.At("configMapRef", "name").Text()] = true
		}
		for _, from := range c.References {
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
		if f := im.runsIn(c); f != nil && !f.Scoped && (f.IsCompanion == nil || !f.IsCompanion(c)) && !im.workloads[ownerOf(v)] {
			f.Scoped, f.Scope = true, im.placement(pod, nil)
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

// formatOn returns the format of a plugin on some nodes. Objects of a plugin on different nodes have
// settings of their own.
func (im *importer) formatOn(f *plugin.Format, scope []*v1alpha1.Nodes) *plugin.Format {
	if !f.Scoped {
		f.Scoped, f.Scope = true, scope
	}
	same := func(other *plugin.Format) bool { return other.Name == f.Name && reflect.DeepEqual(other.Scope, scope) }
	if i := slices.IndexFunc(im.Formats, same); i >= 0 {
		return im.Formats[i]
	}
	formats := im.newFormats()
	created := formats[slices.IndexFunc(formats, func(other *plugin.Format) bool { return other.Name == f.Name })]
	created.Scoped, created.Scope = true, scope
	im.Formats = append(im.Formats, created)
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
	for _, name := range plugin.NodeSelectors {
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
		if term, ok := draft.Intersect(selected, im.affinityTerm(item)); ok {
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
			im.Notes.AddPodChange(e, "is a condition that entries cannot have, so they apply to more nodes")
		}
	}
	return nodes
}
