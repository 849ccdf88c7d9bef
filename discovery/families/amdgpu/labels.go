package amdgpu

import (
	"maps"
	"strconv"

	"chandler.dev/discovery"
)

// labels are the labels of AMD's k8s-node-labeller (cmd/k8s-node-labeller in the repository of the
// AMD device plugin), as far as the values need no call to a device node.
var labels = append(tallies(),
	discovery.Labels{Set: map[string]string{
		"amd.com/gpu.driver-version":     "{release}",
		"amd.com/gpu.driver-src-version": "{source}",
	}},
	discovery.Labels{If: discovery.Agreed, Where: map[string]string{isMissing: "!true"}, Set: map[string]string{"amd.com/compute-memory-partition": "{profile}"}},
	supported("compute", "false"), supported("compute", "true"), // later entries win: "true" if any GPU supports it
	supported("memory", "false"), supported("memory", "true"),
)

// tallies returns labels with the number of GPUs for each value. Labels in the domain beta.amd.com
// always have the counts, and also the value if all GPUs agree. Labels in amd.com have the value if
// all GPUs agree, and otherwise the counts.
func tallies() (all []discovery.Labels) {
	for _, tally := range []struct{ name, value, count string }{
		{"device-id", "{pciDevice}", "{silicon}"},
		{"product-name", "{model}", "{silicon}"},
		{"vram", "{memory.Gi}G", "{count}"},
		{"simd-count", "{simds}", "{count}"},
		{"cu-count", "{cores}", "{count}"},
		{"family", "{generation}", "{count}"},
	} {
		stable, beta := "amd.com/gpu."+tally.name, "beta.amd.com/gpu."+tally.name
		where := map[string]string{"driver": "!", isMissing: "!true"} // the labeller ignores GPUs without their driver
		for _, l := range []discovery.Labels{
			{Set: map[string]string{beta + "." + tally.value: tally.count}},
			{If: discovery.Agreed, Set: map[string]string{stable: tally.value, beta: tally.value}},
			{If: discovery.Disputed, Set: map[string]string{stable + "." + tally.value: tally.count}},
		} {
			l.Where, l.Space = where, "_"
			all = append(all, l)
		}
	}
	return all
}

// supported returns the label for GPUs that support a way of partitioning, or do not.
func supported(way, whether string) discovery.Labels {
	return discovery.Labels{
		Where: map[string]string{way + "Partitions": whether},
		Set:   map[string]string{"amd.com/" + way + "-partitioning-supported": whether},
	}
}

// generations maps architectures to the driver's names for GPU families, without the prefix
// (amdgpu_discovery_set_ip_blocks in drivers/gpu/drm/amd/amdgpu/amdgpu_discovery.c). gfx1036 is
// left out because two families have the architecture.
var generations = map[string]string{
	"gfx900": "AI", "gfx904": "AI", "gfx906": "AI", "gfx908": "AI", "gfx90a": "AI", "gfx942": "AI", "gfx950": "AI",
	"gfx902": "RV", "gfx909": "RV", "gfx90c": "RV",
	"gfx1010": "NV", "gfx1011": "NV", "gfx1012": "NV", "gfx1013": "NV",
	"gfx1030": "NV", "gfx1031": "NV", "gfx1032": "NV", "gfx1034": "NV",
	"gfx1033": "VGH",
	"gfx1035": "YC",
	"gfx1100": "GC_11_0_0", "gfx1101": "GC_11_0_0", "gfx1102": "GC_11_0_0",
	"gfx1103": "GC_11_0_1",
	"gfx1150": "GC_11_5_0", "gfx1151": "GC_11_5_0", "gfx1152": "GC_11_5_0",
}

// setFacts sets the facts that only labels use.
func (g *gpu) setFacts(facts map[string]string, architecture string) {
	facts["generation"] = generations[architecture]
	if source, err := g.host.ReadText("/sys/module/amdgpu/srcversion"); err == nil {
		facts["source"] = source
	}
	for _, way := range []string{"compute", "memory"} {
		facts[way+"Partitions"] = strconv.FormatBool(g.function.HasEntry("available_" + way + "_partition"))
	}
	maps.DeleteFunc(facts, func(_, value string) bool { return value == "" })
}
