// Package network says what all families of network functions have to say: how
// a function or sub-function is found again by its adapter and its interface,
// and what containers and network plugins are told of it, in the words of the
// SR-IOV network device plugin. It knows no vendor, and what makes a device a
// family's is the family's business.
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

// The attributes by which Multus finds a device of a claim: the resource that a
// NetworkAttachmentDefinition names, and what the network plugin calls the
// device (docs/how-to-use.md in k8snetworkplumbingwg/multus-cni).
const (
	DeviceIDAttribute     resourceapi.QualifiedName = "k8s.cni.cncf.io/deviceID"
	ResourceNameAttribute resourceapi.QualifiedName = "k8s.cni.cncf.io/resourceName"
)

// InfoDir is where network plugins look for what device plugins say of a device
// (SPEC.md, 4.1, in k8snetworkplumbingwg/device-info-spec).
const InfoDir = "/var/run/k8s.cni.cncf.io/devinfo/dp"

// Function is a network function, or a sub-function of one.
type Function struct {
	sysfs.Device                // the PCI function, or the auxiliary device of a sub-function
	PCI          sysfs.Device   // the PCI function
	Interfaces   []sysfs.Device // in the host's network namespace
	Port         Port           // that it sends through: its own, if it is physical
	Routes       Routes         // the host's
	RoutesErr    error          // why they are not known

	// VDPA is the device of the vDPA bus that the kernel made of the function,
	// if it did.
	VDPA *VDPA
}

// VDPA is a device of the vDPA bus.
type VDPA struct {
	Name   string // on the bus
	Driver string // "vhost" or "virtio"
	Path   string // of what it is used by: a node in /dev, or a device of the virtio bus; "" if that is not known
}

// Describe adds to a device by what it is found again: ifName, defaultRoute,
// pfName, pfPCIBusID, vfIndex, sfNumber, representor, acpiIndex, vdpaType, and
// linkLayer where it has none yet; its ID in the classic API, and the file that
// network plugins read. An interface that was moved into a pod is not there to
// be named; the rest is as before.
func (f Function) Describe(d *discovery.Device, host *discovery.Host) error {
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
	d.Classic = []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{f.Name()}, NameAs: ResourceNameAttribute}}
	// There is no word for a sub-function in it.
	if f.Path == f.PCI.Path {
		d.Files = f.info(d)
	}
	return errors.Join(errs...)
}

// describePlace says which part of which physical function it is.
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

// info returns the file that tells network plugins of the function, none where
// what must be in it is not known.
func (f Function) info(d *discovery.Device) []discovery.HostFile {
	info := deviceInfo{Type: "pci", Version: "1.1.0"}
	pf, representor := f.Port.address, d.Attributes.String("representor")
	if pf == f.Name() {
		pf = "" // a physical function has none above it
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
		return nil // strings can be encoded
	}
	return []discovery.HostFile{{Path: InfoDir + "/{resource}-" + f.Name() + "-device.json", Text: text.String()}}
}
