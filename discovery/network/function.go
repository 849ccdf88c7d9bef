// Package network contains the common parts of all families of network functions: the attributes
// that identify a function or sub-function by its adapter and interface, and the information for
// containers and network plugins, in the form of the SR-IOV network device plugin. The package
// depends on no vendor; the families decide which devices they describe.
package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Multus finds a device of a claim by these attributes: the resource name in a
// NetworkAttachmentDefinition, and the network plugin's name of the device (docs/how-to-use.md in
// k8snetworkplumbingwg/multus-cni).
const (
	DeviceIDAttribute     resourceapi.QualifiedName = "k8s.cni.cncf.io/deviceID"
	ResourceNameAttribute resourceapi.QualifiedName = "k8s.cni.cncf.io/resourceName"
)

// InfoDir is the directory where network plugins read the device information files of device
// plugins (SPEC.md, 4.1, in k8snetworkplumbingwg/device-info-spec).
const InfoDir = "/var/run/k8s.cni.cncf.io/devinfo/dp"

// Function is a network function, or a sub-function of a network function.
type Function struct {
	sysfs.Device                // the PCI function, or the auxiliary device of a sub-function
	PCI          sysfs.Device   // the PCI function
	Interfaces   []sysfs.Device // in the host's network namespace
	Port         Port           // the port that the function uses, its own for a physical function
	Routes       Routes         // the host's default routes
	RoutesErr    error          // why Routes is unknown

	// VDPA is the function's device on the vDPA bus, nil if there is none.
	VDPA *VDPA
}

// VDPA is a device of the vDPA bus.
type VDPA struct {
	Name   string // on the bus
	Driver string // "vhost" or "virtio"
	Path   string // a node in /dev, or a device of the virtio bus; "" if unknown
}

// DescribeFunction adds the identifying attributes to a device: ifName, defaultRoute, pfName,
// pfPCIBusID, vfIndex, sfNumber, representor, acpiIndex, vdpaType, and linkLayer if not yet set. It
// also adds the ID in the device plugin API, and the file for network plugins. While the interface
// is in a pod, the attributes of the interface are missing, and the others remain.
func (f Function) DescribeFunction(d *discovery.Device, host *discovery.Host) error {
	errs := []error{f.Port.err, f.describePlace(d)}
	layer := f.Port.linkLayer
	if own, ok := uplinkOf(f.Interfaces); ok {
		d.Attributes.SetString("ifName", own.Name())
		if f.RoutesErr == nil {
			d.Attributes.SetBool("defaultRoute", f.Routes.LeadThrough(host, f.Interfaces))
		}
		ownLayer, err := linkLayer(own)
		layer, errs = ownLayer, append(errs, err)
	}
	if d.Attributes.String("linkLayer") == "" {
		d.Attributes.SetString("linkLayer", layer)
	}
	if f.VDPA != nil {
		d.Attributes.SetString("vdpaType", f.VDPA.Driver)
	}
	d.Attributes.SetString(DeviceIDAttribute, f.Name())
	d.PluginOffers = []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{f.Name()}, NameAs: ResourceNameAttribute}}
	f.joinVirtual(d, host)
	// The file format does not support sub-functions.
	if f.Path == f.PCI.Path {
		d.Files = f.info(d)
	}
	return errors.Join(errs...)
}

// joinVirtual gives the virtual functions of an adapter that have the same driver a common name. A pod
// uses such a function through its interface or its nodes, which are the same in all containers. These
// functions have no common name:
//
//   - functions for virtual machines, under vfio or on the vDPA bus, because KubeVirt reads the address of
//     a claim's function from the ResourceSlice,
//   - functions of a host with on-demand creation, because they exist only while a claim has one,
//   - functions with a default route of the host, because claims cannot move their interface.
func (f Function) joinVirtual(d *discovery.Device, host *discovery.Host) {
	driver := f.Driver()
	switch {
	case d.Attributes.String("function") != "virtual" || d.PartOf == nil || driver == "" || len(host.VirtualFunctions) > 0:
	case discovery.IsVFIO(driver) || f.VDPA != nil || f.RoutesErr == nil && f.Routes.LeadThrough(host, f.Interfaces):
	default:
		d.Interchangeable = d.PartOf.Name + "-vfs-" + strings.ReplaceAll(strings.ToLower(driver), "_", "-")
	}
}

// describePlace adds the attributes of the physical function and of the function's index.
func (f Function) describePlace(d *discovery.Device) error {
	d.Attributes.SetString("pfName", f.Port.name)
	d.Attributes.SetString("pfPCIBusID", f.Port.address)
	attrs := f.Attrs()
	if index, ok := f.Port.indices[f.Name()]; ok {
		d.Attributes.SetInt("vfIndex", index)
		d.Attributes.SetString("representor", f.Port.representors[part{number: index}])
	}
	if number, ok := attrs.Uint("sfnum"); ok && number <= 1<<32-1 {
		d.Attributes.SetInt("sfNumber", int64(number))
		d.Attributes.SetString("representor", f.Port.representors[part{true, int64(number)}])
	}
	if index, ok := attrs.Uint("acpi_index"); ok && index <= 1<<32-1 {
		d.Attributes.SetInt("acpiIndex", int64(index))
	} else if f.Port.hasACPIIndex {
		d.Attributes.SetInt("acpiIndex", f.Port.acpiIndex)
	}
	if err := attrs.Err(); err != nil {
		return fmt.Errorf("network function %s: %w", f.Name(), err)
	}
	return nil
}

// deviceInfo is the content of a device information file (SPEC.md, 3, in
// k8snetworkplumbingwg/device-info-spec).
type deviceInfo struct {
	Type    string    `json:"type"`
	Version string    `json:"version"`
	PCI     *pciInfo  `json:"pci,omitempty"`
	VDPA    *vdpaInfo `json:"vdpa,omitempty"`
}

type pciInfo struct {
	Address     string `json:"pci-address"`
	RDMADevice  string `json:"rdma-device,omitempty"`
	PFAddress   string `json:"pf-pci-address,omitempty"`
	Representor string `json:"representor-device,omitempty"`
}

type vdpaInfo struct {
	Parent      string `json:"parent-device"`
	Driver      string `json:"driver"`
	Path        string `json:"path"`
	Address     string `json:"pci-address"`
	PFAddress   string `json:"pf-pci-address,omitempty"`
	Representor string `json:"representor-device,omitempty"`
}

// info returns the device information file of the function for network plugins, none if required
// content is unknown.
func (f Function) info(d *discovery.Device) []discovery.HostFile {
	info := deviceInfo{Type: "pci", Version: "1.1.0"}
	pf, representor := f.Port.address, d.Attributes.String("representor")
	if pf == f.Name() {
		pf = "" // a physical function has no parent
	}
	switch {
	case f.VDPA == nil:
		info.PCI = &pciInfo{f.Name(), d.Attributes.String("rdmaDevice"), pf, representor}
	case f.VDPA.Path == "":
		return nil
	default:
		info.Type = "vdpa"
		info.VDPA = &vdpaInfo{f.VDPA.Name, f.VDPA.Driver, f.VDPA.Path, f.Name(), pf, representor}
	}
	var text strings.Builder
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	if encoder.Encode(info) != nil {
		return nil // cannot happen: strings can be encoded
	}
	return []discovery.HostFile{{Path: InfoDir + "/{resource}-" + f.Name() + "-device.json", Text: text.String()}}
}
