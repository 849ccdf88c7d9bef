package plugin

import (
	"slices"
	"strings"

	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// PlacementOf returns the part of an operator's object or of Helm values that selects the nodes of a
// plugin, and whether there is one.
func PlacementOf(v source.Value) (source.Value, bool) {
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
	case kind == "" && v.At(ROCmSelector).IsMap():
		return v, v.At(ROCmSelector + "_enabled").IsTrue()
	case kind == "" && !v.At("apiVersion").IsPresent() && v.HasAny("nodeSelector", "affinity"):
		return v, true
	}
	return source.Value{}, false
}

// nodeSelectorsOfHAMi are the node selectors in the section devicePlugin of HAMi's values, in the
// chart's present and former spelling.
var nodeSelectorsOfHAMi = []string{"nvidiaNodeSelector", "nvidianodeSelector"}

// ROCmSelector is the node selector in the values of the AMD GPU chart.
const ROCmSelector = "node_selector"

// NodeSelectors are the names of node selectors: those of pods, of a DeviceConfig, and of the values of
// the AMD GPU and HAMi charts.
var NodeSelectors = append([]string{"nodeSelector", "selector", ROCmSelector}, nodeSelectorsOfHAMi...)

// PlacementFields returns the fields of an operator's object or of Helm values that select nodes.
func PlacementFields(v source.Value) (fields []source.Value) {
	pod, ok := PlacementOf(v)
	if !ok {
		return nil
	}
	for name, field := range pod.Fields() {
		if name == "affinity" || name == "nodeAffinity" || slices.Contains(NodeSelectors, name) {
			fields = append(fields, field)
		}
	}
	return fields
}
