package importer

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	"chandler.dev/api/v1alpha1"
)

// intel reads configurations of one of the Intel device plugins: flags, the operator's object, and
// values of the charts (cmd/*_plugin and pkg/apis/deviceplugin/v1 in
// intel/intel-device-plugins-for-kubernetes v0.36, and intel/helm-charts).
type intel struct {
	im       *importer
	settings *settings
	plugin   *intelPlugin
	version  string // of the image, "" if unknown
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
		{short: "gpu", title: "GPU", families: []string{"intelgpu"}, own: []string{"enableMonitoring", "resourceManager", "bypathMode", "allowIDs", "denyIDs"}, options: (*intel).gpu, finish: (*intel).monitoring},
		{short: "qat", title: "QAT", families: []string{"qat"}, own: []string{"dpdkDriver", "kernelVfDrivers", "maxNumDevices"}, options: (*intel).qat},
		{short: "sgx", title: "SGX", families: []string{"sgx"}, own: []string{"enclaveLimit", "provisionLimit", "dcapInfraResources"}, options: (*intel).sgx},
		{short: "fpga", title: "FPGA", families: []string{"fpga-intel"}, options: (*intel).fpga},
		{short: "dsa", title: "DSA", families: []string{"idxd"}, options: (*intel).dsa},
		{short: "iaa", title: "IAA", families: []string{"idxd"}, options: (*intel).iaa},
		{short: "npu", title: "NPU", families: []string{"npu"}, options: (*intel).npu},
		{short: "dlb", title: "DLB", families: []string{"dlb"}, options: (*intel).common},
		{short: "vpu", title: "VPU", families: []string{"vpu"}, options: (*intel).vpu},
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
		i.settings = newSettings(im, append(plugin.options(i), i.deployment()...))
		formats = append(formats, &format{
			name:      "Intel's " + plugin.title + " device plugin",
			group:     "Intel's device plugins for " + titles(),
			forms:     "flags, DaemonSet, object of the operator, Helm values",
			families:  plugin.families,
			is:        func(v value) bool { return i.isObject(v) || i.isValues(v) || i.isMapping(v) },
			read:      i.read,
			runs:      i.runs,
			container: i.container,
			finish:    i.finish,
		})
	}
	return formats
}

func (i *intel) isObject(v value) bool {
	return strings.EqualFold(v.at("kind").text(), i.plugin.short+"DevicePlugin") && strings.HasPrefix(v.at("apiVersion").text(), "deviceplugin.intel.com/")
}

// isMapping recognises the objects with which an admission webhook translates FPGA names.
func (i *intel) isMapping(v value) bool {
	return i.plugin.short == "fpga" && strings.HasPrefix(v.at("apiVersion").text(), "fpga.intel.com/")
}

// isValues recognises the values of the plugin's chart, by the plugin's own fields or by its name.
func (i *intel) isValues(v value) bool {
	if v.hasAny("apiVersion", "kind", argsField, "command") { // a container has these fields
		return false
	}
	if v.hasAny(i.plugin.own...) {
		return true
	}
	named := strings.Contains(i.im.chart, "device-plugins-"+i.plugin.short)
	for _, name := range []string{v.at("name").text(), v.at("image").text(), v.at("image", "repository").text()} {
		named = named || strings.HasPrefix(name, i.plugin.short+"deviceplugin") || strings.Contains(name, "intel-"+i.plugin.short+"-plugin")
	}
	return named && (v.hasAny("sharedDevNum", "mode", "logLevel", "nodeFeatureRule", "driver") || i.im.chart != "") ||
		i.plugin.short == "gpu" && v.has("sharedDevNum") && !v.has("name")
}

func (i *intel) read(v value) {
	switch {
	case i.isMapping(v):
		i.mapping(v)
	case i.isObject(v):
		i.version = imageVersion(v.at("spec", "image").text())
		i.settings.file(v.at("spec"), inOwn, i.im.unknown)
	default:
		i.version = v.at("image", "tag").text()
		var rest []value
		i.settings.file(v, func(o *option) string { return o.at }, func(field value) { rest = append(rest, field) })
		i.im.others(v, rest)
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

func (i *intel) runs(c container) bool {
	short := i.plugin.short
	if c.names("intel-"+short+"-plugin", short+"_plugin", "intel-"+short+"-device-plugin", "intel-"+short+"-initcontainer", "intel-"+short+"-kernel-plugin") || short != "gpu" && c.names(short+"_device_plugin") {
		return true
	}
	if c.image == "" && short == "qat" && len(c.args) == 0 && (c.env["KERNEL_VF_DRIVERS"].there() || c.env["DPDK_DRIVER"].there()) {
		return true // the ConfigMap of the plugin's first releases
	}
	if c.names("intel-idxd-config-initcontainer") {
		return short == strings.ToLower(c.env["DEVICE_TYPE"].text()) || short == "dsa" && c.env["DEVICE_TYPE"].text() == ""
	}
	if c.image != "" || c.at("name").there() {
		return false
	}
	return c.hasFlag(flagsOf[short]...) || short == "gpu" && c.hasFlag("shared-dev-num") || short == "fpga" && i.fpgaMode(c)
}

// fpgaMode reports whether arguments set a mode of the FPGA plugin.
func (i *intel) fpgaMode(c container) bool {
	return slices.ContainsFunc(c.args, func(arg value) bool {
		_, mode, _ := strings.Cut(arg.text(), "mode=")
		return mode == "af" || mode == "region" || mode == "regiondevel"
	})
}

func (i *intel) container(c container) {
	if c.names("initcontainer", "-init") {
		i.im.say(c.at("name"), "prepares devices before the plugin starts; see chandler provision, or keep it")
		return
	}
	if version := imageVersion(c.image); version != "" {
		i.version = version
	}
	i.settings.flags(c)
}

func (i *intel) finish() {
	i.settings.finish()
	if i.plugin.finish != nil {
		i.plugin.finish(i)
	}
}

// deployment returns the fields of the operator's objects and of charts that configure the
// deployment of the plugin.
func (i *intel) deployment() []option {
	return []option{
		{at: "image", fate: carried},
		{at: "initImage", why: "prepares devices before the plugin starts; see chandler provision, or keep it"},
		{at: "provisioningConfig", why: "prepares devices before the plugin starts; see chandler provision, or keep it"},
		{at: "nodeSelector", fate: carried},
		{at: "tolerations", fate: carried},
		{at: "logLevel", fate: carried},
		{name: "prefix", why: "is for trees that are no host's; the agent has --host-root"},
		{name: "kubeconfig", why: "the agent has flags of its own"},
		{name: "master", why: "the agent has flags of its own"},
		{name: "verbosity", why: "the agent has flags for its log"},
		{name: "node-name", why: "the agent has flags of its own"},
	}
}

func (i *intel) common() []option { return nil }

// policy returns the option that selects among several free devices. known maps the values of the
// option; names are the resources that get the policy.
func (i *intel) policy(at string, known map[string]v1alpha1.Policy, names ...string) option {
	return option{name: "allocation-policy", at: at, do: func(v value) {
		policy, ok := known[v.text()]
		switch {
		case !ok && v.text() != "":
			i.im.lost(v, "is no policy that is known here")
		case policy != v1alpha1.PolicyAligned && policy != "":
			i.im.policy(v, policy, names...)
		}
	}}
}

const fromKernel = "health is what the kernel tells"

func (i *intel) gpu() []option {
	// With balanced, shares come from the GPUs with the most shares left.
	policies := map[string]v1alpha1.Policy{"none": v1alpha1.PolicyAligned, "balanced": v1alpha1.PolicyAligned, "packed": v1alpha1.PolicyPacked}
	policy := i.policy("preferredAllocationPolicy", policies, "gpu.intel.com/i915", "gpu.intel.com/xe")
	ofChart := policy
	ofChart.name, ofChart.at = "", "allocationPolicy"
	return []option{
		i.shared(oneOf(familyAttribute, []string{"intelgpu"}) + " && " + oneOf(kindAttribute, []string{"gpu"})),
		{name: "enable-monitoring", at: "enableMonitoring", alone: true, fate: carried},
		{name: "monitoring-mode", at: "monitoringMode", fate: carried},
		{name: "allow-ids", at: "allowIDs", do: func(v value) { i.byID(v, "!(", ")") }},
		{name: "deny-ids", at: "denyIDs", do: func(v value) { i.byID(v, "", "") }},
		{name: "bypath", at: "bypathMode", fate: lost, fine: []string{"single"}, why: "not carried over: containers get the links in /dev/dri/by-path that lead to their own devices"},
		{name: "run-mode", fate: lost, fine: []string{"dri"}, why: "GPUs under vfio are offered where an entry of resources names them"},
		{name: "wsl", alone: true, fate: lost, fine: []string{"false"}, why: "GPUs of WSL are not offered"},
		{name: "resource-manager", at: "resourceManager", alone: true, fate: lost, fine: []string{"false"}, why: "parts of GPUs in millicores, tiles and memory are not offered; share them by replicas, or memory by units"},
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

// shared returns the option for the number of containers per device.
func (i *intel) shared(cel string) option {
	return option{name: "shared-dev-num", at: "sharedDevNum", do: func(v value) {
		n, ok := v.number()
		switch {
		case !ok || n < 1:
			i.im.lost(v, "is no number of containers")
		case n > 1:
			i.im.share(v, cel, v1alpha1.Sharing{Replicas: n})
		}
	}}
}

// split matches the versions before 0.36. From 0.36 on, the plugin offers all GPUs to a monitor
// under one name.
var split = regexp.MustCompile(`^v?0\.([0-2]?[0-9]|3[0-5])(\.|$|-)`)

// monitoring reads the resource names under which monitors get all GPUs.
func (i *intel) monitoring() {
	enabled := i.settings.get("enable-monitoring")
	if !enabled.is() {
		return
	}
	mode := i.settings.get("monitoring-mode")
	names := map[string]string{"monitoring": "monitoring"}
	if mode.text() == "split" || !mode.there() && split.MatchString(i.version) {
		names = map[string]string{"i915_monitoring": "i915-monitoring", "xe_monitoring": "xe-monitoring"}
	} else if !mode.there() && i.version == "" {
		i.im.say(enabled, "before release 0.36 of the plugin the names are gpu.intel.com/i915_monitoring and xe_monitoring; set monitoring-mode=split for these")
	}
	for _, name := range sorted(names) {
		i.im.resource(enabled, "gpu.intel.com/"+name, oneOf(text("profile"), []string{names[name]}))
	}
}

// byID excludes GPUs by their PCI device IDs.
func (i *intel) byID(v value, before, after string) {
	var list []string
	for _, text := range v.texts() {
		for id := range strings.SplitSeq(text, ",") {
			if id = strings.TrimPrefix(strings.ToLower(strings.TrimSpace(id)), "0x"); id != "" {
				list = append(list, id)
			}
		}
	}
	if len(list) > 0 {
		i.im.exclude(v, all([]string{oneOf(familyAttribute, []string{"intelgpu"}), oneOf(kindAttribute, []string{"gpu"}), before + oneOf(text("pciDevice"), list) + after}))
	}
}

func (i *intel) qat() []option {
	return []option{
		{name: "dpdk-driver", at: "dpdkDriver", fine: []string{"vfio-pci"}, why: "virtual functions are offered under igb_uio as well as under vfio-pci"},
		{name: "kernel-vf-drivers", at: "kernelVfDrivers", do: i.architectures},
		{name: "max-num-devices", at: "maxNumDevices", why: "all virtual functions that are bound to vfio-pci are offered; leave those with their driver that the kernel is to keep"},
		// With packed, virtual functions of one device are allocated together.
		i.policy("preferredAllocationPolicy", map[string]v1alpha1.Policy{"balanced": v1alpha1.PolicySpread, "packed": v1alpha1.PolicyAligned},
			"qat.intel.com/generic", "qat.intel.com/cy", "qat.intel.com/dc", "qat.intel.com/sym", "qat.intel.com/asym"),
		{name: "mode", fate: lost, fine: []string{"dpdk"}, why: "instances of the kernel's own driver are not offered, only virtual functions"},
		{name: "binds", env: "ENABLED_QAT_PF_PCIIDS", why: "is about making virtual functions: see chandler provision"},
	}
}

// architectures excludes virtual functions whose driver is not in the plugin's list.
func (i *intel) architectures(v value) {
	var kept []string
	for _, text := range v.texts() {
		for driver := range strings.SplitSeq(text, ",") {
			if name := strings.TrimSuffix(strings.TrimSpace(driver), "vf"); name != "" {
				if name == "c62x" {
					name = "c6xx" // the name of the kernel module
				}
				kept = append(kept, name)
			}
		}
	}
	if len(kept) == 0 {
		return
	}
	i.im.exclude(v, all([]string{oneOf(familyAttribute, []string{"qat"}), "!(" + oneOf(text("architecture"), kept) + ")"}))
	i.im.say(v, "the plugin binds virtual functions to vfio-pci by itself; here chandler provision does")
}

func (i *intel) sgx() []option {
	limit := func(name, at, model string) option {
		return option{name: name, at: at, do: func(v value) {
			n, ok := v.number()
			switch {
			case !ok || n < 1:
				i.im.lost(v, "is no number of containers")
			case n != sgxDefault:
				i.im.share(v, all([]string{oneOf(familyAttribute, []string{"sgx"}), oneOf(text("model"), []string{model})}), v1alpha1.Sharing{Replicas: n})
			}
		}}
	}
	return []option{
		limit("enclave-limit", "enclaveLimit", "sgx_enclave"),
		limit("provision-limit", "provisionLimit", "sgx_provision"),
		{name: "dcap-infra-resources", at: "dcapInfraResources", alone: true, fate: lost, fine: []string{"false"}, why: "sgx.intel.com/qe and sgx.intel.com/registration are not offered"},
		{name: "per-core", env: "PODS_PER_CORE", fate: lost, why: "the number of containers is not counted by cores, but is " + strconv.Itoa(sgxDefault)},
		{name: "epc", at: "initContainer", why: "sgx.intel.com/epc is a matter of Node Feature Discovery"},
	}
}

// sgxDefault is the default number of containers with an enclave.
const sgxDefault = 110

func (i *intel) fpga() []option {
	return []option{{name: "mode", at: "mode", do: func(v value) {
		switch v.text() {
		case "af":
		case "region", "regiondevel":
			i.im.lost(v, "a container is not programmed by FPGA_AFU_… variables, but by a claim's acceleratorFunction; fpga.intel.com/region-… is offered where an entry of resources names it")
		default:
			i.im.lost(v, "is no mode that is known here")
		}
	}}}
}

// interfaceID matches an FPGA interface ID.
var interfaceID = regexp.MustCompile(`^[0-9a-f]{32}$`)

// mapping reads an object that translates a resource name of pods.
func (i *intel) mapping(v value) {
	id := strings.ToLower(v.at("spec", "interfaceId").text())
	kind := v.at("kind").text()
	if kind == "FpgaRegion" || v.at("spec", "mode").text() == "region" {
		if !interfaceID.MatchString(id) {
			i.im.lost(cmpValue(v.at("spec", "interfaceId"), v), "is no ID of 32 digits")
			return
		}
		i.im.resource(v.at("spec"), "fpga.intel.com/region-"+id, all([]string{oneOf(familyAttribute, []string{"fpga-intel"}), oneOf(text("profile"), []string{id})}))
		i.im.lost(v.at("metadata", "name"), "a container is not programmed by FPGA_AFU_… variables, but by a claim's acceleratorFunction; the admission webhook goes on translating the name")
		return
	}
	i.im.say(v.at("metadata", "name"), "the admission webhook goes on translating the name; keep it")
}

func (i *intel) dsa() []option {
	return []option{
		i.sharedQueues("dsa"),
		{name: "driver", at: "driver", fine: []string{"idxd", "vfio-pci"}, why: "is no driver that is known here"},
		{name: "dsa-driver", env: "DSA_DRIVER", why: "is about binding functions: see chandler provision"},
	}
}

func (i *intel) iaa() []option { return []option{i.sharedQueues("iaa")} }

// sharedQueues returns the option for the number of containers per shared work queue.
func (i *intel) sharedQueues(architecture string) option {
	return i.shared(all([]string{oneOf(familyAttribute, []string{"idxd"}), oneOf(text("architecture"), []string{architecture}), oneOf(text("profile"), []string{"user-shared"})}))
}

func (i *intel) npu() []option {
	return []option{i.shared(all([]string{oneOf(familyAttribute, []string{"npu"}), oneOf(text("vendor"), []string{"intel"})}))}
}

func (i *intel) vpu() []option {
	return []option{
		{name: "mode", do: func(v value) { i.im.root(v, "vpu", "/var/tmp") }},
		{name: "shared-dev-num", fate: lost, fine: []string{"1"}, why: "not carried over: each processor is for one container"},
	}
}
