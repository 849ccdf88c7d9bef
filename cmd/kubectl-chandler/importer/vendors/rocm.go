package vendors

import (
	"strings"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// rocm reads configurations of the AMD GPU device plugin, alone or under the GPU operator
// (cmd/k8s-device-plugin and helm/amd-gpu in ROCm/k8s-device-plugin, and the DeviceConfig of
// ROCm/gpu-operator).
type rocm struct {
	im       *plugin.Import
	settings *plugin.Settings
}

// NewROCm returns the format of the AMD GPU device plugin.
func NewROCm(im *plugin.Import) *plugin.Format {
	r := &rocm{im: im}
	const notDone = "the plugin documents it and does nothing with it (ROCm/k8s-device-plugin#149)"
	r.settings = plugin.NewSettings(im, []plugin.Option{
		{Name: "resource_naming_strategy", Field: "spec.devicePlugin.devicePluginArguments.resource_naming_strategy", HelmField: "resource_naming_strategy", Fate: plugin.FateCarried, Read: r.readStrategy},
		{Name: "pulse", HelmField: "pulse", Harmless: []string{"0"}, Reason: "the agent watches devices by itself"},
		{Name: "kubelet-url", Reason: "the agent finds the kubelet by its directory"},
		{Name: "driver_type", Fate: plugin.FatePodChange, Harmless: []string{"container"}, Reason: "GPUs under vfio are offered where an entry of resources names them"},
		{Name: "device-count", Variable: "AMD_GPU_DEVICE_COUNT", Field: "gpu.device_count", Reason: notDone},
		{Name: "config-file", Variable: "CONFIG_FILE_PATH", Reason: notDone},
		{Name: "replicas", Field: "gpu.replicas", Read: r.readReplicas},
		{HelmField: "labeller.enabled", Read: r.labels},
		{HelmField: "node_selector_enabled", Fate: plugin.FateCarried},
		{HelmField: "node_selector", Fate: plugin.FateCarried},
		{HelmField: "nfd.enabled", Fate: plugin.FateCarried},
	})
	return &plugin.Format{
		Name:          "AMD's GPU device plugin",
		Forms:         "flags, DaemonSet, Helm values, DeviceConfig of the GPU operator, configuration file",
		Families:      []string{"amdgpu"},
		IsDocument:    func(v source.Value) bool { return r.isFile(v) || r.isValues(v) || r.isOperator(v) },
		ReadDocument:  r.read,
		IsContainer:   r.runsPlugin,
		ReadContainer: r.readContainer,
		DefaultSelector: func(v source.Value) map[string]string {
			if !v.At(plugin.ROCmSelector + "_enabled").IsTrue() {
				return nil
			}
			return map[string]string{"feature.node.kubernetes.io/pci-0300_1002.present": "true", "kubernetes.io/arch": "amd64"}
		},
		Finish: r.settings.FinishOptions,
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
		r.settings.ReadFields(v, plugin.OwnField, r.im.Notes.AddUnknownField)
	case r.isOperator(v):
		r.readOperator(v)
	default:
		r.settings.ReadFields(v, plugin.HelmField, func(field source.Value) { rest = append(rest, field) })
		r.settings.ReadFlags(plugin.ContainerOf(v.At("dp")))
		r.im.NoteUnread(v, rest)
	}
}

// readOperator reads the GPU operator's object.
func (r *rocm) readOperator(v source.Value) {
	section := v.At("spec", "devicePlugin")
	if enabled := section.At("enableDevicePlugin"); enabled.IsPresent() && !enabled.IsTrue() {
		r.im.Notes.AddRemark(enabled, "the operator starts no device plugin")
		return
	}
	for name, said := range section.At("devicePluginArguments").Fields() {
		if o := r.settings.FindFlag(name); o != nil {
			r.settings.Put(o, said, plugin.InFlags)
			continue
		}
		r.im.Notes.AddPodChange(said, "is an unknown flag")
	}
	if enabled := section.At("enableNodeLabeller"); !enabled.IsPresent() || enabled.IsTrue() {
		r.labels(enabled.OrPlaceOf(section))
	}
	var rest []source.Value
	for name, field := range v.At("spec").Fields() {
		if name != "devicePlugin" {
			rest = append(rest, field)
		}
	}
	r.im.NoteUnread(v, rest)
}

func (r *rocm) runsPlugin(c plugin.Container) bool {
	return strings.Contains(c.Image, "rocm/k8s-device-plugin") || c.HasName("amdgpu-dp", "amd-device-plugin", "k8s-node-labeller", "amdgpu-labeller", "amdgpu-lbl", "amd-gpu-device-plugin") ||
		c.Image == "" && c.HasFlag("resource_naming_strategy", "pulse")
}

func (r *rocm) readContainer(c plugin.Container) {
	if c.HasName("labeller", "-lbl") || strings.Contains(plugin.ImageVersion(c.Image), "labeller") {
		r.labels(c.At("name"))
		return
	}
	r.settings.ReadFlags(c)
}

// readReplicas reads the number of containers per GPU (ROCm/k8s-device-plugin#189).
func (r *rocm) readReplicas(v source.Value) {
	n, ok := v.AsInteger()
	switch {
	case !ok || n < 0:
		r.im.Notes.AddPodChange(v, "is not a number of containers; the plugin does not start with it")
	case n > 1:
		r.im.Config.AddSharing(v, expression.All([]string{expression.OneOf(expression.Family, []string{"amdgpu"}), expression.OneOf(expression.Kind, []string{"gpu"})}), v1alpha1.Sharing{Replicas: n})
	}
}

// labels notes that the agent labels nodes.
func (r *rocm) labels(v source.Value) {
	if truth, ok := v.AsBoolean(); ok && !truth {
		return
	}
	r.im.Notes.AddRemark(v, "the agent sets the labels amd.com/gpu.* of nodes, through Node Feature Discovery; see docs/node-labels.md")
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
			r.im.Config.AddResource(v, "amd.com/"+partition, expression.All([]string{expression.OneOf(expression.Family, []string{"amdgpu"}), expression.OneOf(expression.Text("profile"), []string{partition})}))
		}
	default:
		r.im.Notes.AddPodChange(v, "is an unknown strategy")
	}
}
