package discovery

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
)

// Vocabulary lists the attributes that all families share, with their types. Names without a domain
// are in Chandler's domain. To add an attribute, add it here and to docs/attributes.md.
var Vocabulary = map[resourceapi.QualifiedName]string{
	"kind":                  "string",
	"family":                "string",
	"vendor":                "string",
	"model":                 "string",
	"architecture":          "string",
	"cudaComputeCapability": "version",
	"pciVendor":             "string",
	"pciDevice":             "string",
	"pciClass":              "string",
	"driver":                "string",
	"driverVersion":         "version",
	"firmwareVersion":       "version",
	"uuid":                  "string",
	"serial":                "string",
	"function":              "string",
	"vfioDriver":            "string",
	"parent":                "string",
	"profile":               "string",
	"partitionIndex":        "int",
	"fabric":                "string",
	"afuID":                 "string",
	"channel":               "int",
	"linkedTo":              "string",
	"iommuGroup":            "int",
	"linkSpeed":             "int",
	"linkWidth":             "int",
	"moduleID":              "int",
	"linkLayer":             "string",
	"ifName":                "string",
	"pfName":                "string",
	"vfIndex":               "int",
	"vdpaType":              "string",
	"queueName":             "string",
	"queueSize":             "int",
	"queuePriority":         "int",
	"queueGroup":            "int",
	"queueEngines":          "int",
	"resource":              "string",
	"usbVendor":             "string",
	"usbProduct":            "string",
	"pfPCIBusID":            "string",
	"sfNumber":              "int",
	"representor":           "string",
	"acpiIndex":             "int",
	"defaultRoute":          "bool",
	"rdmaDevice":            "string",
	"rdmaNamespaces":        "string",
	"pKey":                  "string",

	// Multus uses these attributes to find a device.
	"k8s.cni.cncf.io/deviceID":     "string",
	"k8s.cni.cncf.io/resourceName": "string",
}

// DerivedAttributes lists the attributes that only ResourceSlices have, with their types. Package
// driver/pool computes them from all devices of the node.
var DerivedAttributes = map[resourceapi.QualifiedName]string{
	"partitionType":  "string",
	"group2":         "string",
	"group4":         "string",
	"group8":         "string",
	"nearestAdapter": "string",
}

// AttributeNames returns the names of all attributes of Chandler, sorted.
func AttributeNames() (names []string) {
	for name := range Vocabulary {
		names = append(names, string(name))
	}
	for name := range DerivedAttributes {
		names = append(names, string(name))
	}
	slices.Sort(names)
	return names
}

// Capacities lists the names of the capacities of all families. To add a capacity, add it here and to
// docs/attributes.md.
var Capacities = []resourceapi.QualifiedName{"memory", "cores", "tiles", "chips", Shares}

// OptionalAttributes are the attributes that ResourceSlices have only if the administrator lists
// them. The scheduler keeps the attributes of all devices of the cluster in memory, and copies those
// of each device that it examines.
var OptionalAttributes = []resourceapi.QualifiedName{
	"acpiIndex", "channel", "defaultRoute", "firmwareVersion", "group2", "group4", "group8", "iommuGroup", "linkSpeed", "linkWidth", "linkedTo",
	"moduleID", "nearestAdapter", "pfPCIBusID", "queueEngines", "queueGroup", "queuePriority", "rdmaNamespaces", "representor", "serial",
	"sfNumber",
}

// DistinctAttributes are the attributes that distinguish interchangeable devices. The one device that
// ResourceSlices have for all of them has none of these attributes. If the administrator lists one,
// the devices are published one by one.
var DistinctAttributes = []resourceapi.QualifiedName{
	"channel", "ifName", "k8s.cni.cncf.io/deviceID", "rdmaDevice", "resource.kubernetes.io/pciBusID", "vfIndex",
}

// ReplacedByModel are the attributes that ResourceSlices have only for devices without a model,
// unless the administrator lists them.
var ReplacedByModel = []resourceapi.QualifiedName{"pciVendor", "pciDevice"}
