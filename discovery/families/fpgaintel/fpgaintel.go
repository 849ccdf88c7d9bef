// Package fpgaintel describes the ports of Intel's FPGA cards, through which the
// accelerator functions (AFUs) that are programmed into them are used, as either
// driver shows them: OPAE's own or the kernel's (DFL). It programs nothing, gives
// away no management engine (FME), and knows no bitstreams.
package fpgaintel

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family is Intel's FPGA cards, and those of others that DFL drives.
var Family = &discovery.Family{
	Name: "fpga-intel",
	Doc:  "accelerator functions in Intel FPGAs, under OPAE or DFL",
	Match: []discovery.Match{
		{Class: "fpga", Name: "intel-fpga-dev.*"},
		{Class: "fpga_region", Name: "region*"}, // any FPGA's; those of DFL have ports
	},
	Describe: describe,
	Grant:    grant,
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
	if physical, ok := function.LinkTo("physfn"); ok {
		d.PartOf = &discovery.Whole{Name: discovery.DeviceName(physical)}
	} else {
		d.PartOf = &discovery.Whole{Name: d.Name}
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
	d.Offers = []discovery.Offer{{Resource: resource(region, afu), IDs: []string{port.Name()}}}
	if region != "" {
		// In its other modes Intel's plugin hands a card out with all of its ports.
		d.Offers = append(d.Offers, discovery.Offer{Resource: "fpga.intel.com/region-" + region, IDs: []string{engine}, Unit: engine, Optional: true})
	}
	return d, true, errors.Join(pciErr, attrs.Err(), afuErr, regionErr, nodeErr)
}

// crashed is what the driver reads as an ID from a card that does not answer.
const crashed = "ffffffffffffffffffffffffffffffff"

// idDigits matches the ID of an accelerator function or of the interface that
// the static part of the FPGA has for such.
var idDigits = regexp.MustCompile(`^[0-9a-f]{32}$`)

// readID returns an ID, "" if there is none.
func readID(d sysfs.Device, name string) (string, error) {
	attrs := d.Attrs()
	id, ok := attrs.Text(name)
	if ok && !idDigits.MatchString(id) {
		return "", fmt.Errorf("attribute %s: not 32 hexadecimal digits: %.48q", name, id)
	}
	return id, attrs.Err()
}

// interfaceID returns the ID of the interface that accelerator functions for the
// card must have been made for, and the name of the management engine, which tells
// it and is on the physical function. They are "" where that is not to be seen, as in a virtual
// machine, and where the card has several regions and it is not said which one is
// the port's.
func interfaceID(function sysfs.Device) (id, engine string, err error) {
	if physical, ok := function.LinkTo("physfn"); ok {
		function = physical
	}
	told := 0
	var errs []error
	read := func(of, d sysfs.Device, name string) {
		read, err := readID(d, name)
		if errs = append(errs, err); read != "" {
			id, engine = read, of.Name()
			told++
		}
	}
	for _, device := range function.Children("fpga") {
		for _, engine := range children(device, "intel-fpga-fme.") {
			read(engine, engine.Child("pr"), "interface_id")
		}
	}
	for _, device := range function.Children("fpga_region") {
		for _, engine := range children(device, "dfl-fme.") {
			for _, partial := range children(engine, "dfl-fme-region.") {
				for _, region := range partial.Children("fpga_region") {
					read(engine, region, "compat_id")
				}
			}
		}
	}
	if err := errors.Join(errs...); told != 1 || err != nil {
		return "", "", err
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
		return ""
	}
	return fmt.Sprintf("fpga.intel.com/af-%s.%s.%s", region[:3], afu[:3], base64.RawURLEncoding.EncodeToString(both))
}

// bcom is what b<>com's plugin calls any port. It is offered under this name
// only where the administrator says so.
const bcom = "b-com.com/accelerator"

// grant names the ports to b<>com's software by their addresses without domain.
func grant(given []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
	if grant.Resource != bcom {
		return specs.ContainerEdits{}
	}
	addresses := make([]string, len(given))
	for i, d := range given {
		address := d.Attributes.String(deviceattribute.StandardDeviceAttributePCIBusID)
		_, addresses[i], _ = strings.Cut(address, ":")
	}
	return specs.ContainerEdits{Env: []string{"ACCELERATOR_DEVICES=" + strings.Join(addresses, ",")}}
}
