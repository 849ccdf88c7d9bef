package importer

import (
	"cmp"
	"maps"
	"slices"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// hami reads configurations of HAMi and of its predecessors (charts/hami and
// cmd/device-plugin/nvidia in Project-HAMi/HAMi v2.10).
type hami struct {
	im       *importer
	settings *settings
	volcano  bool           // the variant for the Volcano scheduler
	counts   []source.Value // containers per GPU, on nodes with a number of their own
	single   source.Value   // the first file with the settings of single nodes
}

// hamiCount is the default number of containers per GPU.
const hamiCount = 10

func newHAMi(im *importer) *format {
	h := &hami{im: im}
	const (
		limits  = "not carried over: nothing keeps a container to a part of a GPU's memory or cores; without HAMi's scheduler pods cannot ask for "
		runtime = "NVIDIA's container runtime brings the driver's libraries, as before"
		library = "is about HAMi's library in containers, which are without it"
	)
	h.settings = newSettings(im, []option{
		{name: "device-split-count", at: "deviceSplitCount", in: "devicePlugin.deviceSplitCount", fate: fateCarried},
		{name: "resource-name", at: "resourceCountName", in: "resourceName", fate: fateCarried},
		{name: "mig-strategy", at: "migStrategy", in: "devicePlugin.migStrategy", fate: fatePodChange, fine: []string{"none", "mixed"}, why: "import it with the strategy of NVIDIA's plugin, --mig-strategy"},
		{name: "device-memory-scaling", at: "deviceMemoryScaling", in: "devicePlugin.deviceMemoryScaling", fate: fatePodChange, fine: []string{"1", "1.0"}, why: "not carried over: GPUs have no more memory than they have"},
		{name: "device-cores-scaling", at: "deviceCoreScaling", in: "devicePlugin.deviceCoreScaling", fate: fatePodChange, fine: []string{"1", "1.0"}, why: "not carried over: nothing limits cores"},
		{name: "device-core-scaling", fate: fatePodChange, fine: []string{"1", "1.0"}, why: "not carried over: nothing limits cores"},
		{name: "disable-core-limit", at: "disableCoreLimit", in: "devicePlugin.disablecorelimit", alone: true, fine: []string{"true", "false"}, why: library},
		{name: "device-list-strategy", at: "deviceListStrategy", in: "devicePlugin.deviceListStrategy", fate: fateCarried},
		{name: "device-id-strategy", fate: fateCarried},
		{name: "pass-device-specs", in: "devicePlugin.passDeviceSpecsEnabled", alone: true, fine: []string{"true", "false"}, why: "containers always get the device nodes"},
		{name: "fail-on-init-error", alone: true, why: "the agent waits for a driver that is not there yet"},
		{name: "nvidia-driver-root", in: "devicePlugin.nvidiaDriverRoot", fine: []string{"/"}, why: runtime},
		{name: "hook", env: "NVIDIA_CDI_HOOK_PATH", in: "devicePlugin.nvidiaHookPath", why: runtime},
		{name: "gdrcopy-enabled", in: "devicePlugin.gdrcopyEnabled", alone: true, fate: fateCarried},
		{name: "gds-enabled", in: "devicePlugin.gdsEnabled", alone: true, fate: fateCarried},
		{name: "mofed-enabled", in: "devicePlugin.mofedEnabled", alone: true, fate: fateCarried},
		{name: "visible", env: "NVIDIA_VISIBLE_DEVICES", fate: fatePodChange, fine: []string{"all", "void", "none"}, why: "has the plugin see some GPUs only; exclude the others by their attribute uuid"},
		{name: "config-file", fine: []string{"/device-config.yaml"}, why: "import that file too, if it is not among the files"},
		{at: "resourceMemoryName", in: "resourceMem", fate: fatePodChange, why: limits + "it, as GPUs are shared by number here; to share them by memory instead, under that name alone, write a unit in place of replicas: 1Mi on nodes with at most 55,000 MiB of GPU memory, and a larger one otherwise"},
		{at: "resourceMemoryPercentageName", in: "resourceMemPercentage", fate: fatePodChange, why: limits + "it"},
		{at: "resourceCoreName", in: "resourceCores", fate: fatePodChange, why: limits + "it"},
		{at: "resourcePriorityName", in: "resourcePriority", fate: fatePodChange, why: limits + "it"},
		{at: "defaultMemory", fine: []string{"0"}, why: library},
		{at: "defaultCores", fine: []string{"0"}, why: library},
		{at: "defaultGPUNum", fate: fatePodChange, fine: []string{"1"}, why: "pods ask for a number of GPUs themselves"},
		{at: "overwriteEnv", fine: []string{"false"}, why: library},
		{at: "preConfiguredDeviceMemory", in: "devicePlugin.preConfiguredDeviceMemory", fine: []string{"0"}, why: library},
		{name: "gpu-memory-factor", at: "gpuMemoryFactor", fate: fatePodChange, fine: []string{"1"}, why: "not carried over: it is the unit of volcano.sh/vgpu-memory in MiB, and pods cannot request a part of the memory of a GPU by that name"},
		{at: "memoryFactor", fine: []string{"0", "1"}, why: library},
		{at: "enableNumaTopology", in: "devicePlugin.enableNumaTopology", fine: []string{"true"}, why: "the agent always reports the NUMA nodes of GPUs to the kubelet: with the Topology Manager policies restricted and single-numa-node, the kubelet rejects a pod whose GPUs are not on the same NUMA node as its CPUs"},
		{at: "gpuCorePolicy", in: "devices.nvidia.gpuCorePolicy", fine: []string{"default"}, why: library},
		{at: "libCudaLogLevel", in: "devices.nvidia.libCudaLogLevel", fine: []string{"1"}, why: library},
		{at: "runtimeClassName", in: "devicePlugin.runtimeClassName", fate: fatePodChange, why: "pods name their runtime class themselves"},
		{at: "knownMigGeometries", why: "MIG instances are not created on demand"},
		{at: "migProfileAllowlist", why: "MIG instances are not created on demand"},
		{in: "devicePlugin.enabled", fate: fateCarried},
		{in: "devicePlugin.nodeConfiguration.config", fate: fateCarried},
		{in: "devicePlugin.nodeConfiguration.externalConfigName", why: "import that ConfigMap too, if it is not among the files"},
		{in: "devicePlugin.extraArgs", fate: fateCarried},
		{in: "device-config.content", fate: fateCarried},
		{name: "gpu-scheduler-policy", in: "scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy", fate: fateCarried},
		{name: "node-scheduler-policy", in: "scheduler.defaultSchedulerPolicy.nodeSchedulerPolicy", why: "the policy for nodes is a setting of the scheduler: see NodeResourcesFit in its configuration"},
		{in: "schedulerName", fine: []string{"hami-scheduler"}, why: "pods go to the cluster's scheduler"},
	})
	return &format{
		name:     "HAMi",
		forms:    "flags, DaemonSet, Helm values, device-config.yaml and config.json of its ConfigMaps",
		families: []string{"nvidia"},
		is:       func(v source.Value) bool { return h.isDevices(v) || h.isNodes(v) || h.isValues(v) },
		read:     h.read,
		runs:     h.runsPlugin,
		defaultSelector: func(v source.Value) map[string]string {
			if h.isDevices(v) || h.isNodes(v) {
				return nil // a ConfigMap
			}
			return map[string]string{"gpu": "on"}
		},
		container: func(c container) {
			h.volcano = h.volcano || c.names("volcano")
			h.settings.flags(c)
		},
		finish: h.finishSettings,
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

func (h *hami) runsPlugin(c container) bool {
	if c.names("vgpumonitor", "vgpu-monitor", "hami-scheduler", "vgpu-scheduler") && !c.names("device-plugin") {
		return false
	}
	return c.names("hami", "vgpu-device-plugin", "4pdosc/k8s-device-plugin", "4pdosc/k8s-vdevice", "volcano-vgpu") && (c.names("device-plugin") || c.image == "") || c.hasFlag("device-split-count", "device-memory-scaling", "device-cores-scaling") || c.image == "" && c.env["DEVICE_SPLIT_COUNT"].IsPresent()
}

func (h *hami) read(v source.Value) {
	switch {
	case h.isNodes(v):
		if !h.single.IsPresent() {
			h.single = v.At("nodeconfig").WithText("")
		}
		h.im.unknownExcept(v, "nodeconfig")
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
	h.settings.file(v.At("nvidia"), inOwn, h.im.noteUnknown)
	for name, field := range v.Fields() {
		if name != "nvidia" {
			at := field.WithText("")
			h.im.noteRemark(at, "is offered by the vendor's own plugin, and HAMi's scheduler divides it; without HAMi, see which family of Chandler offers it")
		}
	}
}

func (h *hami) values(v source.Value) {
	var rest []source.Value
	nvidia := v.At("devices", "nvidia") // older charts had these fields in devicePlugin and at the top level
	h.settings.file(v, inValues, func(field source.Value) {
		if o := h.settings.find(func(o *option) bool { return o.at != "" && nvidia.IsPresent() && field.Path == nvidia.Path+"."+o.at }); o != nil {
			h.settings.put(o, field, inFile)
			return
		}
		rest = append(rest, field)
	})
	h.settings.flags(container{args: v.At("devicePlugin", "extraArgs").ListItems(), env: make(map[string]source.Value)})
	if content := v.At("device-config", "content"); content.Text() != "" {
		if inside, err := source.ParseEmbedded(content); err == nil && h.isDevices(inside) {
			h.readDevices(inside)
		} else {
			h.im.notePodChange(content, "is not a configuration of devices")
		}
	}
	if config := v.At("devicePlugin", "nodeConfiguration", "config"); config.Text() != "" {
		if inside, err := source.ParseEmbedded(config); err == nil && h.isNodes(inside) {
			h.read(inside)
		} else {
			h.im.notePodChange(config, "is not a configuration of nodes")
		}
	}
	h.im.noteOthers(v, rest)
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
	h.im.unknownExcept(v, slices.Concat([]string{"name", "devicesplitcount", "filterdevices"}, slices.Sorted(maps.Keys(sameOnNode)))...)
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
		h.im.addExclude(on(filter.At("uuid")), all([]string{oneOf(familyAttribute, []string{"nvidia"}), oneOf(text("uuid"), list)}))
	}
	if index := filter.At("index"); len(index.ListTexts()) > 0 {
		h.im.notePodChange(index, "GPUs are not known by their numbers; exclude them by their attribute uuid")
	}
	if count := v.At("devicesplitcount"); !count.IsNull() {
		h.counts = append(h.counts, on(count))
	}
	for _, field := range slices.Sorted(maps.Keys(sameOnNode)) {
		if said := v.At(field); !said.IsNull() && !slices.Contains(sameOnNode[field], said.Text()) {
			h.im.notePodChange(said, "is not carried over")
		}
	}
}

func (h *hami) finishSettings() {
	h.settings.finishOptions()
	count := h.settings.get("device-split-count")
	replicas := hamiCount
	if n, ok := count.AsInteger(); ok && n > 0 {
		replicas = n
	} else if count.IsPresent() && count.Text() != "" {
		h.im.notePodChange(count, "is not a number of containers; %d is used", hamiCount)
	}
	if !count.IsPresent() && h.single.IsPresent() {
		count = h.single
		h.im.noteRemark(count, "on all other nodes, %d containers share a GPU, which is the default of HAMi; if its ConfigMap or its values have another deviceSplitCount, import them too", hamiCount)
	}
	name := cmp.Or(h.settings.get("resource-name").Text(), nvidiaOne)
	memory := "nvidia.com/gpumem and nvidia.com/gpucores"
	if h.volcano {
		name, memory = cmp.Or(h.settings.get("resource-name").Text(), "volcano.sh/vgpu-number"), "volcano.sh/vgpu-memory, volcano.sh/vgpu-memory-percentage and volcano.sh/vgpu-cores"
	}
	for _, count := range h.counts { // before the entry for all other nodes, because the first match wins
		if n, ok := count.AsInteger(); ok && n > 0 {
			h.im.addSharing(count, nvidiaFull, v1alpha1.Sharing{Replicas: n, Resource: name})
		} else {
			h.im.notePodChange(count, "is not a number of containers")
		}
	}
	if replicas > 1 {
		h.im.addSharing(count, nvidiaFull, v1alpha1.Sharing{Replicas: replicas, Resource: name})
	} else {
		h.im.addResource(count, name, nvidiaFull)
	}
	switch policy := h.settings.get("gpu-scheduler-policy"); policy.Text() {
	case "":
	case "binpack":
		h.im.setPolicy(policy, v1alpha1.PolicyPacked, name)
	case "spread":
		h.im.setPolicy(policy, v1alpha1.PolicySpread, name)
	case "topology-aware":
		h.im.noteRemark(policy, "GPUs are selected by their topology without an entry in the configuration")
	case "numa":
		h.im.noteRemark(policy, "GPUs on the same NUMA node are preferred without an entry in the configuration")
	case "mutex":
		h.im.notePodChange(policy, "not carried over: with it a pod gets only GPUs that no other pod uses; for GPUs that are not to be shared, write an entry of resources in place of the entry of sharing")
	default:
		h.im.notePodChange(policy, "is an unknown policy, or a list of policies; want one of binpack, spread and topology-aware")
	}
	h.im.listStrategy(h.settings.get("device-list-strategy"), name)
	h.im.idStrategy(h.settings.get("device-id-strategy"), []string{name})
	h.im.runtimeVariables(h.settings, []string{name})
	if !h.settings.get("resourceMemoryName").IsPresent() && !h.settings.get("resourceCoreName").IsPresent() {
		h.im.notePodChange(source.Value{File: count.File}, "a container is not kept to a part of a GPU: without HAMi's scheduler pods cannot ask for %s", memory)
	}
}
