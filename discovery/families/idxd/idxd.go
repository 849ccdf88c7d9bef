// Package idxd describes the Intel Data Streaming and In-Memory Analytics Accelerators (DSA, IAA):
// work queues that the idxd driver has enabled for programs in user space, and whole DSA functions
// that are bound to vfio-pci. When it describes devices, it configures no queues; kernel queues
// belong to the kernel.
package idxd

import (
	"errors"
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/pattern"
)

// Family recognises Intel DSA and IAA.
var Family = &discovery.Family{
	Name: "idxd",
	Doc:  "Intel DSA and IAA work queues, and DSA functions under vfio",
	Match: []discovery.Match{
		{Bus: "dsa", Name: "wq*"},
		{Bus: "pci", Vendor: "8086", Driver: vfioPCI},
	},
	Describe:    describe,
	CommonNodes: pci.VFIOControl(),
	Grant:       grant,
	Provision:   provision,
	Labels:      []discovery.Labels{{Set: map[string]string{"intel.feature.node.kubernetes.io/{architecture}": "true"}}},
}

const vfioPCI = "vfio-pci"

// dsa lists the PCI device IDs of DSA.
var dsa = map[string]bool{"0b25": true, "11fb": true, "1212": true}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, kernel := range found {
		describe := describeQueue
		if sysfs.IsPCIAddress(kernel.Name()) {
			describe = describeFunction
		}
		d, ours, err := describe(host, kernel)
		if err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		if ours {
			devices = append(devices, d)
		}
	}
	return devices, problems
}

// describeFunction describes a PCI function that is bound to vfio-pci, if the function is a DSA.
func describeFunction(host *discovery.Host, function sysfs.Device) (d discovery.Device, ours bool, err error) {
	d, err = pci.DescribeFunction(host, function)
	id := d.Attributes.String("pciDevice")
	if !dsa[id] {
		if id != "" {
			err = nil // another function
		}
		return d, false, err
	}
	setKind(d.Attributes, "dsa")
	nodes, nodesErr := pci.VFIONodes(host, function)
	d.Edits.DeviceNodes = nodes
	d.Health = pci.VFIOHealth(host, function, nodes)
	d.PluginOffers = []discovery.Offer{{Resource: "dsa.intel.com/vfio", IDs: []string{function.Name()}}}
	return d, true, errors.Join(err, nodesErr)
}

func setKind(a discovery.Attributes, architecture string) {
	a.SetString("kind", "dma")
	a.SetString("vendor", "intel")
	a.SetString("architecture", architecture)
}

// accelerators maps prefixes of kernel device names to Intel's names.
var accelerators = map[string]string{"dsa": "dsa", "iax": "iaa"}

// queueName matches "wq0.1": the second queue of the device dsa0 or iax0.
var queueName = pattern.Lazy(`^wq([0-9]{1,9})\.([0-9]{1,9})$`)

// describeQueue describes a work queue if it is enabled and has the type "user"
// (Documentation/ABI/stable/sysfs-driver-dma-idxd).
func describeQueue(host *discovery.Host, wq sysfs.Device) (d discovery.Device, ours bool, err error) {
	d.Name = discovery.DeviceName(wq)
	numbers := queueName().FindStringSubmatch(wq.Name())
	prefix := strings.TrimRight(wq.Parent().Name(), "0123456789") // the same prefix as in /dev
	function, ok := wq.PCIFunction()
	if numbers == nil || !ok || accelerators[prefix] == "" {
		return d, false, fmt.Errorf("%s: not a work queue of DSA or IAA", wq.Path)
	}
	d, err = pci.DescribeFunction(host, function)
	d.PartOf = &discovery.Silicon{Name: d.Name}
	d.Attributes.SetString("function", "partition")
	d.Attributes.SetString("parent", d.Name)
	d.Name += "-wq-" + numbers[2]
	d.Source = wq.Path

	attrs := wq.Attrs()
	state, _ := attrs.Text("state")
	kind, _ := attrs.Text("type")
	mode, _ := attrs.Text("mode")
	if err := attrs.Err(); err != nil {
		return d, false, fmt.Errorf("describe work queue %s: %w", wq.Name(), err)
	}
	if state != "enabled" || kind != "user" {
		return d, false, nil
	}
	if mode != "shared" && mode != "dedicated" {
		return d, false, fmt.Errorf("describe work queue %s: attribute mode: neither shared nor dedicated: %.32q", wq.Name(), mode)
	}
	setQueue(&d, wq, accelerators[prefix], mode)
	groupErr := setGroup(d.Attributes, wq, attrs, numbers[1])
	var nodesErr error
	d.Edits.DeviceNodes, nodesErr = queueNodes(host, wq, prefix)
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	return d, true, errors.Join(err, attrs.Err(), groupErr, nodesErr)
}

// setQueue sets the properties that depend on the queue's mode. A shared queue accepts work from
// any number of processes through the ENQCMD instruction.
func setQueue(d *discovery.Device, wq sysfs.Device, accelerator, mode string) {
	setKind(d.Attributes, accelerator)
	d.Attributes.SetString("profile", "user-"+mode)
	d.Shareable = mode == "shared"
	resource := "wq-user-" + mode
	// By default, the Intel plugin allocates a shared queue to one container.
	stem := resource + "-" + wq.Name() + "-"
	d.PluginOffers = []discovery.Offer{{Resource: accelerator + ".intel.com/" + resource, IDs: []string{stem + "0"}, Dialect: discovery.Dialect{Stem: stem}}}
}

// setGroup sets the administrator's settings of the queue: its name, size and priority, and its
// group with the number of engines.
func setGroup(a discovery.Attributes, wq sysfs.Device, attrs *sysfs.Attrs, device string) error {
	name, _ := attrs.Text("name")
	a.SetString("queueName", name)
	for _, file := range []struct {
		attribute resourceapi.QualifiedName
		name      string
	}{{"queueSize", "size"}, {"queuePriority", "priority"}, {"queueGroup", "group_id"}} {
		if value, ok := attrs.Int(file.name); ok && value >= 0 { // a queue without a group has -1
			a.SetInt(file.attribute, value)
		}
	}
	group := a["queueGroup"].IntValue
	if group == nil {
		return nil
	}
	members := wq.Parent().Child(fmt.Sprintf("group%s.%d", device, *group)).Attrs()
	text, ok := members.Text("engines")
	if !ok {
		return members.Err()
	}
	engines := strings.Fields(text)
	for _, engine := range engines {
		if !strings.HasPrefix(engine, "engine"+device+".") {
			return fmt.Errorf("group %d: attribute engines: not a list of engines: %.32q", *group, text)
		}
	}
	a.SetInt("queueEngines", int64(len(engines)))
	return nil
}

// queueNodes returns the node of a work queue twice: under its name, and under its numbers, where
// libaccel-config looks for the node.
func queueNodes(host *discovery.Host, wq sysfs.Device, prefix string) ([]*specs.DeviceNode, error) {
	node, err := discovery.Node(sysfs.At(host.FS, "sys/bus/dsa/devices/"+prefix+"!"+wq.Name()), "/dev")
	nodes := []*specs.DeviceNode{node}
	if node.Type != "" {
		byNumber := *node
		byNumber.Path = fmt.Sprintf("/dev/char/%d:%d", node.Major, node.Minor)
		nodes = append(nodes, &byNumber)
	}
	return nodes, err
}

// grant numbers the functions under vfio. Work queues need no environment variables.
func grant(given []discovery.Device, _ discovery.Grant) specs.ContainerEdits {
	var edits specs.ContainerEdits
	for _, d := range given {
		if d.Attributes.String("driver") != vfioPCI {
			continue
		}
		address := d.Attributes.String(deviceattribute.StandardDeviceAttributePCIBusID)
		edits.Env = append(edits.Env, fmt.Sprintf("VFIO_BDF%d=%s", len(edits.Env), address))
	}
	return edits
}
