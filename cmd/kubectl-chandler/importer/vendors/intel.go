package vendors

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// intel reads configurations of one of the Intel device plugins: flags, the operator's object, and
// values of the charts (cmd/*_plugin and pkg/apis/deviceplugin/v1 in
// intel/intel-device-plugins-for-kubernetes v0.36, and intel/helm-charts).
type intel struct {
	im       *plugin.Import
	settings *plugin.Settings
	plugin   *intelPlugin
	version  string       // of the image, "" if unknown
	first    source.Value // the first object or container of the plugin
	object   bool         // first is an object of the operator
}

// An intelPlugin describes one of the Intel device plugins.
type intelPlugin struct {
	short    string   // such as gpu, as in intel-gpu-plugin and GpuDevicePlugin
	title    string   // the name in messages
	families []string // the Chandler families that offer the same devices
	own      []string // fields of Helm values that no other plugin has
	options  func(*intel) []plugin.Option
	finish   func(*intel)
}

func intelPlugins() []*intelPlugin {
	return []*intelPlugin{
		{short: "gpu", title: "GPU", families: []string{"intelgpu"}, own: []string{"enableMonitoring", "resourceManager", "bypathMode", "allowIDs", "denyIDs"}, options: (*intel).gpuOptions, finish: (*intel).readMonitoring},
		{short: "qat", title: "QAT", families: []string{"qat"}, own: []string{"dpdkDriver", "kernelVfDrivers", "maxNumDevices"}, options: (*intel).qatOptions, finish: (*intel).readBinding},
		{short: "sgx", title: "SGX", families: []string{"sgx"}, own: []string{"enclaveLimit", "provisionLimit", "dcapInfraResources"}, options: (*intel).sgxOptions},
		{short: "fpga", title: "FPGA", families: []string{"fpga-intel"}, options: (*intel).fpgaOptions},
		{short: "dsa", title: "DSA", families: []string{"idxd"}, options: (*intel).dsaOptions},
		{short: "iaa", title: "IAA", families: []string{"idxd"}, options: (*intel).iaaOptions},
		{short: "npu", title: "NPU", families: []string{"npu"}, options: (*intel).npuOptions},
		{short: "dlb", title: "DLB", families: []string{"dlb"}, options: (*intel).common},
		{short: "vpu", title: "VPU", families: []string{"vpu"}, options: (*intel).vpuOptions},
	}
}

// titles returns the titles of all plugins.
func titles() string {
	var titles []string
	for _, p := range intelPlugins() {
		titles = append(titles, p.title)
	}
	return strings.Join(titles, ", ")
}

// NewIntel returns the formats of the Intel device plugins.
func NewIntel(im *plugin.Import) []*plugin.Format {
	var formats []*plugin.Format
	for _, p := range intelPlugins() {
		i := &intel{im: im, plugin: p}
		i.settings = plugin.NewSettings(im, append(p.options(i), i.deploymentOptions()...))
		formats = append(formats, &plugin.Format{
			Name:          "Intel's " + p.title + " device plugin",
			Group:         "Intel's device plugins for " + titles(),
			Forms:         "flags, DaemonSet, object of the operator, Helm values",
			Families:      p.families,
			IsDocument:    func(v source.Value) bool { return i.isObject(v) || i.isValues(v) || i.isMapping(v) },
			ReadDocument:  i.read,
			IsContainer:   i.runsPlugin,
			ReadContainer: i.readContainer,
			Finish:        i.finishSettings,
		})
	}
	return formats
}

func (i *intel) isObject(v source.Value) bool {
	return strings.EqualFold(v.At("kind").Text(), i.plugin.short+"DevicePlugin") && strings.HasPrefix(v.At("apiVersion").Text(), "deviceplugin.intel.com/")
}

// isMapping recognises the objects with which an admission webhook translates FPGA names.
func (i *intel) isMapping(v source.Value) bool {
	return i.plugin.short == "fpga" && strings.HasPrefix(v.At("apiVersion").Text(), "fpga.intel.com/")
}

// isValues recognises the values of the plugin's chart, by the plugin's own fields or by its name.
func (i *intel) isValues(v source.Value) bool {
	if v.HasAny("apiVersion", "kind", source.ArgsField, "command") { // a container has these fields
		return false
	}
	if v.HasAny(i.plugin.own...) {
		return true
	}
	named := strings.Contains(i.im.Chart, "device-plugins-"+i.plugin.short)
	for _, name := range []string{v.At("name").Text(), v.At("image").Text(), v.At("image", "repository").Text()} {
		named = named || strings.HasPrefix(name, i.plugin.short+"deviceplugin") || strings.Contains(name, "intel-"+i.plugin.short+"-plugin")
	}
	return named && (v.HasAny("sharedDevNum", "mode", "logLevel", "nodeFeatureRule", "driver") || i.im.Chart != "") ||
		i.plugin.short == "gpu" && v.Has("sharedDevNum") && !v.Has("name")
}

// rememberFirst stores the first object or container of the plugin.
func (i *intel) rememberFirst(v source.Value, object bool) {
	if !i.first.IsPresent() {
		i.first, i.object = v.WithText(""), object
	}
}

func (i *intel) read(v source.Value) {
	i.rememberFirst(v, i.isObject(v))
	switch {
	case i.isMapping(v):
		i.readMapping(v)
	case i.isObject(v):
		i.version = plugin.ImageVersion(v.At("spec", "image").Text())
		i.settings.ReadFields(v.At("spec"), plugin.OwnField, i.im.Notes.AddUnknownField)
	default:
		i.version = v.At("image", "tag").Text()
		var rest []source.Value
		i.settings.ReadFields(v, func(o *plugin.Option) string { return o.Field }, func(field source.Value) { rest = append(rest, field) })
		i.im.NoteUnread(v, rest)
	}
}

// flagsOf lists flags that only one of the plugins has.
var flagsOf = map[string][]string{
	"gpu":  {"enable-monitoring", "monitoring-mode", "allow-ids", "deny-ids", "bypath", "wsl", "resource-manager", "health-management", "xpumd-endpoint", "levelzero-socket", "run-mode"},
	"qat":  {"dpdk-driver", "kernel-vf-drivers", "max-num-devices"},
	"sgx":  {"enclave-limit", "provision-limit", "dcap-infra-resources"},
	"dsa":  {"driver"},
	"fpga": {"node-name"},
}

func (i *intel) runsPlugin(c plugin.Container) bool {
	short := i.plugin.short
	if short == "fpga" && c.HasName("xilinx") {
		return false // xilinxatg/xilinx_k8s_fpga_plugin
	}
	if c.HasName("intel-"+short+"-plugin", short+"_plugin", "intel-"+short+"-device-plugin", "intel-"+short+"-initcontainer", "intel-"+short+"-kernel-plugin") || short != "gpu" && c.HasName(short+"_device_plugin") {
		return true
	}
	if c.Image == "" && short == "qat" && len(c.Args) == 0 && (c.Env["KERNEL_VF_DRIVERS"].IsPresent() || c.Env["DPDK_DRIVER"].IsPresent()) {
		return true // the ConfigMap of the plugin's first releases
	}
	if c.HasName("intel-idxd-config-initcontainer") {
		return short == strings.ToLower(c.Env["DEVICE_TYPE"].Text()) || short == "dsa" && c.Env["DEVICE_TYPE"].Text() == ""
	}
	if c.Image != "" || c.At("name").IsPresent() {
		return false
	}
	return c.HasFlag(flagsOf[short]...) || short == "gpu" && c.HasFlag("shared-dev-num") || short == "fpga" && i.fpgaMode(c)
}

// fpgaMode reports whether arguments set a mode of the FPGA plugin.
func (i *intel) fpgaMode(c plugin.Container) bool {
	return slices.ContainsFunc(c.Args, func(arg source.Value) bool {
		_, mode, _ := strings.Cut(arg.Text(), "mode=")
		return mode == "af" || mode == "region" || mode == "regiondevel"
	})
}

func (i *intel) readContainer(c plugin.Container) {
	if c.HasName("initcontainer", "-init") {
		i.im.Notes.AddRemark(c.At("name"), "prepares devices before the plugin starts; see chandler provision, or keep it")
		return
	}
	i.rememberFirst(c.Value, false)
	if version := plugin.ImageVersion(c.Image); version != "" {
		i.version = version
	}
	i.settings.ReadFlags(c)
}

func (i *intel) finishSettings() {
	i.settings.FinishOptions()
	if i.plugin.finish != nil {
		i.plugin.finish(i)
	}
}

// deploymentOptions returns the fields of the operator's objects and of charts that configure the
// deployment of the plugin.
func (i *intel) deploymentOptions() []plugin.Option {
	return []plugin.Option{
		{Field: "image", Fate: plugin.FateCarried},
		{Field: "initImage", Reason: "prepares devices before the plugin starts; see chandler provision, or keep it"},
		{Field: "provisioningConfig", Reason: "prepares devices before the plugin starts; see chandler provision, or keep it"},
		{Field: "nodeSelector", Fate: plugin.FateCarried},
		{Field: "tolerations", Fate: plugin.FateCarried},
		{Field: "logLevel", Fate: plugin.FateCarried},
		{Name: "prefix", Reason: "is for trees that are no host's; the agent has --host-root"},
		{Name: "kubeconfig", Reason: "the agent has flags of its own"},
		{Name: "master", Reason: "the agent has flags of its own"},
		{Name: "verbosity", Reason: "the agent has flags for its log"},
		{Name: "node-name", Reason: "the agent has flags of its own"},
	}
}

func (i *intel) common() []plugin.Option { return nil }

// policyOption returns the option that selects among several free devices. known maps the values of
// the option; names are the resources that get the policy.
func (i *intel) policyOption(at string, known map[string]v1alpha1.Policy, names ...string) plugin.Option {
	return plugin.Option{Name: "allocation-policy", Field: at, Read: func(v source.Value) {
		policy, ok := known[v.Text()]
		switch {
		case !ok && v.Text() != "":
			i.im.Notes.AddPodChange(v, "is an unknown policy")
		case policy != v1alpha1.PolicyAligned && policy != "":
			i.im.Config.SetPolicy(v, policy, names...)
		}
	}}
}

const fromKernel = "the agent reads the health of GPUs from the kernel"

func (i *intel) gpuOptions() []plugin.Option {
	// With balanced, shares come from the GPUs with the most shares left.
	policies := map[string]v1alpha1.Policy{"none": v1alpha1.PolicyAligned, "balanced": v1alpha1.PolicyAligned, "packed": v1alpha1.PolicyPacked}
	policy := i.policyOption("preferredAllocationPolicy", policies, "gpu.intel.com/i915", "gpu.intel.com/xe")
	ofChart := policy
	ofChart.Name, ofChart.Field = "", "allocationPolicy"
	return []plugin.Option{
		i.sharedOption(expression.OneOf(expression.Family, []string{"intelgpu"}) + " && " + expression.OneOf(expression.Kind, []string{"gpu"})),
		{Name: "enable-monitoring", Field: "enableMonitoring", NoValue: true, Fate: plugin.FateCarried},
		{Name: "monitoring-mode", Field: "monitoringMode", Fate: plugin.FateCarried},
		{Name: "allow-ids", Field: "allowIDs", Read: func(v source.Value) { i.byID(v, "!(", ")") }},
		{Name: "deny-ids", Field: "denyIDs", Read: func(v source.Value) { i.byID(v, "", "") }},
		{Name: "bypath", Field: "bypathMode", Fate: plugin.FatePodChange, Harmless: []string{"single"}, Reason: "not carried over: containers get the links in /dev/dri/by-path that lead to their own devices"},
		{Name: "run-mode", Fate: plugin.FatePodChange, Harmless: []string{"dri"}, Reason: "GPUs under vfio are offered where an entry of resources names them"},
		{Name: "wsl", NoValue: true, Fate: plugin.FatePodChange, Harmless: []string{"false"}, Reason: "GPUs of WSL are not offered"},
		{Name: "resource-manager", Field: "resourceManager", NoValue: true, Fate: plugin.FatePodChange, Harmless: []string{"false"}, Reason: "parts of GPUs in millicores, tiles and memory are not offered; share them by replicas, or memory by units"},
		policy,
		ofChart,
		{Name: "health-management", NoValue: true, Reason: fromKernel},
		{Name: "xpumd-endpoint", Reason: fromKernel},
		{Name: "levelzero-socket", Reason: fromKernel},
		{Name: "temp-limit", Reason: fromKernel},
		{Name: "gpu-temp-limit", Reason: fromKernel},
		{Name: "memory-temp-limit", Reason: fromKernel},
	}
}

// sharedOption returns the option for the number of containers per device.
func (i *intel) sharedOption(cel string) plugin.Option {
	return plugin.Option{Name: "shared-dev-num", Field: "sharedDevNum", Read: func(v source.Value) {
		n, ok := v.AsInteger()
		switch {
		case !ok || n < 1:
			i.im.Notes.AddPodChange(v, "is not a number of containers")
		case n > 1:
			i.im.Config.AddSharing(v, cel, v1alpha1.Sharing{Replicas: n})
		}
	}}
}

// split matches the versions before 0.36. From 0.36 on, the plugin offers all GPUs to a monitor
// under one name.
var split = regexp.MustCompile(`^v?0\.([0-2]?[0-9]|3[0-5])(\.|$|-)`)

// readMonitoring reads the resource names under which monitors get all GPUs.
func (i *intel) readMonitoring() {
	enabled := i.settings.Get("enable-monitoring")
	if !enabled.IsTrue() {
		return
	}
	mode := i.settings.Get("monitoring-mode")
	names := map[string]string{"monitoring": "monitoring"}
	if mode.Text() == "split" || !mode.IsPresent() && split.MatchString(i.version) {
		names = map[string]string{"i915_monitoring": "i915-monitoring", "xe_monitoring": "xe-monitoring"}
	} else if !mode.IsPresent() && i.version == "" {
		i.im.Notes.AddRemark(enabled, "before release 0.36 of the plugin the names are gpu.intel.com/i915_monitoring and xe_monitoring; set monitoring-mode=split for these")
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		i.im.Config.AddResource(enabled, "gpu.intel.com/"+name, expression.OneOf(expression.Text("profile"), []string{names[name]}))
	}
}

// byID excludes GPUs by their PCI device IDs.
func (i *intel) byID(v source.Value, before, after string) {
	var list []string
	for _, text := range v.ListTexts() {
		for id := range strings.SplitSeq(text, ",") {
			if id = strings.TrimPrefix(strings.ToLower(strings.TrimSpace(id)), "0x"); id != "" {
				list = append(list, id)
			}
		}
	}
	if len(list) > 0 {
		i.im.Config.AddExclude(v, expression.All([]string{expression.OneOf(expression.Family, []string{"intelgpu"}), expression.OneOf(expression.Kind, []string{"gpu"}), before + expression.OneOf(expression.Text("pciDevice"), list) + after}))
	}
}

func (i *intel) qatOptions() []plugin.Option {
	return []plugin.Option{
		{Name: "dpdk-driver", Field: "dpdkDriver", Fate: plugin.FateCarried},
		{Name: "kernel-vf-drivers", Field: "kernelVfDrivers", Fate: plugin.FateCarried},
		{Name: "max-num-devices", Field: "maxNumDevices", Reason: "all virtual functions that are bound to vfio-pci are offered; leave those with their driver that the kernel is to keep"},
		// With packed, virtual functions of one device are allocated together.
		i.policyOption("preferredAllocationPolicy", map[string]v1alpha1.Policy{"balanced": v1alpha1.PolicySpread, "packed": v1alpha1.PolicyAligned},
			"qat.intel.com/generic", "qat.intel.com/cy", "qat.intel.com/dc", "qat.intel.com/sym", "qat.intel.com/asym"),
		{Name: "mode", Fate: plugin.FatePodChange, Harmless: []string{"dpdk"}, Reason: "instances of the kernel's own driver are not offered, only virtual functions"},
		{Name: "binds", Variable: "ENABLED_QAT_PF_PCIIDS", Reason: "is about making virtual functions: see chandler provision"},
	}
}

// The default drivers of virtual functions: those of the plugin, and those that the operator sets.
const (
	qatDrivers         = "4xxxvf,420xxvf"
	qatOperatorDrivers = "c6xxvf,4xxxvf"
)

// qatFunctions lists the PCI device IDs of QAT virtual functions, by architecture (the drivers below
// drivers/crypto/intel/qat in Linux 6.18).
var qatFunctions = map[string][]string{
	"dh895xcc": {"0442", "0443"}, "c4xxx": {"18a1"}, "c3xxx": {"19e3"}, "c6xx": {"37c9"}, "d15xx": {"6f55"},
	"4xxx": {"4941", "4943", "4945"}, "420xx": {"4947"}, "6xxx": {"4949"},
}

// readBinding reads the drivers of virtual functions that the plugin takes from the kernel. It
// excludes virtual functions of all other drivers.
func (i *intel) readBinding() {
	v, drivers := i.settings.Get("kernel-vf-drivers"), strings.Join(i.settings.Get("kernel-vf-drivers").ListTexts(), ",")
	which := "the virtual functions of these drivers"
	if drivers == "" {
		v, drivers = i.first, qatDrivers
		if i.object {
			drivers = qatOperatorDrivers
		}
		which = "the virtual functions of its default drivers (" + drivers + ")"
	}
	var kept, functions []string
	for driver := range strings.SplitSeq(drivers, ",") {
		name := strings.TrimSuffix(strings.TrimSpace(driver), "vf")
		if name == "" {
			continue
		}
		if name == "c62x" {
			name = "c6xx" // the name of the kernel module
		}
		kept = append(kept, name)
		functions = append(functions, qatFunctions[name]...)
		if qatFunctions[name] == nil {
			i.im.Notes.AddPodChange(v, "%s is an unknown driver of QAT virtual functions", driver)
		}
	}
	slices.Sort(kept)
	slices.Sort(functions) // the same entry, whatever the order of the drivers
	i.im.Config.AddExclude(v, expression.All([]string{expression.OneOf(expression.Family, []string{"qat"}), "!(" + expression.OneOf(expression.Text("architecture"), kept) + ")"}))
	if len(functions) == 0 {
		return
	}
	to := cmp.Or(i.settings.Get("dpdk-driver").Text(), "vfio-pci")
	i.im.Notes.AddPodChange(v, "the plugin binds %s to %s, and the agent does not: without the configuration for chandler provision below, none are offered", which, to)
	i.im.Config.AddFunction(expression.All([]string{expression.OneOf(expression.Text("pciVendor"), []string{"8086"}), expression.OneOf(expression.Text("pciDevice"), functions), expression.OneOf(expression.Text("function"), []string{"virtual"})}), to)
}

func (i *intel) sgxOptions() []plugin.Option {
	limit := func(name, at, model string) plugin.Option {
		return plugin.Option{Name: name, Field: at, Read: func(v source.Value) {
			n, ok := v.AsInteger()
			switch {
			case !ok || n < 1:
				i.im.Notes.AddPodChange(v, "is not a number of containers")
			case n != sgxDefault:
				i.im.Config.AddSharing(v, expression.All([]string{expression.OneOf(expression.Family, []string{"sgx"}), expression.OneOf(expression.Text("model"), []string{model})}), v1alpha1.Sharing{Replicas: n})
			}
		}}
	}
	return []plugin.Option{
		limit("enclave-limit", "enclaveLimit", "sgx_enclave"),
		limit("provision-limit", "provisionLimit", "sgx_provision"),
		{Name: "dcap-infra-resources", Field: "dcapInfraResources", NoValue: true, Fate: plugin.FatePodChange, Harmless: []string{"false"}, Reason: "sgx.intel.com/qe and sgx.intel.com/registration are not offered"},
		{Name: "per-core", Variable: "PODS_PER_CORE", Fate: plugin.FatePodChange, Reason: "the number of containers is not counted by cores, but is " + strconv.Itoa(sgxDefault)},
		{Name: "epc", Field: "initContainer", Reason: "sgx.intel.com/epc is a matter of Node Feature Discovery"},
	}
}

// sgxDefault is the default number of containers with an enclave.
const sgxDefault = 110

func (i *intel) fpgaOptions() []plugin.Option {
	return []plugin.Option{{Name: "mode", Field: "mode", Read: func(v source.Value) {
		switch v.Text() {
		case "af":
		case "region", "regiondevel":
			i.im.Notes.AddPodChange(v, "a container is not programmed by FPGA_AFU_… variables, but by a claim's acceleratorFunction; for pods that request a region, copy this entry for each interface ID, in place of the zeros: resources: [%s]", i.regionEntries(v))
		default:
			i.im.Notes.AddPodChange(v, "is an unknown mode")
		}
	}}}
}

// regionEntries returns the entries of resources for a region, in YAML, one for each term of the
// plugin's nodes.
func (i *intel) regionEntries(from source.Value) string {
	var entries []string
	for _, nodes := range i.im.Config.NodesOf(from) {
		entry := fmt.Sprintf("{name: fpga.intel.com/region-%s, cel: '%s'", noInterface, expression.All([]string{expression.OneOf(expression.Family, []string{"fpga-intel"}), expression.OneOf(expression.Text("profile"), []string{noInterface})}))
		if text, err := json.Marshal(nodes); nodes != nil && err == nil {
			entry += ", nodes: " + string(text)
		}
		entries = append(entries, entry+"}")
	}
	return strings.Join(entries, ", ")
}

// noInterface stands for the interface ID of an FPGA region, which is known only on the node.
const noInterface = "00000000000000000000000000000000"

// interfaceID matches an FPGA interface ID.
var interfaceID = regexp.MustCompile(`^[0-9a-f]{32}$`)

// readMapping reads an object that translates a resource name of pods.
func (i *intel) readMapping(v source.Value) {
	id := strings.ToLower(v.At("spec", "interfaceId").Text())
	kind := v.At("kind").Text()
	if kind == "FpgaRegion" || v.At("spec", "mode").Text() == "region" {
		if !interfaceID.MatchString(id) {
			i.im.Notes.AddPodChange(v.At("spec", "interfaceId").OrPlaceOf(v), "is not an ID of 32 hexadecimal digits")
			return
		}
		i.im.Config.AddResource(v.At("spec"), "fpga.intel.com/region-"+id, expression.All([]string{expression.OneOf(expression.Family, []string{"fpga-intel"}), expression.OneOf(expression.Text("profile"), []string{id})}))
		i.im.Notes.AddPodChange(v.At("metadata", "name"), "a container is not programmed by FPGA_AFU_… variables, but by a claim's acceleratorFunction; the admission webhook goes on translating the name")
		return
	}
	i.im.Notes.AddRemark(v.At("metadata", "name"), "the admission webhook goes on translating the name; keep it")
}

func (i *intel) dsaOptions() []plugin.Option {
	return []plugin.Option{
		i.sharedQueues("dsa"),
		{Name: "driver", Field: "driver", Harmless: []string{"idxd", "vfio-pci"}, Reason: "is an unknown driver"},
		{Name: "dsa-driver", Variable: "DSA_DRIVER", Reason: "is about binding functions: see chandler provision"},
	}
}

func (i *intel) iaaOptions() []plugin.Option { return []plugin.Option{i.sharedQueues("iaa")} }

// sharedQueues returns the option for the number of containers per shared work queue.
func (i *intel) sharedQueues(architecture string) plugin.Option {
	return i.sharedOption(expression.All([]string{expression.OneOf(expression.Family, []string{"idxd"}), expression.OneOf(expression.Text("architecture"), []string{architecture}), expression.OneOf(expression.Text("profile"), []string{"user-shared"})}))
}

func (i *intel) npuOptions() []plugin.Option {
	return []plugin.Option{i.sharedOption(expression.All([]string{expression.OneOf(expression.Family, []string{"npu"}), expression.OneOf(expression.Text("vendor"), []string{"intel"})}))}
}

func (i *intel) vpuOptions() []plugin.Option {
	return []plugin.Option{
		{Name: "mode", Read: func(v source.Value) { i.im.Config.SetRoot(v, "vpu", "/var/tmp") }},
		{Name: "shared-dev-num", Fate: plugin.FatePodChange, Harmless: []string{"1"}, Reason: "not carried over: each processor is for one container"},
	}
}
