package main

import (
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/template"

	"chandler.dev/e2e/chandler"
)

// gpuTemplate is the kernel's description of one GPU: an MI210 as in the recorded server with eight
// of them, but alone below its PCIe root.
//
//go:embed gpu.host.tmpl
var gpuTemplate string

// functionTemplate is the kernel's description of one virtual function of an E810, as in the recorded
// server with four of them.
//
//go:embed function.host.tmpl
var functionTemplate string

// adapter is the kernel's description of the physical function of the virtual functions.
const adapter = `-- sys/bus/pci/devices/ffff:01:00.0 -> ../../../devices/pciffff:00/ffff:01:00.0 --
-- sys/devices/pciffff:00/ffff:01:00.0/vendor --
0x8086
-- sys/devices/pciffff:00/ffff:01:00.0/device --
0x1593
-- sys/devices/pciffff:00/ffff:01:00.0/class --
0x020000
-- sys/devices/pciffff:00/ffff:01:00.0/driver -> ../../../bus/pci/drivers/ice --
-- sys/devices/pciffff:00/ffff:01:00.0/numa_node --
0
-- sys/class/net/ens1f0np0 -> ../../devices/pciffff:00/ffff:01:00.0/net/ens1f0np0 --
-- sys/devices/pciffff:00/ffff:01:00.0/net/ens1f0np0/type --
1
-- sys/devices/pciffff:00/ffff:01:00.0/net/ens1f0np0/carrier --
1
-- proc/1/net/route --
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
`

// hostHead is the part of a recorded server that is independent of the number of GPUs.
const hostHead = `A server with as many GPUs as a benchmark wants.

-- sys/class/kfd/kfd -> ../../devices/virtual/kfd/kfd --
-- sys/devices/virtual/kfd/kfd/dev --
510:0
-- sys/devices/virtual/kfd/kfd/uevent --
MAJOR=510
MINOR=0
DEVNAME=kfd
-- dev/kfd c 510:0 --
-- sys/module/amdgpu/version --
6.8.5
`

// A gpu holds the values that differ between GPUs.
type gpu struct {
	Number       int // from 0
	Domain, Bus  int // of its PCI address
	Node, Render int // number in the compute topology; number of its render node
}

// gpusPerDomain is the number of GPUs in one PCI domain of the made-up server.
const gpusPerDomain = 128

func newGPU(number int) gpu {
	return gpu{Number: number, Domain: number / gpusPerDomain, Bus: 1 + number%gpusPerDomain, Node: 1 + number, Render: 10000 + number}
}

// Address returns the GPU's PCI address.
func (g gpu) Address() string { return fmt.Sprintf("%04x:%02x:00.0", g.Domain, g.Bus) }

// Location returns the PCI address as the compute topology states it, without the domain.
func (g gpu) Location() int { return g.Bus << 8 }

// device returns the agent's name for the GPU.
func (g gpu) device() string {
	return "pci-" + strings.NewReplacer(":", "-", ".", "-").Replace(g.Address())
}

// renderNode returns the path of the GPU's device node. Without the node, the GPU is unhealthy.
func (g gpu) renderNode() string { return fmt.Sprintf("/dev/dri/renderD%d", g.Render) }

// A function holds the values that differ between virtual functions.
type function struct{ Number int } // from 0

// Address returns the PCI address of the function.
func (f function) Address() string {
	return fmt.Sprintf("ffff:01:%02x.%d", 1+f.Number/8, f.Number%8)
}

// recordedHost returns a recorded host with GPUs, and with an adapter if it has virtual functions.
func recordedHost(gpus, functions int) (string, error) {
	tmpl, err := template.New("gpu").Parse(gpuTemplate)
	if err != nil {
		return "", err
	}
	if _, err := tmpl.New("function").Parse(functionTemplate); err != nil {
		return "", err
	}
	var host strings.Builder
	host.WriteString(hostHead)
	for i := range gpus {
		if err := tmpl.Execute(&host, newGPU(i)); err != nil {
			return "", err
		}
	}
	if functions > 0 {
		host.WriteString(adapter)
		fmt.Fprintf(&host, "-- sys/devices/pciffff:00/ffff:01:00.0/sriov_numvfs --\n%d\n", functions)
	}
	for i := range functions {
		if err := tmpl.ExecuteTemplate(&host, "function", function{i}); err != nil {
			return "", err
		}
	}
	host.WriteString("-- end --\n")
	return host.String(), nil
}

// simulate replaces the simulated host on the node by a host that has GPUs, virtual functions, and no
// other devices.
func (b *bench) simulate(gpus, functions int) error {
	host, err := recordedHost(gpus, functions)
	if err != nil {
		return err
	}
	dir := b.cluster.NodePath(chandler.HostDir)
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	file := filepath.Join(b.cluster.NodePath("/var/lib"), "gpus.host")
	if err := os.WriteFile(file, []byte(host), 0o644); err != nil {
		return err
	}
	if out, err := exec.Command(b.project.Agent, "simulate", "--device-nodes", dir, file).CombinedOutput(); err != nil {
		return fmt.Errorf("simulate a host with %d GPUs and %d virtual functions: %w\n%s", gpus, functions, err, out)
	}
	return nil
}
