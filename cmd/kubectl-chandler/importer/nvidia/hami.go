package nvidia

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// hami reads configurations of HAMi and of its predecessors (charts/hami and
// cmd/device-plugin/nvidia in Project-HAMi/HAMi v2.10).
type hami struct {
	im       *plugin.Import
	settings *plugin.Settings
	volcano  bool           // the variant for the Volcano scheduler
	counts   []source.Value // containers per GPU, on nodes with a number of their own
	single   source.Value   // the first file with the settings of single nodes
}

// hamiCount is the default number of containers per GPU.
const hamiCount = 10

func newHAMi(im *plugin.Import) *plugin.Format {
	h := &hami{im: im}
	const (
		limits  = "not carried over: nothing keeps a container to a part of a GPU's memory or cores; without HAMi's scheduler pods cannot ask for "
		runtime = "NVIDIA's container runtime brings the driver's libraries, as before"
		library = "is about HAMi's library in containers, which are without it"
	)
	h.settings = plugin.NewSettings(im, []plugin.Option{
		{Name: "device-split-count", Field: "deviceSplitCount", HelmField: "devicePlugin.deviceSplitCount", Fate: plugin.FateCarried},
		{Name: "resource-name", Field: "resourceCountName", HelmField: "resourceName", Fate: plugin.FateCarried},
		{Name: "mig-strategy", Field: "migStrategy", HelmField: "devicePlugin.migStrategy", Fate: plugin.FatePodChange, Harmless: []string{"none", "mixed"}, Reason: "import it with the strategy of NVIDIA's plugin, --mig-strategy"},
		{Name: "device-memory-scaling", Field: "deviceMemoryScaling", HelmField: "devicePlugin.deviceMemoryScaling", Fate: plugin.FatePodChange, Harmless: []string{"1", "1.0"}, Reason: "not carried over: GPUs have no more memory than they have"},
		{Name: "device-cores-scaling", Field: "deviceCoreScaling", HelmField: "devicePlugin.deviceCoreScaling", Fate: plugin.FatePodChange, Harmless: []string{"1", "1.0"}, Reason: "not carried over: nothing limits cores"},
		{Name: "device-core-scaling", Fate: plugin.FatePodChange, Harmless: []string{"1", "1.0"}, Reason: "not carried over: nothing limits cores"},
		{Name: "disable-core-limit", Field: "disableCoreLimit", HelmField: "devicePlugin.disablecorelimit", NoValue: true, Harmless: []string{"true", "false"}, Reason: library},
		{Name: "device-list-strategy", Field: "deviceListStrategy", HelmField: "devicePlugin.deviceListStrategy", Fate: plugin.FateCarried},
		{Name: "device-id-strategy", Fate: plugin.FateCarried},
		{Name: "pass-device-specs", HelmField: "devicePlugin.passDeviceSpecsEnabled", NoValue: true, Harmless: []string{"true", "false"}, Reason: "containers always get the device nodes"},
		{Name: "fail-on-init-error", NoValue: true, Reason: "the agent waits for a driver that is not there yet"},
		{Name: "nvidia-driver-root", HelmField: "devicePlugin.nvidiaDriverRoot", Harmless: []string{"/"}, Reason: runtime},
		{Name: "hook", Variable: "NVIDIA_CDI_HOOK_PATH", HelmField: "devicePlugin.nvidiaHookPath", Reason: runtime},
		{Name: "gdrcopy-enabled", HelmField: "devicePlugin.gdrcopyEnabled", NoValue: true, Fate: plugin.FateCarried},
		{Name: "gds-enabled", HelmField: "devicePlugin.gdsEnabled", NoValue: true, Fate: plugin.FateCarried},
		{Name: "mofed-enabled", HelmField: "devicePlugin.mofedEnabled", NoValue: true, Fate: plugin.FateCarried},
		{Name: "visible", Variable: "NVIDIA_VISIBLE_DEVICES", Fate: plugin.FatePodChange, Harmless: []string{"all", "void", "none"}, Reason: "has the plugin see some GPUs only; exclude the others by their attribute uuid"},
		{Name: "config-file", Harmless: []string{"/device-config.yaml"}, Reason: "import that file too, if it is not among the files"},
		{Field: "resourceMemoryName", HelmField: "resourceMem", Fate: plugin.FatePodChange, Reason: limits + "it, as GPUs are shared by number here; to share them by memory instead, under that name alone, write a unit in place of replicas: 1Mi on nodes with at most 55,000 MiB of GPU memory, and a larger one otherwise"},
		{Field: "resourceMemoryPercentageName", HelmField: "resourceMemPercentage", Fate: plugin.FatePodChange, Reason: limits + "it"},
		{Field: "resourceCoreName", HelmField: "resourceCores", Fate: plugin.FatePodChange, Reason: limits + "it"},
		{Field: "resourcePriorityName", HelmField: "resourcePriority", Fate: plugin.FatePodChange, Reason: limits + "it"},
		{Field: "defaultMemory", Harmless: []string{"0"}, Reason: library},
		{Field: "defaultCores", Harmless: []string{"0"}, Reason: library},
		{Field: "defaultGPUNum", Fate: plugin.FatePodChange, Harmless: []string{"1"}, Reason: "pods ask for a number of GPUs themselves"},
		{Field: "overwriteEnv", Harmless: []string{"false"}, Reason: library},
		{Field: "preConfiguredDeviceMemory", HelmField: "devicePlugin.preConfiguredDeviceMemory", Harmless: []string{"0"}, Reason: library},
		{Name: "gpu-memory-factor", Field: "gpuMemoryFactor", Fate: plugin.FatePodChange, Harmless: []string{"1"}, Reason: "not carried over: it is the unit of volcano.sh/vgpu-memory in MiB, and pods cannot request a part of the memory of a GPU by that name"},
		{Field: "memoryFactor", Harmless: []string{"0", "1"}, Reason: library},
		{Field: "enableNumaTopology", HelmField: "devicePlugin.enableNumaTopology", Harmless: []string{"true"}, Reason: "the agent always reports the NUMA nodes of GPUs to the kubelet: with the Topology Manager policies restricted and single-numa-node, the kubelet rejects a pod whose GPUs are not on the same NUMA node as its CPUs"},
		{Field: "gpuCorePolicy", HelmField: "devices.nvidia.gpuCorePolicy", Harmless: []string{"default"}, Reason: library},
		{Field: "libCudaLogLevel", HelmField: "devices.nvidia.libCudaLogLevel", Harmless: []string{"1"}, Reason: library},
		{Field: "runtimeClassName", HelmField: "devicePlugin.runtimeClassName", Fate: plugin.FatePodChange, Reason: "pods name their runtime class themselves"},
		{Field: "knownMigGeometries", Reason: "MIG instances are not created on demand"},
		{Field: "migProfileAllowlist", Reason: "MIG instances are not created on demand"},
		{HelmField: "devicePlugin.enabled", Fate: plugin.FateCarried},
		{HelmField: "devicePlugin.nodeConfiguration.config", Fate: plugin.FateCarried},
		{HelmField: "devicePlugin.nodeConfiguration.externalConfigName", Reason: "import that ConfigMap too, if it is not among the files"},
		{HelmField: "devicePlugin.extraArgs", Fate: plugin.FateCarried},
		{HelmField: "device-config.content", Fate: plugin.FateCarried},
		{Name: "gpu-scheduler-policy", HelmField: "scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy", Fate: plugin.FateCarried},
		{Name: "node-scheduler-policy", HelmField: "scheduler.defaultSchedulerPolicy.nodeSchedulerPolicy", Reason: "the policy for nodes is a setting of the scheduler: see NodeResourcesFit in its configuration"},
		{HelmField: "schedulerName", Harmless: []string{"hami-scheduler"}, Reason: "pods go to the cluster's scheduler"},
	})
	return &plugin.Format{
		Name:         "HAMi",
		Forms:        "flags, DaemonSet, Helm values, device-config.yaml and config.json of its ConfigMaps",
		Families:     []string{"nvidia"},
		IsDocument:   func(v source.Value) bool { return h.isDevices(v) || h.isNodes(v) || h.isValues(v) },
		ReadDocument: h.read,
		IsContainer:  h.runsPlugin,
		DefaultSelector: func(v source.Value) map[string]string {
			if h.isDevices(v) || h.isNodes(v) {
				return nil // a ConfigMap
			}
			return map[string]string{"gpu": "on"}
		},
		ReadContainer: func(c plugin.Container) {
			h.volcano = h.volcano || c.HasName("volcano")
			h.settings.ReadFlags(c)
		},
		Finish: h.finishSettings,
	}
}

// isDevices recognises the file with the resource names of each vendor.
func (h *hami) isDevices(v source.Value) bool {
	return v.At("nvidia").HasAny("resourceCountName", "resourceMemoryName", "deviceSplitCount", "migProfileAllowlist", "knownMigGeometries") && !v.HasAny("kind", "apiVersion")
}

// isNodes recognises the file with the settings of single nodes.
func (h *hami) isNodes(v source.Value) bool { return v.At("nodeconfig").IsList() }

func (h *hami) isValues(v source.Value) bool {
	return v.HasAny("resourceMem", "resourceCores", "mluResourceName", "dcuResourceName") || v.At("devicePlugin").HasAny("deviceSplitCount", "deviceMemoryScaling", "disablecorelimit", "nodeConfiguration") || h.isDevices(v.At("devices"))
}

func (h *hami) runsPlugin(c plugin.Container) bool {
	if c.HasName("vgpumonitor", "vgpu-monitor", "hami-scheduler", "vgpu-scheduler") && !c.HasName("device-plugin") {
		return false
	}
	return c.HasName("hami", "vgpu-device-plugin", "4pdosc/k8s-device-plugin", "4pdosc/k8s-vdevice", "volcano-vgpu") && (c.HasName("device-plugin") || c.Image == "") || c.HasFlag("device-split-count", "device-memory-scaling", "device-cores-scaling") || c.Image == "" && c.Env["DEVICE_SPLIT_COUNT"].IsPresent()
}

func (h *hami) read(v source.Value) {
	switch {
	case h.isNodes(v):
		if !h.single.IsPresent() {
			h.single = v.At("nodeconfig").WithText("")
		}
		h.im.Notes.AddUnknownExcept(v, "nodeconfig")
		for _, node := range v.At("nodeconfig").ListItems() {
			h.node(node)
		}
	case h.isDevices(v):
		h.readDevices(v)
	default:
		h.values(v)
	}
}

// readDevices reads the file with the resource names of each vendor.
func (h *hami) readDevices(v source.Value) {
	h.settings.ReadFields(v.At("nvidia"), plugin.OwnField, h.im.Notes.AddUnknownField)
	for name, field := range v.Fields() {
		if name != "nvidia" {
			at := field.WithText("")
			h.im.Notes.AddRemark(at, "is offered by the vendor's own plugin, and HAMi's scheduler divides it; without HAMi, see which family of Chandler offers it")
		}
	}
}

func (h *hami) values(v source.Value) {
	var rest []source.Value
	nvidia := v.At("devices", "nvidia") // older charts had these fields in devicePlugin and at the top level
	h.settings.ReadFields(v, plugin.HelmField, func(field source.Value) {
		name, inNVIDIA := strings.CutPrefix(field.Path, nvidia.Path+".")
		if o := h.settings.FindField(name); o != nil && inNVIDIA && nvidia.IsPresent() {
			h.settings.Put(o, field, plugin.InFile)
			return
		}
		rest = append(rest, field)
	})
	h.settings.ReadFlags(plugin.Container{Args: v.At("devicePlugin", "extraArgs").ListItems(), Env: make(map[string]source.Value)})
	if content := v.At("device-config", "content"); content.Text() != "" {
		if inside, err := source.ParseEmbedded(content); err == nil && h.isDevices(inside) {
			h.readDevices(inside)
		} else {
			h.im.Notes.AddPodChange(content, "is not a configuration of devices")
		}
	}
	if config := v.At("devicePlugin", "nodeConfiguration", "config"); config.Text() != "" {
		if inside, err := source.ParseEmbedded(config); err == nil && h.isNodes(inside) {
			h.read(inside)
		} else {
			h.im.Notes.AddPodChange(config, "is not a configuration of nodes")
		}
	}
	h.im.NoteUnread(v, rest)
}

// example is the node name in the example of the chart's values.
const example = "your-node-name"

// sameOnNode lists the settings of a node that are not imported, with the values that have no
// effect.
var sameOnNode = map[string][]string{
	"operatingmode":                {"hami-core"},
	"devicememoryscaling":          {"1", "1.0"},
	"devicecorescaling":            {"1", "1.0"},
	"preconfigureddevicememory":    {"0"},
	"migstrategy":                  {"none", "mixed"},
	"enablenumatopology":           {"true", "false"}, // noted once, at the setting for all nodes
	"enablegetpreferredallocation": {"true", "false"},
}

// node reads the settings of a single node.
func (h *hami) node(v source.Value) {
	h.im.Notes.AddUnknownExcept(v, slices.Concat([]string{"name", "devicesplitcount", "filterdevices"}, slices.Sorted(maps.Keys(sameOnNode)))...)
	name := v.At("name")
	if name.Text() == example {
		return
	}
	filter := v.At("filterdevices")
	on := func(v source.Value) source.Value {
		v.Nodes = &v1alpha1.Nodes{Names: []string{name.Text()}}
		return v
	}
	if list := filter.At("uuid").ListTexts(); len(list) > 0 {
		h.im.Config.AddExclude(on(filter.At("uuid")), expression.All([]string{expression.OneOf(expression.Family, []string{"nvidia"}), expression.OneOf(expression.Text("uuid"), list)}))
	}
	if index := filter.At("index"); len(index.ListTexts()) > 0 {
		h.im.Notes.AddPodChange(index, "GPUs are not known by their numbers; exclude them by their attribute uuid")
	}
	if count := v.At("devicesplitcount"); !count.IsNull() {
		h.counts = append(h.counts, on(count))
	}
	for _, field := range slices.Sorted(maps.Keys(sameOnNode)) {
		if said := v.At(field); !said.IsNull() && !slices.Contains(sameOnNode[field], said.Text()) {
			h.im.Notes.AddPodChange(said, "is not carried over")
		}
	}
}

func (h *hami) finishSettings() {
	h.settings.FinishOptions()
	count := h.settings.Get("device-split-count")
	replicas := hamiCount
	if n, ok := count.AsInteger(); ok && n > 0 {
		replicas = n
	} else if count.IsPresent() && count.Text() != "" {
		h.im.Notes.AddPodChange(count, "is not a number of containers; %d is used", hamiCount)
	}
	if !count.IsPresent() && h.single.IsPresent() {
		count = h.single
		h.im.Notes.AddRemark(count, "on all other nodes, %d containers share a GPU, which is the default of HAMi; if its ConfigMap or its values have another deviceSplitCount, import them too", hamiCount)
	}
	name := cmp.Or(h.settings.Get("resource-name").Text(), nvidiaOne)
	memory := "nvidia.com/gpumem and nvidia.com/gpucores"
	if h.volcano {
		name, memory = cmp.Or(h.settings.Get("resource-name").Text(), "volcano.sh/vgpu-number"), "volcano.sh/vgpu-memory, volcano.sh/vgpu-memory-percentage and volcano.sh/vgpu-cores"
	}
	for _, count := range h.counts { // before the entry for all other nodes, because the first match wins
		if n, ok := count.AsInteger(); ok && n > 0 {
			h.im.Config.AddSharing(count, nvidiaFull, v1alpha1.Sharing{Replicas: n, Resource: name})
		} else {
			h.im.Notes.AddPodChange(count, "is not a number of containers")
		}
	}
	if replicas > 1 {
		h.im.Config.AddSharing(count, nvidiaFull, v1alpha1.Sharing{Replicas: replicas, Resource: name})
	} else {
		h.im.Config.AddResource(count, name, nvidiaFull)
	}
	switch policy := h.settings.Get("gpu-scheduler-policy"); policy.Text() {
	case "":
	case "binpack":
		h.im.Config.SetPolicy(policy, v1alpha1.PolicyPacked, name)
	case "spread":
		h.im.Config.SetPolicy(policy, v1alpha1.PolicySpread, name)
	case "topology-aware":
		h.im.Notes.AddRemark(policy, "GPUs are selected by their topology without an entry in the configuration")
	case "numa":
		h.im.Notes.AddRemark(policy, "GPUs on the same NUMA node are preferred without an entry in the configuration")
	case "mutex":
		h.im.Notes.AddPodChange(policy, "not carried over: with it a pod gets only GPUs that no other pod uses; for GPUs that are not to be shared, write an entry of resources in place of the entry of sharing")
	default:
		h.im.Notes.AddPodChange(policy, "is an unknown policy, or a list of policies; want one of binpack, spread and topology-aware")
	}
	listStrategy(h.im, h.settings.Get("device-list-strategy"), name)
	idStrategy(h.im, h.settings.Get("device-id-strategy"), []string{name})
	runtimeVariables(h.im, h.settings, []string{name})
	if !h.settings.Get("resourceMemoryName").IsPresent() && !h.settings.Get("resourceCoreName").IsPresent() {
		h.im.Notes.AddPodChange(source.Value{File: count.File}, "a container is not kept to a part of a GPU: without HAMi's scheduler pods cannot ask for %s", memory)
	}
}
