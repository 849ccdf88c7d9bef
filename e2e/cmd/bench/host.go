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

// recordedHost returns a recorded host with n GPUs.
func recordedHost(n int) (string, error) {
	tmpl, err := template.New("gpu").Parse(gpuTemplate)
	if err != nil {
		return "", err
	}
	var host strings.Builder
	host.WriteString(hostHead)
	for i := range n {
		if err := tmpl.Execute(&host, newGPU(i)); err != nil {
			return "", err
		}
	}
	host.WriteString("-- end --\n")
	return host.String(), nil
}

// simulate replaces the simulated host on the node by a host that has n GPUs and no other devices.
func (b *bench) simulate(n int) error {
	host, err := recordedHost(n)
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
		return fmt.Errorf("simulate a host with %d GPUs: %w\n%s", n, err, out)
	}
	return nil
}
