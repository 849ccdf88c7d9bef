package importer

import (
	"strings"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// rocm reads configurations of the AMD GPU device plugin, alone or under the GPU operator
// (cmd/k8s-device-plugin and helm/amd-gpu in ROCm/k8s-device-plugin, and the DeviceConfig of
// ROCm/gpu-operator).
type rocm struct {
	im       *importer
	settings *settings
}

func newROCm(im *importer) *format {
	r := &rocm{im: im}
	const notDone = "the plugin documents it and does nothing with it (ROCm/k8s-device-plugin#149)"
	r.settings = newSettings(im, []option{
		{name: "resource_naming_strategy", at: "spec.devicePlugin.devicePluginArguments.resource_naming_strategy", in: "resource_naming_strategy", fate: fateCarried, do: r.readStrategy},
		{name: "pulse", in: "pulse", fine: []string{"0"}, why: "the agent watches devices by itself"},
		{name: "kubelet-url", why: "the agent finds the kubelet by its directory"},
		{name: "driver_type", fate: fatePodChange, fine: []string{"container"}, why: "GPUs under vfio are offered where an entry of resources names them"},
		{name: "device-count", env: "AMD_GPU_DEVICE_COUNT", at: "gpu.device_count", why: notDone},
		{name: "config-file", env: "CONFIG_FILE_PATH", why: notDone},
		{name: "replicas", at: "gpu.replicas", do: r.readReplicas},
		{in: "labeller.enabled", do: r.labels},
		{in: "node_selector_enabled", fate: fateCarried},
		{in: "node_selector", fate: fateCarried},
		{in: "nfd.enabled", fate: fateCarried},
	})
	return &format{
		name:      "AMD's GPU device plugin",
		forms:     "flags, DaemonSet, Helm values, DeviceConfig of the GPU operator, configuration file",
		families:  []string{"amdgpu"},
		is:        func(v source.Value) bool { return r.isFile(v) || r.isValues(v) || r.isOperator(v) },
		read:      r.read,
		runs:      r.runsPlugin,
		container: r.readContainer,
		defaultSelector: func(v source.Value) map[string]string {
			if !v.At(rocmSelector + "_enabled").IsTrue() {
				return nil
			}
			return map[string]string{"feature.node.kubernetes.io/pci-0300_1002.present": "true", "kubernetes.io/arch": "amd64"}
		},
		finish: r.settings.finishOptions,
	}
}

func (r *rocm) isFile(v source.Value) bool {
	return v.At("gpu").HasAny("device_count", "replicas") && !v.HasAny("kind", "apiVersion")
}

func (r *rocm) isValues(v source.Value) bool {
	repository := v.At("dp", "image", "repository").Text()
	return strings.Contains(repository, "rocm") || v.At("dp").IsMap() && v.At("lbl").IsMap() || v.Has("dp", "labeller")
}

// isOperator recognises the GPU operator's object, and the part of its chart's values that becomes
// such an object.
func (r *rocm) isOperator(v source.Value) bool {
	return v.At("kind").Text() == "DeviceConfig" && strings.HasPrefix(v.At("apiVersion").Text(), "amd.com/") ||
		v.At("spec", "devicePlugin").HasAny("devicePluginArguments", "devicePluginImage", "enableDevicePlugin", "enableNodeLabeller")
}

func (r *rocm) read(v source.Value) {
	var rest []source.Value
	switch {
	case r.isFile(v):
		r.settings.file(v, inOwn, r.im.noteUnknown)
	case r.isOperator(v):
		r.readOperator(v)
	default:
		r.settings.file(v, inValues, func(field source.Value) { rest = append(rest, field) })
		r.settings.flags(containerOf(v.At("dp")))
		r.im.noteOthers(v, rest)
	}
}

// readOperator reads the GPU operator's object.
func (r *rocm) readOperator(v source.Value) {
	plugin := v.At("spec", "devicePlugin")
	if enabled := plugin.At("enableDevicePlugin"); enabled.IsPresent() && !enabled.IsTrue() {
		r.im.noteRemark(enabled, "the operator starts no device plugin")
		return
	}
	for name, said := range plugin.At("devicePluginArguments").Fields() {
		if o := r.settings.find(func(o *option) bool { return o.name == name }); o != nil {
			r.settings.put(o, said, inFlags)
			continue
		}
		r.im.notePodChange(said, "is an unknown flag")
	}
	if enabled := plugin.At("enableNodeLabeller"); !enabled.IsPresent() || enabled.IsTrue() {
		r.labels(enabled.OrPlaceOf(plugin))
	}
	var rest []source.Value
	for name, field := range v.At("spec").Fields() {
		if name != "devicePlugin" {
			rest = append(rest, field)
		}
	}
	r.im.noteOthers(v, rest)
}

func (r *rocm) runsPlugin(c container) bool {
	return strings.Contains(c.image, "rocm/k8s-device-plugin") || c.names("amdgpu-dp", "amd-device-plugin", "k8s-node-labeller", "amdgpu-labeller", "amdgpu-lbl", "amd-gpu-device-plugin") ||
		c.image == "" && c.hasFlag("resource_naming_strategy", "pulse")
}

func (r *rocm) readContainer(c container) {
	if c.names("labeller", "-lbl") || strings.Contains(imageVersion(c.image), "labeller") {
		r.labels(c.At("name"))
		return
	}
	r.settings.flags(c)
}

// readReplicas reads the number of containers per GPU (ROCm/k8s-device-plugin#189).
func (r *rocm) readReplicas(v source.Value) {
	n, ok := v.AsInteger()
	switch {
	case !ok || n < 0:
		r.im.notePodChange(v, "is not a number of containers; the plugin does not start with it")
	case n > 1:
		r.im.addSharing(v, all([]string{oneOf(familyAttribute, []string{"amdgpu"}), oneOf(kindAttribute, []string{"gpu"})}), v1alpha1.Sharing{Replicas: n})
	}
}

// labels notes that the agent labels nodes.
func (r *rocm) labels(v source.Value) {
	if truth, ok := v.AsBoolean(); ok && !truth {
		return
	}
	r.im.noteRemark(v, "the agent sets the labels amd.com/gpu.* of nodes, through Node Feature Discovery; see docs/node-labels.md")
}

// partitions lists the compute and memory partitions of GPUs. A memory partition is never smaller
// than a compute partition.
var partitions = []string{
	"spx_nps1", "dpx_nps1", "dpx_nps2", "tpx_nps1", "qpx_nps1", "qpx_nps2", "qpx_nps4", "cpx_nps1", "cpx_nps2", "cpx_nps4", "cpx_nps8",
}

// readStrategy reads the naming strategy of GPU partitions.
func (r *rocm) readStrategy(v source.Value) {
	switch strings.ToLower(v.Text()) {
	case "single", "":
	case "mixed":
		for _, partition := range partitions {
			r.im.addResource(v, "amd.com/"+partition, all([]string{oneOf(familyAttribute, []string{"amdgpu"}), oneOf(text("profile"), []string{partition})}))
		}
	default:
		r.im.notePodChange(v, "is an unknown strategy")
	}
}
