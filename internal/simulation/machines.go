package simulation

import (
	"fmt"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/internal/simulation/kernel"
)

func quantity(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.DecimalSI) }

// machine is a kind of machine that simulations have.
type machine struct {
	name     string
	text     []byte
	families []*discovery.Family
	snapshot *discovery.Snapshot // of it at first
	cards    []card
}

// card is what can vanish from a machine.
type card struct {
	address string   // on the PCI bus
	nodes   []string // of /dev
	silicon string
}

// gpus is a machine with cards that are given out whole.
func gpus(n int) *machine {
	m := &machine{name: fmt.Sprintf("%d GPUs", n)}
	var b strings.Builder
	b.WriteString("-- proc/devices --\nCharacter devices:\n195 nvidia\n195 nvidiactl\n511 nvidia-uvm\n\nBlock devices:\n")
	b.WriteString("-- sys/module/nvidia/version --\n535.104.05\n-- dev/nvidiactl c 195:255 --\n-- dev/nvidia-uvm c 511:0 --\n")
	for i := range n {
		address := fmt.Sprintf("0000:0%d:00.0", i+1)
		dir := fmt.Sprintf("sys/devices/pci0000:00/0000:00:0%d.0/%s", i+1, address)
		fmt.Fprintf(&b, "-- sys/bus/pci/devices/%s -> ../../../%s --\n", address, strings.TrimPrefix(dir, "sys/"))
		for _, attribute := range []string{"vendor 0x10de", "device 0x20b0", "class 0x030200", "numa_node 0"} {
			name, value, _ := strings.Cut(attribute, " ")
			fmt.Fprintf(&b, "-- %s/%s --\n%s\n", dir, name, value)
		}
		fmt.Fprintf(&b, "-- %s/driver -> ../../../../bus/pci/drivers/nvidia --\n", dir)
		fmt.Fprintf(&b, "-- proc/driver/nvidia/gpus/%s/information --\nModel: \t\t NVIDIA A100-SXM4-40GB\nGPU UUID: \t GPU-5d2c1f0%d-8a41-4e0b-9c37-0b6f3d9ae40%d\nBus Location: \t %s\nDevice Minor: \t %d\nGPU Excluded:\t No\n", address, i, i, address, i)
		fmt.Fprintf(&b, "-- dev/nvidia%d c 195:%d --\n", i, i)
		m.cards = append(m.cards, card{address, []string{fmt.Sprintf("dev/nvidia%d", i)}, fmt.Sprintf("pci-0000-0%d-00-0", i+1)})
	}
	b.WriteString("-- end --\n")
	m.text = []byte(b.String())
	return m
}

// cores is a machine with chips that are given out whole or by their cores.
func cores(chips, each int) *machine {
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
		m.cards = append(m.cards, card{address, []string{fmt.Sprintf("dev/neuron%d", i)}, fmt.Sprintf("neuron%d", i)})
	}
	b.WriteString("-- end --\n")
	m.text = []byte(b.String())
	return m
}

// machines returns the kinds of machines that there are.
var machines = sync.OnceValue(func() []*machine {
	all := []*machine{gpus(3), cores(2, 2)}
	for _, m := range all {
		for _, f := range families.All {
			if f.Name == "nvidia" || f.Name == "neuron" {
				m.families = append(m.families, f)
			}
		}
		m.snapshot = discovery.Scan(&discovery.Host{FS: kernel.New(m.text)}, m.families)
	}
	return all
})
