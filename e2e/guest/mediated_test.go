package guest_test

import (
	"strings"
	"testing"
	"time"

	"chandler.dev/e2e/guest"
)

// TestMediated covers devices that kernels create on a function: mediated devices, and virtio
// devices by vDPA. No Debian kernel has a driver for these without hardware, so the tests use their
// own modules (modules/mademdev and modules/madevdpa). These create devices without function, by
// the kernel's own interfaces and in the kernel's own places.
func TestMediated(t *testing.T) {
	guest.Long(t)
	if !guest.HasCompiler() {
		t.Skip("needs gcc and make")
	}
	config := vfioGuest(t, guest.Newer, "")
	config.Modules = append(config.Modules, "igb", "virtio_vdpa", "mdev", "madevdpa", "mademdev")
	g := guest.Boot(t, config)
	t.Logf("Linux %s in QEMU %s", g.Kernel, g.QEMU)

	t.Run("a mediated device", func(t *testing.T) {
		const uuid = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
		parent := functions(t, g, edu)[0]
		bind(t, g, parent, "mademdev")
		dir := "/sys/bus/pci/devices/" + parent
		g.Sh(t, "echo "+uuid+" > "+dir+"/mdev_supported_types/mademdev-one/create")
		if name := g.Sh(t, "cat "+dir+"/"+uuid+"/iommu_group/name"); name != "vfio-noiommu\n" {
			t.Errorf("its group is named %q; want the name of groups without an IOMMU", name)
		}
		h := discover(t, g)
		d, found := h.named("mdev-" + uuid)
		if !found || d.Health.Status != "Healthy" {
			t.Fatalf("found %v: %+v", found, d)
		}
		said := h.run(t, d.group(t), []string{d.Name}, []string{uuid})
		// The device has no configuration space to read, but its descriptor was opened.
		if !said.Viable || said.IOMMU != "" || !strings.Contains(said.Functions[uuid], "configuration space") {
			t.Errorf("a container that was given it is told %+v", said)
		}
	})
	t.Run("a virtio device by vDPA", func(t *testing.T) {
		physical := "/sys/bus/pci/devices/" + functions(t, g, "8086:10c9")[0]
		g.Sh(t, "ip link set $(ls "+physical+"/net) up; echo 0 > "+physical+"/sriov_drivers_autoprobe; echo 1 > "+physical+"/sriov_numvfs")
		virtual := strings.TrimSpace(g.Sh(t, "basename $(readlink "+physical+"/virtfn0)"))
		bind(t, g, virtual, "madevdpa")
		made := strings.TrimSpace(g.Sh(t, "cd /sys/bus/pci/devices/"+virtual+"; ls -d vdpa* >&2; ls -d virtio*"))
		d := discover(t, g).device(t, virtual)
		if len(d.Files) != 1 || !strings.Contains(d.Files[0].Text, `"path":"/sys/bus/virtio/devices/`+made+`"`) {
			t.Errorf("the kernel made %s; the device-info file is %+v", made, d.Files)
		}
		g.Must(t, "test", "-e", "/sys/bus/virtio/devices/"+made)
	})
	t.Run("a driver that is slow", func(t *testing.T) { slowDriver(t, g) })
}

// slowDriver checks that the agent's scan does not wait for a slow driver. The driver holds the
// kernel's lock of the function meanwhile: the kernel blocks readers of sriov_numvfs.
func slowDriver(t *testing.T, g *guest.Guest) {
	physical := functions(t, g, "8086:10c9")[0]
	dir := "/sys/bus/pci/devices/" + physical
	g.Sh(t, "echo 0 > "+dir+"/sriov_numvfs; echo "+physical+" > "+dir+"/driver/unbind; echo mademdev > "+dir+"/driver_override; echo 45 > /sys/module/mademdev/parameters/slow")
	probe := g.Start(t, "sh", "-c", "echo "+physical+" > /sys/bus/pci/drivers_probe; echo probed")
	time.Sleep(time.Second)
	read := g.Start(t, "cat", dir+"/sriov_numvfs")
	h := discover(t, g)
	if said := probe.Output() + read.Output(); said != "" {
		t.Errorf("a look at the host took as long as the driver, or the kernel keeps no lock: %q", said)
	}
	for _, d := range h.devices {
		if d.Health.Status == "Unknown" {
			t.Errorf("%s is %+v", d.Name, d.Health)
		}
	}
	probe.Wait(t)
	if r := read.Wait(t); r.Stdout != "0\n" {
		t.Errorf("then it has %q virtual functions: %s", r.Stdout, r.Stderr)
	}
}
