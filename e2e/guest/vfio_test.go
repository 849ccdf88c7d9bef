package guest_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"chandler.dev/e2e/guest"
)

// edu is the ID of QEMU's educational device. No kernel has a driver for it.
const edu = "1234:11e8"

// vfioGuest returns a guest with functions to bind to vfio: a single edu, two edus behind one
// bridge, and adapters with SR-IOV.
func vfioGuest(t *testing.T, kernel guest.Version, iommu string) guest.Config {
	return guest.Config{
		Kernel: kernel, IOMMU: iommu,
		Modules:  []string{"vfio-pci", "vfio_iommu_type1", "pci-stub"},
		Carry:    []string{"igb", "igbvf", "nvme", "vgem", "pci-pf-stub"},
		Tools:    []string{"lspci", "runc"},
		Programs: map[string]string{"vfiouser": guest.Build(t, "chandler.dev/e2e/cmd/vfiouser")},
		Args: []string{
			"-device", "edu,addr=0x10",
			"-device", "pcie-pci-bridge,id=bridge,addr=0x11", "-device", "edu,bus=bridge,addr=1", "-device", "edu,bus=bridge,addr=2",
			"-device", "pcie-root-port,id=rp0,chassis=1,addr=0x12", "-device", "igb,bus=rp0",
			"-device", "pcie-root-port,id=rp1,chassis=2,addr=0x13", "-device", "nvme-subsys,id=subsystem",
			"-device", "nvme,serial=A,subsys=subsystem,bus=rp1,max_ioqpairs=26,msix_qsize=28,sriov_max_vfs=2,sriov_vq_flexible=4,sriov_vi_flexible=2",
		},
	}
}

// TestVFIO compares chandler's description of functions under vfio with the kernel's behavior for a
// container that has only the devices of the CDI spec.
func TestVFIO(t *testing.T) {
	t.Run("newer", func(t *testing.T) { testVFIO(t, guest.Newer) })
	t.Run("debian12", func(t *testing.T) {
		guest.Long(t)
		testVFIO(t, guest.Debian12)
	})
}

func testVFIO(t *testing.T, kernel guest.Version) {
	g := guest.Boot(t, vfioGuest(t, kernel, "intel"))
	t.Logf("Linux %s in QEMU %s", g.Kernel, g.QEMU)
	edus := functions(t, g, edu)
	if len(edus) != 3 {
		t.Fatalf("the guest has %q", edus)
	}
	alone, first, second := edus[0], edus[1], edus[2]

	t.Run("a function of its own", func(t *testing.T) {
		bind(t, g, alone, "vfio-pci")
		usable(t, g, edu, alone)
		if !testing.Short() {
			staysAsleep(t, g, alone)
		}
	})
	t.Run("a group", func(t *testing.T) {
		bind(t, g, first, "vfio-pci")
		usable(t, g, edu, first) // next to one without a driver
		bind(t, g, second, "pci-stub")
		usable(t, g, edu, first)
		const other = "pci-pf-stub" // a driver whose name alone does not distinguish it from pci-stub
		g.Load(t, other)
		bind(t, g, second, other)
		d, answers := discover(t, g).use(t, first)
		if d.Health.Status != "Unhealthy" || !strings.Contains(d.Health.Reason, second+", which is bound to "+other) {
			t.Errorf("beside %s, %s is %+v", other, first, d.Health)
		}
		if answers.Viable || answers.Container == "" {
			t.Errorf("beside %s, the kernel gives %s: %+v", other, first, answers)
		}
		bind(t, g, second, "vfio-pci")
		usable(t, g, edu, first, second)
		h := discover(t, g)
		if a, b := h.device(t, first), h.device(t, second); a.PartOf.Name == "" || a.PartOf.Name != b.PartOf.Name {
			t.Errorf("%+v and %+v are of one group, and no unit", a.PartOf, b.PartOf)
		}
		if _, answers := h.use(t, first, h.device(t, alone).group(t)); !strings.Contains(answers.Group, "operation not permitted") {
			t.Errorf("a container that was given %s opens the group of %s: %+v", first, alone, answers)
		}
	})
	t.Run("virtual functions", func(t *testing.T) {
		for _, adapter := range []struct{ module, id string }{{"igb", "8086:10c9"}, {"nvme", "1b36:0010"}} {
			g.Load(t, adapter.module)
			physical := functions(t, g, adapter.id)[0]
			dir := "/sys/bus/pci/devices/" + physical
			if adapter.module == "igb" { // otherwise its virtual functions wait for the interface
				g.Sh(t, "ip link set $(ls "+dir+"/net) up")
			}
			g.Sh(t, "echo 0 > "+dir+"/sriov_drivers_autoprobe; echo 2 > "+dir+"/sriov_numvfs")
			if adapter.module == "igb" { // igb sets its interface down and up again while it creates functions (igb_sriov_reinit, 6.1 to 6.12)
				g.Sh(t, "n=0; until grep -q 1 "+dir+"/net/*/carrier || [ $n = 600 ]; do sleep 0.1; n=$((n+1)); done")
			}
			virtual := strings.Fields(g.Sh(t, "for vf in "+dir+"/virtfn*; do basename $(readlink $vf); done"))
			bind(t, g, virtual[0], "vfio-pci")
			usable(t, g, "", virtual[0])
			if adapter.module == "igb" {
				bind(t, g, virtual[1], "pci-stub")
			}
			if _, found := discover(t, g).find(virtual[1]); found {
				t.Errorf("%s is offered, and is not usable", virtual[1])
			}
		}
	})
	t.Run("software that looks like a GPU", func(t *testing.T) {
		g.Load(t, "vgem")
		if nodes := g.Must(t, "ls", "/dev/dri"); !strings.Contains(nodes, "renderD") {
			t.Fatalf("vgem made no node: %s", nodes)
		}
		for _, d := range discover(t, g).devices {
			if d.Attributes.Kind.String == "gpu" {
				t.Errorf("%s is offered as a GPU", d.Name)
			}
		}
	})
}

// TestVFIOWithoutInterruptRemapping uses virtio-iommu, which remaps no interrupts on x86.
func TestVFIOWithoutInterruptRemapping(t *testing.T) {
	config := vfioGuest(t, guest.Newer, "virtio")
	config.Files = map[string]string{"/etc/provision.yaml": provisionEdu}
	g := guest.Boot(t, config)
	t.Logf("Linux %s in QEMU %s", g.Kernel, g.QEMU)
	const alone = "0000:00:10.0"
	if r := g.Run(t, "test", "-e", "/sys/bus/pci/devices/"+alone+"/iommu_group"); r.Code == 0 {
		t.Fatal("a function has its group before it has a driver; nothing is proved")
	}
	g.Must(t, "chandler", "provision", "--config", "/etc/provision.yaml")

	d, answers := discover(t, g).use(t, alone)
	if d.Health.Status != "Unhealthy" || !strings.Contains(d.Health.Reason, "allow_unsafe_interrupts of vfio_iommu_type1 is off") {
		t.Errorf("%s is %+v", alone, d.Health)
	}
	if !answers.Viable || answers.Container != "" || !strings.Contains(answers.IOMMU, "operation not permitted") {
		t.Errorf("the kernel says: %+v; want EPERM for the IOMMU", answers)
	}
	if err := g.WriteAttribute(t, "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts", "1"); err != nil {
		t.Fatal(err)
	}
	usable(t, g, edu, alone)
}

// staysAsleep checks that discovery does not wake a free function that the kernel has suspended.
func staysAsleep(t *testing.T, g *guest.Guest, address string) {
	t.Helper()
	power := "/sys/bus/pci/devices/" + address + "/power/"
	g.Sh(t, "n=0; until grep -q suspended "+power+"runtime_status || [ $n = 100 ]; do sleep 0.1; n=$((n+1)); done")
	awake := func() string { return g.Sh(t, "cat "+power+"runtime_status "+power+"runtime_active_time") }
	before := awake()
	discover(t, g)
	if after := awake(); after != before || !strings.HasPrefix(after, "suspended") {
		t.Errorf("%s was %q (and for so many ms awake), and after a look is %q", address, before, after)
	}
}

const provisionEdu = `apiVersion: chandler.dev/v1alpha1
kind: ProvisionConfig
functions:
- cel: device.attributes["resource.kubernetes.io"].pciBusID == "0000:00:10.0"
  driver: vfio-pci
`

// functions returns the addresses of the functions with an ID, "vendor:device", sorted.
func functions(t *testing.T, g *guest.Guest, id string) []string {
	t.Helper()
	var found []string
	for line := range strings.Lines(g.Must(t, "lspci", "-D", "-n", "-d", id)) {
		found = append(found, strings.Fields(line)[0])
	}
	if len(found) == 0 {
		t.Fatalf("the guest has no function %s", id)
	}
	return found
}

// bind replaces the driver of a function.
func bind(t *testing.T, g *guest.Guest, address, driver string) {
	t.Helper()
	dir := "/sys/bus/pci/devices/" + address
	g.Sh(t, fmt.Sprintf("echo %s > %s/driver_override; if [ -e %s/driver ]; then echo %s > %s/driver/unbind; fi; echo %s > /sys/bus/pci/drivers_probe; test $(basename $(readlink %s/driver)) = %s",
		driver, dir, dir, address, dir, address, dir, driver))
}

// A vfioHost is the output of chandler discover in a guest.
type vfioHost struct {
	g       *guest.Guest
	text    string
	devices []vfioDevice
}

type vfioDevice struct {
	Name       string
	Health     struct{ Status, Reason string }
	PartOf     struct{ Name string }
	Attributes struct {
		Kind struct{ String string } `json:"kind"`
	}
	Edits struct {
		DeviceNodes []struct{ Path string }
	}
	Files []struct{ Text string }
}

func discover(t *testing.T, g *guest.Guest) vfioHost {
	t.Helper()
	h := vfioHost{g: g, text: g.Must(t, "chandler", "discover", "-o", "json")}
	var snapshot struct{ Devices []vfioDevice }
	if err := json.Unmarshal([]byte(h.text), &snapshot); err != nil {
		t.Fatalf("%v:\n%s", err, h.text)
	}
	h.devices = snapshot.Devices
	return h
}

// find returns the device of a PCI function, if there is one.
func (h vfioHost) find(address string) (vfioDevice, bool) {
	return h.named("pci-" + strings.NewReplacer(":", "-", ".", "-").Replace(address))
}

func (h vfioHost) named(name string) (vfioDevice, bool) {
	for _, d := range h.devices {
		if d.Name == name {
			return d, true
		}
	}
	return vfioDevice{}, false
}

func (h vfioHost) device(t *testing.T, address string) vfioDevice {
	t.Helper()
	d, found := h.find(address)
	if !found {
		t.Fatalf("%s is not offered; these are:\n%s", address, h.text)
	}
	return d
}

// group returns the node of the IOMMU group of a device.
func (d vfioDevice) group(t *testing.T) string {
	t.Helper()
	for _, node := range d.Edits.DeviceNodes {
		if strings.Trim(strings.TrimPrefix(node.Path, "/dev/vfio/"), "0123456789") == "" {
			return node.Path
		}
	}
	t.Fatalf("%s has no group's node: %+v", d.Name, d.Edits)
	return ""
}

// answers is the output of e2e/cmd/vfiouser.
type answers struct {
	Group, Container, IOMMU string
	Viable                  bool
	Functions               map[string]string
}

// use opens a function through its group in a container. If other names the node of another group,
// the container gets that node without a CDI spec, and opens it instead of its own.
func (h vfioHost) use(t *testing.T, address string, other ...string) (vfioDevice, answers) {
	t.Helper()
	d := h.device(t, address)
	return d, h.useAll(t, d.group(t), []string{address}, other...)
}

func (h vfioHost) useAll(t *testing.T, group string, addresses []string, other ...string) answers {
	t.Helper()
	names := make([]string, len(addresses))
	for i, address := range addresses {
		names[i] = h.device(t, address).Name
	}
	return h.run(t, group, names, addresses, other...)
}

// run opens functions by their kernel addresses in a container with the named devices.
func (h vfioHost) run(t *testing.T, group string, names, addresses []string, other ...string) (said answers) {
	t.Helper()
	const dir = "/tmp/bundle"
	h.g.Sh(t, "rm -rf "+dir+"; mkdir -p "+dir+"/rootfs; cp /usr/bin/vfiouser "+dir+"/rootfs/; cd "+dir+"; runc spec")
	var spec map[string]any
	if err := json.Unmarshal([]byte(h.g.ReadFile(t, dir+"/config.json")), &spec); err != nil {
		t.Fatal(err)
	}
	for _, path := range other {
		group = "/given" // by a mount, which the device cgroup does not cover
		spec["mounts"] = append(spec["mounts"].([]any), map[string]any{"destination": group, "source": path, "type": "bind", "options": []string{"bind", "rw"}})
	}
	process := spec["process"].(map[string]any)
	process["terminal"], process["args"] = false, append([]string{"/vfiouser", "open", group}, addresses...)
	data, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	h.g.WriteFile(t, dir+"/config.json", string(data), 0o644)
	if r := h.g.RunCommand(t, guest.Command{Args: append([]string{"vfiouser", "bundle", dir}, names...), Stdin: h.text}); r.Code != 0 {
		t.Fatalf("give the container its devices: %s", r.Stderr)
	}
	out := h.g.Must(t, "runc", "run", "--no-pivot", "--bundle", dir, "user")
	if err := json.Unmarshal([]byte(out), &said); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return said
}

// usable fails the test unless chandler reports functions as usable and a container can use them.
func usable(t *testing.T, g *guest.Guest, id string, addresses ...string) {
	t.Helper()
	h := discover(t, g)
	for _, address := range addresses {
		if d := h.device(t, address); d.Health.Status != "Healthy" {
			t.Errorf("%s is %+v", address, d.Health)
		}
	}
	said := h.useAll(t, h.device(t, addresses[0]).group(t), addresses)
	for _, address := range addresses {
		if got := said.Functions[address]; got == "" || id != "" && got != id || strings.Contains(got, " ") {
			t.Errorf("a container that was given %s is told %+v", address, said)
		}
	}
}
