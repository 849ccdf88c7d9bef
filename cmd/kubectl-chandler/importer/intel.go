package importer

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
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// intel reads configurations of one of the Intel device plugins: flags, the operator's object, and
// values of the charts (cmd/*_plugin and pkg/apis/deviceplugin/v1 in
// intel/intel-device-plugins-for-kubernetes v0.36, and intel/helm-charts).
type intel struct {
	im       *importer
	settings *settings
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
	options  func(*intel) []option
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
	for _, plugin := range intelPlugins() {
		titles = append(titles, plugin.title)
	}
	return strings.Join(titles, ", ")
}

func newIntel(im *importer) []*format {
	var formats []*format
	for _, plugin := range intelPlugins() {
		i := &intel{im: im, plugin: plugin}
		i.settings = newSettings(im, append(plugin.options(i), i.deploymentOptions()...))
		formats = append(formats, &format{
			name:      "Intel's " + plugin.title + " device plugin",
			group:     "Intel's device plugins for " + titles(),
			forms:     "flags, DaemonSet, object of the operator, Helm values",
			families:  plugin.families,
			is:        func(v source.Value) bool { return i.isObject(v) || i.isValues(v) || i.isMapping(v) },
			read:      i.read,
			runs:      i.runsPlugin,
			container: i.readContainer,
			finish:    i.finishSettings,
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
	named := strings.Contains(i.im.chart, "device-plugins-"+i.plugin.short)
	for _, name := range []string{v.At("name").Text(), v.At("image").Text(), v.At("image", "repository").Text()} {
		named = named || strings.HasPrefix(name, i.plugin.short+"deviceplugin") || strings.Contains(name, "intel-"+i.plugin.short+"-plugin")
	}
	return named && (v.HasAny("sharedDevNum", "mode", "logLevel", "nodeFeatureRule", "driver") || i.im.chart != "") ||
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
		i.version = imageVersion(v.At("spec", "image").Text())
		i.settings.file(v.At("spec"), inOwn, i.im.noteUnknown)
	default:
		i.version = v.At("image", "tag").Text()
		var rest []source.Value
		i.settings.file(v, func(o *option) string { return o.at }, func(field source.Value) { rest = append(rest, field) })
		i.im.noteOthers(v, rest)
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

func (i *intel) runsPlugin(c container) bool {
	short := i.plugin.short
	if short == "fpga" && c.names("xilinx") {
		return false // xilinxatg/xilinx_k8s_fpga_plugin
	}
	if c.names("intel-"+short+"-plugin", short+"_plugin", "intel-"+short+"-device-plugin", "intel-"+short+"-initcontainer", "intel-"+short+"-kernel-plugin") || short != "gpu" && c.names(short+"_device_plugin") {
		return true
	}
	if c.image == "" && short == "qat" && len(c.args) == 0 && (c.env["KERNEL_VF_DRIVERS"].IsPresent() || c.env["DPDK_DRIVER"].IsPresent()) {
		return true // the ConfigMap of the plugin's first releases
	}
	if c.names("intel-idxd-config-initcontainer") {
		return short == strings.ToLower(c.env["DEVICE_TYPE"].Text()) || short == "dsa" && c.env["DEVICE_TYPE"].Text() == ""
	}
	if c.image != "" || c.At("name").IsPresent() {
		return false
	}
	return c.hasFlag(flagsOf[short]...) || short == "gpu" && c.hasFlag("shared-dev-num") || short == "fpga" && i.fpgaMode(c)
}

// fpgaMode reports whether arguments set a mode of the FPGA plugin.
func (i *intel) fpgaMode(c container) bool {
	return slices.ContainsFunc(c.args, func(arg source.Value) bool {
		_, mode, _ := strings.Cut(arg.Text(), "mode=")
		return mode == "af" || mode == "region" || mode == "regiondevel"
	})
}

func (i *intel) readContainer(c container) {
	if c.names("initcontainer", "-init") {
		i.im.noteRemark(c.At("name"), "prepares devices before the plugin starts; see chandler provision, or keep it")
		return
	}
	i.rememberFirst(c.Value, false)
	if version := imageVersion(c.image); version != "" {
		i.version = version
	}
	i.settings.flags(c)
}

func (i *intel) finishSettings() {
	i.settings.finishOptions()
	if i.plugin.finish != nil {
		i.plugin.finish(i)
	}
}

// deploymentOptions returns the fields of the operator's objects and of charts that configure the
// deployment of the plugin.
func (i *intel) deploymentOptions() []option {
	return []option{
		{at: "image", fate: fateCarried},
		{at: "initImage", why: "prepares devices before the plugin starts; see chandler provision, or keep it"},
		{at: "provisioningConfig", why: "prepares devices before the plugin starts; see chandler provision, or keep it"},
		{at: "nodeSelector", fate: fateCarried},
		{at: "tolerations", fate: fateCarried},
		{at: "logLevel", fate: fateCarried},
		{name: "prefix", why: "is for trees that are no host's; the agent has --host-root"},
		{name: "kubeconfig", why: "the agent has flags of its own"},
		{name: "master", why: "the agent has flags of its own"},
		{name: "verbosity", why: "the agent has flags for its log"},
		{name: "node-name", why: "the agent has flags of its own"},
	}
}

func (i *intel) common() []option { return nil }

// policyOption returns the option that selects among several free devices. known maps the values of
// the option; names are the resources that get the policy.
func (i *intel) policyOption(at string, known map[string]v1alpha1.Policy, names ...string) option {
	return option{name: "allocation-policy", at: at, do: func(v source.Value) {
		policy, ok := known[v.Text()]
		switch {
		case !ok && v.Text() != "":
			i.im.notePodChange(v, "is an unknown policy")
		case policy != v1alpha1.PolicyAligned && policy != "":
			i.im.setPolicy(v, policy, names...)
		}
	}}
}

const fromKernel = "the agent reads the health of GPUs from the kernel"

func (i *intel) gpuOptions() []option {
	// With balanced, shares come from the GPUs with the most shares left.
	policies := map[string]v1alpha1.Policy{"none": v1alpha1.PolicyAligned, "balanced": v1alpha1.PolicyAligned, "packed": v1alpha1.PolicyPacked}
	policy := i.policyOption("preferredAllocationPolicy", policies, "gpu.intel.com/i915", "gpu.intel.com/xe")
	ofChart := policy
	ofChart.name, ofChart.at = "", "allocationPolicy"
	return []option{
		i.sharedOption(oneOf(familyAttribute, []string{"intelgpu"}) + " && " + oneOf(kindAttribute, []string{"gpu"})),
		{name: "enable-monitoring", at: "enableMonitoring", alone: true, fate: fateCarried},
		{name: "monitoring-mode", at: "monitoringMode", fate: fateCarried},
		{name: "allow-ids", at: "allowIDs", do: func(v source.Value) { i.byID(v, "!(", ")") }},
		{name: "deny-ids", at: "denyIDs", do: func(v source.Value) { i.byID(v, "", "") }},
		{name: "bypath", at: "bypathMode", fate: fatePodChange, fine: []string{"single"}, why: "not carried over: containers get the links in /dev/dri/by-path that lead to their own devices"},
		{name: "run-mode", fate: fatePodChange, fine: []string{"dri"}, why: "GPUs under vfio are offered where an entry of resources names them"},
		{name: "wsl", alone: true, fate: fatePodChange, fine: []string{"false"}, why: "GPUs of WSL are not offered"},
		{name: "resource-manager", at: "resourceManager", alone: true, fate: fatePodChange, fine: []string{"false"}, why: "parts of GPUs in millicores, tiles and memory are not offered; share them by replicas, or memory by units"},
		policy,
		ofChart,
		{name: "health-management", alone: true, why: fromKernel},
		{name: "xpumd-endpoint", why: fromKernel},
		{name: "levelzero-socket", why: fromKernel},
		{name: "temp-limit", why: fromKernel},
		{name: "gpu-temp-limit", why: fromKernel},
		{name: "memory-temp-limit", why: fromKernel},
	}
}

// sharedOption returns the option for the number of containers per device.
func (i *intel) sharedOption(cel string) option {
	return option{name: "shared-dev-num", at: "sharedDevNum", do: func(v source.Value) {
		n, ok := v.AsInteger()
		switch {
		case !ok || n < 1:
			i.im.notePodChange(v, "is not a number of containers")
		case n > 1:
			i.im.addSharing(v, cel, v1alpha1.Sharing{Replicas: n})
		}
	}}
}

// split matches the versions before 0.36. From 0.36 on, the plugin offers all GPUs to a monitor
// under one name.
var split = regexp.MustCompile(`^v?0\.([0-2]?[0-9]|3[0-5])(\.|$|-)`)

// readMonitoring reads the resource names under which monitors get all GPUs.
func (i *intel) readMonitoring() {
	enabled := i.settings.get("enable-monitoring")
	if !enabled.IsTrue() {
		return
	}
	mode := i.settings.get("monitoring-mode")
	names := map[string]string{"monitoring": "monitoring"}
	if mode.Text() == "split" || !mode.IsPresent() && split.MatchString(i.version) {
		names = map[string]string{"i915_monitoring": "i915-monitoring", "xe_monitoring": "xe-monitoring"}
	} else if !mode.IsPresent() && i.version == "" {
		i.im.noteRemark(enabled, "before release 0.36 of the plugin the names are gpu.intel.com/i915_monitoring and xe_monitoring; set monitoring-mode=split for these")
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		i.im.addResource(enabled, "gpu.intel.com/"+name, oneOf(text("profile"), []string{names[name]}))
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
		i.im.addExclude(v, all([]string{oneOf(familyAttribute, []string{"intelgpu"}), oneOf(kindAttribute, []string{"gpu"}), before + oneOf(text("pciDevice"), list) + after}))
	}
}

func (i *intel) qatOptions() []option {
	return []option{
		{name: "dpdk-driver", at: "dpdkDriver", fate: fateCarried},
		{name: "kernel-vf-drivers", at: "kernelVfDrivers", fate: fateCarried},
		{name: "max-num-devices", at: "maxNumDevices", why: "all virtual functions that are bound to vfio-pci are offered; leave those with their driver that the kernel is to keep"},
		// With packed, virtual functions of one device are allocated together.
		i.policyOption("preferredAllocationPolicy", map[string]v1alpha1.Policy{"balanced": v1alpha1.PolicySpread, "packed": v1alpha1.PolicyAligned},
			"qat.intel.com/generic", "qat.intel.com/cy", "qat.intel.com/dc", "qat.intel.com/sym", "qat.intel.com/asym"),
		{name: "mode", fate: fatePodChange, fine: []string{"dpdk"}, why: "instances of the kernel's own driver are not offered, only virtual functions"},
		{name: "binds", env: "ENABLED_QAT_PF_PCIIDS", why: "is about making virtual functions: see chandler provision"},
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
	v, drivers := i.settings.get("kernel-vf-drivers"), strings.Join(i.settings.get("kernel-vf-drivers").ListTexts(), ",")
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
			i.im.notePodChange(v, "%s is an unknown driver of QAT virtual functions", driver)
		}
	}
	slices.Sort(kept)
	slices.Sort(functions) // the same entry, whatever the order of the drivers
	i.im.addExclude(v, all([]string{oneOf(familyAttribute, []string{"qat"}), "!(" + oneOf(text("architecture"), kept) + ")"}))
	if len(functions) == 0 {
		return
	}
	to := cmp.Or(i.settings.get("dpdk-driver").Text(), "vfio-pci")
	i.im.notePodChange(v, "the plugin binds %s to %s, and the agent does not: without the configuration for chandler provision below, none are offered", which, to)
	i.im.addFunction(all([]string{oneOf(text("pciVendor"), []string{"8086"}), oneOf(text("pciDevice"), functions), oneOf(text("function"), []string{"virtual"})}), to)
}

func (i *intel) sgxOptions() []option {
	limit := func(name, at, model string) option {
		return option{name: name, at: at, do: func(v source.Value) {
			n, ok := v.AsInteger()
			switch {
			case !ok || n < 1:
				i.im.notePodChange(v, "is not a number of containers")
			case n != sgxDefault:
				i.im.addSharing(v, all([]string{oneOf(familyAttribute, []string{"sgx"}), oneOf(text("model"), []string{model})}), v1alpha1.Sharing{Replicas: n})
			}
		}}
	}
	return []option{
		limit("enclave-limit", "enclaveLimit", "sgx_enclave"),
		limit("provision-limit", "provisionLimit", "sgx_provision"),
		{name: "dcap-infra-resources", at: "dcapInfraResources", alone: true, fate: fatePodChange, fine: []string{"false"}, why: "sgx.intel.com/qe and sgx.intel.com/registration are not offered"},
		{name: "per-core", env: "PODS_PER_CORE", fate: fatePodChange, why: "the number of containers is not counted by cores, but is " + strconv.Itoa(sgxDefault)},
		{name: "epc", at: "initContainer", why: "sgx.intel.com/epc is a matter of Node Feature Discovery"},
	}
}

// sgxDefault is the default number of containers with an enclave.
const sgxDefault = 110

func (i *intel) fpgaOptions() []option {
	return []option{{name: "mode", at: "mode", do: func(v source.Value) {
		switch v.Text() {
		case "af":
		case "region", "regiondevel":
			i.im.notePodChange(v, "a container is not programmed by FPGA_AFU_… variables, but by a claim's acceleratorFunction; for pods that request a region, copy this entry for each interface ID, in place of the zeros: resources: [%s]", i.regionEntries(v))
		default:
			i.im.notePodChange(v, "is an unknown mode")
		}
	}}}
}

// regionEntries returns the entries of resources for a region, in YAML, one for each term of the
// plugin's nodes.
func (i *intel) regionEntries(from source.Value) string {
	var entries []string
	for _, nodes := range i.im.nodesOf(from) {
		entry := fmt.Sprintf("{name: fpga.intel.com/region-%s, cel: '%s'", noInterface, all([]string{oneOf(familyAttribute, []string{"fpga-intel"}), oneOf(text("profile"), []string{noInterface})}))
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
			i.im.notePodChange(v.At("spec", "interfaceId").OrPlaceOf(v), "is not an ID of 32 hexadecimal digits")
			return
		}
		i.im.addResource(v.At("spec"), "fpga.intel.com/region-"+id, all([]string{oneOf(familyAttribute, []string{"fpga-intel"}), oneOf(text("profile"), []string{id})}))
		i.im.notePodChange(v.At("metadata", "name"), "a container is not programmed by FPGA_AFU_… variables, but by a claim's acceleratorFunction; the admission webhook goes on translating the name")
		return
	}
	i.im.noteRemark(v.At("metadata", "name"), "the admission webhook goes on translating the name; keep it")
}

func (i *intel) dsaOptions() []option {
	return []option{
		i.sharedQueues("dsa"),
		{name: "driver", at: "driver", fine: []string{"idxd", "vfio-pci"}, why: "is an unknown driver"},
		{name: "dsa-driver", env: "DSA_DRIVER", why: "is about binding functions: see chandler provision"},
	}
}

func (i *intel) iaaOptions() []option { return []option{i.sharedQueues("iaa")} }

// sharedQueues returns the option for the number of containers per shared work queue.
func (i *intel) sharedQueues(architecture string) option {
	return i.sharedOption(all([]string{oneOf(familyAttribute, []string{"idxd"}), oneOf(text("architecture"), []string{architecture}), oneOf(text("profile"), []string{"user-shared"})}))
}

func (i *intel) npuOptions() []option {
	return []option{i.sharedOption(all([]string{oneOf(familyAttribute, []string{"npu"}), oneOf(text("vendor"), []string{"intel"})}))}
}

func (i *intel) vpuOptions() []option {
	return []option{
		{name: "mode", do: func(v source.Value) { i.im.setRoot(v, "vpu", "/var/tmp") }},
		{name: "shared-dev-num", fate: fatePodChange, fine: []string{"1"}, why: "not carried over: each processor is for one container"},
	}
}
