// Package furiosa describes FuriosaAI accelerators, Warboy and RNGD, as their drivers show them in
// /sys/class/npu_mgmt and /sys/class/rngd_mgmt. It offers whole cards. The FuriosaAI plugin can
// also offer partitions of an RNGD (2core.12gb); the package does not create them.
//
// The drivers' sources are not public. The files are the files that furiosa-ai/device-api reads, as
// in its test data. The nodes are the same as in furiosa-ai/libfuriosa-kubernetes (pkg/cdi_spec).
package furiosa

import (
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

const vendor = "1ed2"

// Family recognises FuriosaAI accelerators.
var Family = &discovery.Family{
	Name: "furiosa",
	Doc:  "FuriosaAI's accelerators, Warboy and RNGD",
	Match: []discovery.Match{
		{Class: "npu_mgmt", Name: "npu[0-9]*_mgmt"},
		{Class: "rngd_mgmt", Name: "rngd!npu[0-9]*mgmt"},
		{Bus: "pci", Vendor: vendor},
	},
	Describe: describe,
	Labels:   labels,
}

// chips maps classes to the known facts of their accelerators.
var chips = map[string]struct {
	model string
	dir   string // directory of the nodes
	name  *regexp.Regexp
	nodes string // pattern for the rest of a node's name after the card's name
	cores int64
}{
	"npu_mgmt":  {"Warboy", "dev", regexp.MustCompile(`^(npu[0-9]{1,3})_mgmt$`), `|_mgmt|pe[0-9]+(-[0-9]+)?|ch[0-9]+`, 2},
	"rngd_mgmt": {"RNGD", "dev/rngd", regexp.MustCompile(`^rngd!(npu[0-9]{1,3})mgmt$`), `mgmt|pe[0-9]+(-[0-9]+)?|ch[0-9]+r?|dmar|bar[0-9]`, 8},
}

func describe(host *discovery.Host, found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
	return pci.ByClassDevices(host, found, "npu", "furiosa", func(mgmt sysfs.Device, functions map[string]sysfs.Device) (discovery.Device, error) {
		return describeCard(host, mgmt, functions)
	})
}

// describeCard describes a card by its management class device, which is not below the PCI
// function.
func describeCard(host *discovery.Host, mgmt sysfs.Device, functions map[string]sysfs.Device) (discovery.Device, error) {
	class := mgmt.Parent().Name()
	chip, known := chips[class]
	match := []string{}
	if known {
		match = chip.name.FindStringSubmatch(mgmt.Name())
	}
	if len(match) == 0 {
		return discovery.Device{Name: discovery.DeviceName(mgmt), Source: mgmt.Path}, fmt.Errorf("%s: the class device has no name of an accelerator", mgmt.Path)
	}
	card := match[1]
	d := discovery.Device{Attributes: discovery.Attributes{}, Capacity: discovery.Capacity{}}
	attrs := mgmt.Attrs()
	location, _ := attrs.Text("busname")
	function, known := functions[location]
	var err error
	switch {
	case known:
		d, err = pci.DescribeFunction(host, function)
		d.Includes = []string{function.Path}
	case location != "":
		err = fmt.Errorf("attribute busname: not the address of a FuriosaAI function: %.32q", location)
	}
	// The name does not depend on the location, which some drivers do not report.
	d.Name, d.Source = strings.ToLower(chip.model)+"-"+card, mgmt.Path
	d.Attributes.SetString("kind", "npu")
	d.Attributes.SetString("vendor", "furiosa")
	d.Attributes.SetString("model", chip.model)
	d.Capacity.Set("cores", chip.cores)
	serial, _ := attrs.Text("device_sn")
	uuid, _ := attrs.Text("device_uuid")
	d.Attributes.SetString("serial", serial)
	d.Attributes.SetString("uuid", uuid)
	d.Identity = uuid
	version, _ := attrs.Text("version")
	firmware, _ := attrs.Text("fw_version")
	d.Attributes.SetVersion("driverVersion", before(version))
	d.Attributes.SetVersion("firmwareVersion", before(firmware))
	d.Facts = facts(strings.ToLower(chip.model), version)
	if uuid != "" {
		d.PluginOffers = []discovery.Offer{{Resource: "furiosa.ai/" + strings.ToLower(chip.model), IDs: []string{uuid}}}
	}
	alive, _ := attrs.Text("alive") // only Warboy has the attribute
	nodes, nodesErr := nodesOf(host, mgmt, chip.dir, card, chip.nodes)
	d.Edits.DeviceNodes = nodes
	d.Health = discovery.NodeHealth(host, nodes)
	if alive == "0" {
		d.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "the driver reports that the firmware does not respond"}
	}
	return d, errors.Join(err, attrs.Err(), nodesErr)
}

// before returns the version number in a text such as "1.6.0, c1bebfd", without the commit.
func before(version string) string {
	numbers, _, _ := strings.Cut(version, ",")
	return strings.TrimSpace(numbers)
}

// nodesOf returns the nodes of a card: the management node, and the existing nodes of its cores,
// channels and memory. The kernel reports device numbers only for the management node.
func nodesOf(host *discovery.Host, mgmt sysfs.Device, dir, card, names string) ([]*specs.DeviceNode, error) {
	managing, err := discovery.Node(mgmt, "/dev")
	nodes := []*specs.DeviceNode{managing}
	entries, listErr := fs.ReadDir(host.FS, dir)
	if errors.Is(listErr, fs.ErrNotExist) {
		listErr = nil
	}
	own := regexp.MustCompile("^" + card + "(" + names + ")$")
	for _, entry := range entries {
		if node := "/" + dir + "/" + entry.Name(); own.MatchString(entry.Name()) && node != managing.Path {
			nodes = append(nodes, &specs.DeviceNode{Path: node, HostPath: node, Permissions: "rw"})
		}
	}
	slices.SortFunc(nodes[1:], func(a, b *specs.DeviceNode) int { return strings.Compare(a.Path, b.Path) })
	return nodes, errors.Join(err, listErr)
}

// labels are the labels of FuriosaAI's feature discovery, according to its documentation.
var labels = []discovery.Labels{{Set: map[string]string{
	"furiosa.ai/npu.count":                   "{silicon}",
	"furiosa.ai/npu.family":                  "{product}",
	"furiosa.ai/npu.product":                 "{product}",
	"furiosa.ai/npu.driver.version":          "{driverVersion}",
	"furiosa.ai/npu.driver.version.major":    "{driverVersion.major}",
	"furiosa.ai/npu.driver.version.minor":    "{driverVersion.minor}",
	"furiosa.ai/npu.driver.version.patch":    "{driverVersion.patch}",
	"furiosa.ai/npu.driver.version.metadata": "{commit}",
}}}

// facts returns the facts that only labels use.
func facts(product, version string) map[string]string {
	facts := map[string]string{"product": product}
	if _, commit, there := strings.Cut(version, ","); there {
		facts["commit"] = strings.TrimSpace(commit)
	}
	return facts
}
