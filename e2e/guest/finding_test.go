package guest_test

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/e2e/guest"
)

// strangers are functions of real models, created by pcifake: no driver works with them.
var strangers = []string{
	"0/10de:2330:030200/4/2330", // an H100
	"0/15b3:101d:020000",        // a ConnectX-6 Dx
	"0/1da3:1020:120000",        // a Gaudi2
	"0/17db:0501:020000",        // an HPE Slingshot adapter
	"0/19e5:d802:120000",        // an Ascend 910
	"0/1e60:2864:120000",        // a Hailo-8
	"0/1af4:1110:050000",        // not an accelerator
	"1/1002:74a1:120000",        // an MI300X
	"1/8086:4940:0b4000/4/4941", // a QAT of the fourth generation
	"1/10ee:5001:120000",        // an Alveo U200
	"1/1ac1:089a:088000",        // an Edge TPU
	"1/1d0f:f010:058000",        // an FPGA of AWS
	"1/8086:0bd5:038000/4/0bd5", // a Data Center GPU Max
}

// strangersDomain is the PCI domain of the functions on node 0. It has five digits.
const strangersDomain = 0x10010

// TestFinding compares all found devices with the information of the kernel, lspci and QEMU.
func TestFinding(t *testing.T) {
	t.Run("newer", func(t *testing.T) { testFinding(t, guest.Newer) })
	t.Run("debian12", func(t *testing.T) {
		guest.Long(t)
		testFinding(t, guest.Debian12)
	})
}

func testFinding(t *testing.T, kernel guest.Version) {
	config := topology(kernel)
	if !guest.HasCompiler() {
		t.Run("fake functions", func(t *testing.T) {
			t.Skip("there is no C compiler for functions without their driver and in long PCI domains")
		})
		config.Carry = nil
	}
	if !testing.Short() {
		config.Programs = programs(t)
	}
	g := guest.Boot(t, config)
	t.Logf("Linux %s, QEMU %s", g.Kernel, g.QEMU)
	if guest.HasCompiler() {
		g.Load(t, "pcifake", "functions="+strings.Join(strangers, ","), "domain="+strconv.Itoa(strangersDomain))
	}
	g.Sh(t, `
		echo "(none)" > /proc/sys/kernel/hostname # which is no name of a node
		ip link set dummy0 up
		rdma link add rxe0 type rxe netdev dummy0
		igb=$(lspci -Dn -d 8086:10c9 | cut -d' ' -f1)
		ip link set $(ls /sys/bus/pci/devices/$igb/net) up
		echo 2 > /sys/bus/pci/devices/$igb/sriov_numvfs
		for address in $(lspci -Dn -d 1b36:0010 | cut -d' ' -f1); do # both, since they are in one IOMMU group
			echo vfio-pci > /sys/bus/pci/devices/$address/driver_override
			echo $address > /sys/bus/pci/devices/$address/driver/unbind
			echo $address > /sys/bus/pci/drivers_probe
		done`)

	out := discoverAll(t, g)
	if len(out.Problems) > 0 {
		t.Errorf("problems: %s", out.Problems)
	}
	agreeWithKernel(t, out.Devices, kernelFunctions(t, g))
	agreeWithQEMU(t, out.byModel(), guest.HasCompiler())
	for _, d := range out.byModel()["1af4:1050"] {
		if d.text("vendor") != "redhat" || d.text("model") != "Virtio 1.0 GPU" {
			t.Errorf("virtio-gpu is %q of %q", d.text("model"), d.text("vendor"))
		}
	}
	seesFamilies(t, g, out.Devices, guest.HasCompiler())
	for _, d := range out.byModel()["8086:10ca"] { // virtual functions of igb
		if parent := d.text("parent"); !strings.HasSuffix(parent, "41-00-0") && !strings.HasSuffix(parent, "41:00.0") {
			t.Errorf("the parent of %s is %q", d.Name, parent)
		}
	}
	for _, d := range out.Devices {
		if strings.Contains(d.Path, "/vgem") || strings.Contains(d.Path, "/virtual/infiniband") {
			t.Errorf("%s is software, and is offered", d.Path)
		}
	}
	for _, name := range []string{"kvm", "tun", "vhost-net", "vhost-vsock"} {
		if !slices.ContainsFunc(out.Devices, func(d device) bool { return d.Name == name && d.Health.Status == "Healthy" }) {
			t.Errorf("%s is not offered", name)
		}
	}

	t.Run("replay", func(t *testing.T) { replay(t, g, out) })
	t.Run("least privilege", func(t *testing.T) { leastPrivilege(t, g, out) })
	if !testing.Short() {
		t.Run("least privileged agent", func(t *testing.T) { leastPrivilegedAgent(t, g) })
	}
}

// topology returns a machine with two NUMA nodes, each with a root complex, and a switch.
func topology(kernel guest.Version) guest.Config {
	return guest.Config{
		Kernel: kernel, NUMA: true, IOMMU: "intel", Memory: 1280,
		Tools: []string{"lspci", "ip", "rdma", "runc"},
		Modules: []string{
			"nvme", "e1000e", "igb", "igbvf", "virtio_gpu", "bochs", "vgem", "kvm_amd", "vhost_net", "vhost_vsock", "tun",
			"crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm", "dummy", "vfio_pci", "uio_pci_generic",
		},
		Carry: []string{"pcifake"},
		Args: []string{
			"-device", "pxb-pcie,id=node1,bus_nr=0x40,numa_node=1,bus=pcie.0",
			"-device", "pxb-pcie,id=node0,bus_nr=0x20,numa_node=0,bus=pcie.0",
			"-device", "pcie-root-port,id=port1,bus=node1,chassis=1,slot=1",
			"-device", "pcie-root-port,id=port2,bus=node1,chassis=2,slot=2",
			"-device", "pcie-root-port,id=port3,bus=node0,chassis=3,slot=3",
			"-device", "x3130-upstream,id=up,bus=port3",
			"-device", "xio3130-downstream,id=down1,bus=up,chassis=4,slot=0", "-device", "xio3130-downstream,id=down2,bus=up,chassis=4,slot=1",
			"-device", "nvme,serial=below-switch-1,bus=down1", "-device", "nvme,serial=below-switch-2,bus=down2",
			"-device", "igb,bus=port1,netdev=net1", "-netdev", "user,id=net1,restrict=on,ipv6=off",
			"-device", "e1000e,bus=pcie.0,netdev=net2", "-netdev", "user,id=net2,restrict=on,ipv6=off",
			"-device", "virtio-gpu-pci,bus=port2", "-device", "bochs-display,bus=pcie.0", "-device", "edu,bus=pcie.0",
		},
	}
}

// A discovered host is the output of "chandler discover -o json", as far as tests use it.
type discovered struct {
	Devices  []device
	Problems json.RawMessage
}

type device struct {
	Name, Family, Path string
	Attributes         map[string]value
	Health             struct{ Status, Condition, Reason string }
	Edits              json.RawMessage
	Offers             []json.RawMessage
}

// A value is the value of an attribute. One field is set.
type value struct {
	String string
	Int    *int
}

func (d device) text(attribute string) string { return d.Attributes[attribute].String }

// number returns an attribute, or -1 if it is missing, as in the kernel's files.
func (d device) number(attribute string) int {
	if n := d.Attributes[attribute].Int; n != nil {
		return *n
	}
	return -1
}

// model returns a device's PCI IDs in the format of lspci -n.
func (d device) model() string { return d.text("pciVendor") + ":" + d.text("pciDevice") }

func (h discovered) byModel() map[string][]device {
	models := make(map[string][]device)
	for _, d := range h.Devices {
		models[d.model()] = append(models[d.model()], d)
	}
	return models
}

func discoverAll(t *testing.T, g *guest.Guest) discovered {
	t.Helper()
	return parse(t, g.Must(t, "chandler", "discover", "-o", "json"))
}

func parse(t *testing.T, text string) discovered {
	t.Helper()
	var out discovered
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if string(out.Problems) == "[]" {
		out.Problems = nil
	}
	return out
}

// A function is the information of the kernel and lspci about a PCI function.
type function struct {
	path  string
	node  int
	group int
	lspci map[string]string
}

// kernelFunctions reads all functions from sysfs and lspci, by address.
func kernelFunctions(t *testing.T, g *guest.Guest) map[string]function {
	t.Helper()
	found := make(map[string]function)
	asked := g.Sh(t, `
		for f in /sys/bus/pci/devices/*; do
			group=-1
			[ ! -e $f/iommu_group ] || group=$(basename $(readlink $f/iommu_group))
			echo $(basename $f) $(readlink -f $f) $(cat $f/numa_node) $group
		done`)
	for line := range strings.Lines(asked) {
		fields := strings.Fields(line)
		node, nodeErr := strconv.Atoi(fields[2])
		group, groupErr := strconv.Atoi(fields[3])
		if nodeErr != nil || groupErr != nil {
			t.Fatalf("sysfs says %q", line)
		}
		found[fields[0]] = function{path: fields[1], node: node, group: group}
	}
	for record := range strings.SplitSeq(g.Must(t, "lspci", "-Dvmmn"), "\n\n") {
		says := make(map[string]string)
		for line := range strings.Lines(record) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), ":\t")
			says[name] = value
		}
		if f, known := found[says["Slot"]]; known {
			f.lspci = says
			found[says["Slot"]] = f
		}
	}
	return found
}

// agreeWithKernel compares the standard attributes of devices with those of their functions.
func agreeWithKernel(t *testing.T, devices []device, kernel map[string]function) {
	t.Helper()
	compared := 0
	for _, d := range devices {
		address := d.text("resource.kubernetes.io/pciBusID")
		if address == "" {
			continue
		}
		f, known := kernel[address]
		if !known {
			t.Errorf("%s has the address %s, which the kernel does not know", d.Name, address)
			continue
		}
		compared++
		root := strings.Split(f.path, "/")[3]
		want := map[string]any{
			"path": f.path, "node": f.node, "group": f.group, "root": root,
			"lspci": f.lspci["Vendor"] + ":" + f.lspci["Device"],
		}
		got := map[string]any{
			"path": d.Path, "node": d.number("resource.kubernetes.io/numaNode"), "group": d.number("iommuGroup"),
			"root": d.text("resource.kubernetes.io/pcieRoot"), "lspci": d.model(),
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s and the kernel (-kernel +discovered):\n%s", d.Name, diff)
		}
		if node := f.lspci["NUMANode"]; node != "" && node != strconv.Itoa(f.node) {
			t.Errorf("%s: lspci says NUMA node %s, and the kernel %d", address, node, f.node)
		}
	}
	if compared < 3 {
		t.Errorf("only %d PCI functions were found", compared)
	}
}

// agreeWithQEMU compares devices with the configuration of QEMU and pcifake.
func agreeWithQEMU(t *testing.T, found map[string][]device, fake bool) {
	t.Helper()
	type want struct {
		family, kind, status, condition string
		node, count, above              int // above: the number of bridges between the device and its root
	}
	wants := map[string]want{
		"1af4:1050": {"generic", "gpu", "Healthy", "", 1, 1, 1},
		"8086:10ca": {"sriovnet", "nic", "Healthy", "", 1, 2, 1},
		"1b36:0010": {"vfio", "other", "Healthy", "", 0, 2, 3},
	}
	if fake {
		wants["10de:2330"] = want{"nvidia", "gpu", "Unhealthy", "driver-unbound", 0, 1, 1}
		wants["1002:74a1"] = want{"amdgpu", "gpu", "Unhealthy", "driver-unbound", 1, 1, 1}
		wants["15b3:101d"] = want{"rdma", "nic", "Unhealthy", "driver-unbound", 0, 1, 1}
		wants["8086:4940"] = want{"qat", "crypto", "Unhealthy", "driver-unbound", 1, 1, 1}
		wants["10ee:5001"] = want{"fpga-xilinx", "fpga", "Unhealthy", "driver-unbound", 1, 1, 1}
		wants["1da3:1020"] = want{"gaudi", "npu", "Unhealthy", "driver-unbound", 0, 1, 1}
		wants["17db:0501"] = want{"slingshot", "nic", "Unhealthy", "driver-unbound", 0, 1, 1}
		wants["19e5:d802"] = want{"ascend", "npu", "Unhealthy", "driver-unbound", 0, 1, 1}
		wants["1e60:2864"] = want{"hailo", "npu", "Unhealthy", "driver-unbound", 0, 1, 1}
		wants["1ac1:089a"] = want{"apex", "npu", "Unhealthy", "driver-unbound", 1, 1, 1}
		wants["1d0f:f010"] = want{"fpga-aws", "fpga", "Unhealthy", "driver-unbound", 1, 1, 1}
		wants["8086:0bd5"] = want{"intelgpu", "gpu", "Unhealthy", "driver-unbound", 1, 1, 1}
	}
	for _, model := range slices.Sorted(maps.Keys(wants)) {
		w := wants[model]
		if len(found[model]) != w.count {
			t.Errorf("of %s there are %d devices, want %d", model, len(found[model]), w.count)
		}
		for _, d := range found[model] {
			above := len(strings.Split(strings.TrimPrefix(d.Path, "/sys/devices/"), "/")) - 2
			got := want{d.Family, d.text("kind"), d.Health.Status, d.Health.Condition, d.number("resource.kubernetes.io/numaNode"), w.count, above}
			if got != w {
				t.Errorf("%s, of %s: %+v (%s), want %+v", d.Name, model, got, d.Health.Reason, w)
			}
			if w.condition != "" && (string(d.Edits) != "{}" || len(d.Offers) > 0) {
				t.Errorf("%s has no driver, and would be given out: %s %s", d.Name, d.Edits, d.Offers)
			}
		}
	}
	for model, devices := range found {
		if _, expected := wants[model]; !expected && model != ":" {
			t.Errorf("%s, of %s, is found by family %s, and was not expected", devices[0].Name, model, devices[0].Family)
		}
	}
}

// replay records the guest and reads the recording on this machine: the devices must be the same.
func replay(t *testing.T, g *guest.Guest, want discovered) {
	record := filepath.Join(t.TempDir(), "guest.host")
	if err := os.WriteFile(record, []byte(g.Must(t, "chandler", "record", "--comment", "A guest.")), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), guest.Build(t, "chandler.dev/cmd/chandler"), "discover", record, "-o", "json")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, parse(t, string(out))); diff != "" {
		t.Errorf("the recorded guest and the guest (-guest +record):\n%s", diff)
	}
}
