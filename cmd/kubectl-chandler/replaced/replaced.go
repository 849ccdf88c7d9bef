// Package replaced lists the DRA drivers that Chandler replaces, with the counterparts of their classes,
// attributes and capacities. It is data: the import translates objects by it, and validate warns of the
// names.
package replaced

import (
	"maps"
	"regexp"
	"slices"
	"strings"
)

// A Driver is a DRA driver that Chandler replaces.
type Driver struct {
	Name     string
	Domains  []string // other domains of the driver's attributes
	Families []string // the Chandler families that offer the same devices
	Devices  string   // a CEL expression for the same devices

	Attributes map[string]Attribute
	Capacities map[string]string // the capacities of Chandler, by the driver's name
	Unserved   string            // the reason why Chandler does not offer the devices, or ""
}

// An Attribute is the counterpart of an attribute of another driver.
type Attribute struct {
	Name string // the attribute of Chandler, with the domain if it is not chandler.dev
	CEL  string // a CEL expression with the same boolean value, in place of name

	Values  func(string) (string, bool) // translates values, nil for the same values
	Missing bool                        // some devices of Chandler lack the attribute, and all of the other driver have it
	Matches bool                        // only constraints can be translated, because the values differ
	Remark  string                      // a hint about the values
}

const (
	standardDomain = "resource.kubernetes.io"
	pciBusIDName   = standardDomain + "/pciBusID"
	pcieRootName   = standardDomain + "/pcieRoot"
	numaNodeName   = standardDomain + "/numaNode"

	attributes      = `device.attributes["chandler.dev"].`
	family          = attributes + "family"
	kind            = attributes + "kind"
	intelGPU        = family + ` == "intelgpu"`
	virtualFunction = attributes + `?function.orValue("") == "virtual"`
	productRemark   = "the drivers can write product names differently; compare the value with the model that chandler discover prints"
)

// Drivers lists the drivers. The table in docs/attributes.md has the same names.
var Drivers = []Driver{
	{
		Name: "gpu.nvidia.com", Families: []string{"nvidia"}, Devices: family + ` == "nvidia"` + " && " + kind + ` == "gpu"`,
		Attributes: map[string]Attribute{
			"productName":           {Name: "model"},
			"architecture":          {Name: "architecture", Values: lowerWords},
			"cudaComputeCapability": {Name: "cudaComputeCapability"},
			"driverVersion":         {Name: "driverVersion"},
			"uuid":                  {Name: "uuid"},
			"type":                  {Name: "function", Values: oneValue(map[string]string{"gpu": "physical", "mig": "partition"}), Missing: true},
			"parentUUID":            {Name: "parent", Matches: true},
			"profile":               {Name: "profile"},
			"gpuModuleID":           {Name: "moduleID"},
			"vendorID":              {Name: "pciVendor", Values: pciID},
			"deviceID":              {Name: "pciDevice", Values: pciID},
			"pciBusID":              {Name: pciBusIDName},
			"pcieBusID":             {Name: pciBusIDName}, // before the standard attribute
			"pcieRoot":              {Name: pcieRootName},
			"numaNode":              {Name: numaNodeName},
		},
		Capacities: map[string]string{"memory": "memory"},
	},
	{Name: "compute-domain.nvidia.com", Unserved: "Chandler does not manage ComputeDomains; the class nvidia-imex.chandler.dev offers the IMEX channels of a node"},
	{
		Name: "gpu.amd.com", Families: []string{"amdgpu"}, Devices: family + ` == "amdgpu"`,
		Attributes: map[string]Attribute{
			"productName":      {Name: "model", Remark: productRemark},
			"driverVersion":    {Name: "driverVersion"},
			"type":             {Name: "function", Values: oneValue(map[string]string{"amdgpu": "physical", "amdgpu-partition": "partition"}), Missing: true},
			"isVF":             {CEL: virtualFunction},
			"partitionProfile": {Name: "profile"},
			"iommuGroup":       {Name: "iommuGroup", Matches: true},
			"vendorID":         {Name: "pciVendor", Values: pciID},
			"deviceID":         {Name: "pciDevice", Values: pciID},
			"pciAddr":          {Name: pciBusIDName},
			"pciBusID":         {Name: pciBusIDName},
			"pcieRoot":         {Name: pcieRootName},
			"numaNode":         {Name: numaNodeName},
		},
		Capacities: map[string]string{"memory": "memory", "computeUnits": "cores"},
	},
	{
		Name: "gpu.intel.com", Families: []string{"intelgpu"}, Devices: family + ` == "intelgpu"` + " && " + kind + ` == "gpu"`,
		Attributes: map[string]Attribute{
			"model":      {Name: "model", Remark: productRemark},
			"driver":     {Name: "driver"},
			"pciId":      {Name: "pciDevice", Values: pciID},
			"pciAddress": {Name: pciBusIDName},
			"pciRoot":    {Name: pcieRootName, Matches: true},
		},
		Capacities: map[string]string{"memory": "memory"},
	},
	{
		Name: "gaudi.intel.com", Families: []string{"gaudi"}, Devices: family + ` == "gaudi"`,
		Attributes: map[string]Attribute{
			"model":    {Name: "model", Remark: productRemark},
			"serial":   {Name: "serial"},
			"pcieRoot": {Name: pcieRootName, Matches: true},
		},
	},
	{Name: "qat.intel.com", Families: []string{"qat"}, Devices: family + ` == "qat"`},
	{
		Name: "dra.net", Families: []string{"rdma", "sriovnet"}, Devices: kind + ` == "nic"`,
		Attributes: map[string]Attribute{
			"ifName":     {Name: "ifName"},
			"pciAddress": {Name: pciBusIDName},
			"numaNode":   {Name: numaNodeName},
			"pciVendor":  {Name: "pciVendor", Values: pciID},
			"pciDevice":  {Name: "pciDevice", Values: pciID},
			"rdma":       {CEL: attributes + `?rdmaDevice.hasValue()`},
			"rdmaDevice": {Name: "rdmaDevice"},
			"isSriovVf":  {CEL: virtualFunction},
		},
	},
	{
		Name: "neuron.aws.com", Domains: []string{"resource.aws.com"}, Families: []string{"neuron"}, Devices: family + ` == "neuron"`,
		Attributes: map[string]Attribute{
			"driverVersion": {Name: "driverVersion"},
		},
	},
	{Name: "tpu.google.com", Families: []string{"tpu"}, Devices: family + ` == "tpu"`},
	{
		// The names are in pkg/consts/consts.go of k8snetworkplumbingwg/dra-driver-sriov.
		Name: "sriovnetwork.k8snetworkplumbingwg.io", Families: []string{"rdma", "sriovnet"}, Devices: kind + ` == "nic"` + " && " + virtualFunction,
		Attributes: map[string]Attribute{
			"pciAddress":    {Name: pciBusIDName},
			"vendor":        {Name: "pciVendor", Values: pciID, Missing: true},
			"deviceID":      {Name: "pciDevice", Values: pciID, Missing: true},
			"PFName":        {Name: "pfName", Missing: true},
			"interfaceName": {Name: "ifName", Missing: true},
		},
	},
	{Name: "hami-core-gpu.project-hami.io", Unserved: "Chandler does not limit a container to a part of the cores of a GPU; it shares GPUs by number or by memory, as the page on sharing describes"},
}

// A Class is the counterpart of a DeviceClass of another driver.
type Class struct {
	Own      string // the class of Chandler, "" without a counterpart
	Driver   string
	Extended string // the extended resource of that class, or ""
	CEL      string // a further selector, or ""
	VFIO     bool   // the class is for VFIO passthrough
}

// Classes lists the classes that the drivers install. Those of compute-domain.nvidia.com and of HAMi
// have no counterpart.
var Classes = map[string]Class{
	"gpu.nvidia.com":      {Own: "nvidia.chandler.dev", Driver: "gpu.nvidia.com", Extended: "nvidia.com/gpu"},
	"mig.nvidia.com":      {Own: "nvidia-mig.chandler.dev", Driver: "gpu.nvidia.com"},
	"vfio.gpu.nvidia.com": {Own: "nvidia.chandler.dev", Driver: "gpu.nvidia.com", VFIO: true},

	"compute-domain-daemon.nvidia.com":          {Driver: "compute-domain.nvidia.com"},
	"compute-domain-default-channel.nvidia.com": {Driver: "compute-domain.nvidia.com"},

	"hami-core-gpu.project-hami.io": {Driver: "hami-core-gpu.project-hami.io"},

	"gpu.amd.com":        {Own: "amdgpu.chandler.dev", Driver: "gpu.amd.com", Extended: "amd.com/gpu"},
	"vfio.gpu.amd.com":   {Own: "amdgpu.chandler.dev", Driver: "gpu.amd.com", VFIO: true},
	"gpu.intel.com":      {Own: "gpu.chandler.dev", Driver: "gpu.intel.com", CEL: intelGPU},
	"gpu-vfio.intel.com": {Own: "gpu.chandler.dev", Driver: "gpu.intel.com", CEL: intelGPU, VFIO: true},
	"gaudi.intel.com":    {Own: "gaudi.chandler.dev", Driver: "gaudi.intel.com", Extended: "habana.ai/gaudi"},
	"qat.intel.com":      {Own: "qat.chandler.dev", Driver: "qat.intel.com"},
	"tpu.google.com":     {Own: "tpu.chandler.dev", Driver: "tpu.google.com", Extended: "google.com/tpu"},
	"neuron.aws.com":     {Own: "neuron.chandler.dev", Driver: "neuron.aws.com", Extended: "aws.amazon.com/neuron"},
}

// DriverOf returns the driver with a name or an attribute domain, nil if there is none.
func DriverOf(domain string) *Driver {
	for i := range Drivers {
		if d := &Drivers[i]; d.Name == domain || slices.Contains(d.Domains, domain) {
			return d
		}
	}
	return nil
}

// IsMentioned reports whether a text has the name of a driver or of its class.
func IsMentioned(text string) bool { return mention.MatchString(text) }

// mention matches a name of a driver or of its class in a longer text, such as a CEL expression.
var mention = func() *regexp.Regexp {
	var names []string
	for _, d := range Drivers {
		for _, domain := range append([]string{d.Name}, d.Domains...) {
			names = append(names, regexp.QuoteMeta(domain))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(Classes)) {
		names = append(names, regexp.QuoteMeta(name))
	}
	return regexp.MustCompile(`(?:^|[^a-zA-Z0-9.-])(?:` + strings.Join(names, "|") + `)(?:$|[^a-zA-Z0-9.-])`)
}()

// lowerWords translates the name of an architecture: "Ada Lovelace" is ada-lovelace.
func lowerWords(value string) (string, bool) {
	return strings.ReplaceAll(strings.ToLower(value), " ", "-"), true
}

// pciIDText matches a PCI vendor or device ID.
var pciIDText = regexp.MustCompile(`^(?:0[xX])?([0-9a-fA-F]{4})$`)

// pciID translates a PCI ID. A name from the PCI database has no translation.
func pciID(value string) (string, bool) {
	m := pciIDText.FindStringSubmatch(value)
	if m == nil {
		return "", value == ""
	}
	return strings.ToLower(m[1]), true
}

// oneValue returns a function that translates the values of a table, and "".
func oneValue(table map[string]string) func(string) (string, bool) {
	return func(value string) (string, bool) {
		translated, ok := table[value]
		return translated, ok || value == ""
	}
}
