package importer

import (
	"regexp"
	"slices"
	"strings"
)

// A draDriver is a DRA driver that Chandler replaces.
type draDriver struct {
	name     string
	domains  []string // other domains of the driver's attributes
	families []string // the Chandler families that offer the same devices
	devices  string   // a CEL expression for the same devices

	attributes map[string]draAttribute
	capacities map[string]string // the capacities of Chandler, by the driver's name
	unserved   string            // the reason why Chandler does not offer the devices, or ""
}

// A draAttribute is the counterpart of an attribute of another driver.
type draAttribute struct {
	name string // the attribute of Chandler, with the domain if it is not chandler.dev
	cel  string // a CEL expression with the same boolean value, in place of name

	values  func(string) (string, bool) // translates values, nil for the same values
	missing bool                        // some devices of Chandler lack the attribute, and all of the other driver have it
	matches bool                        // only constraints can be translated, because the values differ
	remark  string                      // a hint about the values
}

const (
	standardDomain = "resource.kubernetes.io"
	pciBusIDName   = standardDomain + "/pciBusID"
	pcieRootName   = standardDomain + "/pcieRoot"
	numaNodeName   = standardDomain + "/numaNode"

	virtualFunction = attributes + `?function.orValue("") == "virtual"`
	productRemark   = "the drivers can write product names differently; compare the value with the model that chandler discover prints"
)

// draDrivers lists the drivers. The table in docs/attributes.md has the same names.
var draDrivers = []draDriver{
	{
		name: "gpu.nvidia.com", families: []string{"nvidia"}, devices: all([]string{familyAttribute + ` == "nvidia"`, kindAttribute + ` == "gpu"`}),
		attributes: map[string]draAttribute{
			"productName":           {name: "model"},
			"architecture":          {name: "architecture", values: lowerWords},
			"cudaComputeCapability": {name: "cudaComputeCapability"},
			"driverVersion":         {name: "driverVersion"},
			"uuid":                  {name: "uuid"},
			"type":                  {name: "function", values: oneValue(map[string]string{"gpu": "physical", "mig": "partition"}), missing: true},
			"parentUUID":            {name: "parent", matches: true},
			"profile":               {name: "profile"},
			"gpuModuleID":           {name: "moduleID"},
			"vendorID":              {name: "pciVendor", values: pciID},
			"deviceID":              {name: "pciDevice", values: pciID},
			"pciBusID":              {name: pciBusIDName},
			"pcieBusID":             {name: pciBusIDName}, // before the standard attribute
			"pcieRoot":              {name: pcieRootName},
			"numaNode":              {name: numaNodeName},
		},
		capacities: map[string]string{"memory": "memory"},
	},
	{name: "compute-domain.nvidia.com", unserved: "Chandler does not manage ComputeDomains; the class nvidia-imex.chandler.dev offers the IMEX channels of a node"},
	{
		name: "gpu.amd.com", families: []string{"amdgpu"}, devices: familyAttribute + ` == "amdgpu"`,
		attributes: map[string]draAttribute{
			"productName":      {name: "model", remark: productRemark},
			"driverVersion":    {name: "driverVersion"},
			"type":             {name: "function", values: oneValue(map[string]string{"amdgpu": "physical", "amdgpu-partition": "partition"}), missing: true},
			"isVF":             {cel: virtualFunction},
			"partitionProfile": {name: "profile"},
			"iommuGroup":       {name: "iommuGroup", matches: true},
			"vendorID":         {name: "pciVendor", values: pciID},
			"deviceID":         {name: "pciDevice", values: pciID},
			"pciAddr":          {name: pciBusIDName},
			"pciBusID":         {name: pciBusIDName},
			"pcieRoot":         {name: pcieRootName},
			"numaNode":         {name: numaNodeName},
		},
		capacities: map[string]string{"memory": "memory", "computeUnits": "cores"},
	},
	{
		name: "gpu.intel.com", families: []string{"intelgpu"}, devices: all([]string{familyAttribute + ` == "intelgpu"`, kindAttribute + ` == "gpu"`}),
		attributes: map[string]draAttribute{
			"model":      {name: "model", remark: productRemark},
			"driver":     {name: "driver"},
			"pciId":      {name: "pciDevice", values: pciID},
			"pciAddress": {name: pciBusIDName},
			"pciRoot":    {name: pcieRootName, matches: true},
		},
		capacities: map[string]string{"memory": "memory"},
	},
	{
		name: "gaudi.intel.com", families: []string{"gaudi"}, devices: familyAttribute + ` == "gaudi"`,
		attributes: map[string]draAttribute{
			"model":    {name: "model", remark: productRemark},
			"serial":   {name: "serial"},
			"pcieRoot": {name: pcieRootName, matches: true},
		},
	},
	{name: "qat.intel.com", families: []string{"qat"}, devices: familyAttribute + ` == "qat"`},
	{
		name: "dra.net", families: []string{"rdma", "sriovnet"}, devices: kindAttribute + ` == "nic"`,
		attributes: map[string]draAttribute{
			"ifName":     {name: "ifName"},
			"pciAddress": {name: pciBusIDName},
			"numaNode":   {name: numaNodeName},
			"pciVendor":  {name: "pciVendor", values: pciID},
			"pciDevice":  {name: "pciDevice", values: pciID},
			"rdma":       {cel: attributes + `?rdmaDevice.hasValue()`},
			"rdmaDevice": {name: "rdmaDevice"},
			"isSriovVf":  {cel: virtualFunction},
		},
	},
	{
		name: "neuron.aws.com", domains: []string{"resource.aws.com"}, families: []string{"neuron"}, devices: familyAttribute + ` == "neuron"`,
		attributes: map[string]draAttribute{
			"driverVersion": {name: "driverVersion"},
		},
	},
	{name: "tpu.google.com", families: []string{"tpu"}, devices: familyAttribute + ` == "tpu"`},
	{
		// The names are in pkg/consts/consts.go of k8snetworkplumbingwg/dra-driver-sriov.
		name: "sriovnetwork.k8snetworkplumbingwg.io", families: []string{"rdma", "sriovnet"}, devices: all([]string{kindAttribute + ` == "nic"`, virtualFunction}),
		attributes: map[string]draAttribute{
			"pciAddress":    {name: pciBusIDName},
			"vendor":        {name: "pciVendor", values: pciID, missing: true},
			"deviceID":      {name: "pciDevice", values: pciID, missing: true},
			"PFName":        {name: "pfName", missing: true},
			"interfaceName": {name: "ifName", missing: true},
		},
	},
	{name: "hami-core-gpu.project-hami.io", unserved: "Chandler does not limit a container to a part of the cores of a GPU; it shares GPUs by number or by memory, as the page on sharing describes"},
}

// A draClass is the counterpart of a DeviceClass of another driver.
type draClass struct {
	driver   string
	extended string // the extended resource of that class, or ""
	cel      string // a further selector, or ""
	vfio     bool   // the class is for VFIO passthrough
}

// draClasses lists the classes that the drivers install. [validation.ReplacedClasses] has their
// counterparts. Classes of compute-domain.nvidia.com and of HAMi have no counterpart.
var draClasses = map[string]draClass{
	"gpu.nvidia.com":      {driver: "gpu.nvidia.com", extended: "nvidia.com/gpu"},
	"mig.nvidia.com":      {driver: "gpu.nvidia.com"},
	"vfio.gpu.nvidia.com": {driver: "gpu.nvidia.com", vfio: true},

	"compute-domain-daemon.nvidia.com":          {driver: "compute-domain.nvidia.com"},
	"compute-domain-default-channel.nvidia.com": {driver: "compute-domain.nvidia.com"},

	"hami-core-gpu.project-hami.io": {driver: "hami-core-gpu.project-hami.io"},

	"gpu.amd.com":        {driver: "gpu.amd.com", extended: "amd.com/gpu"},
	"vfio.gpu.amd.com":   {driver: "gpu.amd.com", vfio: true},
	"gpu.intel.com":      {driver: "gpu.intel.com", cel: familyAttribute + ` == "intelgpu"`},
	"gpu-vfio.intel.com": {driver: "gpu.intel.com", cel: familyAttribute + ` == "intelgpu"`, vfio: true},
	"gaudi.intel.com":    {driver: "gaudi.intel.com", extended: "habana.ai/gaudi"},
	"qat.intel.com":      {driver: "qat.intel.com"},
	"tpu.google.com":     {driver: "tpu.google.com", extended: "google.com/tpu"},
	"neuron.aws.com":     {driver: "neuron.aws.com", extended: "aws.amazon.com/neuron"},
}

// draDriverOf returns the driver with a name or an attribute domain, nil if there is none.
func draDriverOf(domain string) *draDriver {
	for i := range draDrivers {
		if d := &draDrivers[i]; d.name == domain || slices.Contains(d.domains, domain) {
			return d
		}
	}
	return nil
}

// draName matches a name of a driver or of its class in a longer text, such as a CEL expression.
var draName = func() *regexp.Regexp {
	var names []string
	for _, d := range draDrivers {
		for _, domain := range append([]string{d.name}, d.domains...) {
			names = append(names, regexp.QuoteMeta(domain))
		}
	}
	for _, name := range sorted(draClasses) {
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
