// Package fpgaintel describes the ports of Intel FPGA cards by either driver: OPAE's own or the
// kernel's (DFL). Containers use the accelerator functions (AFUs) of an FPGA through its ports. If
// the administrator named a directory of bitstreams, a claim can request that a port is programmed
// with a function. Management engines (FMEs) are not offered.
package fpgaintel

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/fpgaintel/program"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/pattern"
)

// name is the name of the family and of its root.
const name = "fpga-intel"

// Family recognises Intel FPGA cards, and other cards under DFL.
var Family = &discovery.Family{
	Name: name,
	Doc:  "accelerator functions in Intel FPGAs, under OPAE or DFL",
	Match: []discovery.Match{
		{Class: "fpga", Name: "intel-fpga-dev.*"},
		{Class: "fpga_region", Name: "region*"}, // of any FPGA; DFL regions have ports
	},
	Describe:   describe,
	Grant:      grant,
	Parameters: []discovery.Parameter{AcceleratorFunction},
	Configure:  programmer(program.Port).configurePort,
	Variables:  variables,
	Roots:      []string{name},
	Labels:     []discovery.Labels{{Where: map[string]string{"pciDevice": "09c4"}, Set: map[string]string{"intel.feature.node.kubernetes.io/fpga-arria10": "true"}}},
}

// variables tune the libraries of OPAE.
var variables = []string{
	"LIBOPAE_LOG",
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, region := range found {
		function, ok := region.PCIFunction()
		if !ok {
			continue
		}
		for _, port := range children(region, "intel-fpga-port.", "dfl-port.") {
			d, ok, err := describePort(host, function, port)
			if err != nil {
				problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
			}
			if ok {
				devices = append(devices, d)
			}
		}
	}
	discovery.CountMembers(devices) // counts the ports of each card
	return devices, problems
}

// describePort describes a port. The device's name contains the port's number on the card, because
// the number in the node's name depends on the other cards of the host.
func describePort(host *discovery.Host, function, port sysfs.Device) (d discovery.Device, ok bool, err error) {
	attrs := port.Attrs()
	number, ok := attrs.Uint("id")
	if !ok {
		d.Name = discovery.DeviceName(port)
		return d, false, errors.Join(errors.New("port without a number"), attrs.Err())
	}
	d, pciErr := pci.DescribeFunction(host, function)
	if d.PartOf == nil { // not a virtual function
		d.PartOf = &discovery.Silicon{Name: d.Name}
		d.Attributes.SetString("function", "partition")
		d.Attributes.SetString("parent", d.Name)
	}
	d.Name += fmt.Sprintf("-port-%d", number)
	d.Source = port.Path
	d.Attributes.SetString("kind", "fpga")
	if d.Attributes.String("pciVendor") == "8086" {
		d.Attributes.SetString("vendor", "intel")
	}
	afu, afuErr := readID(port, "afu_id")
	region, engine, regionErr := interfaceID(function)
	dead := afu == crashed || region == crashed
	if dead {
		afu, region = "", "" // the IDs are unknown
	}
	d.Attributes.SetString("afuID", afu)
	d.Attributes.SetString("profile", region)
	node, nodeErr := discovery.Node(port, "/dev")
	d.Edits.DeviceNodes = []*specs.DeviceNode{node}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	if dead {
		d.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "the card's firmware has crashed: its IDs are all ones"}
	}
	d.PluginOffers = []discovery.Offer{{Resource: resource(region, afu), IDs: []string{port.Name()}}}
	if region != "" {
		// In its other modes the Intel plugin allocates a card with all of its ports.
		d.PluginOffers = append(d.PluginOffers, discovery.Offer{Resource: "fpga.intel.com/region-" + region, IDs: []string{engine.Name()}, Unit: engine.Name(), Optional: true})
	}
	// The b<>com plugin does the same, with the addresses of PCI functions as IDs.
	id := shortAddress(function.Name())
	d.PluginOffers = append(d.PluginOffers, discovery.Offer{Resource: bcom, IDs: []string{id}, Unit: id, Optional: true})
	return d, true, errors.Join(pciErr, attrs.Err(), afuErr, regionErr, nodeErr)
}

// crashed is the ID that the driver reads from an unresponsive card.
const crashed = "ffffffffffffffffffffffffffffffff"

// idDigits matches the ID of an accelerator function, or of the interface in the static part of the
// FPGA for such functions.
var idDigits = pattern.Lazy(`^[0-9a-f]{32}$`)

// readID returns an ID in lower case, "" if there is none.
func readID(d sysfs.Device, attribute string) (string, error) {
	attrs := d.Attrs()
	id, ok := attrs.Text(attribute)
	id = strings.ToLower(id)
	if ok && !idDigits().MatchString(id) {
		return "", fmt.Errorf("attribute %s: not 32 hexadecimal digits: %.48q", attribute, id)
	}
	return id, attrs.Err()
}

// interfaceID returns the ID of the interface that accelerator functions must match, and the
// management engine with the ID, which is on the physical function. Both are empty if the physical
// function is not visible, as in a virtual machine, and if the regions of the card have different
// IDs, because the region of the port is unknown.
func interfaceID(function sysfs.Device) (id string, engine sysfs.Device, err error) {
	if physical, ok := function.LinkTo("physfn"); ok {
		function = physical
	}
	told := make(map[[2]string]bool) // by engine and ID
	var errs []error
	read := func(of, d sysfs.Device, attribute string) {
		read, err := readID(d, attribute)
		if errs = append(errs, err); read != "" {
			id, engine = read, of
			told[[2]string{of.Path, read}] = true
		}
	}
	for _, device := range function.Children("fpga") {
		for _, engine := range children(device, "intel-fpga-fme.") {
			read(engine, engine.Child("pr"), "interface_id")
		}
	}
	for _, device := range function.Children("fpga_region") {
		for _, engine := range children(device, "dfl-fme.") {
			// There is one region for each port. All report the ID of the engine
			// (drivers/fpga/dfl-fme-pr.c).
			for _, partial := range children(engine, "dfl-fme-region.") {
				for _, region := range partial.Children("fpga_region") {
					read(engine, region, "compat_id")
				}
			}
		}
	}
	if err := errors.Join(errs...); len(told) != 1 || err != nil {
		return "", sysfs.Device{}, err
	}
	return id, engine, nil
}

// children returns the directories below a device whose names consist of one of the prefixes and a
// number.
func children(d sysfs.Device, prefixes ...string) (found []sysfs.Device) {
	for _, child := range d.Children("") {
		for _, prefix := range prefixes {
			number, ok := strings.CutPrefix(child.Name(), prefix)
			if ok && number != "" && strings.Trim(number, "0123456789") == "" {
				found = append(found, child)
			}
		}
	}
	return found
}

// resource returns the resource name of an accelerator function in the Intel plugin: the readable
// first digits of both IDs, and both complete IDs in the remaining 43 characters of the name. If an
// ID is unknown, it returns [discovery.AnyName].
func resource(region, afu string) string {
	both, err := hex.DecodeString(region + afu)
	if err != nil || region == "" || afu == "" {
		return discovery.AnyName
	}
	return fmt.Sprintf("fpga.intel.com/af-%s.%s.%s", region[:3], afu[:3], base64.RawURLEncoding.EncodeToString(both))
}

// bcom is the resource name of all ports in the b<>com plugin. The ports have this name only if the
// administrator configures the name.
const bcom = "b-com.com/accelerator"

// shortAddress returns a PCI address in the form of the b<>com software: without the domain, unless
// the domain is not 0000.
func shortAddress(address string) string { return strings.TrimPrefix(address, "0000:") }

// grant returns the addresses of the ports' functions for the b<>com software, in the environment
// variable of its code and in the variable of its documentation.
func grant(given []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
	if grant.API == discovery.ModeDRA || grant.Resource != bcom {
		return specs.ContainerEdits{}
	}
	var addresses []string
	for _, d := range given {
		address := shortAddress(d.Attributes.String(deviceattribute.StandardDeviceAttributePCIBusID))
		if !slices.Contains(addresses, address) {
			addresses = append(addresses, address)
		}
	}
	joined := strings.Join(addresses, ",")
	return specs.ContainerEdits{Env: []string{"ACCELERATOR_DEVICES=" + joined, "ACCELERATOR_UNITS=" + joined}}
}
