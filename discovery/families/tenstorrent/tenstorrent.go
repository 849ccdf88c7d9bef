// Package tenstorrent describes Tenstorrent's AI accelerators as the tt-kmd
// driver shows them in /sys. It covers the chips that are PCI functions; those
// that are only reached through another chip, such as the second one of an
// n300, come with it. It does not know how boards are cabled to each other.
package tenstorrent

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"regexp"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family is Tenstorrent's accelerators.
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

// architectures are the chips by their PCI device IDs.
var architectures = map[string]string{"faca": "grayskull", "401e": "wormhole", "b140": "blackhole"}

// resources are what guhaneswaran/tt-k8s-device-plugin offers of the cards that
// it knows, by what the driver calls them. A card that is not listed, such as
// one of a Galaxy, has no name in the classic API until it is given one.
var resources = map[string]string{
	"n150": "n150",
	"n300": "n300", "n300l": "n300", "n300s": "n300",
	"p100a": "blackhole",
	"p150a": "blackhole", "p150b": "blackhole", "p150c": "blackhole",
	"p300a": "blackhole", "p300b": "blackhole", "p300c": "blackhole",
	"e75": "grayskull", "e150": "grayskull",
}

// chips are how many chips come with one PCI function of a card: that of an n300
// is also the only way to its second chip.
var chips = map[string]int64{
	"n150": 1,
	"n300": 2, "n300l": 2, "n300s": 2,
	"p100a": 1,
	"p150a": 1, "p150b": 1, "p150c": 1,
	"p300a": 1, "p300b": 1, "p300c": 1,
	"e75": 1, "e150": 1,
}

// hugepages is where Tenstorrent's installer mounts pages of 1 GiB, which its
// software needs on a host without an IOMMU.
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
	d, err := discovery.PCI(host, function)
	errs := []error{err}
	d.Attributes.SetString("kind", "npu")
	d.Attributes.SetString("vendor", "tenstorrent")
	d.Attributes.SetString("architecture", architectures[d.Attributes.String("pciDevice")])
	if version, err := host.ReadText("/sys/module/tenstorrent/version"); err == nil {
		d.Attributes.SetVersion("driverVersion", version)
	}
	// Its software looks the chips up in /sys. File systems mounted below, such as
	// debugfs, do not come with it.
	d.Edits.Mounts = []*specs.Mount{{HostPath: "/sys", ContainerPath: "/sys", Options: []string{"ro", "nosuid", "nodev", "noexec", "bind", "rprivate"}}}
	if host.Exists(hugepages) {
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
		d.Classic = []discovery.Offer{offer}
	}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	hot, err := temperature(function)
	if hot.Status == discovery.Unhealthy {
		d.Health = hot
	}
	return d, errors.Join(append(errs, err)...)
}

// setTelemetry sets what the chip's firmware tells of itself. A file that is
// not there is one that this firmware does not know of.
func setTelemetry(d *discovery.Device, chip sysfs.Device) error {
	attrs := chip.Attrs()
	if card, ok := attrs.Written("tt_card_type"); ok && card != "unknown" {
		d.Attributes.SetString("model", card)
		if n := chips[card]; n > 0 {
			d.Capacity.Set("chips", n)
		}
	}
	// The board's number, which the chips of a board have in common and by which
	// they are known to be linked, and the chip's own.
	serial, serialErr := number(attrs, "tt_serial")
	if serial != "" {
		d.Attributes.SetString("serial", serial)
		d.Attributes.SetString("fabric", "board-"+serial)
	}
	asic, asicErr := number(attrs, "tt_asic_id")
	d.Attributes.SetString("uuid", asic)
	versionErr := setFirmware(d.Attributes, attrs)
	// While the chip's number cannot be read, the board's must not stand in for
	// it: the chip would be taken for another once it can be.
	if asic != "" || errors.Join(attrs.Err(), asicErr) == nil {
		d.Identity = cmp.Or(asic, serial)
	}
	return errors.Join(attrs.Err(), serialErr, asicErr, versionErr)
}

// numberText is how the driver writes the numbers of boards and chips ("%016llX").
var numberText = regexp.MustCompile(`^[0-9A-F]{16}$`)

// number returns the number of a board or chip, "" if none was ever given.
func number(attrs *sysfs.Attrs, name string) (string, error) {
	text, ok := attrs.Written(name)
	if ok && !numberText.MatchString(text) {
		return "", fmt.Errorf("attribute %s: not 16 hexadecimal digits: %.32q", name, text)
	}
	if strings.Trim(text, "0") == "" {
		return "", nil
	}
	return text, nil
}

// versionText is how the driver writes a version. A byte of 255 is one that the
// firmware did not tell.
var versionText = regexp.MustCompile(`^[0-9]{1,3}(\.[0-9]{1,3}){3}$`)

// setFirmware sets the version of the firmware. Of the four numbers that the
// driver writes the last is 0 in releases.
func setFirmware(a discovery.Attributes, attrs *sysfs.Attrs) error {
	version, ok := attrs.Written("tt_fw_bundle_ver")
	if !ok {
		return nil
	}
	if !versionText.MatchString(version) {
		return fmt.Errorf("attribute tt_fw_bundle_ver: not four numbers: %.32q", version)
	}
	a.SetVersion("firmwareVersion", strings.TrimSuffix(version, ".0"))
	return nil
}

// temperature reads whether the chip is too hot, by the limit that its firmware
// tells. Whether the firmware's heartbeat goes on is not to be seen in one
// reading.
func temperature(function sysfs.Device) (discovery.Health, error) {
	for _, hwmon := range function.Children("hwmon") {
		attrs := hwmon.Attrs()
		now, read := attrs.Int("temp1_input") // in thousandths of a degree
		limit, known := attrs.Int("temp1_max")
		if read && known && limit > 0 && now >= limit {
			return discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionOverTemperature, Reason: fmt.Sprintf("as hot as its limit of %d °C, or hotter", limit/1000)}, attrs.Err()
		}
		if err := attrs.Err(); err != nil {
			return discovery.Health{}, fmt.Errorf("temperature: %w", err)
		}
	}
	return discovery.Health{}, nil
}

// index returns the number of a chip, which is the name of its node.
func index(node *specs.DeviceNode) string { return path.Base(node.HostPath) }

// grant names the chips to Tenstorrent's software, by the numbers of the host.
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
