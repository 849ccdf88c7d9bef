package guest_test

import (
	"strings"
	"testing"

	"chandler.dev/e2e/guest"
)

// TestHarness tests the functions of the harness that other tests rely on.
func TestHarness(t *testing.T) {
	t.Run("newer", func(t *testing.T) { testHarness(t, guest.Config{}) })
	t.Run("debian12", func(t *testing.T) {
		guest.Long(t)
		testHarness(t, guest.Config{Kernel: guest.Debian12, QEMU: guest.Debian12, IOMMU: "intel", NUMA: true})
	})
}

func testHarness(t *testing.T, config guest.Config) {
	g := guest.Boot(t, guest.Config{
		Kernel: config.Kernel, QEMU: config.QEMU, IOMMU: config.IOMMU, NUMA: config.NUMA,
		Modules: []string{"nvme"},
		Tools:   []string{"lspci"},
		Args:    []string{"-device", "pcie-root-port,id=rp0,chassis=1", "-device", "nvme,id=disk,serial=A,bus=rp0"},
		Disks:   []guest.Disk{{Size: 64, Ext4: true}},
	})
	t.Logf("Linux %s in QEMU %s", g.Kernel, g.QEMU)

	if out := g.Must(t, "chandler", "version"); strings.Contains(out, "development") {
		t.Errorf("the guest's agent does not know its version: %s", out)
	}
	if out := g.Must(t, "lspci", "-n"); !strings.Contains(out, "0108") {
		t.Errorf("lspci does not list the NVMe controller:\n%s", out)
	}
	if r := g.Run(t, "sh", "-c", "echo out; echo err >&2; exit 3"); r != (guest.Result{Stdout: "out\n", Stderr: "err\n", Code: 3}) {
		t.Errorf("a program's end: %+v", r)
	}

	g.Mount(t, "/dev/vda", "/mnt", "ext4", "")
	g.Sh(t, "echo kept > /mnt/kept; sync; echo gone > /mnt/gone; echo gone > /run/gone")
	cat := g.Start(t, "sh", "-c", "echo ready; sleep 1000")
	cat.Until(t, "ready")
	if r := cat.Stop(t); r.Code != -1 {
		t.Errorf("a program that was stopped: %+v", r)
	}
	g.Start(t, "sleep", "1000")
	g.Reset(t)
	g.Mount(t, "/dev/vda", "/mnt", "ext4", "")
	if got := g.Must(t, "ls", "/mnt", "/run"); !strings.Contains(got, "kept") || strings.Contains(got, "gone") {
		t.Errorf("after a loss of power the guest has\n%s", got)
	}

	deleted := g.Events("DEVICE_DELETED")
	g.QMP(t, "device_del", map[string]any{"id": "disk"})
	<-deleted
	if out := g.Must(t, "lspci", "-n"); strings.Contains(out, "0108") {
		t.Errorf("lspci lists the NVMe controller that was taken out:\n%s", out)
	}
}
