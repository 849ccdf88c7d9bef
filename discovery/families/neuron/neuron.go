// Package neuron describes AWS Inferentia and Trainium devices as the neuron driver shows them in
// /sys. Cores are devices too, and exclude the whole device.
//
// The driver does not report the PCI function of a device, so NUMA nodes and PCI roots are unknown,
// and so is the memory. Cores are physical cores: the number of physical cores in a logical core of
// the runtime is also unknown.
package neuron

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family recognises AWS accelerators.
var Family = &discovery.Family{
	Name:      "neuron",
	Doc:       "AWS Inferentia and Trainium devices",
	Match:     []discovery.Match{{Class: "neuron_device", Name: prefix + "[0-9]*"}},
	Describe:  describe,
	Grant:     grant,
	Variables: variables,
}

// variables tune the libraries of the Neuron runtime, according to its configuration guide.
var variables = []string{
	"NEURON_RT_EXEC_TIMEOUT", "NEURON_RT_LOG_LEVEL", "NEURON_RT_LOG_LOCATION",
	"NEURON_RT_STOCHASTIC_ROUNDING_EN", "NEURON_RT_STOCHASTIC_ROUNDING_SEED", "NEURON_RT_VALIDATE_HASH",
}

// prefix is the prefix of the kernel's names: "neuron0".
const prefix = "neuron"

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	version, _ := host.ReadText("/sys/module/neuron/version")
	for _, neuron := range found {
		d, err := describeDevice(host, neuron)
		// The driver's version has four numbers, and the last one is 0.
		d.Attributes.SetVersion("driverVersion", strings.TrimSuffix(version, ".0"))
		cores := divideCores(&d)
		// A core shares the device's node and serial number. If they are unreadable, the core needs
		// a problem of its own. Without the problem, the device would keep the last serial number
		// and the core would lose it.
		for _, d := range append(cores, d) {
			devices = append(devices, d)
			problems = append(problems, discovery.Problems(d.Name, err)...)
		}
	}
	return devices, problems
}

func describeDevice(host *discovery.Host, neuron sysfs.Device) (discovery.Device, error) {
	d := discovery.Device{
		Name:         discovery.DeviceName(neuron),
		Source:       neuron.Path,
		Attributes:   discovery.Attributes{},
		Capacity:     discovery.Capacity{},
		PluginOffers: []discovery.Offer{{Resource: "aws.amazon.com/neuron", IDs: []string{strings.TrimPrefix(neuron.Name(), prefix)}}},
	}
	attrs := neuron.Attrs()
	d.Attributes.SetString("kind", "npu")
	d.Attributes.SetString("vendor", "aws")
	d.Attributes.SetString("function", "physical")
	for _, file := range []struct {
		attribute resourceapi.QualifiedName
		name      string
	}{
		{"model", "info/architecture/device_name"},
		{"serial", "info/serial_number"},
		// Models are compiled for the version of the cores. The version of the device is the same
		// for Inferentia2 and Trainium2.
		{"architecture", "neuron_core0/info/architecture/arch_type"},
	} {
		text, _ := attrs.Text(file.name)
		d.Attributes.SetString(file.attribute, text)
	}
	d.Identity = d.Attributes.String("serial")
	if cores, ok := attrs.Uint("core_count"); ok && cores > 0 && cores <= math.MaxInt64 {
		d.Capacity.Set("cores", int64(cores))
	}
	links, err := linkedTo(neuron)
	d.SetNames("linkedTo", links)
	node, nodeErr := discovery.Node(neuron, "/dev")
	d.Edits.DeviceNodes = []*specs.DeviceNode{node}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	if state, ok := attrs.Uint("reset"); ok && d.Health.Status == discovery.Healthy {
		d.Health = healthOf(state)
	}
	return d, errors.Join(attrs.Err(), err, nodeErr)
}

// healthOf returns the health for a state of a device (enum neuron_device_state in
// neuron_device.h). A starting runtime resets the device; this is not a failure. Error counters are
// not read, because they only describe the past.
func healthOf(state uint64) discovery.Health {
	switch state {
	case 0:
		return discovery.Health{Status: discovery.Unknown, Reason: "the device is being reset", Resetting: true}
	case 1:
		return discovery.Health{Status: discovery.Healthy}
	}
	return discovery.Health{Status: discovery.Unhealthy, Reason: "the driver could not reset the device"}
}

// linkedTo returns the names of the devices at the other ends of NeuronLinks.
func linkedTo(neuron sysfs.Device) ([]string, error) {
	attrs := neuron.Attrs()
	text, ok := attrs.Text("connected_devices")
	if !ok {
		return nil, attrs.Err()
	}
	numbers, err := parseConnected(text)
	names := make([]string, len(numbers))
	for i, number := range numbers {
		names[i] = prefix + strconv.FormatUint(number, 10)
	}
	return names, err
}

// parseConnected parses device numbers, such as "12, 3, 4, 1", and returns them in order. In a
// torus each device has four neighbours.
func parseConnected(text string) ([]uint64, error) {
	var numbers []uint64
	for field := range strings.SplitSeq(text, ",") {
		number, err := strconv.ParseUint(strings.TrimSpace(field), 10, 8)
		if err != nil || len(numbers) == 4 {
			return nil, fmt.Errorf("attribute connected_devices: not up to four numbers: %.32q", text)
		}
		numbers = append(numbers, number)
	}
	slices.Sort(numbers)
	return numbers, nil
}
