package simulation

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

func newQuantity(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.DecimalSI) }

// machine is a kind of machine for simulations.
type machine struct {
	name     string
	text     []byte
	families []*discovery.Family
	snapshot *discovery.Snapshot      // of the machine at the start
	devices  map[string]rules.Offered // the snapshot's devices by name, without any rules of the administrator
	cards    []card

	functions []kernel.Function // the functions whose drivers change
	allowed   allowed           // the changes of functions that agents may make
	resets    bool              // the devices' functions can be reset
	named     []rules.Resource  // extended resources of the functions
	daemons   bool              // claims may request MPS daemons
	joins     bool              // some devices are published as one device

	reassigns bool             // cards may return with each other's names and nodes
	renumbers bool             // cards may return with each other's nodes
	sharings  [][]rules.Share  // possible ways to share the devices
	exclude   []rules.Selector // one selector for each card
}

// card is a device that can vanish from a machine.
type card struct {
	address string   // on the PCI bus
	nodes   []string // the nodes in /dev of this card alone
}

// gpuMachine returns a machine with cards that are allocated whole.
func gpuMachine(n int) *machine {
	m := &machine{name: fmt.Sprintf("%d GPUs", n), renumbers: true, resets: true, daemons: true}
	var b strings.Builder
	b.WriteString("-- proc/devices --\nCharacter devices:\n195 nvidia\n195 nvidiactl\n511 nvidia-uvm\n\nBlock devices:\n")
	b.WriteString("-- sys/module/nvidia/version --\n535.104.05\n-- dev/nvidiactl c 195:255 --\n-- dev/nvidia-uvm c 511:0 --\n")
	for i := range n {
		address := fmt.Sprintf("0000:0%d:00.0", i+1)
		dir := fmt.Sprintf("sys/devices/pci0000:00/0000:00:0%d.0/%s", i+1, address)
		fmt.Fprintf(&b, "-- sys/bus/pci/devices/%s -> ../../../%s --\n", address, strings.TrimPrefix(dir, "sys/"))
		for _, attribute := range []string{"vendor 0x10de", "device 0x20b0", "class 0x030200", "numa_node 0", "reset ", "reset_method bus"} {
			name, value, _ := strings.Cut(attribute, " ")
			fmt.Fprintf(&b, "-- %s/%s --\n%s\n", dir, name, value)
		}
		fmt.Fprintf(&b, "-- %s/driver -> ../../../../bus/pci/drivers/nvidia --\n", dir)
		fmt.Fprintf(&b, "-- proc/driver/nvidia/gpus/%s/information --\nModel: \t\t NVIDIA A100-SXM4-40GB\nGPU UUID: \t GPU-5d2c1f0%d-8a41-4e0b-9c37-0b6f3d9ae40%d\nBus Location: \t %s\nDevice Minor: \t %d\nGPU Excluded:\t No\n", address, i, i, address, i)
		fmt.Fprintf(&b, "-- dev/nvidia%d c 195:%d --\n", i, i)
		m.cards = append(m.cards, card{address, []string{fmt.Sprintf("dev/nvidia%d", i)}})
	}
	b.WriteString("-- end --\n")
	m.text = []byte(b.String())
	return m
}

// channelMachine returns a machine with cards, and with channels that are published as one device.
func channelMachine(gpus, channels int) *machine {
	m := gpuMachine(gpus)
	m.name, m.joins = fmt.Sprintf("%d GPUs and %d channels", gpus, channels), true
	m.daemons, m.resets = false, false // a claim for a daemon could get a channel, and a channel cannot be reset
	text := bytes.NewBuffer(bytes.TrimSuffix(m.text, []byte("-- end --\n")))
	for i := range channels {
		fmt.Fprintf(text, "-- dev/nvidia-caps-imex-channels/channel%d c 503:%d --\n", i, i)
	}
	m.text = append(text.Bytes(), "-- end --\n"...)
	return m
}

// virtualMachine returns a machine with a disk, and an adapter whose virtual functions are published as
// one device.
func virtualMachine(functions int) *machine {
	m := &machine{name: fmt.Sprintf("an adapter with %d virtual functions", functions), joins: true}
	m.add("0000:01:00.0", kernel.Function{Driver: "nvme", Group: 1})
	m.add("0000:05:00.0", kernel.Function{Driver: "igb", Group: 20, Total: 7, Boot: functions})
	m.cards = append(m.cards, card{address: "0000:01:00.0"})
	m.text = append(m.text, "-- end --\n"...)
	return m
}

// coreMachine returns a machine with chips that are allocated whole or by core.
func coreMachine(chips, each int) *machine {
	m := &machine{name: fmt.Sprintf("%d chips of %d cores", chips, each)}
	var b strings.Builder
	for i := range chips {
		address := fmt.Sprintf("0000:0%d:1e.0", i)
		dir := fmt.Sprintf("sys/devices/pci0000:0%d/%s", i, address)
		fmt.Fprintf(&b, "-- sys/bus/pci/devices/%s -> ../../../%s --\n", address, strings.TrimPrefix(dir, "sys/"))
		for _, attribute := range []string{"vendor 0x1d0f", "device 0x7064", "class 0x088000", "numa_node 0"} {
			name, value, _ := strings.Cut(attribute, " ")
			fmt.Fprintf(&b, "-- %s/%s --\n%s\n", dir, name, value)
		}
		fmt.Fprintf(&b, "-- %s/driver -> ../../../bus/pci/drivers/neuron-driver --\n", dir)
		class := fmt.Sprintf("sys/devices/virtual/neuron_device/neuron%d", i)
		fmt.Fprintf(&b, "-- sys/class/neuron_device/neuron%d -> ../../devices/virtual/neuron_device/neuron%d --\n", i, i)
		fmt.Fprintf(&b, "-- %s/dev --\n245:%d\n-- %s/core_count --\n%d\n-- %s/reset --\n1\n", class, i, class, each, class)
		fmt.Fprintf(&b, "-- %s/subsystem -> ../../../../class/neuron_device --\n", class)
		fmt.Fprintf(&b, "-- %s/info/architecture/device_name --\nInferentia\n-- %s/info/architecture/arch_type --\nNDv1\n", class, class)
		fmt.Fprintf(&b, "-- dev/neuron%d c 245:%d --\n", i, i)
		m.cards = append(m.cards, card{address, []string{fmt.Sprintf("dev/neuron%d", i)}})
	}
	b.WriteString("-- end --\n")
	m.text = []byte(b.String())
	return m
}

// numberedMachine returns a machine with chips whose names are numbers assigned by the kernel. Each
// chip can be reset.
func numberedMachine(n int) *machine {
	m := &machine{name: fmt.Sprintf("%d chips that the kernel numbers", n), resets: true, reassigns: true}
	var b strings.Builder
	for i := range n {
		address := fmt.Sprintf("0000:0%d:00.0", i+1)
		dir := fmt.Sprintf("sys/devices/pci0000:00/0000:00:0%d.0/%s", i+1, address)
		fmt.Fprintf(&b, "-- sys/bus/pci/devices/%s -> ../../../%s --\n", address, strings.TrimPrefix(dir, "sys/"))
		for _, attribute := range []string{"vendor 0x1e60", "device 0x2864", "class 0x120000", "numa_node 0", "reset ", "reset_method flr"} {
			name, value, _ := strings.Cut(attribute, " ")
			fmt.Fprintf(&b, "-- %s/%s --\n%s\n", dir, name, value)
		}
		fmt.Fprintf(&b, "-- %s/driver -> ../../../../bus/pci/drivers/hailo --\n", dir)
		class := fmt.Sprintf("%s/hailo_chardev/hailo%d", dir, i)
		fmt.Fprintf(&b, "-- sys/class/hailo_chardev/hailo%d -> ../../%s --\n", i, strings.TrimPrefix(class, "sys/"))
		fmt.Fprintf(&b, "-- %s/dev --\n510:%d\n-- %s/uevent --\nMAJOR=510\nMINOR=%d\nDEVNAME=hailo%d\n", class, i, class, i, i)
		fmt.Fprintf(&b, "-- dev/hailo%d c 510:%d --\n", i, i)
		m.cards = append(m.cards, card{address, []string{fmt.Sprintf("dev/hailo%d", i)}})
	}
	b.WriteString("-- end --\n")
	m.text = []byte(b.String())
	return m
}

// recorded lists host recordings of other families. All their devices are healthy.
var recorded = []string{
	"dlb/two", "fpgaxilinx/media", "hypervisor/kvm", "idxd/spr", "intelgpu/flex170x2", "qat/old", "tenstorrent/loudbox", "tpu/accel", "vfio/iommufd",
}

// read returns the machine of a host recording.
func read(name string) (*machine, error) {
	family, file, _ := strings.Cut(name, "/")
	text, err := os.ReadFile(filepath.Join("../../discovery/families", family, "testdata", file+".host"))
	return &machine{name: name, text: text}, err
}

// machines returns all kinds of machines. The machines made for simulations appear several times,
// so that they are chosen often.
var machines = sync.OnceValues(func() (all []*machine, err error) {
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
func (m *machine) scanMachine() error {
	present := kernel.New(m.text)
	present.DriveFunctions(m.functions...)
	host := m.host(present)
	for _, f := range families.All {
		if f.Name != "generic" && len(scan.ReadHost(host, []*discovery.Family{f}).Devices) > 0 {
			m.families = append(m.families, f)
		}
	}
	m.snapshot = scan.ReadHost(host, m.families)
	m.devices = make(map[string]rules.Offered)
	for _, d := range (&rules.Rules{}).ApplyTo(m.snapshot).Devices {
		if d.Health.Status == discovery.Unhealthy {
			return fmt.Errorf("machine %s: device %s is not well: %s", m.name, d.Name, d.Health.Reason)
		}
		m.devices[d.Name] = d
	}
	m.findCards()
	return m.makeRules()
}

// address matches the address of a PCI function.
var address = regexp.MustCompile(`[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]`)

// findCards fills in the cards: the functions of the devices, with their nodes.
func (m *machine) findCards() {
	if len(m.cards) > 0 {
		return
	}
	silicon := make(map[string]map[string]bool) // by node
	for _, d := range m.devices {
		for _, n := range nodesOf(&d) {
			if silicon[n] == nil {
				silicon[n] = make(map[string]bool)
			}
			silicon[n][d.Silicon()] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m.devices)) {
		d := m.devices[name]
		found := address.FindAllString(d.Source, -1)
		if len(found) == 0 {
			continue
		}
		own := slices.DeleteFunc(nodesOf(&d), func(n string) bool { return len(silicon[n]) > 1 })
		i := slices.IndexFunc(m.cards, func(c card) bool { return c.address == found[len(found)-1] })
		if i < 0 {
			m.cards, i = append(m.cards, card{address: found[len(found)-1]}), len(m.cards)
		}
		for _, n := range own {
			if !slices.Contains(m.cards[i].nodes, n) {
				m.cards[i].nodes = append(m.cards[i].nodes, n)
			}
		}
	}
}

// interchangeable returns the devices with a common name, none for "".
func (m *machine) interchangeable(name string) (devices []string) {
	for _, d := range m.devices {
		if name != "" && d.Interchangeable == name {
			devices = append(devices, d.Name)
		}
	}
	return devices
}

// nodesOf returns the host paths of a device's nodes, without the leading slash.
func nodesOf(d *rules.Offered) (paths []string) {
	for _, n := range d.Edits.DeviceNodes {
		paths = append(paths, strings.TrimPrefix(cmp.Or(n.HostPath, n.Path), "/"))
	}
	return paths
}

// makeRules creates the administrator's possible settings for the machine.
func (m *machine) makeRules() error {
	every, err := rules.Compile("true")
	if err != nil {
		return err
	}
	m.named, err = m.resources()
	if len(m.functions) > 0 {
		m.sharings = [][]rules.Share{nil}
	} else {
		m.sharings = [][]rules.Share{nil, nil, {{Selector: every, Replicas: 2}}, {{Selector: every, Replicas: 3}}}
	}
	if err != nil {
		return err
	}
	memory := make(map[int64]bool)
	for _, d := range m.devices {
		capacity := d.Capacity["memory"]
		memory[capacity.Value.Value()] = true
	}
	if len(memory) == 1 && !memory[0] {
		for bytes := range memory {
			m.sharings = append(m.sharings, []rules.Share{{Selector: every, Capacity: "memory", Unit: newQuantity(bytes / 4)}})
		}
	}
	for _, c := range m.cards {
		if m.reassigns {
			break // a card is excluded by its address, regardless of its name
		}
		one, err := rules.Compile(fmt.Sprintf(`device.attributes["resource.kubernetes.io"].?pciBusID.orValue("") == %q`, c.address))
		if err != nil {
			return err
		}
		m.exclude = append(m.exclude, one)
	}
	return nil
}
