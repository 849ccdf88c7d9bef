// Package vendors reads the configurations of the device plugins of AMD, Intel and Xilinx, and of the plugins
// in a table, which need no or few entries.
package vendors

import (
	"regexp"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// A vendorPlugin is a device plugin whose devices Chandler offers without configuration, or with the
// entries of the table.
type vendorPlugin struct {
	name     string
	families []string // the Chandler families that offer the same devices
	runs     []string // names of the plugin's image, command or container
	offers   string   // the resource names that need no entry, or ""
	options  func(*plugin.Import) []plugin.Option

	entries []vendorEntry
	remark  string // a note that pods get something else, or ""
}

// A vendorEntry is an entry of resources for devices that Chandler offers only if an entry names
// them.
type vendorEntry struct{ resource, cel string }

var vendorPlugins = []vendorPlugin{
	{
		name: "AWS's Neuron device plugin", families: []string{"neuron"}, offers: "aws.amazon.com/neuron",
		runs:    []string{"neuron-device-plugin", "k8s-neuron-device-plugin"},
		entries: []vendorEntry{{"aws.amazon.com/neuroncore", expression.All([]string{expression.OneOf(expression.Family, []string{"neuron"}), expression.OneOf(expression.Text("function"), []string{"partition"})})}},
	},
	{
		name: "Habana's device plugin", families: []string{"gaudi"}, offers: "habana.ai/gaudi and habana.ai/goya",
		runs: []string{"habanalabs-device-plugin", "habanalabs-k8s-device-plugin", "docker-k8s-device-plugin", "habanalabs-gaudi"},
		options: func(*plugin.Import) []plugin.Option {
			return []plugin.Option{{Name: "dev_type", Reason: "the agent finds the model of each card"}}
		},
	},
	{
		name: "Solarflare's sfc-dev-plugin", families: []string{"solarflare"},
		runs:    []string{"sfc-dev-plugin", "sfc-device-plugin"},
		entries: []vendorEntry{{"solarflare/smartNIC", onloadInterfaces}},
	},
	{
		name: "Solarflare's sfc-k8s-device-plugin", families: []string{"solarflare"},
		runs:    []string{"sfc-k8s-device-plugin"},
		entries: []vendorEntry{{"solarflare.com/sfc", onloadInterfaces}},
	},
	{
		name: "AMD's Onload device plugin", families: []string{"solarflare"}, offers: "amd.com/onload",
		runs: []string{"onload-device-plugin"},
	},
	{
		name: "Google's TPU device plugin", families: []string{"tpu"}, offers: "google.com/tpu",
		runs:   []string{"tpu-device-plugin"},
		remark: "TPU_TOPOLOGY, TPU_HOST_BOUNDS and TPU_WORKER_ID are not set, and /tmp/tpu_logs is not mounted: write the variables to the pods of slices with several hosts",
	},
	{
		name: "Huawei's Ascend device plugin", families: []string{"ascend"}, offers: "huawei.com/Ascend310, Ascend310B, Ascend310P and Ascend910",
		runs:    []string{"ascend-k8sdeviceplugin", "ascend-device-plugin"},
		options: ascendOptions,
	},
	{
		name: "Hygon's DCU device plugin", families: []string{"hygon"}, offers: "hygon.com/dcu",
		runs: []string{"dcu-device-plugin", "hygon-device-plugin"},
	},
	{
		name: "FuriosaAI's device plugin", families: []string{"furiosa"}, offers: "furiosa.ai/rngd and furiosa.ai/warboy",
		runs: []string{"furiosa-device-plugin"},
		options: func(*plugin.Import) []plugin.Option {
			return []plugin.Option{
				{Name: "config-file", Fate: plugin.FatePodChange, Reason: "not read: partitions of NPUs are not offered, and NPUs that the file disables need an entry of exclude"},
				{Name: "node-name", Reason: "the agent has flags of its own"},
			}
		},
	},
	{
		name: "Tenstorrent's device plugin", families: []string{"tenstorrent"}, offers: "tenstorrent.com/n150, n300, blackhole and grayskull",
		runs: []string{"tt-k8s-device-plugin", "tenstorrent-device-plugin", "tt-device-plugin"},
	},
	{
		name: "Qualcomm's Cloud AI device plugin", families: []string{"npu"}, offers: "qualcomm.com/qaic",
		runs: []string{"qaic-device-plugin", "qaic-k8s-device-plugin", "cloud-ai-device-plugin", "cloud_ai_k8s_device_plugin"},
		options: func(*plugin.Import) []plugin.Option {
			return []plugin.Option{{Name: "sku-names", Variable: "QAIC_SKU_BASED_RESOURCE_ENABLED", Fate: plugin.FatePodChange, Harmless: []string{"false", "0"}, Reason: "not carried over: all cards are offered as qualcomm.com/qaic; name qaic-std, qaic-pro and qaic-ultra in entries of resources"}}
		},
	},
	{
		name: "NVIDIA's KubeVirt GPU device plugin", families: []string{"vfio"},
		runs:   []string{"kubevirt-gpu-device-plugin", "nvidia-kubevirt-gpu-dp"},
		remark: "its resources have the names of GPUs in the PCI ID database, and of vGPU types: import the KubeVirt object too, whose permittedHostDevices has these names, or write an entry of resources for each name",
	},
	{
		name: "HPE's CXI device plugin", families: []string{"slingshot"}, offers: "beta.hpe.com/cxi",
		runs:    []string{"cxi-k8s-device-plugin"},
		options: cxiOptions,
		remark:  "libcxi, libfabric and LD_LIBRARY_PATH are not given to pods: install the libraries in the images, or mount them from the host",
	},
}

// onloadInterfaces selects Onload with one device for each interface.
var onloadInterfaces = expression.All([]string{expression.OneOf(expression.Family, []string{"solarflare"}), expression.OneOf(expression.Text("profile"), []string{"interface"})})

func cxiOptions(im *plugin.Import) []plugin.Option {
	return []plugin.Option{
		{Name: "pulse", Reason: "the agent checks the health of devices itself"},
		{Name: "enable-cdi", NoValue: true, Fate: plugin.FatePodChange, Harmless: []string{"false"}, Reason: "not carried over: the plugin's CDI spec also gives /dev/xpmem to pods"},
		{Name: "virtual-devices", Variable: "CXI_VIRTUAL_DEVICES", Read: func(v source.Value) {
			n, ok := v.AsInteger()
			switch {
			case !ok || n < 0:
				im.Notes.AddPodChange(v, "is not a number of containers")
			case n > 1:
				im.Config.AddSharing(v, expression.OneOf(expression.Family, []string{"slingshot"}), v1alpha1.Sharing{Replicas: n})
			}
		}},
	}
}

func ascendOptions(im *plugin.Import) []plugin.Option {
	const scheduler = "not carried over: the device plugin API of Kubernetes selects the NPUs, and Volcano does not"
	options := []plugin.Option{
		{Name: "volcanoType", NoValue: true, Fate: plugin.FatePodChange, Harmless: []string{"false"}, Reason: scheduler},
		{Name: "presetVirtualDevice", NoValue: true, Fate: plugin.FatePodChange, Harmless: []string{"true"}, Reason: "not carried over: no virtual NPUs are created"},
		{Name: "shareDevCount", Read: func(v source.Value) {
			n, ok := v.AsInteger()
			switch {
			case !ok || n < 1:
				im.Notes.AddPodChange(v, "is not a number of containers")
			case n > 1:
				im.Config.AddSharing(v, expression.OneOf(expression.Family, []string{"ascend"}), v1alpha1.Sharing{Replicas: n})
			}
		}},
		{Name: "useAscendDocker", NoValue: true, Fate: plugin.FatePodChange, Harmless: []string{"true"}, Reason: "containers get ASCEND_VISIBLE_DEVICES as well as the device nodes"},
	}
	for _, name := range []string{"logFile", "logLevel", "maxAge", "maxBackups", "listWatchPeriod", "hotReset", "linkdownTimeout", "mode"} {
		options = append(options, plugin.Option{Name: name, Reason: "the agent has flags of its own"})
	}
	return options
}

// vendorGroup is the common name of the plugins in the table.
const vendorGroup = "device plugins of AWS Neuron, Habana, Solarflare, Google TPU, Ascend, Hygon, FuriosaAI, Tenstorrent, Qualcomm, HPE, and NVIDIA's for KubeVirt"

// neuron1 matches the first major version of the Neuron plugin.
var neuron1 = regexp.MustCompile(`^v?1\.`)

// NewTable returns the formats of the plugins in the table.
func NewTable(im *plugin.Import) []*plugin.Format {
	var formats []*plugin.Format
	for _, p := range vendorPlugins {
		var options []plugin.Option
		if p.options != nil {
			options = p.options(im)
		}
		settings := plugin.NewSettings(im, options)
		formats = append(formats, &plugin.Format{
			Name:        p.name,
			Group:       vendorGroup,
			Forms:       "DaemonSet, flags of Ascend",
			Families:    p.families,
			IsContainer: func(c plugin.Container) bool { return c.HasName(p.runs...) },
			ReadContainer: func(c plugin.Container) {
				settings.ReadFlags(c)
				p.read(im, c)
			},
			Finish: settings.FinishOptions,
		})
	}
	return formats
}

// read adds the entries for a container that runs the plugin.
func (p *vendorPlugin) read(im *plugin.Import, c plugin.Container) {
	at := c.At("name").OrPlaceOf(c.Value)
	if p.offers != "" {
		im.Notes.AddRemark(at, "%s: offered without an entry in the configuration", p.offers)
	}
	for _, entry := range p.entries {
		im.Config.AddResource(at, entry.resource, entry.cel)
	}
	if p.remark != "" {
		im.Notes.AddPodChange(at, "%s", p.remark)
	}
	if p.families[0] == "neuron" && neuron1.MatchString(plugin.ImageVersion(c.Image)) {
		im.Notes.AddPodChange(at, "aws.amazon.com/neurondevice of the first releases is not offered: request aws.amazon.com/neuron in its place, or name the devices by an entry of resources")
	}
}
