package amdgpu

import (
	"maps"
	"strconv"

	"chandler.dev/discovery"
)

// labels are those of AMD's k8s-node-labeller (cmd/k8s-node-labeller in its device plugin's
// repository), as far as the kernel says them without a call to a device node.
var labels = append(tallies(),
	discovery.Labels{Set: map[string]string{
		"amd.com/gpu.driver-version":     "{release}",
		"amd.com/gpu.driver-src-version": "{source}",
	}},
	discovery.Labels{If: discovery.Agreed, Where: map[string]string{unmade: "!true"}, Set: map[string]string{"amd.com/compute-memory-partition": "{profile}"}},
	supported("compute", "false"), supported("compute", "true"), // that any GPU does comes last
	supported("memory", "false"), supported("memory", "true"),
)

// tallies returns labels that say how many GPUs have which value. In the domain
// beta.amd.com they always do so, and have the value besides if it is the only one; in
// amd.com they have the value, or else the counts.
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
		where := map[string]string{"driver": "!", unmade: "!true"} // the labeller knows of no GPU without its driver
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

// supported returns the label that says whether GPUs can be partitioned in that way.
func supported(way, whether string) discovery.Labels {
	return discovery.Labels{
		Where: map[string]string{way + "Partitions": whether},
		Set:   map[string]string{"amd.com/" + way + "-partitioning-supported": whether},
	}
}

// generations are what the driver calls families of GPUs, by architecture, without the
// prefix: amdgpu_discovery_set_ip_blocks in drivers/gpu/drm/amd/amdgpu/amdgpu_discovery.c.
// gfx1036 is of two of them.
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

// setFacts sets what only labels say of a GPU.
func (g *gpu) setFacts(facts map[string]string, architecture string) {
	facts["generation"] = generations[architecture]
	if source, err := g.host.ReadText("/sys/module/amdgpu/srcversion"); err == nil {
		facts["source"] = source
	}
	for _, way := range []string{"compute", "memory"} {
		facts[way+"Partitions"] = strconv.FormatBool(g.function.Exists("available_" + way + "_partition"))
	}
	maps.DeleteFunc(facts, func(_, value string) bool { return value == "" })
}
