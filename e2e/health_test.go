package e2e

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"chandler.dev/e2e/chandler"
)

// TestUnhealthyDevice removes the device node of a GPU. The GPU must get a taint, or leave the slices
// where the API server does not support taints. No pod may get the GPU until its node is back.
func TestUnhealthyDevice(t *testing.T) {
	offers(t)
	const address, name = "0000:23:00.0", "pci-0000-23-00-0"
	host := node.NodePath(chandler.HostDir)
	render, err := filepath.Glob(filepath.Join(host, "sys/bus/pci/devices", address, "drm/renderD*"))
	if err != nil || len(render) != 1 {
		t.Fatalf("render nodes of %s: %q, %v", address, render, err)
	}
	device := filepath.Join(host, "dev/dri", filepath.Base(render[0]))
	aside := filepath.Join(host, "aside")
	rename(t, device, aside)
	t.Cleanup(func() {
		if _, err := os.Stat(aside); err == nil {
			rename(t, aside, device)
		}
	})

	if has(t, "DRADeviceTaints") {
		tainted(t, name, "chandler.dev/node-missing")
	} else {
		until(t, "the GPU to leave the slices", func(ctx context.Context) error { return offersGPUs(ctx, 7) })
	}
	pod := gpuPod("convalescent", address)
	apply(t, pod)
	waits(t, "convalescent")
	rename(t, aside, device)
	running(t, "convalescent")
	remove(t, pod)
	nothingHeld(t)
}
