// Package tenstorrent describes Tenstorrent AI accelerators as the tt-kmd driver shows them in
// /sys. It covers the chips that are PCI functions. Chips behind another chip, such as the second
// chip of an n300, belong to the same device. The package does not detect the cabling between
// boards.
package tenstorrent

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/pattern"
)

// Family recognises Tenstorrent accelerators.
var Family = &discovery.Family{
	Name:      "tenstorrent",
	Doc:       "Tenstorrent Grayskull, Wormhole and Blackhole accelerators",
	Match:     []discovery.Match{{Bus: "pci", Vendor: "1e52", Driver: "tenstorrent"}},
	Describe:  describe,
	Grant:     grant,
	Variables: variables,
}

// variables tune the libraries of TT-Metalium.
var variables = []string{
	"TT_METAL_LOGGER_LEVEL", "TT_METAL_SLOW_DISPATCH_MODE",
}

// architectures maps PCI device IDs to architectures.
var architectures = map[string]string{"faca": "grayskull", "401e": "wormhole", "b140": "blackhole"}

// resources maps the driver's card names to the resources of guhaneswaran/tt-k8s-device-plugin. A
// card that is not listed, such as a card of a Galaxy, needs a resource name from the
// administrator.
var resources = map[string]string{
	"n150": "n150",
	"n300": "n300", "n300l": "n300", "n300s": "n300",
	"p100a": "blackhole",
	"p150a": "blackhole", "p150b": "blackhole", "p150c": "blackhole",
	"p300a": "blackhole", "p300b": "blackhole", "p300c": "blackhole",
	"e75": "grayskull", "e150": "grayskull",
}

// chips is the number of chips behind one PCI function of a card. The function of an n300 also
// gives access to the second chip.
var chips = map[string]int64{
	"n150": 1,
	"n300": 2, "n300l": 2, "n300s": 2,
	"p100a": 1,
	"p150a": 1, "p150b": 1, "p150c": 1,
	"p300a": 1, "p300b": 1, "p300c": 1,
	"e75": 1, "e150": 1,
}

// hugepages is the directory where the Tenstorrent installer mounts pages of 1 GiB. The software
// needs them on a host without an IOMMU.
const hugepages = "/dev/hugepages-1G"

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, function := range found {
		d, err := describeChip(host, function)
		if err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		devices = append(devices, d)
	}
	return devices, problems
}

func describeChip(host *discovery.Host, function sysfs.Device) (discovery.Device, error) {
	d, err := pci.DescribeFunction(host, function)
	errs := []error{err}
	d.Attributes.SetString("kind", "npu")
	d.Attributes.SetString("vendor", "tenstorrent")
	d.Attributes.SetString("architecture", architectures[d.Attributes.String("pciDevice")])
	if version, err := host.ReadText("/sys/module/tenstorrent/version"); err == nil {
		d.Attributes.SetVersion("driverVersion", version)
	}
	// Tenstorrent software searches /sys for the chips. The bind mount does not include file
	// systems that are mounted below, such as debugfs.
	d.Edits.Mounts = []*specs.Mount{{HostPath: "/sys", ContainerPath: "/sys", Options: []string{"ro", "nosuid", "nodev", "noexec", "bind", "rprivate"}}}
	if host.FileExists(hugepages) {
		d.Edits.Mounts = append(d.Edits.Mounts, &specs.Mount{HostPath: hugepages, ContainerPath: hugepages, Options: []string{"rw", "nosuid", "nodev", "rbind", "rprivate"}})
	}
	for _, chip := range function.Children("tenstorrent") { // one, "tenstorrent!0"
		errs = append(errs, setTelemetry(&d, chip))
		node, err := discovery.Node(chip, "/dev")
		errs = append(errs, err)
		d.Edits.DeviceNodes = []*specs.DeviceNode{node}
		offer := discovery.Offer{Resource: discovery.AnyName, IDs: []string{index(node)}}
		if name := resources[d.Attributes.String("model")]; name != "" {
			offer.Resource = "tenstorrent.com/" + name
		}
		d.PluginOffers = []discovery.Offer{offer}
	}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	hot, err := temperature(function)
	if hot.Status == discovery.Unhealthy {
		d.Health = hot
	}
	return d, errors.Join(append(errs, err)...)
}

// setTelemetry sets the attributes that the chip's firmware reports. A missing file means that the
// firmware does not support the value.
func setTelemetry(d *discovery.Device, chip sysfs.Device) error {
	attrs := chip.Attrs()
	if card, ok := attrs.RequiredText("tt_card_type"); ok && card != "unknown" {
		d.Attributes.SetString("model", card)
		if n := chips[card]; n > 0 {
			d.Capacity.Set("chips", n)
		}
	}
	// The board's number is common to all chips of a board, so it identifies linked chips. The chip
	// also has a number of its own.
	serial, serialErr := number(attrs, "tt_serial")
	if serial != "" {
		d.Attributes.SetString("serial", serial)
		d.Attributes.SetString("fabric", "board-"+serial)
	}
	asic, asicErr := number(attrs, "tt_asic_id")
	d.Attributes.SetString("uuid", asic)
	versionErr := setFirmware(d.Attributes, attrs)
	// While the chip's number is unreadable, the board's number must not replace it. Otherwise the
	// chip would look like another chip once its number is readable.
	if asic != "" || errors.Join(attrs.Err(), asicErr) == nil {
		d.Identity = cmp.Or(asic, serial)
	}
	return errors.Join(attrs.Err(), serialErr, asicErr, versionErr)
}

// numberText is the driver's form of the numbers of boards and chips ("%016llX").
var numberText = pattern.Lazy(`^[0-9A-F]{16}$`)

// number returns the number of a board or chip, "" if the vendor assigned none.
func number(attrs *sysfs.Attrs, name string) (string, error) {
	text, ok := attrs.RequiredText(name)
	if ok && !numberText().MatchString(text) {
		return "", fmt.Errorf("attribute %s: not 16 hexadecimal digits: %.32q", name, text)
	}
	if strings.Trim(text, "0") == "" {
		return "", nil
	}
	return text, nil
}

// versionText is the driver's form of a version. A component of 255 means that the firmware did not
// report the component.
var versionText = pattern.Lazy(`^[0-9]{1,3}(\.[0-9]{1,3}){3}$`)

// setFirmware sets the version of the firmware. The driver writes four numbers; the last number is
// 0 in releases.
func setFirmware(a discovery.Attributes, attrs *sysfs.Attrs) error {
	version, ok := attrs.RequiredText("tt_fw_bundle_ver")
	if !ok {
		return nil
	}
	if !versionText().MatchString(version) {
		return fmt.Errorf("attribute tt_fw_bundle_ver: not four numbers: %.32q", version)
	}
	a.SetVersion("firmwareVersion", strings.TrimSuffix(version, ".0"))
	return nil
}

// temperature returns an unhealthy reading if the chip has reached the limit in its firmware. It
// does not check the firmware's heartbeat, which a single reading does not show.
func temperature(function sysfs.Device) (discovery.Health, error) {
	for _, hwmon := range function.Children("hwmon") {
		attrs := hwmon.Attrs()
		now, read := attrs.Int("temp1_input") // in thousandths of a degree
		limit, known := attrs.Int("temp1_max")
		if read && known && limit > 0 && now >= limit {
			return discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionOverTemperature, Reason: fmt.Sprintf("the temperature has reached the limit of %d °C", limit/1000)}, attrs.Err()
		}
		if err := attrs.Err(); err != nil {
			return discovery.Health{}, fmt.Errorf("temperature: %w", err)
		}
	}
	return discovery.Health{}, nil
}

// index returns the number of a chip, which is the name of its node.
func index(node *specs.DeviceNode) string { return path.Base(node.HostPath) }

// grant returns the host's numbers of the chips for the Tenstorrent software.
func grant(given []discovery.Device, _ discovery.Grant) specs.ContainerEdits {
	var chips []string
	for _, d := range given {
		for _, node := range d.Edits.DeviceNodes {
			chips = append(chips, index(node))
		}
	}
	if len(chips) == 0 {
		return specs.ContainerEdits{}
	}
	return specs.ContainerEdits{Env: []string{"TT_VISIBLE_DEVICES=" + strings.Join(chips, ",")}}
}
