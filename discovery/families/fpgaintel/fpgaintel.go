// Package fpgaintel describes the ports of Intel's FPGA cards, through which the
// accelerator functions (AFUs) that are programmed into them are used, as either
// driver shows them: OPAE's own or the kernel's (DFL). Where the administrator
// named a directory of bitstreams, a port is programmed with the function that a
// claim asks for. It gives away no management engine (FME).
package fpgaintel

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/fpgaintel/program"
	"chandler.dev/discovery/sysfs"
)

// name is the family's, also for its root.
const name = "fpga-intel"

// Family is Intel's FPGA cards, and those of others that DFL drives.
var Family = &discovery.Family{
	Name: name,
	Doc:  "accelerator functions in Intel FPGAs, under OPAE or DFL",
	Match: []discovery.Match{
		{Class: "fpga", Name: "intel-fpga-dev.*"},
		{Class: "fpga_region", Name: "region*"}, // any FPGA's; those of DFL have ports
	},
	Describe:   describe,
	Grant:      grant,
	Parameters: []discovery.Parameter{AcceleratorFunction},
	Configure:  programmer(program.Port).configure,
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
	discovery.CountMembers(devices) // of cards with all of their ports
	return devices, problems
}

// describePort describes a port, which has its name by its number on the card:
// that of its node depends on what other cards there are.
func describePort(host *discovery.Host, function, port sysfs.Device) (d discovery.Device, ok bool, err error) {
	attrs := port.Attrs()
	number, ok := attrs.Uint("id")
	if !ok {
		d.Name = discovery.DeviceName(port)
		return d, false, errors.Join(errors.New("port without a number"), attrs.Err())
	}
	d, pciErr := discovery.PCI(host, function)
	if d.PartOf == nil { // no virtual function
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
		afu, region = "", "" // what the card is, it does not say
	}
	d.Attributes.SetString("afuID", afu)
	d.Attributes.SetString("profile", region)
	node, nodeErr := discovery.Node(port, "/dev")
	d.Edits.DeviceNodes = []*specs.DeviceNode{node}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	if dead {
		d.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "the card's firmware has crashed: its IDs are all ones"}
	}
	d.Classic = []discovery.Offer{{Resource: resource(region, afu), IDs: []string{port.Name()}}}
	if region != "" {
		// In its other modes Intel's plugin hands a card out with all of its ports.
		d.Classic = append(d.Classic, discovery.Offer{Resource: "fpga.intel.com/region-" + region, IDs: []string{engine.Name()}, Unit: engine.Name(), Named: true})
	}
	// So does b<>com's, whose IDs are those of PCI functions.
	id := shortAddress(function.Name())
	d.Classic = append(d.Classic, discovery.Offer{Resource: bcom, IDs: []string{id}, Unit: id, Named: true})
	return d, true, errors.Join(pciErr, attrs.Err(), afuErr, regionErr, nodeErr)
}

// crashed is what the driver reads as an ID from a card that does not answer.
const crashed = "ffffffffffffffffffffffffffffffff"

// idDigits matches the ID of an accelerator function or of the interface that
// the static part of the FPGA has for such.
var idDigits = regexp.MustCompile(`^[0-9a-f]{32}$`)

// readID returns an ID, "" if there is none.
func readID(d sysfs.Device, attribute string) (string, error) {
	attrs := d.Attrs()
	id, ok := attrs.Text(attribute)
	if ok && !idDigits.MatchString(id) {
		return "", fmt.Errorf("attribute %s: not 32 hexadecimal digits: %.48q", attribute, id)
	}
	return id, attrs.Err()
}

// interfaceID returns the ID of the interface that accelerator functions for the
// card must have been made for, and the management engine, which tells it and is
// on the physical function. There is none where that is not to be seen, as in a
// virtual machine, and where the card's regions say different things, since it is
// not said which one is the port's.
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
			// One for each port, all of which tell what the engine knows
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

// children returns the directories below a device that one of the prefixes
// begins and a number ends.
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

// resource returns what Intel's plugin calls an accelerator function: the
// beginnings of both IDs, for people, and both whole, in the 43 characters that a
// resource's name has left. It is "" where one of them is not known.
func resource(region, afu string) string {
	both, err := hex.DecodeString(region + afu)
	if err != nil || region == "" || afu == "" {
		return discovery.AnyName
	}
	return fmt.Sprintf("fpga.intel.com/af-%s.%s.%s", region[:3], afu[:3], base64.RawURLEncoding.EncodeToString(both))
}

// bcom is what b<>com's plugin calls any port. It is offered under this name
// only where the administrator says so.
const bcom = "b-com.com/accelerator"

// shortAddress returns a PCI address as b<>com's software writes it: without
// its domain, which stays where it is another than the first.
func shortAddress(address string) string { return strings.TrimPrefix(address, "0000:") }

// grant names the ports to b<>com's software by the addresses of their
// functions, under the name of variable that its code uses and under the one that
// its documentation does.
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
