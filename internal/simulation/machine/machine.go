// Package machine describes the machines of simulations: their host recordings, devices and cards, and
// what an administrator may configure on them. Descriptions never change. It is no part of the product.
package machine

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/simulation/kernel"
)

// NewQuantity returns a number as a quantity.
func NewQuantity(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.DecimalSI) }

// Machine is a kind of machine for simulations.
type Machine struct {
	Name     string
	Text     []byte
	Families []*discovery.Family
	Snapshot *discovery.Snapshot      // of the machine at the start
	Devices  map[string]rules.Offered // the snapshot's devices by name, without any rules of the administrator
	Cards    []Card

	Functions []kernel.Function // the functions whose drivers change
	Allowed   Allowed           // the changes of functions that agents may make
	Resets    bool              // the devices' functions can be reset
	Named     []rules.Resource  // extended resources of the functions
	Daemons   bool              // claims may request MPS daemons
	Joins     bool              // some devices are published as one device

	Reassigns bool             // cards may return with each other's names and nodes
	Renumbers bool             // cards may return with each other's nodes
	Sharings  [][]rules.Share  // possible ways to share the devices
	Exclude   []rules.Selector // one selector for each card
}

// Card is a device that can vanish from a machine.
type Card struct {
	Address string   // on the PCI bus
	Nodes   []string // the nodes in /dev of this card alone
}

// writeFunction writes the directory of a PCI function and the link to it. An attribute is a name
// and a value.
func writeFunction(b *strings.Builder, dir, address string, attributes ...string) {
	fmt.Fprintf(b, "-- sys/bus/pci/devices/%s -> ../../../%s --\n", address, strings.TrimPrefix(dir, "sys/"))
	for _, attribute := range attributes {
		name, value, _ := strings.Cut(attribute, " ")
		fmt.Fprintf(b, "-- %s/%s --\n%s\n", dir, name, value)
	}
}

// gpuMachine returns a machine with cards that are allocated whole.
func gpuMachine(n int) *Machine {
	m := &Machine{Name: fmt.Sprintf("%d GPUs", n), Renumbers: true, Resets: true, Daemons: true}
	var b strings.Builder
	b.WriteString("-- proc/devices --\nCharacter devices:\n195 nvidia\n195 nvidiactl\n511 nvidia-uvm\n\nBlock devices:\n")
	b.WriteString("-- sys/module/nvidia/version --\n535.104.05\n-- dev/nvidiactl c 195:255 --\n-- dev/nvidia-uvm c 511:0 --\n")
	for i := range n {
		address := fmt.Sprintf("0000:0%d:00.0", i+1)
		dir := fmt.Sprintf("sys/devices/pci0000:00/0000:00:0%d.0/%s", i+1, address)
		writeFunction(&b, dir, address, "vendor 0x10de", "device 0x20b0", "class 0x030200", "numa_node 0", "reset ", "reset_method bus")
		fmt.Fprintf(&b, "-- %s/driver -> ../../../../bus/pci/drivers/nvidia --\n", dir)
		fmt.Fprintf(&b, "-- proc/driver/nvidia/gpus/%s/information --\nModel: \t\t NVIDIA A100-SXM4-40GB\nGPU UUID: \t GPU-5d2c1f0%d-8a41-4e0b-9c37-0b6f3d9ae40%d\nBus Location: \t %s\nDevice Minor: \t %d\nGPU Excluded:\t No\n", address, i, i, address, i)
		fmt.Fprintf(&b, "-- dev/nvidia%d c 195:%d --\n", i, i)
		m.Cards = append(m.Cards, Card{address, []string{fmt.Sprintf("dev/nvidia%d", i)}})
	}
	b.WriteString("-- end --\n")
	m.Text = []byte(b.String())
	return m
}

// channelMachine returns a machine with cards, and with channels that are published as one device.
func channelMachine(gpus, channels int) *Machine {
	m := gpuMachine(gpus)
	m.Name, m.Joins = fmt.Sprintf("%d GPUs and %d channels", gpus, channels), true
	m.Daemons, m.Resets = false, false // a claim for a daemon could get a channel, and a channel cannot be reset
	text := bytes.NewBuffer(bytes.TrimSuffix(m.Text, []byte("-- end --\n")))
	for i := range channels {
		fmt.Fprintf(text, "-- dev/nvidia-caps-imex-channels/channel%d c 503:%d --\n", i, i)
	}
	m.Text = append(text.Bytes(), "-- end --\n"...)
	return m
}

// virtualMachine returns a machine with a disk, and an adapter whose virtual functions are published as
// one device.
func virtualMachine(functions int) *Machine {
	m := &Machine{Name: fmt.Sprintf("an adapter with %d virtual functions", functions), Joins: true}
	m.add("0000:01:00.0", kernel.Function{Driver: "nvme", Group: 1})
	m.add("0000:05:00.0", kernel.Function{Driver: "igb", Group: 20, Total: 7, Boot: functions})
	m.Cards = append(m.Cards, Card{Address: "0000:01:00.0"})
	m.Text = append(m.Text, "-- end --\n"...)
	return m
}

// coreMachine returns a machine with chips that are allocated whole or by core.
func coreMachine(chips, each int) *Machine {
	m := &Machine{Name: fmt.Sprintf("%d chips of %d cores", chips, each)}
	var b strings.Builder
	for i := range chips {
		address := fmt.Sprintf("0000:0%d:1e.0", i)
		dir := fmt.Sprintf("sys/devices/pci0000:0%d/%s", i, address)
		writeFunction(&b, dir, address, "vendor 0x1d0f", "device 0x7064", "class 0x088000", "numa_node 0")
		fmt.Fprintf(&b, "-- %s/driver -> ../../../bus/pci/drivers/neuron-driver --\n", dir)
		class := fmt.Sprintf("sys/devices/virtual/neuron_device/neuron%d", i)
		fmt.Fprintf(&b, "-- sys/class/neuron_device/neuron%d -> ../../devices/virtual/neuron_device/neuron%d --\n", i, i)
		fmt.Fprintf(&b, "-- %s/dev --\n245:%d\n-- %s/core_count --\n%d\n-- %s/reset --\n1\n", class, i, class, each, class)
		fmt.Fprintf(&b, "-- %s/subsystem -> ../../../../class/neuron_device --\n", class)
		fmt.Fprintf(&b, "-- %s/info/architecture/device_name --\nInferentia\n-- %s/info/architecture/arch_type --\nNDv1\n", class, class)
		fmt.Fprintf(&b, "-- dev/neuron%d c 245:%d --\n", i, i)
		m.Cards = append(m.Cards, Card{address, []string{fmt.Sprintf("dev/neuron%d", i)}})
	}
	b.WriteString("-- end --\n")
	m.Text = []byte(b.String())
	return m
}

// numberedMachine returns a machine with chips whose names are numbers assigned by the kernel. Each
// chip can be reset.
func numberedMachine(n int) *Machine {
	m := &Machine{Name: fmt.Sprintf("%d chips that the kernel numbers", n), Resets: true, Reassigns: true}
	var b strings.Builder
	for i := range n {
		address := fmt.Sprintf("0000:0%d:00.0", i+1)
		dir := fmt.Sprintf("sys/devices/pci0000:00/0000:00:0%d.0/%s", i+1, address)
		writeFunction(&b, dir, address, "vendor 0x1e60", "device 0x2864", "class 0x120000", "numa_node 0", "reset ", "reset_method flr")
		fmt.Fprintf(&b, "-- %s/driver -> ../../../../bus/pci/drivers/hailo --\n", dir)
		class := fmt.Sprintf("%s/hailo_chardev/hailo%d", dir, i)
		fmt.Fprintf(&b, "-- sys/class/hailo_chardev/hailo%d -> ../../%s --\n", i, strings.TrimPrefix(class, "sys/"))
		fmt.Fprintf(&b, "-- %s/dev --\n510:%d\n-- %s/uevent --\nMAJOR=510\nMINOR=%d\nDEVNAME=hailo%d\n", class, i, class, i, i)
		fmt.Fprintf(&b, "-- dev/hailo%d c 510:%d --\n", i, i)
		m.Cards = append(m.Cards, Card{address, []string{fmt.Sprintf("dev/hailo%d", i)}})
	}
	b.WriteString("-- end --\n")
	m.Text = []byte(b.String())
	return m
}

// recorded lists host recordings of other families. All their devices are healthy.
var recorded = []string{
	"dlb/two", "fpgaxilinx/media", "hypervisor/kvm", "idxd/spr", "intelgpu/flex170x2", "qat/old", "tenstorrent/loudbox", "tpu/accel", "vfio/iommufd",
}

// read returns the machine of a host recording.
func read(name string) (*Machine, error) {
	family, file, _ := strings.Cut(name, "/")
	text, err := os.ReadFile(filepath.Join("../../discovery/families", family, "testdata", file+".host"))
	return &Machine{Name: name, Text: text}, err
}

// All returns all kinds of machines. The machines made for simulations appear several times,
// so that they are chosen often.
var All = sync.OnceValues(func() (all []*Machine, err error) {
	for range 4 {
		all = append(all, gpuMachine(3), coreMachine(2, 2))
	}
	for range 2 {
		all = append(all, numberedMachine(3), channelMachine(1, 3), virtualMachine(3))
	}
	for range 2 {
		all = append(all, functionMachine(true, true, false), functionMachine(true, true, true))
	}
	all = append(all, functionMachine(true, false, false), functionMachine(false, true, false), functionMachine(false, false, false))
	for _, name := range recorded {
		m, readErr := read(name)
		all, err = append(all, m), errors.Join(err, readErr)
	}
	for _, m := range all {
		err = errors.Join(err, m.scanMachine())
	}
	return all, err
})

// scanMachine scans a machine and fills in its fields.
func (m *Machine) scanMachine() error {
	present := kernel.New(m.Text)
	present.DriveFunctions(m.Functions...)
	host := m.Host(present)
	for _, f := range families.All {
		if f.Name != "generic" && len(scan.ReadHost(host, []*discovery.Family{f}).Devices) > 0 {
			m.Families = append(m.Families, f)
		}
	}
	m.Snapshot = scan.ReadHost(host, m.Families)
	m.Devices = make(map[string]rules.Offered)
	for _, d := range (&rules.Rules{}).ApplyTo(m.Snapshot).Devices {
		if d.Health.Status == discovery.Unhealthy {
			return fmt.Errorf("machine %s: device %s is not well: %s", m.Name, d.Name, d.Health.Reason)
		}
		m.Devices[d.Name] = d
	}
	m.findCards()
	return m.makeRules()
}

// address matches the address of a PCI function.
var address = regexp.MustCompile(`[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]`)

// findCards fills in the cards: the functions of the devices, with their nodes.
func (m *Machine) findCards() {
	if len(m.Cards) > 0 {
		return
	}
	silicon := make(map[string]map[string]bool) // by node
	for _, d := range m.Devices {
		for _, n := range NodesOf(&d) {
			if silicon[n] == nil {
				silicon[n] = make(map[string]bool)
			}
			silicon[n][d.Silicon()] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m.Devices)) {
		d := m.Devices[name]
		found := address.FindAllString(d.Source, -1)
		if len(found) == 0 {
			continue
		}
		own := slices.DeleteFunc(NodesOf(&d), func(n string) bool { return len(silicon[n]) > 1 })
		i := slices.IndexFunc(m.Cards, func(c Card) bool { return c.Address == found[len(found)-1] })
		if i < 0 {
			m.Cards, i = append(m.Cards, Card{Address: found[len(found)-1]}), len(m.Cards)
		}
		for _, n := range own {
			if !slices.Contains(m.Cards[i].Nodes, n) {
				m.Cards[i].Nodes = append(m.Cards[i].Nodes, n)
			}
		}
	}
}

// DevicesNamed returns the interchangeable devices with a common name, none for "".
func (m *Machine) DevicesNamed(name string) (devices []string) {
	for _, d := range m.Devices {
		if name != "" && d.Interchangeable == name {
			devices = append(devices, d.Name)
		}
	}
	return devices
}

// ShareStem returns the device behind a name in slices, and whether the name is that of a share.
func ShareStem(name string) (device string, share bool) {
	device, _, share = strings.Cut(name, "-share-")
	return device, share
}

// NodesOf returns the host paths of a device's nodes, without the leading slash.
func NodesOf(d *rules.Offered) (paths []string) {
	for _, n := range d.Edits.DeviceNodes {
		paths = append(paths, strings.TrimPrefix(cmp.Or(n.HostPath, n.Path), "/"))
	}
	return paths
}

// makeRules creates the administrator's possible settings for the machine.
func (m *Machine) makeRules() error {
	every, err := rules.Compile("true")
	if err != nil {
		return err
	}
	m.Named, err = m.resources()
	if len(m.Functions) > 0 {
		m.Sharings = [][]rules.Share{nil}
	} else {
		m.Sharings = [][]rules.Share{nil, nil, {{Selector: every, Replicas: 2}}, {{Selector: every, Replicas: 3}}}
	}
	if err != nil {
		return err
	}
	memory := make(map[int64]bool)
	for _, d := range m.Devices {
		capacity := d.Capacity["memory"]
		memory[capacity.Value.Value()] = true
	}
	if len(memory) == 1 && !memory[0] {
		for bytes := range memory {
			m.Sharings = append(m.Sharings, []rules.Share{{Selector: every, Capacity: "memory", Unit: NewQuantity(bytes / 4)}})
		}
	}
	for _, c := range m.Cards {
		if m.Reassigns {
			break // a card is excluded by its address, regardless of its name
		}
		one, err := rules.Compile(fmt.Sprintf(`device.attributes["resource.kubernetes.io"].?pciBusID.orValue("") == %q`, c.Address))
		if err != nil {
			return err
		}
		m.Exclude = append(m.Exclude, one)
	}
	return nil
}

// AllowDaemons returns the setting that allows daemons for all GPUs of the machine.
func (m *Machine) AllowDaemons() map[discovery.SharingDaemonKind][]discovery.Selection[struct{}] {
	if !m.Daemons {
		return nil
	}
	every := discovery.Selection[struct{}]{Expression: "true", Selects: func(discovery.Device) (bool, error) { return true, nil }}
	return map[discovery.SharingDaemonKind][]discovery.Selection[struct{}]{discovery.SharingDaemonMPS: {every}}
}

// Form is a set of devices by name, under one configuration of the administrator.
type Form map[string]rules.Offered

// ApplyRules returns the devices under rules of the administrator.
func (m *Machine) ApplyRules(r *rules.Rules) Form {
	form := make(Form)
	for _, d := range r.ApplyTo(m.Snapshot).Devices {
		form[d.Name] = d
	}
	return form
}
