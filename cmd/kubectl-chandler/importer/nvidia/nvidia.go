// Package nvidia reads the configurations of the device plugins for NVIDIA GPUs: those of NVIDIA, GKE,
// HAMi and Aliyun.
package nvidia

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// nvidia reads configurations of the NVIDIA device plugin, alone or under the GPU operator
// (api/config/v1 and cmd/nvidia-device-plugin in NVIDIA/k8s-device-plugin v0.20, its
// deployments/helm, and the ClusterPolicy of NVIDIA/gpu-operator).
type nvidia struct {
	im       *plugin.Import
	settings *plugin.Settings
	names    []string       // the resource names
	own      bool           // the plugin's configuration file was read
	each     []source.Value // configuration files that apply to some nodes only
	where    source.Value   // the file or ConfigMap that contains the configuration
}

// NewFormats returns the formats of the plugins for NVIDIA GPUs. HAMi comes first, because its
// containers have names that are similar to those of the NVIDIA plugin.
func NewFormats(im *plugin.Import) []*plugin.Format {
	return []*plugin.Format{newHAMi(im), newNVIDIA(im), newGKE(im), newAliyun(im)}
}

func newNVIDIA(im *plugin.Import) *plugin.Format {
	n := &nvidia{im: im}
	n.settings = plugin.NewSettings(im, n.optionTable())
	return &plugin.Format{
		Name:           "NVIDIA's device plugin",
		Forms:          "configuration file, flags, variables, DaemonSet, Helm values, ClusterPolicy of the GPU operator",
		Families:       []string{"nvidia"},
		Alternatives:   true,
		Label:          nvidiaLabel,
		IsDocument:     func(v source.Value) bool { return n.isOwn(v) || n.isPolicy(v) || n.isValues(v) },
		ReadDocument:   n.read,
		Configurations: n.named,
		IsContainer:    n.runsPlugin,
		ReadContainer:  n.readContainer,
		IsCompanion: func(c plugin.Container) bool {
			return c.HasName("gpu-feature-discovery", "mps-control-daemon", "config-manager")
		},
		Finish: n.finishSettings,
	}
}

// Expressions for NVIDIA GPUs: all of them, and all except MIG instances.
var (
	nvidiaGPU  = expression.All([]string{expression.OneOf(expression.Family, []string{"nvidia"}), expression.OneOf(expression.Kind, []string{"gpu"})})
	nvidiaMIG  = expression.OneOf(expression.Text("function"), []string{"partition"})
	nvidiaFull = nvidiaGPU + " && " + expression.Text("function") + ` != "partition"`
)

const (
	nvidiaPrefix = "nvidia.com/"
	nvidiaOne    = nvidiaPrefix + "gpu"
	nvidiaLabel  = nvidiaPrefix + "device-plugin.config"
)

func (n *nvidia) optionTable() []plugin.Option {
	const (
		ours      = "the agent finds that out by itself"
		noFile    = "containers get their devices by device nodes and NVIDIA_VISIBLE_DEVICES, and no CDI specification is made for others to read"
		noRuntime = "is for NVIDIA's container runtime, which does it by what a pod's image or pod says itself"
	)
	return []plugin.Option{
		{Name: "mig-strategy", Field: "flags.migStrategy", Kind: yaml.ScalarNode, HelmField: "migStrategy", Fate: plugin.FateCarried, Read: n.readMIG},
		{Name: "device-list-strategy", Field: "flags.plugin.deviceListStrategy", HelmField: "deviceListStrategy", Fate: plugin.FateCarried},
		{Name: "device-id-strategy", Field: "flags.plugin.deviceIDStrategy", Kind: yaml.ScalarNode, HelmField: "deviceIDStrategy", Fate: plugin.FateCarried},
		{Name: "pass-device-specs", Field: "flags.plugin.passDeviceSpecs", Kind: yaml.ScalarNode, HelmField: "passDeviceSpecs", NoValue: true, Harmless: []string{"true", "1"}, Reason: "containers always get the device nodes"},
		{Name: "compat-with-cpumanager", HelmField: "compatWithCPUManager", Reason: "containers always get the device nodes"},
		{Name: "fail-on-init-error", Field: "flags.failOnInitError", Kind: yaml.ScalarNode, HelmField: "failOnInitError", NoValue: true, Reason: "the agent waits for a driver that is not there yet"},
		{Name: "restart-on-device-unhealthy", Field: "flags.restartOnDeviceUnhealthy", Kind: yaml.ScalarNode, NoValue: true, Reason: "devices that are well again are offered again"},
		{Name: "nvidia-driver-root", Field: "flags.nvidiaDriverRoot", Kind: yaml.ScalarNode, HelmField: "nvidiaDriverRoot", Harmless: []string{"/"}, Reason: driverRoot},
		{Name: "driver-root", Variable: "DRIVER_ROOT", Harmless: []string{"/"}, Reason: driverRoot},
		{Name: "nvidia-dev-root", Field: "flags.nvidiaDevRoot", Kind: yaml.ScalarNode, Harmless: []string{"/"}, Reason: "device nodes are those in /dev of the host"},
		{Name: "dev-root", Variable: "DEV_ROOT", Harmless: []string{"/"}, Reason: "device nodes are those in /dev of the host"},
		{Name: "gdrcopy-enabled", Field: "flags.gdrcopyEnabled", Kind: yaml.ScalarNode, HelmField: "gdrcopyEnabled", NoValue: true, Fate: plugin.FateCarried},
		{Name: "gds-enabled", Field: "flags.gdsEnabled", Kind: yaml.ScalarNode, HelmField: "gdsEnabled", NoValue: true, Fate: plugin.FateCarried},
		{Name: "mofed-enabled", Field: "flags.mofedEnabled", Kind: yaml.ScalarNode, HelmField: "mofedEnabled", NoValue: true, Fate: plugin.FateCarried},
		{Name: "device-discovery-strategy", Field: "flags.deviceDiscoveryStrategy", Kind: yaml.ScalarNode, HelmField: "deviceDiscoveryStrategy", Fate: plugin.FatePodChange, Harmless: []string{"auto", "nvml"}, Reason: "Tegra's GPUs are not offered"},
		{Name: "shared-devices-allocation-policy", Field: "flags.plugin.sharedDevicesAllocationPolicy", Kind: yaml.ScalarNode, Fate: plugin.FateCarried},
		{Name: "cdi-enabled", Field: "flags.plugin.cdiEnabled", Kind: yaml.ScalarNode, NoValue: true, Reason: noFile},
		{Name: "cdi-annotation-prefix", Field: "flags.plugin.cdiAnnotationPrefix", Kind: yaml.ScalarNode, Harmless: []string{"cdi.k8s.io/"}, Reason: "annotations begin with cdi.k8s.io/"},
		{Name: "nvidia-ctk-path", Field: "flags.plugin.nvidiaCTKPath", Kind: yaml.ScalarNode, Reason: noFile},
		{Name: "nvidia-cdi-hook-path", Field: "flags.plugin.nvidiaCDIHookPath", Kind: yaml.ScalarNode, HelmField: "cdi.nvidiaHookPath", Reason: noFile},
		{Name: "container-driver-root", Field: "flags.plugin.containerDriverRoot", Kind: yaml.ScalarNode, Reason: noFile},
		{Name: "driver-root-ctr-path", Reason: noFile},
		{Name: "cdi-feature-flags", Field: "flags.plugin.cdiFeatureFlags", HelmField: "cdi.featureFlags", Reason: noFile},
		{Name: "cdi-disable-hooks", Reason: noFile},
		{Name: "use-node-feature-api", Field: "flags.useNodeFeatureAPI", Kind: yaml.ScalarNode, NoValue: true, Reason: "is about labels of nodes"},
		{Name: "kubelet-socket", Reason: ours},
		{Name: "config-file", Fate: plugin.FateCarried},
		{Name: "mps-root", Field: "flags.mpsRoot", Kind: yaml.ScalarNode, HelmField: "mps.root", Fate: plugin.FateCarried},
		{Name: "imex-channel-ids", Field: "imex.channelIDs", Fate: plugin.FateCarried},
		{Name: "imex-required", Field: "imex.required", NoValue: true, Harmless: []string{"false"}, Reason: "an IMEX channel is a device of its own"},
		{Name: "visible", Variable: "NVIDIA_VISIBLE_DEVICES", Fate: plugin.FatePodChange, Harmless: []string{"all", "void", "none"}, Reason: "has the plugin see some GPUs only; exclude the others by their attribute uuid"},
		{Name: "mig-monitor", Variable: "NVIDIA_MIG_MONITOR_DEVICES", Harmless: []string{"all"}, Reason: noRuntime},
		{Name: "capabilities", Variable: "NVIDIA_DRIVER_CAPABILITIES", Harmless: []string{"all", "compute", "utility"}, Reason: noRuntime},
		{Name: "unhealthy-not", Variable: "DP_DISABLE_HEALTHCHECKS", Fate: plugin.FatePodChange, Reason: "not carried over: a GPU whose driver says that it must be reset is not given to new pods"},
		{Name: "unhealthy-too", Variable: "DP_ENABLE_HEALTHCHECKS", Fate: plugin.FatePodChange, Reason: "not carried over: XIDs that an application brings upon itself do not count"},
		{Name: "gfd", Field: "flags.gfd", Kind: yaml.MappingNode, Reason: "is about labels of nodes"},
		{Name: "labels", HelmField: "gfd.enabled", Read: n.labels},
		{Field: "version", Kind: yaml.ScalarNode, Harmless: []string{"v1", "v1alpha1"}, Reason: "is an unknown version"},
		{Field: "resources", Fate: plugin.FateIdle, Reason: "the plugin itself ignores it and uses its own names; name devices by an entry of resources"},
		{Field: "sharing.timeSlicing", Kind: yaml.MappingNode, Fate: plugin.FateCarried, Read: n.timeSlicing},
		{Field: "sharing.mps", Kind: yaml.MappingNode, Fate: plugin.FateCarried, Read: n.readMPS},
		{HelmField: "config.name", Kind: yaml.ScalarNode, Fate: plugin.FateCarried},
		{HelmField: "config.default", Kind: yaml.ScalarNode, Fate: plugin.FateCarried},
		{HelmField: "config.fallbackStrategies", Fate: plugin.FateCarried},
		{HelmField: "config.map", Kind: yaml.MappingNode, Fate: plugin.FateCarried},
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
		v.IsMap() && strings.Contains(n.im.Chart, "nvidia-device-plugin")
}

// finishSettings adds the entries of the settings, and of each configuration that applies to some
// nodes only. Flags apply to all of these configurations.
func (n *nvidia) finishSettings() {
	all := n.settings
	for _, configuration := range n.each {
		n.settings, n.names, n.im.Config.Nodes = all.Clone(), nil, configuration.Nodes
		n.settings.ReadFields(configuration, plugin.OwnField, n.im.Notes.AddUnknownField)
		n.addEntries()
	}
	if n.im.Config.Nodes = nil; len(n.each) == 0 {
		n.addEntries()
	}
	for _, name := range []string{"config-file", "config.name"} {
		if v := all.Get(name); v.Text() != "" {
			n.where = v
		}
	}
	if n.where.Text() != "" && !n.own {
		n.im.Notes.AddPodChange(n.where, "how GPUs are shared is in there, and it is not among the files")
	}
}

// addEntries adds the entries of the settings.
func (n *nvidia) addEntries() {
	n.settings.FinishOptions()
	names := append(n.names, nvidiaOne)
	listStrategy(n.im, n.settings.Get("device-list-strategy"), names...)
	carried := []source.Value{}
	if isListed(n.im, nvidiaOne) {
		carried = append(carried, n.settings.Get("device-list-strategy"))
	}
	carried = append(carried, idStrategy(n.im, n.settings.Get("device-id-strategy"), names)...)
	carried = append(carried, runtimeVariables(n.im, n.settings, names)...)
	if strategy := n.settings.Get("mig-strategy"); strings.EqualFold(strategy.Text(), "single") {
		for _, name := range names {
			if strings.HasPrefix(name, nvidiaOne) {
				n.im.Config.SetAllocation(strategy, name, func(a *v1alpha1.Allocation) { a.MatchAttributes = []string{"function", "profile"} })
			}
		}
		n.im.Notes.AddRemark(strategy, "a node with whole GPUs and instances, or with unlike instances, offers no %s; there the plugin does not start. GPUs in MIG mode without instances do not count", nvidiaOne)
	}
	if strategy := n.settings.Get("mig-strategy"); strategy.Text() == "mixed" && len(carried) > 0 {
		n.im.Notes.AddPodChange(carried[0], "is carried over for %s; write it for the resources of MIG instances, nvidia.com/mig-…, that your nodes have", nvidiaOne)
	}
}

func (n *nvidia) read(v source.Value) {
	switch {
	case v.Nodes != nil:
		n.own, n.each = true, append(n.each, v)
	case n.isPolicy(v):
		n.readOperator(v.At("spec"))
	case n.isOwn(v):
		n.own = true
		n.settings.ReadFields(v, plugin.OwnField, n.im.Notes.AddUnknownField)
	case n.isOperator(v):
		n.readOperator(v)
	default:
		n.values(v)
	}
}

// values reads the values of the plugin's chart.
func (n *nvidia) values(v source.Value) {
	var rest []source.Value
	n.settings.ReadHelmValues(v, func(field source.Value) { rest = append(rest, field) })
	main := plugin.ContainerOf(v.At("devicePlugin", "containers", "main"))
	n.settings.ReadFlags(main)
	n.im.NoteUnread(v, rest)
}

// named returns the named configurations in the values of a chart or in a ClusterPolicy.
func (n *nvidia) named(v source.Value) (known []source.Value) {
	var configs source.Value
	switch {
	case v.Nodes != nil || n.isOwn(v):
		return nil
	case n.isPolicy(v):
		configs = operatorConfigs(v.At("spec", "devicePlugin"))
	case n.isOperator(v):
		configs = operatorConfigs(v.At("devicePlugin"))
	default:
		configs = v.At("config", "map")
	}
	for _, c := range configs.Fields() {
		inside, err := source.ParseEmbedded(c)
		if err != nil || !n.isOwn(inside) {
			n.im.Notes.AddPodChange(c, "is not a configuration of the plugin")
			continue
		}
		known = append(known, inside)
	}
	return known
}

// operatorConfigs returns the configurations of the operator, or an absent value if the operator
// starts no device plugin.
func operatorConfigs(section source.Value) source.Value {
	if enabled := section.At("enabled"); enabled.IsPresent() && !enabled.IsTrue() {
		return source.Value{}
	}
	return section.At("config", "data")
}

// readOperator reads a ClusterPolicy, or the values of the operator's chart.
func (n *nvidia) readOperator(v source.Value) {
	section := v.At("devicePlugin")
	if enabled := section.At("enabled"); enabled.IsPresent() && !enabled.IsTrue() {
		n.im.Notes.AddRemark(enabled, "the operator starts no device plugin")
		return
	}
	c := plugin.ContainerOf(section)
	n.settings.ReadFlags(c)
	if strategy := v.At("mig", "strategy"); strategy.IsPresent() {
		n.settings.Put(n.settings.FindFlag("mig-strategy"), strategy, plugin.InEnv)
	}
	if root := section.At("mps", "root"); root.IsPresent() {
		n.settings.Put(n.settings.FindFlag("mps-root"), root, plugin.InEnv)
	}
	if name := section.At("config", "name"); name.Text() != "" {
		n.where = name
	}
	if gfd := v.At("gfd", "enabled"); gfd.IsTrue() {
		n.labels(gfd)
	}
	if cdi := v.At("cdi", "enabled"); cdi.IsTrue() && (v.At("cdi", "default").IsTrue() || !v.At("cdi", "default").IsPresent()) {
		n.im.Notes.AddRemark(cdi, "NVIDIA's container runtime reads NVIDIA_VISIBLE_DEVICES under CDI too, if it is the runtime of the pods")
	}
	if sandbox := v.At("sandboxWorkloads", "enabled"); sandbox.IsTrue() {
		n.im.Notes.AddPodChange(sandbox, "GPUs under vfio are offered where KubeVirt's permittedHostDevices name them; import the KubeVirt object too")
	}
	var rest []source.Value
	for name, field := range v.Fields() {
		if !slices.Contains([]string{"devicePlugin", "mig", "gfd", "cdi", "sandboxWorkloads"}, name) {
			rest = append(rest, field)
		}
	}
	for name, field := range section.Fields() {
		if !slices.Contains([]string{"enabled", "config", "env", "args", "mps"}, name) {
			rest = append(rest, field)
		}
	}
	n.im.NoteUnread(v, rest)
}

// runsPlugin recognises the containers of the plugin and of its companions.
func (n *nvidia) runsPlugin(c plugin.Container) bool {
	if n.isPlugin(c) {
		return true
	}
	return c.HasName("gpu-feature-discovery", "mps-control-daemon", "config-manager") && strings.Contains(c.Image+c.At("name").Text(), "nvidia")
}

func (n *nvidia) isPlugin(c plugin.Container) bool {
	if strings.Contains(c.Image, "nvidia/k8s-device-plugin") || c.HasName("nvidia-device-plugin") {
		return true
	}
	variables := func(name string) bool { return c.Env[name].IsPresent() }
	if c.Image == "" && slices.ContainsFunc([]string{"MIG_STRATEGY", "DEVICE_LIST_STRATEGY", "DEVICE_ID_STRATEGY", "PASS_DEVICE_SPECS", "NVIDIA_DRIVER_ROOT"}, variables) {
		return true
	}
	return c.Image == "" && c.HasFlag("mig-strategy", "device-list-strategy", "device-id-strategy", "fail-on-init-error", "pass-device-specs", "nvidia-driver-root", "mps-root")
}

func (n *nvidia) readContainer(c plugin.Container) {
	switch {
	case c.HasName("gpu-feature-discovery"):
		n.labels(c.At("name"))
	case c.HasName("mps-control-daemon"):
		n.im.Notes.AddRemark(c.At("name"), "has to run as before: the agent starts MPS daemons for claims alone")
	case c.HasName("config-manager"):
	default:
		n.settings.ReadFlags(c)
	}
}

// labels notes that the agent labels nodes.
func (n *nvidia) labels(v source.Value) {
	if truth, ok := v.AsBoolean(); ok && !truth {
		return
	}
	n.im.Notes.AddRemark(v, "the agent sets the labels nvidia.com/gpu.* of nodes, through Node Feature Discovery; see docs/node-labels.md")
}

// readMIG reads the MIG strategy.
func (n *nvidia) readMIG(v source.Value) {
	switch strings.ToLower(v.Text()) {
	case "", "none":
		if v.Text() != "" {
			n.im.Notes.AddRemark(v, "GPUs without MIG are offered as before; a GPU in MIG mode is not offered whole, since nothing can compute on it, but by its instances")
		}
	case "mixed":
		n.im.Notes.AddRemark(v, "is how MIG instances are offered anyway; %s", nvml)
	case "single":
		n.im.Config.AddResource(v, nvidiaOne, expression.All([]string{nvidiaGPU, nvidiaMIG}))
		n.im.Notes.AddRemark(v, "%s", nvml)
	default:
		n.im.Notes.AddPodChange(v, "is an unknown strategy")
	}
}

const nvml = "the names and UUIDs of MIG instances need chandler-host on the node"

// timeSlicing reads the time-slicing shares of each resource.
func (n *nvidia) timeSlicing(v source.Value) {
	n.readShares(v, v.At("failRequestsGreaterThanOne").IsTrue())
}

// readMPS reads the MPS shares of each resource, which an MPS daemon limits.
func (n *nvidia) readMPS(v source.Value) {
	if n.settings.Get("sharing.timeSlicing").Has("resources") {
		n.im.Notes.AddPodChange(v, "the plugin does not take it together with timeSlicing, and neither is it here")
		return
	}
	fail := v.At("failRequestsGreaterThanOne")
	n.readShares(v, !fail.IsPresent() || fail.IsTrue())
	root := n.settings.Get("mps-root")
	dir := root.Text()
	if dir == "" {
		root, dir = v, "/run/nvidia/mps"
	}
	n.im.Config.SetRoot(root, "nvidia-mps", dir)
	n.im.Notes.AddRemark(v.At("resources"), "NVIDIA's mps-control-daemon has to run as before, with %s shown to the agent", dir)
}

// readShares reads the number of shares of each resource. With onlyOne, a container gets at most
// one share.
func (n *nvidia) readShares(v source.Value, onlyOne bool) {
	n.im.Notes.AddUnknownExcept(v, "renameByDefault", "failRequestsGreaterThanOne", "resources")
	for _, name := range []string{"renameByDefault", "failRequestsGreaterThanOne"} {
		field := v.At(name)
		if _, ok := field.AsBoolean(); !field.IsNull() && (!ok || field.IsQuoted()) {
			n.im.Notes.AddWrongType(field, "a boolean")
		}
	}
	rename := v.At("renameByDefault").IsTrue()
	resources := v.At("resources")
	if !resources.IsNull() && !resources.IsList() {
		n.im.Notes.AddWrongType(resources, "a list")
		return
	}
	for _, r := range resources.ListItems() {
		if !r.IsMap() {
			n.im.Notes.AddWrongType(r, "an object")
			continue
		}
		n.im.Notes.AddUnknownExcept(r, "name", "rename", "devices", "replicas")
		name := r.At("name").Text()
		if !strings.HasPrefix(name, nvidiaPrefix) {
			name = nvidiaPrefix + name
		}
		cel, ok := n.selectorOf(name)
		if !ok {
			n.im.Notes.AddPodChange(r.At("name").OrPlaceOf(r), "is not a known resource of the plugin")
			continue
		}
		if r.At("replicas").IsQuoted() {
			n.im.Notes.AddWrongType(r.At("replicas"), "a number")
			continue
		}
		replicas, ok := r.At("replicas").AsInteger()
		if !ok || replicas < 1 {
			n.im.Notes.AddPodChange(r.At("replicas").OrPlaceOf(r), "is not a number of shares; the plugin does not start with it")
			continue
		}
		if replicas == 1 {
			n.im.Notes.AddRemark(r.At("replicas"), "one share is the device itself")
			continue
		}
		sharing := v1alpha1.Sharing{Replicas: replicas}
		if rename {
			sharing.Resource = name + ".shared"
		}
		if other := r.At("rename"); other.IsPresent() && other.Text() != sharing.Resource {
			n.im.Notes.AddRemark(other, "the plugin itself ignores it")
		}
		if devices := r.At("devices"); devices.IsPresent() && devices.Text() != "all" {
			n.im.Notes.AddRemark(devices, "the plugin itself ignores it, and shares all devices")
		}
		n.im.Config.AddSharing(r, cel, sharing)
		shared := cmp.Or(sharing.Resource, name)
		n.names = append(n.names, shared)
		if onlyOne {
			allowOnlyOne(n.im, r, shared)
		}
		switch policy := n.settings.Get("shared-devices-allocation-policy"); policy.Text() {
		case "", "distributed":
		case "packed":
			n.im.Config.SetPolicy(policy, v1alpha1.PolicyPacked, shared)
		default:
			n.im.Notes.AddPodChange(policy, "is an unknown policy")
		}
	}
}

// profile matches the resource name of a MIG profile.
var profile = regexp.MustCompile(`^nvidia\.com/mig-([0-9a-z]+g\.[0-9]+gb|[0-9]+c\.[0-9]+g\.[0-9]+gb)([.-].*)?$`)

// selectorOf returns an expression for the devices of one of the plugin's resources.
func (n *nvidia) selectorOf(name string) (string, bool) {
	if name == nvidiaOne {
		if n.settings.Get("mig-strategy").Text() == "single" {
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
	return expression.All([]string{nvidiaGPU, expression.OneOf(expression.Text("profile"), []string{attribute})}), true
}
