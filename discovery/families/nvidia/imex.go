package nvidia

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// channelDir contains the nodes of IMEX channels, through which GPUs of several NVLink-connected
// hosts share memory. The driver creates channel 0. Users of other channels create their nodes.
const channelDir = "/dev/nvidia-caps-imex-channels"

// channelsName is the common name of the channels in ResourceSlices.
const channelsName = "nvidia-imex-channels"

// maxChannel is the highest channel number (NVreg_ImexChannelCount is at most 2048).
const maxChannel = 2047

// channels returns the IMEX channels of the host. A channel exists if its node exists: the kernel
// has no other sign of a channel. The NVIDIA device plugin has no resource name for channels, so
// the administrator may choose the name. On one host, a container may get any channel.
func (d *driver) channels() ([]discovery.Device, error) {
	entries, err := fs.ReadDir(d.host.FS, strings.TrimPrefix(channelDir, "/"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("IMEX channels: %w", err)
	}
	var numbers []int64
	for _, entry := range entries {
		digits, ok := strings.CutPrefix(entry.Name(), "channel")
		number, err := strconv.ParseUint(digits, 10, 16)
		if ok && err == nil && number <= maxChannel && digits == strconv.FormatUint(number, 10) {
			numbers = append(numbers, int64(number))
		}
	}
	slices.Sort(numbers)
	devices := make([]discovery.Device, len(numbers))
	for i, number := range numbers {
		devices[i] = d.channel(number)
	}
	return devices, nil
}

func (d *driver) channel(number int64) discovery.Device {
	name := fmt.Sprintf("channel%d", number)
	node := d.node("nvidia-caps-imex-channels", path.Join(channelDir, name), number)
	channel := discovery.Device{
		Name:       fmt.Sprintf("nvidia-imex-channel-%d", number),
		Source:     strings.TrimPrefix(node.HostPath, "/"),
		Attributes: discovery.Attributes{},

		Interchangeable: channelsName,
		Edits:           specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{node}},
		Health:          discovery.NodeHealth(d.host, []*specs.DeviceNode{node}),
		PluginOffers:    []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{name}}},
	}
	channel.Attributes.SetString("kind", "other")
	channel.Attributes.SetString("vendor", "nvidia")
	channel.Attributes.SetString("model", "IMEX channel")
	channel.Attributes.SetInt("channel", number)
	channel.Attributes.SetVersion("driverVersion", d.version)
	return channel
}
