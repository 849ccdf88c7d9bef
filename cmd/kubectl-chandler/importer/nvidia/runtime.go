package nvidia

import (
	"cmp"
	"reflect"
	"slices"
	"strings"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// listStrategies maps the device list strategies of the NVIDIA plugin.
var listStrategies = map[string]v1alpha1.DeviceListStrategy{
	"envvar":          v1alpha1.ListEnvVar,
	"volume-mounts":   v1alpha1.ListVolumeMounts,
	"cdi-annotations": v1alpha1.ListCDIAnnotations,
	"cdi-cri":         v1alpha1.ListCDIDevices,
}

// listStrategy sets the device list strategy of resources: a list, or strings separated by commas.
func listStrategy(im *plugin.Import, v source.Value, names ...string) {
	var strategies []v1alpha1.DeviceListStrategy
	for _, text := range v.ListTexts() {
		for one := range strings.SplitSeq(text, ",") {
			strategy, ok := listStrategies[strings.ToLower(strings.TrimSpace(one))]
			if !ok {
				im.Notes.AddPodChange(v, "%s is an unknown strategy", one)
				return
			}
			strategies = append(strategies, strategy)
		}
	}
	if len(strategies) == 0 || slices.Equal(strategies, []v1alpha1.DeviceListStrategy{v1alpha1.ListEnvVar}) {
		return // the default
	}
	for _, name := range names {
		im.Config.SetAllocation(v, name, func(a *v1alpha1.Allocation) { a.DeviceListStrategy = strategies })
	}
}

// isListed reports whether a resource has a device list strategy.
func isListed(im *plugin.Import, name string) bool {
	return slices.ContainsFunc(im.Config.Driver.Allocation, func(a v1alpha1.Allocation) bool {
		return a.Resource == name && len(a.DeviceListStrategy) > 0 &&
			slices.ContainsFunc(im.Config.NodesOf(source.Value{}), func(nodes *v1alpha1.Nodes) bool { return reflect.DeepEqual(a.Nodes, nodes) })
	})
}

// idStrategy reads the device ID strategy: how the plugin names GPUs to the container runtime. It
// returns the imported values.
func idStrategy(im *plugin.Import, strategy source.Value, names []string) []source.Value {
	switch strings.ToLower(strategy.Text()) {
	case "", "uuid":
		return nil
	case "index":
		for _, name := range names {
			im.Config.SetAllocation(strategy, name, func(a *v1alpha1.Allocation) { a.DeviceIDStrategy = v1alpha1.DeviceIDIndex })
		}
		im.Notes.AddRemark(strategy, "nodes without chandler-host use the UUIDs of GPUs instead of their numbers, and the container runtime accepts both")
		return []source.Value{strategy}
	default:
		im.Notes.AddPodChange(strategy, "is an unknown strategy")
		return nil
	}
}

// runtimeVariables reads the additional features of the container runtime, which the plugin
// requests by environment variables. It returns the imported values.
func runtimeVariables(im *plugin.Import, settings *plugin.Settings, names []string) (carried []source.Value) {
	set := func(v source.Value, name, text string) {
		carried = append(carried, v)
		for _, resource := range names {
			im.Config.SetAllocation(v, resource, func(a *v1alpha1.Allocation) {
				if a.Env == nil {
					a.Env = make(map[string]string)
				}
				a.Env[name] = text
			})
		}
	}
	for _, what := range []string{"gdrcopy", "gds", "mofed"} {
		if v := settings.Get(what + "-enabled"); v.IsTrue() {
			set(v, "NVIDIA_"+strings.ToUpper(what), "enabled")
		}
	}
	if channels := settings.Get("imex-channel-ids"); len(channels.ListTexts()) > 0 {
		set(channels, "NVIDIA_IMEX_CHANNELS", strings.Join(channels.ListTexts(), ","))
	}
	slices.SortFunc(carried, func(a, b source.Value) int { return cmp.Compare(a.Line(), b.Line()) })
	return carried
}

// allowOnlyOne rejects containers that request more than one device of a resource.
func allowOnlyOne(im *plugin.Import, from source.Value, name string) {
	im.Config.SetAllocation(from, name, func(a *v1alpha1.Allocation) { a.FailRequestsGreaterThanOne = true })
}
