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

// gpuTemplate is what the kernel says of one GPU: an MI210 as in the recorded server with eight of them, alone behind
// its PCIe root.
//
//go:embed gpu.host.tmpl
var gpuTemplate string

// hostHead is what such a server has once.
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

// A gpu is what differs from one to the next.
type gpu struct {
	Number       int // from 0
	Domain, Bus  int // of its PCI address
	Node, Render int // of the compute topology; number of its render node
}

// gpusPerDomain is how many fit into one PCI domain of the made-up servers.
const gpusPerDomain = 128

func newGPU(number int) gpu {
	return gpu{Number: number, Domain: number / gpusPerDomain, Bus: 1 + number%gpusPerDomain, Node: 1 + number, Render: 10000 + number}
}

// address is the GPU's PCI address.
func (g gpu) Address() string { return fmt.Sprintf("%04x:%02x:00.0", g.Domain, g.Bus) }

// Location is the address as the compute topology states it, without the domain.
func (g gpu) Location() int { return g.Bus << 8 }

// device is the name that the agent gives the GPU.
func (g gpu) device() string {
	return "pci-" + strings.NewReplacer(":", "-", ".", "-").Replace(g.Address())
}

// renderNode is the path of its device node, which it is sick without.
func (g gpu) renderNode() string { return fmt.Sprintf("/dev/dri/renderD%d", g.Render) }

// recordedHost is a recorded host with n GPUs.
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

// simulate makes the simulated host on the node one with n GPUs, and nothing else.
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
