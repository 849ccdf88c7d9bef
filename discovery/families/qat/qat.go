// Package qat describes virtual functions of Intel QuickAssist devices that are bound to vfio or
// igb_uio for programs in user space, and physical functions without a driver. It does not describe
// other physical functions or functions that the kernel uses, and does not bind drivers.
package qat

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/pattern"
)

// Family recognises Intel QuickAssist.
var Family = &discovery.Family{
	Name: "qat",
	Doc:  "Intel QuickAssist (QAT) virtual functions under vfio or igb_uio",
	Match: []discovery.Match{
		{Bus: "pci", Vendor: "8086", Driver: "vfio-pci"},
		{Bus: "pci", Vendor: "8086", Driver: "qat_vfio_pci"}, // vfio with live migration
		{Bus: "pci", Vendor: "8086", Driver: igbUIO},
		{Bus: "pci", Vendor: "8086", PCIClass: "0b40", Unbound: true},
	},
	Describe:    describe,
	CommonNodes: pci.VFIOControl(),
	Grant:       grant,
	Provision:   provision,
	Variables:   []string{"QAT_POLICY", "QAT_SECTION_NAME"}, // variables of qatlib and of the QAT engine for OpenSSL
	Labels:      []discovery.Labels{{Set: map[string]string{"intel.feature.node.kubernetes.io/qat": "true"}}},
}

const igbUIO = "igb_uio"

// architectures maps PCI device IDs of virtual functions to the kernel's driver names of their
// physical functions.
var architectures = map[string]string{
	"0442": "dh895xcc", "0443": "dh895xcc",
	"18a1": "c4xxx",
	"19e3": "c3xxx",
	"37c9": "c6xx",
	"6f55": "d15xx",
	"4941": "4xxx", "4943": "4xxx", "4945": "4xxx",
	"4947": "420xx",
	"4949": "6xxx",
}

// physicals maps PCI device IDs of physical functions to the same names. Without a driver, a
// physical function has no virtual functions.
var physicals = map[string]string{
	"0435": "dh895xcc",
	"18a0": "c4xxx",
	"19e2": "c3xxx",
	"37c8": "c6xx",
	"6f54": "d15xx",
	"4940": "4xxx", "4942": "4xxx", "4944": "4xxx",
	"4946": "420xx",
	"4948": "6xxx",
}

// configurable lists the architectures with configurable services.
var configurable = []string{"4xxx", "420xx", "6xxx"}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	parents := make(map[string]physical)
	for _, function := range found {
		if function.Driver() == "" {
			d, ok, err := describeUnbound(host, function)
			problems = append(problems, discovery.Problems(d.Name, err)...)
			if ok {
				devices = append(devices, d)
			}
			continue
		}
		d, err := pci.DescribeFunction(host, function)
		id := d.Attributes.String("pciDevice")
		if id == "" && err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		if architectures[id] == "" {
			continue
		}
		var pf physical
		if parent, ok := function.LinkTo("physfn"); ok {
			if _, read := parents[parent.Path]; !read {
				parents[parent.Path] = readPhysical(host, parent)
			}
			pf = parents[parent.Path]
		}
		nodesErr := addNodes(&d, host, function)
		addServices(&d, host, function, architectures[id], pf)
		for _, err := range []error{err, pf.err, nodesErr} {
			if err != nil {
				problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
			}
		}
		devices = append(devices, d)
	}
	return devices, problems
}

// describeUnbound describes a physical function without a driver. ok is false for a virtual
// function, which may still be waiting for its driver.
func describeUnbound(host *discovery.Host, function sysfs.Device) (d discovery.Device, ok bool, err error) {
	d, err = pci.DescribeUnbound(host, function, "crypto", "intel")
	id := d.Attributes.String("pciDevice")
	d.Attributes.SetString("architecture", physicals[id])
	if id == "" {
		return d, false, err
	}
	return d, physicals[id] != "", err
}

// addServices adds the properties that depend on the physical function, which is not visible in a
// virtual machine.
func addServices(d *discovery.Device, host *discovery.Host, function sysfs.Device, architecture string, pf physical) {
	d.Attributes.SetString("kind", "crypto")
	d.Attributes.SetString("vendor", "intel")
	d.Attributes.SetString("architecture", architecture)
	d.Attributes.SetString("function", "virtual") // known by the device ID, also in a virtual machine
	d.Attributes.SetString("profile", pf.profile())
	d.Health = pf.health
	if d.Health.Status != discovery.Unhealthy {
		d.Health = nodeHealth(host, function, d.Edits.DeviceNodes)
	}
	if pf.err == nil {
		address := d.Attributes.String(deviceattribute.StandardDeviceAttributePCIBusID)
		d.PluginOffers = []discovery.Offer{{Resource: "qat.intel.com/" + pf.suffix(architecture), IDs: []string{address}}}
	}
}

// addNodes adds the nodes of the function, and for igb_uio the directory for mapping the function's
// memory.
func addNodes(d *discovery.Device, host *discovery.Host, function sysfs.Device) (err error) {
	if function.Driver() != igbUIO {
		d.Edits.DeviceNodes, err = pci.VFIONodes(host, function)
		return err
	}
	uios := function.Children("uio")
	if len(uios) == 0 {
		return nil // the health reports the missing node
	}
	node, err := discovery.Node(uios[0], "/dev")
	d.Edits.DeviceNodes = []*specs.DeviceNode{node}
	dir := "/sys/class/uio/" + uios[0].Name() + "/device"
	d.Edits.Mounts = []*specs.Mount{{HostPath: dir, ContainerPath: dir, Options: []string{"rw", "nosuid", "nodev", "rbind", "rprivate"}}}
	return err
}

// nodeHealth returns the health of a function's nodes.
func nodeHealth(host *discovery.Host, function sysfs.Device, nodes []*specs.DeviceNode) discovery.Health {
	if function.Driver() != igbUIO {
		return pci.VFIOHealth(host, function, nodes)
	}
	return discovery.NodeHealth(host, nodes)
}

// physical holds the properties of a physical function that apply to its virtual functions
// (Documentation/ABI/testing/sysfs-driver-qat and debugfs-driver-qat).
type physical struct {
	services []string // in the order of the attribute; empty if unknown
	health   discovery.Health
	err      error
}

func readPhysical(host *discovery.Host, function sysfs.Device) (pf physical) {
	attrs := function.Attrs()
	state, _ := attrs.Text("qat/state")
	text, _ := attrs.Text("qat/cfg_services")
	if state == "" && text == "" { // before Linux 6.0, which added both
		text = servicesEnabled(host, function)
	}
	if pf.err = attrs.Err(); pf.err == nil {
		pf.services, pf.err = parseServices(text)
	}
	if pf.err != nil {
		pf.err = fmt.Errorf("physical function %s: %w", function.Name(), pf.err)
	}
	heartbeat, _ := host.ReadText(debugfs(function) + "/heartbeat/status")
	switch {
	case state == "down":
		pf.health = discovery.Health{
			Status: discovery.Unhealthy, Reason: "physical function " + function.Name() + " is down",
			Fix: fmt.Sprintf(`sudo sh -c "echo up > /sys/bus/pci/devices/%s/qat/state"`, function.Name()), // Documentation/ABI/testing/sysfs-driver-qat
		}
	case heartbeat == "-1":
		pf.health = discovery.Health{
			Status: discovery.Unhealthy, Reason: "physical function " + function.Name() + " does not respond",
			Fix: resetFix(function),
		}
	}
	return pf
}

// resetFix returns the command that repairs a physical function whose heartbeat fails. If
// auto_reset is on, the driver resets the function itself after a failed heartbeat (attribute since Linux
// 6.8, Documentation/ABI/testing/sysfs-driver-qat). A reset by the attribute of the PCI
// function does not restart the driver's firmware (adf_err_handler in qat_common/adf_aer.c).
func resetFix(function sysfs.Device) string {
	if function.HasEntry("qat/auto_reset") {
		return fmt.Sprintf(`sudo sh -c "echo on > /sys/bus/pci/devices/%s/qat/auto_reset"`, function.Name())
	}
	return fmt.Sprintf("sudo dmesg | grep %s   # shows the kernel's messages; if the function does not respond again, reboot the node", function.Name())
}

// debugfs returns the directory of a physical function in debugfs. The directory may not exist or
// may be inaccessible. Its path does not depend on the bridges before the function.
func debugfs(function sysfs.Device) string {
	return "/sys/kernel/debug/qat_" + function.Driver() + "_" + function.Name()
}

// servicesEnabled returns the services from the configuration in debugfs, "" if they are unknown.
func servicesEnabled(host *discovery.Host, function sysfs.Device) string {
	text, err := host.ReadText(debugfs(function) + "/dev_cfg")
	if err != nil {
		return ""
	}
	return parseConfig(text)
}

// parseConfig returns the value of ServicesEnabled in the section GENERAL, "" if there is none
// (qat_dev_cfg_show in drivers/crypto/intel/qat/qat_common/adf_cfg.c).
func parseConfig(text string) string {
	section := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "[") {
			section = strings.Trim(line, "[]")
			continue
		}
		key, value, _ := strings.Cut(line, "=")
		if section == "GENERAL" && strings.TrimSpace(key) == "ServicesEnabled" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// serviceNames matches "dc" and "sym;asym". The kernel combines at most three services. The limits
// keep the resulting resource name short enough.
var serviceNames = pattern.Lazy(`^[a-z0-9]{1,15}(;[a-z0-9]{1,15}){0,2}$`)

func parseServices(text string) ([]string, error) {
	if text == "" {
		return nil, nil
	}
	if !serviceNames().MatchString(text) {
		return nil, fmt.Errorf("attribute qat/cfg_services: not a list of services: %.32q", text)
	}
	return strings.Split(text, ";"), nil
}

// profile lists the services in alphabetical order, because their order is irrelevant.
func (pf *physical) profile() string {
	return strings.Join(slices.Sorted(slices.Values(pf.services)), ";")
}

// suffix returns the last part of the Intel plugin's resource name for functions with these
// services.
func (pf *physical) suffix(architecture string) string {
	if len(pf.services) == 0 || !slices.Contains(configurable, architecture) {
		return "generic"
	}
	if pf.profile() == "asym;sym" {
		return "cy"
	}
	return strings.Join(pf.services, "-")
}

// grant numbers the functions in the form that DPDK programs expect.
func grant(given []discovery.Device, _ discovery.Grant) specs.ContainerEdits {
	var edits specs.ContainerEdits
	for i, d := range given {
		address := d.Attributes.String(deviceattribute.StandardDeviceAttributePCIBusID)
		edits.Env = append(edits.Env, fmt.Sprintf("QAT%d=%s", i, address))
	}
	return edits
}
