// Package fpgaxilinx describes the accelerator cards of AMD and Xilinx: Alveo FPGAs by the XRT
// drivers xocl and xclmgmt, and MA35D transcoders. It does not flash shells or load bitstreams, and
// does not describe FPGAs in a system on a chip.
package fpgaxilinx

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Family recognises AMD and Xilinx cards. Other vendors put these FPGAs on cards with their own PCI
// vendor ID, so the driver decides.
var Family = &discovery.Family{
	Name: "fpga-xilinx",
	Doc:  "AMD Xilinx Alveo FPGAs (U30 and V70 among them) and MA35D transcoders",
	Match: []discovery.Match{
		{Bus: "pci", Driver: "xocl"},
		{Bus: "pci", Driver: "xclmgmt"},
		{Class: "misc", Name: "ama_transcoder*"},
		{Bus: "pci", Vendor: "10ee", PCIClass: "1200", Unbound: true},
	},
	Describe: describe,
}

// users lists the PCI device IDs of user functions of Alveo cards, which xocl binds
// (src/runtime_src/core/pcie/driver/linux/xocl/devices.h in XRT). The list does not contain 7021,
// which any design of the AMD tools may use, or the management functions, because a card is usable
// without them.
var users = []string{
	"5001", "5005", "5009", "500d", "5011", "5015", "5019", "501d", "5021", "503d", "504f",
	"5051", "5059", "505d", "5061", "506d", "5075", "513d",
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	management := make(map[string]sysfs.Device) // by slot
	for _, kernel := range found {
		if kernel.Driver() == "xclmgmt" {
			management[slot(kernel)] = kernel
		}
	}
	for _, kernel := range found {
		d, ok, err := discovery.Device{}, true, error(nil)
		switch {
		case !sysfs.IsPCIAddress(kernel.Name()):
			d, ok, err = describeTranscoder(host, kernel)
		case kernel.Driver() == "":
			d, err = pci.DescribeUnbound(host, kernel, "fpga", "xilinx")
			ok = slices.Contains(users, d.Attributes.String("pciDevice"))
			if !ok && d.Attributes.String("pciDevice") != "" {
				continue
			}
		case kernel.Driver() == "xocl":
			d, err = describeFPGA(host, kernel, management[slot(kernel)])
		default:
			continue // a management function is part of a card
		}
		if err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		if ok {
			devices = append(devices, d)
		}
	}
	return devices, append(problems, joinU30(devices)...)
}

// slot returns the address of a PCI function without the function number.
func slot(function sysfs.Device) string {
	return strings.TrimRight(strings.TrimRight(function.Name(), "01234567"), ".")
}

// describeFPGA describes the user function of an FPGA. Containers may also need the management
// function, which is not visible in virtual machines.
func describeFPGA(host *discovery.Host, user, management sysfs.Device) (discovery.Device, error) {
	d, err := pci.DescribeFunction(host, user)
	errs := []error{err}
	d.Attributes.SetString("kind", "fpga")
	d.Attributes.SetString("vendor", "xilinx")
	shell, resource, shellErr := readShell(user)
	d.Attributes.SetString("profile", shell)
	d.PluginOffers = []discovery.Offer{{Resource: cmp.Or(resource, discovery.AnyName), IDs: []string{user.Name()}}}
	nodes, nodesErr := nodes(host, user, management)
	d.Edits.DeviceNodes = nodes
	d.Health = discovery.NodeHealth(host, nodes)
	attrs := user.Attrs()
	if offline, _ := attrs.Uint("dev_offline"); offline == 1 {
		d.Health = unhealthy(user, "the card is offline, as it is while it is reset")
	}
	err = errors.Join(append(errs, shellErr, setCard(&d, user), nodesErr, attrs.Err())...)
	for _, missing := range []error{errNoRenderNode, errNoShell} {
		if errors.Is(err, missing) {
			d.Health = unhealthy(user, missing.Error())
		}
	}
	return d, err
}

// unhealthy returns the health of a card that may be in a reset. Another reset does not help. xbutil
// takes the address of the user function; releases after 2024.2 have it as xrt-smi only (XRT, xrt-smi).
func unhealthy(user sysfs.Device, reason string) discovery.Health {
	fix := fmt.Sprintf("xbutil examine -d %s   # xrt-smi in XRT 2025 and later; if no reset is in progress, the card needs a new shell, which an administrator flashes with xbmgmt", user.Name())
	return discovery.Health{Status: discovery.Unhealthy, Reason: reason, Fix: fix}
}

// During a reset the driver removes the shell's name and the render node. A device that was
// described before keeps its last description.
var (
	errNoShell      = errors.New("no shell: the card is not flashed, or is being reset")
	errNoRenderNode = errors.New("the kernel has no render node for it")
)

// readShell returns the name and timestamp of the flashed shell, and the resource name of the card
// in the AMD plugin. The resource is "" if the name is invalid in Kubernetes.
func readShell(user sysfs.Device) (shell, resource string, err error) {
	rom, ok := child(user, "rom.", "rom")
	if !ok {
		return "", "", errNoShell
	}
	attrs := rom.Attrs()
	name, named := attrs.Text("VBNV") // vendor, board, name and version
	time, timed := attrs.Text("timestamp")
	if err := attrs.Err(); err != nil {
		return "", "", fmt.Errorf("shell: %w", err)
	}
	if !named || !timed {
		return "", "", errNoShell
	}
	shell = name + "-" + time
	if suffix := resourceSuffix(shell); suffix != "" {
		resource = "amd.com/" + suffix
	}
	return shell, resource, nil
}

// invalid matches characters that a resource name must not contain.
var invalid = regexp.MustCompile(`[^A-Za-z0-9_.-]+`)

// resourceSuffix returns the shell's name as the last part of a resource name. It returns "" if the
// name is too long, because a shortened name could belong to another shell.
func resourceSuffix(shell string) string {
	suffix := strings.Trim(invalid.ReplaceAllString(shell, "-"), "_.-")
	if len(suffix) > 63 {
		return ""
	}
	return suffix
}

// setCard sets the card's serial number and model from its controller: xmc, or hwmon_sdm on a V70.
func setCard(d *discovery.Device, user sysfs.Device) error {
	controller, ok := child(user, "xmc.u.", "hwmon_sdm.u.")
	if !ok {
		return nil
	}
	attrs := controller.Attrs()
	d.Identity, _ = attrs.Text("serial_num")
	d.Attributes.SetString("serial", d.Identity)
	board, _ := attrs.Text("bd_name")
	d.Attributes.SetString("model", board)
	return attrs.Err()
}

// child returns the first directory below a device with one of the prefixes, in the order of the
// prefixes. XRT appends numbers to the names.
func child(d sysfs.Device, prefixes ...string) (sysfs.Device, bool) {
	children := d.Children("")
	for _, prefix := range prefixes {
		for _, child := range children {
			if strings.HasPrefix(child.Name(), prefix) {
				return child, true
			}
		}
	}
	return sysfs.Device{}, false
}

// nodes returns the nodes of an FPGA in the order of the AMD plugin: the node of the management
// function, the render node, and the node of the QDMA engine.
func nodes(host *discovery.Host, user, management sysfs.Device) (nodes []*specs.DeviceNode, err error) {
	var errs []error
	add := func(d sysfs.Device, dir string) {
		node, err := node(d, dir)
		nodes, errs = append(nodes, node), append(errs, err)
	}
	if management.Path != "" {
		attrs := management.Attrs()
		if instance, ok := attrs.Uint("instance"); ok {
			add(sysfs.At(host.FS, fmt.Sprintf("sys/class/xrt_mgmt/xclmgmt%d", instance)), "/dev")
		} else {
			errs = append(errs, fmt.Errorf("management function %s: has no instance", management.Name()), attrs.Err())
		}
	}
	drm := user.Children("drm")
	if i := slices.IndexFunc(drm, func(d sysfs.Device) bool { return strings.HasPrefix(d.Name(), "renderD") }); i >= 0 {
		add(drm[i], "/dev/dri")
	} else {
		errs = append(errs, errNoRenderNode)
	}
	if engine, ok := child(user, "dma.qdma.u"); ok {
		if nodes := engine.Children("xrt_user"); len(nodes) > 0 {
			add(nodes[0], "/dev")
		} else {
			add(engine.Child(fmt.Sprintf("xfpga!dma.qdma.u%d.0", instance(user))), "/dev")
		}
	}
	return nodes, errors.Join(errs...)
}

// node is discovery.Node with the permissions of the AMD plugin.
func node(d sysfs.Device, dir string) (*specs.DeviceNode, error) {
	node, err := discovery.Node(d, dir)
	node.Permissions = "rwm"
	return node, err
}

// instance returns the XRT number of a PCI function, which encodes the PCI address.
func instance(function sysfs.Device) uint64 {
	var domain, bus, device, number uint64
	if _, err := fmt.Sscanf(function.Name(), "%x:%x:%x.%x", &domain, &bus, &device, &number); err != nil {
		return 0
	}
	return domain<<16 | bus<<8 | device<<3 | number
}

// u30 is part of the shell names of U30 cards.
const u30 = "xilinx_u30"

// isU30 reports whether the FPGA has the shell of a U30 card.
func isU30(d *discovery.Device) bool {
	return strings.Contains(d.Attributes.String("profile"), u30)
}

// joinU30 combines the FPGAs of each U30 card, which share the card's serial number, into one unit
// of the device plugin API. The unit's ID is the address of the first FPGA. An FPGA whose card is
// unknown has no ID in that API.
func joinU30(devices []discovery.Device) (problems []discovery.Problem) {
	cards := make(map[string][]*discovery.Device) // by serial number
	lost := false                                 // there is an FPGA that may belong to any U30 card
	withhold := func(d *discovery.Device, why string) {
		d.PluginOffers = nil
		problems = append(problems, discovery.Problem{Device: d.Name, Err: errors.New(why)})
	}
	for i := range devices {
		d := &devices[i]
		switch {
		case d.Identity != "":
			cards[d.Identity] = append(cards[d.Identity], d)
		case isU30(d):
			lost = true
			withhold(d, "this FPGA of a U30 has no serial number, so its card is unknown")
		case d.Attributes.String("profile") == "":
			lost = true
		}
	}
	for i := range devices {
		d := &devices[i]
		card := cards[d.Identity]
		switch {
		case !slices.ContainsFunc(card, isU30):
			continue
		case len(card) == 1 && lost:
			withhold(d, "the other FPGA of this U30 card may be unreadable")
			continue
		case len(card) > 1:
			d.PartOf = &discovery.Silicon{Name: card[0].Name + "-card"} // not the name of any single FPGA
		}
		address := card[0].Attributes.String(deviceattribute.StandardDeviceAttributePCIBusID)
		shell := d.PluginOffers // as in the plugin with U30AllocUnit=Device and U30NameConvention=ExactName
		d.PluginOffers = []discovery.Offer{{Resource: "amd.com/ama_u30", IDs: []string{address}, Unit: "u30-" + d.Identity}}
		for _, offer := range shell {
			if !offer.IsUnnamed() {
				offer.Optional = true
				d.PluginOffers = append(d.PluginOffers, offer)
			}
		}
	}
	discovery.CountMembers(devices)
	return problems
}

// describeTranscoder describes an ASIC of an MA35D. The node has no parent in sysfs; the attribute
// bus_id contains the PCI address. Without the address the ASIC is left out.
func describeTranscoder(host *discovery.Host, misc sysfs.Device) (d discovery.Device, ok bool, err error) {
	d.Name = discovery.DeviceName(misc)
	attrs := misc.Attrs()
	address, _ := attrs.Text("bus_id")
	if !sysfs.IsPCIAddress(address) {
		return d, false, errors.Join(fmt.Errorf("attribute bus_id: not a PCI address: %.32q", address), attrs.Err())
	}
	functions := sysfs.At(host.FS, "sys/bus/pci/devices")
	function, ok := functions.LinkTo(address)
	if !ok {
		function = functions.Child(address)
	}
	d, pciErr := pci.DescribeFunction(host, function)
	d.Source = misc.Path
	d.Attributes.SetString("kind", "other")
	d.Attributes.SetString("vendor", "amd")
	info, _ := attrs.Text("device_info")
	product := parseInfo(info)
	d.Attributes.SetString("model", product["Product name"])
	serial := product["Product serial number"]
	d.Attributes.SetString("serial", serial)
	if serial != "" { // the serial number belongs to the card, which has two ASICs
		d.Identity = serial + "/" + address
	}
	node, nodeErr := node(misc, "/dev")
	d.Edits.DeviceNodes = []*specs.DeviceNode{node}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	d.PluginOffers = []discovery.Offer{{Resource: "amd.com/MA35", IDs: []string{address}}}
	return d, true, errors.Join(pciErr, attrs.Err(), nodeErr)
}

// parseInfo parses lines such as "Product name = MA35D".
func parseInfo(text string) map[string]string {
	info := make(map[string]string)
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, "="); ok {
			info[strings.TrimSpace(key)] = strings.TrimSpace(value)
		}
	}
	return info
}
