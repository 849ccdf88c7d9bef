package importer

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// nvidia reads configurations of the NVIDIA device plugin, alone or under the GPU operator
// (api/config/v1 and cmd/nvidia-device-plugin in NVIDIA/k8s-device-plugin v0.20, its
// deployments/helm, and the ClusterPolicy of NVIDIA/gpu-operator).
type nvidia struct {
	im       *importer
	settings *settings
	names    []string       // the resource names
	own      bool           // the plugin's configuration file was read
	each     []source.Value // configuration files that apply to some nodes only
	where    source.Value   // the file or ConfigMap that contains the configuration
}

func newNVIDIA(im *importer) *format {
	n := &nvidia{im: im}
	n.settings = newSettings(im, n.optionTable())
	return &format{
		name:         "NVIDIA's device plugin",
		forms:        "configuration file, flags, variables, DaemonSet, Helm values, ClusterPolicy of the GPU operator",
		families:     []string{"nvidia"},
		alternatives: true,
		label:        nvidiaLabel,
		is:           func(v source.Value) bool { return n.isOwn(v) || n.isPolicy(v) || n.isValues(v) },
		read:         n.read,
		runs:         n.runsPlugin,
		container:    n.readContainer,
		companion: func(c container) bool {
			return c.names("gpu-feature-discovery", "mps-control-daemon", "config-manager")
		},
		finish: n.finishSettings,
	}
}

// Expressions for NVIDIA GPUs: all of them, and all except MIG instances.
var (
	nvidiaGPU  = all([]string{oneOf(familyAttribute, []string{"nvidia"}), oneOf(kindAttribute, []string{"gpu"})})
	nvidiaMIG  = oneOf(text("function"), []string{"partition"})
	nvidiaFull = nvidiaGPU + " && " + text("function") + ` != "partition"`
)

const (
	nvidiaPrefix = "nvidia.com/"
	nvidiaOne    = nvidiaPrefix + "gpu"
	nvidiaLabel  = nvidiaPrefix + "device-plugin.config"
)

func (n *nvidia) optionTable() []option {
	const (
		ours      = "the agent finds that out by itself"
		noFile    = "containers get their devices by device nodes and NVIDIA_VISIBLE_DEVICES, and no CDI specification is made for others to read"
		noRuntime = "is for NVIDIA's container runtime, which does it by what a pod's image or pod says itself"
	)
	return []option{
		{name: "mig-strategy", at: "flags.migStrategy", kind: yaml.ScalarNode, in: "migStrategy", fate: fateCarried, do: n.readMIG},
		{name: "device-list-strategy", at: "flags.plugin.deviceListStrategy", in: "deviceListStrategy", fate: fateCarried},
		{name: "device-id-strategy", at: "flags.plugin.deviceIDStrategy", kind: yaml.ScalarNode, in: "deviceIDStrategy", fate: fateCarried},
		{name: "pass-device-specs", at: "flags.plugin.passDeviceSpecs", kind: yaml.ScalarNode, in: "passDeviceSpecs", alone: true, fine: []string{"true", "1"}, why: "containers always get the device nodes"},
		{name: "compat-with-cpumanager", in: "compatWithCPUManager", why: "containers always get the device nodes"},
		{name: "fail-on-init-error", at: "flags.failOnInitError", kind: yaml.ScalarNode, in: "failOnInitError", alone: true, why: "the agent waits for a driver that is not there yet"},
		{name: "restart-on-device-unhealthy", at: "flags.restartOnDeviceUnhealthy", kind: yaml.ScalarNode, alone: true, why: "devices that are well again are offered again"},
		{name: "nvidia-driver-root", at: "flags.nvidiaDriverRoot", kind: yaml.ScalarNode, in: "nvidiaDriverRoot", fine: []string{"/"}, why: driverRoot},
		{name: "driver-root", env: "DRIVER_ROOT", fine: []string{"/"}, why: driverRoot},
		{name: "nvidia-dev-root", at: "flags.nvidiaDevRoot", kind: yaml.ScalarNode, fine: []string{"/"}, why: "device nodes are those in /dev of the host"},
		{name: "dev-root", env: "DEV_ROOT", fine: []string{"/"}, why: "device nodes are those in /dev of the host"},
		{name: "gdrcopy-enabled", at: "flags.gdrcopyEnabled", kind: yaml.ScalarNode, in: "gdrcopyEnabled", alone: true, fate: fateCarried},
		{name: "gds-enabled", at: "flags.gdsEnabled", kind: yaml.ScalarNode, in: "gdsEnabled", alone: true, fate: fateCarried},
		{name: "mofed-enabled", at: "flags.mofedEnabled", kind: yaml.ScalarNode, in: "mofedEnabled", alone: true, fate: fateCarried},
		{name: "device-discovery-strategy", at: "flags.deviceDiscoveryStrategy", kind: yaml.ScalarNode, in: "deviceDiscoveryStrategy", fate: fatePodChange, fine: []string{"auto", "nvml"}, why: "Tegra's GPUs are not offered"},
		{name: "shared-devices-allocation-policy", at: "flags.plugin.sharedDevicesAllocationPolicy", kind: yaml.ScalarNode, fate: fateCarried},
		{name: "cdi-enabled", at: "flags.plugin.cdiEnabled", kind: yaml.ScalarNode, alone: true, why: noFile},
		{name: "cdi-annotation-prefix", at: "flags.plugin.cdiAnnotationPrefix", kind: yaml.ScalarNode, fine: []string{"cdi.k8s.io/"}, why: "annotations begin with cdi.k8s.io/"},
		{name: "nvidia-ctk-path", at: "flags.plugin.nvidiaCTKPath", kind: yaml.ScalarNode, why: noFile},
		{name: "nvidia-cdi-hook-path", at: "flags.plugin.nvidiaCDIHookPath", kind: yaml.ScalarNode, in: "cdi.nvidiaHookPath", why: noFile},
		{name: "container-driver-root", at: "flags.plugin.containerDriverRoot", kind: yaml.ScalarNode, why: noFile},
		{name: "driver-root-ctr-path", why: noFile},
		{name: "cdi-feature-flags", at: "flags.plugin.cdiFeatureFlags", in: "cdi.featureFlags", why: noFile},
		{name: "cdi-disable-hooks", why: noFile},
		{name: "use-node-feature-api", at: "flags.useNodeFeatureAPI", kind: yaml.ScalarNode, alone: true, why: "is about labels of nodes"},
		{name: "kubelet-socket", why: ours},
		{name: "config-file", fate: fateCarried},
		{name: "mps-root", at: "flags.mpsRoot", kind: yaml.ScalarNode, in: "mps.root", fate: fateCarried},
		{name: "imex-channel-ids", at: "imex.channelIDs", fate: fateCarried},
		{name: "imex-required", at: "imex.required", alone: true, fine: []string{"false"}, why: "an IMEX channel is a device of its own"},
		{name: "visible", env: "NVIDIA_VISIBLE_DEVICES", fate: fatePodChange, fine: []string{"all", "void", "none"}, why: "has the plugin see some GPUs only; exclude the others by their attribute uuid"},
		{name: "mig-monitor", env: "NVIDIA_MIG_MONITOR_DEVICES", fine: []string{"all"}, why: noRuntime},
		{name: "capabilities", env: "NVIDIA_DRIVER_CAPABILITIES", fine: []string{"all", "compute", "utility"}, why: noRuntime},
		{name: "unhealthy-not", env: "DP_DISABLE_HEALTHCHECKS", fate: fatePodChange, why: "not carried over: a GPU whose driver says that it must be reset is not given to new pods"},
		{name: "unhealthy-too", env: "DP_ENABLE_HEALTHCHECKS", fate: fatePodChange, why: "not carried over: XIDs that an application brings upon itself do not count"},
		{name: "gfd", at: "flags.gfd", kind: yaml.MappingNode, why: "is about labels of nodes"},
		{name: "labels", in: "gfd.enabled", do: n.labels},
		{at: "version", kind: yaml.ScalarNode, fine: []string{"v1", "v1alpha1"}, why: "is an unknown version"},
		{at: "resources", fate: fateIdle, why: "the plugin itself ignores it and uses its own names; name devices by an entry of resources"},
		{at: "sharing.timeSlicing", kind: yaml.MappingNode, fate: fateCarried, do: n.timeSlicing},
		{at: "sharing.mps", kind: yaml.MappingNode, fate: fateCarried, do: n.readMPS},
		{in: "config.name", kind: yaml.ScalarNode, fate: fateCarried},
		{in: "config.default", kind: yaml.ScalarNode, fate: fateCarried},
		{in: "config.fallbackStrategies", fate: fateCarried},
		{in: "config.map", kind: yaml.MappingNode, fate: fateCarried},
	}
}

const driverRoot = "NVIDIA's container runtime brings the driver's libraries, as before; without that runtime, write driverRoots: {nvidia: …}"

// isOwn recognises the plugin's configuration file.
func (n *nvidia) isOwn(v source.Value) bool {
	if v.HasAny("apiVersion", "kind") || !v.IsMap() {
		return false
	}
	if v.At("sharing").HasAny("timeSlicing", "mps") || v.At("flags").HasAny("migStrategy", "failOnInitError", "nvidiaDriverRoot", "plugin", "gfd") {
		return true
	}
	for name := range v.Fields() {
		if !slices.Contains([]string{"version", "flags", "resources", "sharing", "imex"}, name) {
			return false
		}
	}
	return v.At("version").Text() == "v1" || v.At("version").Text() == "v1alpha1"
}

func (n *nvidia) isPolicy(v source.Value) bool {
	return v.At("kind").Text() == "ClusterPolicy" && strings.HasPrefix(v.At("apiVersion").Text(), "nvidia.com/")
}

// isOperator recognises the fields of a ClusterPolicy and of the operator's chart.
func (n *nvidia) isOperator(v source.Value) bool {
	plugin := v.At("devicePlugin")
	return v.At("mig").Has("strategy") ||
		plugin.IsMap() && (v.HasAny("toolkit", "dcgmExporter", "migManager", "sandboxWorkloads", "operator", "vgpuDeviceManager") || plugin.At("config").HasAny("name", "create", "data"))
}

// isValues recognises the values of the plugin's chart and of the operator's chart.
func (n *nvidia) isValues(v source.Value) bool {
	if v.HasAny("apiVersion", "kind") {
		return false
	}
	configs := v.At("config", "map")
	for _, c := range configs.Fields() {
		if inside, err := source.ParseEmbedded(c); err == nil && n.isOwn(inside) {
			return true
		}
	}
	return v.HasAny("migStrategy", "deviceListStrategy", "deviceIDStrategy", "compatWithCPUManager", "nvidiaDriverRoot") || n.isOperator(v) ||
		v.IsMap() && strings.Contains(n.im.chart, "nvidia-device-plugin")
}

// finishSettings adds the entries of the settings, and of each configuration that applies to some
// nodes only. Flags apply to all of these configurations.
func (n *nvidia) finishSettings() {
	all := n.settings
	for _, configuration := range n.each {
		n.settings, n.names, n.im.nodes = all.clone(), nil, configuration.Nodes
		n.settings.file(configuration, inOwn, n.im.noteUnknown)
		n.addEntries()
	}
	if n.im.nodes = nil; len(n.each) == 0 {
		n.addEntries()
	}
	for _, name := range []string{"config-file", "config.name"} {
		if v := all.get(name); v.Text() != "" {
			n.where = v
		}
	}
	if n.where.Text() != "" && !n.own {
		n.im.notePodChange(n.where, "how GPUs are shared is in there, and it is not among the files")
	}
}

// addEntries adds the entries of the settings.
func (n *nvidia) addEntries() {
	n.settings.finishOptions()
	names := append(n.names, nvidiaOne)
	n.im.listStrategy(n.settings.get("device-list-strategy"), names...)
	carried := []source.Value{}
	if n.im.isListed(nvidiaOne) {
		carried = append(carried, n.settings.get("device-list-strategy"))
	}
	carried = append(carried, n.im.idStrategy(n.settings.get("device-id-strategy"), names)...)
	carried = append(carried, n.im.runtimeVariables(n.settings, names)...)
	if strategy := n.settings.get("mig-strategy"); strings.EqualFold(strategy.Text(), "single") {
		for _, name := range names {
			if strings.HasPrefix(name, nvidiaOne) {
				n.im.setAllocation(strategy, name, func(a *v1alpha1.Allocation) { a.MatchAttributes = []string{"function", "profile"} })
			}
		}
		n.im.noteRemark(strategy, "a node with whole GPUs and instances, or with unlike instances, offers no %s; there the plugin does not start. GPUs in MIG mode without instances do not count", nvidiaOne)
	}
	if strategy := n.settings.get("mig-strategy"); strategy.Text() == "mixed" && len(carried) > 0 {
		n.im.notePodChange(carried[0], "is carried over for %s; write it for the resources of MIG instances, nvidia.com/mig-…, that your nodes have", nvidiaOne)
	}
}

// idStrategy reads the device ID strategy: how the plugin names GPUs to the container runtime. It
// returns the imported values.
func (im *importer) idStrategy(strategy source.Value, names []string) []source.Value {
	switch strings.ToLower(strategy.Text()) {
	case "", "uuid":
		return nil
	case "index":
		for _, name := range names {
			im.setAllocation(strategy, name, func(a *v1alpha1.Allocation) { a.DeviceIDStrategy = v1alpha1.DeviceIDIndex })
		}
		im.noteRemark(strategy, "nodes without chandler-host use the UUIDs of GPUs instead of their numbers, and the container runtime accepts both")
		return []source.Value{strategy}
	default:
		im.notePodChange(strategy, "is an unknown strategy")
		return nil
	}
}

// runtimeVariables reads the additional features of the container runtime, which the plugin
// requests by environment variables. It returns the imported values.
func (im *importer) runtimeVariables(settings *settings, names []string) (carried []source.Value) {
	set := func(v source.Value, name, text string) {
		carried = append(carried, v)
		for _, resource := range names {
			im.setAllocation(v, resource, func(a *v1alpha1.Allocation) {
				if a.Env == nil {
					a.Env = make(map[string]string)
				}
				a.Env[name] = text
			})
		}
	}
	for _, what := range []string{"gdrcopy", "gds", "mofed"} {
		if v := settings.get(what + "-enabled"); v.IsTrue() {
			set(v, "NVIDIA_"+strings.ToUpper(what), "enabled")
		}
	}
	if channels := settings.get("imex-channel-ids"); len(channels.ListTexts()) > 0 {
		set(channels, "NVIDIA_IMEX_CHANNELS", strings.Join(channels.ListTexts(), ","))
	}
	slices.SortFunc(carried, func(a, b source.Value) int { return cmp.Compare(a.Line(), b.Line()) })
	return carried
}

func (n *nvidia) read(v source.Value) {
	switch {
	case v.Nodes != nil:
		n.own, n.each = true, append(n.each, v)
	case n.isPolicy(v):
		n.readOperator(v.At("spec"))
	case n.isOwn(v):
		n.own = true
		n.settings.file(v, inOwn, n.im.noteUnknown)
	case n.isOperator(v):
		n.readOperator(v)
	default:
		n.values(v)
	}
}

// values reads the values of the plugin's chart.
func (n *nvidia) values(v source.Value) {
	var rest []source.Value
	n.settings.helmValues(v, func(field source.Value) { rest = append(rest, field) })
	n.im.chooseDefault(v)
	n.named(v.At("config", "map"))
	main := containerOf(v.At("devicePlugin", "containers", "main"))
	n.settings.flags(main)
	n.im.noteOthers(v, rest)
}

// named reads named configurations, each for some nodes.
func (n *nvidia) named(configs source.Value) {
	var known []source.Value
	for _, c := range configs.Fields() {
		inside, err := source.ParseEmbedded(c)
		if err != nil || !n.isOwn(inside) {
			n.im.notePodChange(c, "is not a configuration of the plugin")
			continue
		}
		known = append(known, inside)
	}
	if len(known) > 0 {
		n.im.importChosen(&format{name: "NVIDIA's device plugin", alternatives: true, label: nvidiaLabel, read: n.read}, known)
	}
}

// readOperator reads a ClusterPolicy, or the values of the operator's chart.
func (n *nvidia) readOperator(v source.Value) {
	plugin := v.At("devicePlugin")
	n.im.chooseDefault(v)
	if enabled := plugin.At("enabled"); enabled.IsPresent() && !enabled.IsTrue() {
		n.im.noteRemark(enabled, "the operator starts no device plugin")
		return
	}
	c := containerOf(plugin)
	n.settings.flags(c)
	if strategy := v.At("mig", "strategy"); strategy.IsPresent() {
		n.settings.put(n.settings.find(func(o *option) bool { return o.name == "mig-strategy" }), strategy, inEnv)
	}
	if root := plugin.At("mps", "root"); root.IsPresent() {
		n.settings.put(n.settings.find(func(o *option) bool { return o.name == "mps-root" }), root, inEnv)
	}
	n.named(plugin.At("config", "data"))
	if name := plugin.At("config", "name"); name.Text() != "" {
		n.where = name
	}
	if gfd := v.At("gfd", "enabled"); gfd.IsTrue() {
		n.labels(gfd)
	}
	if cdi := v.At("cdi", "enabled"); cdi.IsTrue() && (v.At("cdi", "default").IsTrue() || !v.At("cdi", "default").IsPresent()) {
		n.im.noteRemark(cdi, "NVIDIA's container runtime reads NVIDIA_VISIBLE_DEVICES under CDI too, if it is the runtime of the pods")
	}
	if sandbox := v.At("sandboxWorkloads", "enabled"); sandbox.IsTrue() {
		n.im.notePodChange(sandbox, "GPUs under vfio are offered where KubeVirt's permittedHostDevices name them; import the KubeVirt object too")
	}
	var rest []source.Value
	for name, field := range v.Fields() {
		if !slices.Contains([]string{"devicePlugin", "mig", "gfd", "cdi", "sandboxWorkloads"}, name) {
			rest = append(rest, field)
		}
	}
	for name, field := range plugin.Fields() {
		if !slices.Contains([]string{"enabled", "config", "env", "args", "mps"}, name) {
			rest = append(rest, field)
		}
	}
	n.im.noteOthers(v, rest)
}

// runsPlugin recognises the containers of the plugin and of its companions.
func (n *nvidia) runsPlugin(c container) bool {
	if n.isPlugin(c) {
		return true
	}
	return c.names("gpu-feature-discovery", "mps-control-daemon", "config-manager") && strings.Contains(c.image+c.At("name").Text(), "nvidia")
}

func (n *nvidia) isPlugin(c container) bool {
	if strings.Contains(c.image, "nvidia/k8s-device-plugin") || c.names("nvidia-device-plugin") {
		return true
	}
	variables := func(name string) bool { return c.env[name].IsPresent() }
	if c.image == "" && slices.ContainsFunc([]string{"MIG_STRATEGY", "DEVICE_LIST_STRATEGY", "DEVICE_ID_STRATEGY", "PASS_DEVICE_SPECS", "NVIDIA_DRIVER_ROOT"}, variables) {
		return true
	}
	return c.image == "" && c.hasFlag("mig-strategy", "device-list-strategy", "device-id-strategy", "fail-on-init-error", "pass-device-specs", "nvidia-driver-root", "mps-root")
}

func (n *nvidia) readContainer(c container) {
	switch {
	case c.names("gpu-feature-discovery"):
		n.labels(c.At("name"))
	case c.names("mps-control-daemon"):
		n.im.noteRemark(c.At("name"), "has to run as before: the agent starts MPS daemons for claims alone")
	case c.names("config-manager"):
	default:
		n.settings.flags(c)
	}
}

// labels notes that the agent labels nodes.
func (n *nvidia) labels(v source.Value) {
	if truth, ok := v.AsBoolean(); ok && !truth {
		return
	}
	n.im.noteRemark(v, "the agent sets the labels nvidia.com/gpu.* of nodes, through Node Feature Discovery; see docs/node-labels.md")
}

// readMIG reads the MIG strategy.
func (n *nvidia) readMIG(v source.Value) {
	switch strings.ToLower(v.Text()) {
	case "", "none":
		if v.Text() != "" {
			n.im.noteRemark(v, "GPUs without MIG are offered as before; a GPU in MIG mode is not offered whole, since nothing can compute on it, but by its instances")
		}
	case "mixed":
		n.im.noteRemark(v, "is how MIG instances are offered anyway; %s", nvml)
	case "single":
		n.im.addResource(v, nvidiaOne, all([]string{nvidiaGPU, nvidiaMIG}))
		n.im.noteRemark(v, "%s", nvml)
	default:
		n.im.notePodChange(v, "is an unknown strategy")
	}
}

const nvml = "the names and UUIDs of MIG instances need chandler-host on the node"

// timeSlicing reads the time-slicing shares of each resource.
func (n *nvidia) timeSlicing(v source.Value) {
	n.readShares(v, v.At("failRequestsGreaterThanOne").IsTrue())
}

// readMPS reads the MPS shares of each resource, which an MPS daemon limits.
func (n *nvidia) readMPS(v source.Value) {
	if n.settings.get("sharing.timeSlicing").Has("resources") {
		n.im.notePodChange(v, "the plugin does not take it together with timeSlicing, and neither is it here")
		return
	}
	fail := v.At("failRequestsGreaterThanOne")
	n.readShares(v, !fail.IsPresent() || fail.IsTrue())
	root := n.settings.get("mps-root")
	dir := root.Text()
	if dir == "" {
		root, dir = v, "/run/nvidia/mps"
	}
	n.im.setRoot(root, "nvidia-mps", dir)
	n.im.noteRemark(v.At("resources"), "NVIDIA's mps-control-daemon has to run as before, with %s shown to the agent", dir)
}

// readShares reads the number of shares of each resource. With onlyOne, a container gets at most
// one share.
func (n *nvidia) readShares(v source.Value, onlyOne bool) {
	n.im.unknownExcept(v, "renameByDefault", "failRequestsGreaterThanOne", "resources")
	for _, name := range []string{"renameByDefault", "failRequestsGreaterThanOne"} {
		field := v.At(name)
		if _, ok := field.AsBoolean(); !field.IsNull() && (!ok || field.IsQuoted()) {
			n.im.noteType(field, "a boolean")
		}
	}
	rename := v.At("renameByDefault").IsTrue()
	resources := v.At("resources")
	if !resources.IsNull() && !resources.IsList() {
		n.im.noteType(resources, "a list")
		return
	}
	for _, r := range resources.ListItems() {
		if !r.IsMap() {
			n.im.noteType(r, "an object")
			continue
		}
		n.im.unknownExcept(r, "name", "rename", "devices", "replicas")
		name := r.At("name").Text()
		if !strings.HasPrefix(name, nvidiaPrefix) {
			name = nvidiaPrefix + name
		}
		cel, ok := n.selectorOf(name)
		if !ok {
			n.im.notePodChange(r.At("name").OrPlaceOf(r), "is not a known resource of the plugin")
			continue
		}
		if r.At("replicas").IsQuoted() {
			n.im.noteType(r.At("replicas"), "a number")
			continue
		}
		replicas, ok := r.At("replicas").AsInteger()
		if !ok || replicas < 1 {
			n.im.notePodChange(r.At("replicas").OrPlaceOf(r), "is not a number of shares; the plugin does not start with it")
			continue
		}
		if replicas == 1 {
			n.im.noteRemark(r.At("replicas"), "one share is the device itself")
			continue
		}
		sharing := v1alpha1.Sharing{Replicas: replicas}
		if rename {
			sharing.Resource = name + ".shared"
		}
		if other := r.At("rename"); other.IsPresent() && other.Text() != sharing.Resource {
			n.im.noteRemark(other, "the plugin itself ignores it")
		}
		if devices := r.At("devices"); devices.IsPresent() && devices.Text() != "all" {
			n.im.noteRemark(devices, "the plugin itself ignores it, and shares all devices")
		}
		n.im.addSharing(r, cel, sharing)
		shared := cmp.Or(sharing.Resource, name)
		n.names = append(n.names, shared)
		if onlyOne {
			n.im.onlyOne(r, shared)
		}
		switch policy := n.settings.get("shared-devices-allocation-policy"); policy.Text() {
		case "", "distributed":
		case "packed":
			n.im.setPolicy(policy, v1alpha1.PolicyPacked, shared)
		default:
			n.im.notePodChange(policy, "is an unknown policy")
		}
	}
}

// profile matches the resource name of a MIG profile.
var profile = regexp.MustCompile(`^nvidia\.com/mig-([0-9a-z]+g\.[0-9]+gb|[0-9]+c\.[0-9]+g\.[0-9]+gb)([.-].*)?$`)

// selectorOf returns an expression for the devices of one of the plugin's resources.
func (n *nvidia) selectorOf(name string) (string, bool) {
	if name == nvidiaOne {
		if n.settings.get("mig-strategy").Text() == "single" {
			return nvidiaGPU, true
		}
		return nvidiaFull, true
	}
	m := profile.FindStringSubmatch(name)
	if m == nil {
		return "", false
	}
	attribute := m[1] + m[2]
	if strings.HasPrefix(m[2], ".") { // a resource name cannot contain a plus sign
		attribute = m[1] + strings.ReplaceAll(m[2], ".", "+")
	}
	return all([]string{nvidiaGPU, oneOf(text("profile"), []string{attribute})}), true
}
