package text_test

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/inventory/text"
	"chandler.dev/internal/terminal"
)

var update = flag.Lookup("update") // defined by package discoverytest

var now = time.Date(2026, 11, 20, 9, 50, 0, 0, time.UTC)

func printed(t *testing.T, inv *inventory.Inventory, style terminal.Style) string {
	t.Helper()
	var out bytes.Buffer
	if err := text.Print(&out, inv, style); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// On any host and with any consumers, no line is wider than the terminal, and the ASCII style
// prints only ASCII.
func TestRecordedHosts(t *testing.T) {
	files, err := filepath.Glob("../../../discovery/families/*/testdata/*.host")
	if err != nil || len(files) < 100 {
		t.Fatalf("%d recorded hosts (%v)", len(files), err)
	}
	for _, file := range files {
		t.Run(filepath.Base(filepath.Dir(filepath.Dir(file)))+"/"+filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			snapshot := (&rules.Rules{}).ApplyTo(scan.ReadHost(discoverytest.ReadHost(t, file), families.All))
			facts := inventory.Facts{Name: "n", Snapshot: snapshot, Families: len(families.All), At: now}
			check(t, inventory.Make(facts))
			facts.ConsumersKnown, facts.Moves = true, make(map[string]inventory.Move)
			for i, d := range snapshot.Devices {
				h := inventory.Holder{Device: d.Name, API: discovery.ModeDRA, Namespace: "a-namespace", Pod: fmt.Sprintf("a-pod-with-a-rather-long-name-%d", i/2), Claim: "a-claim-with-a-rather-long-name", Since: now.Add(-time.Hour)}
				switch i % 3 {
				case 0:
					facts.Holders = append(facts.Holders, h)
				case 1:
					facts.Moves[d.Silicon()] = inventory.Move{To: discovery.ModeDRA, Reason: "moves"}
				}
			}
			check(t, inventory.Make(facts))
		})
	}
}

func check(t *testing.T, inv *inventory.Inventory) {
	t.Helper()
	for _, width := range []int{80, 120, 200} {
		for _, ascii := range []bool{false, true} {
			all := printed(t, inv, terminal.Style{Width: width, ASCII: ascii})
			for l := range strings.Lines(all) {
				l = strings.TrimSuffix(l, "\n")
				if n := terminal.Columns(l); n > width || strings.HasSuffix(l, " ") {
					t.Errorf("a line of %d columns in %d: %q", n, width, l)
				}
				if ascii && strings.ContainsFunc(l, func(r rune) bool { return r >= utf8.RuneSelf }) {
					t.Errorf("not ASCII: %q", l)
				}
			}
			if strings.Contains(all, "\x1b") {
				t.Error("colours where there are none")
			}
		}
	}
}

func str(s string) discovery.Attribute { return discovery.Attribute{StringValue: &s} }

func number(n int64) discovery.Attribute { return discovery.Attribute{IntValue: &n} }

func named(address string) string {
	return "pci-" + strings.NewReplacer(":", "-", ".", "-").Replace("0000:"+address)
}

// pci is a device with an address, at the end of a path that begins with the root's port.
func pci(kind, vendor, model string, node int64, root string, path ...string) rules.Offered {
	address := path[len(path)-1]
	d := rules.Offered{Device: discovery.Device{
		Name: named(address), Family: vendor, Source: "sys/devices/pci0000:" + root + "/0000:" + strings.Join(path, "/0000:"), Capacity: discovery.Capacity{},
		Attributes: discovery.Attributes{
			"kind": str(kind), "vendor": str(vendor), "model": str(model), "linkSpeed": number(32000), "linkWidth": number(16),
			"resource.kubernetes.io/pciBusID": str("0000:" + address), "resource.kubernetes.io/pcieRoot": str("pci0000:" + root),
		},
		Health: discovery.Health{Status: discovery.Healthy},
	}}
	if node >= 0 {
		d.Attributes["resource.kubernetes.io/numaNode"] = number(node)
	}
	return d
}

func open(name string) rules.Offered {
	return rules.Offered{Device: discovery.Device{Name: name, Family: "hypervisor", Shareable: true, Attributes: discovery.Attributes{"kind": str("virtualization"), "model": str(name)}}}
}

func sick(d *rules.Offered, condition discovery.Condition, effect resourceapi.DeviceTaintEffect, reason string, ago time.Duration) {
	d.Health = discovery.Health{Status: discovery.Unhealthy, Condition: condition, Effect: effect, Reason: reason, Since: metav1.Time{Time: now.Add(-ago)}}
}

func dra(pod, claim, request string, ago time.Duration, devices ...string) (holders []inventory.Holder) {
	namespace, name, _ := strings.Cut(pod, "/")
	for _, d := range devices {
		holders = append(holders, inventory.Holder{Device: d, API: discovery.ModeDRA, Namespace: namespace, Pod: name, Container: "main", Claim: claim, Request: request, Since: now.Add(-ago)})
	}
	return holders
}

func plugin(pod, resource string, ago time.Duration, devices ...string) (holders []inventory.Holder) {
	namespace, name, _ := strings.Cut(pod, "/")
	for _, d := range devices {
		holders = append(holders, inventory.Holder{Device: d, API: discovery.ModeDevicePlugin, Namespace: namespace, Pod: name, Container: "main", Resource: resource, Since: now.Add(-ago)})
	}
	return holders
}

func factsOf(name string, devices []rules.Offered, holders ...[]inventory.Holder) inventory.Facts {
	slices.SortFunc(devices, func(a, b rules.Offered) int { return strings.Compare(a.Name, b.Name) })
	return inventory.Facts{Name: name, Snapshot: &rules.Snapshot{Devices: devices}, Families: 23, ConsumersKnown: true, Holders: slices.Concat(holders...), At: now}
}

const (
	hour = time.Hour
	day  = 24 * time.Hour
)

// hgx is a machine with eight GPUs and eight adapters, as in the picture of the web UI.
func hgx() inventory.Facts {
	var devices []rules.Offered
	adapter := 0
	for i, at := range [][6]string{{"17", "17:01.0", "18:00.0", "1a", "1b", "1c 1d"}, {"3a", "3a:01.0", "3b:00.0", "3d", "3e", "3f 40"}, {"9a", "9a:01.0", "9b:00.0", "9d", "9e", "9f a0"}, {"c8", "c8:01.0", "c9:00.0", "cb", "cc", "cd ce"}} {
		for _, bus := range at[3:5] {
			d := pci("gpu", "nvidia", "NVIDIA H100 80GB HBM3", int64(i/2), at[0], at[1], at[2], bus+":00.0")
			d.Attributes["fabric"] = str("nvlink-0000:1a:00.0")
			d.Capacity.Set("memory", 85520809984)
			d.Offers = []discovery.Offer{{Resource: "nvidia.com/gpu", IDs: []string{d.Name}}}
			devices = append(devices, d)
		}
		for bus := range strings.FieldsSeq(at[5]) {
			d := pci("nic", "mellanox", "MT4129", int64(i/2), at[0], at[1], at[2], bus+":00.0")
			d.Attributes["rdmaDevice"] = str(fmt.Sprintf("mlx5_%d", adapter))
			adapter++
			devices = append(devices, d)
		}
	}
	for i := range devices {
		switch devices[i].Name {
		case named("9e:00.0"):
			sick(&devices[i], "", "NoSchedule", "the driver requires gpu-reset; XID 79 at 2026-11-20T09:12:41Z", 37*time.Minute)
		case named("ce:00.0"):
			sick(&devices[i], discovery.ConditionLinkDegraded, "None", "its link has 8 lanes of 16", 3*day)
			devices[i].Attributes["linkWidth"] = number(8)
		}
	}
	devices = append(devices, open("kvm"), open("tun"), open("vhost-net"))
	facts := factsOf("gpu-node-07", devices,
		dra("ml/llama-7b-worker-0", "llama-7b-worker-0-gpus-x7k2q", "gpus", 3*hour, named("1a:00.0"), named("1b:00.0"), named("1c:00.0")),
		dra("ml/llama-7b-worker-1", "llama-7b-worker-1-gpus-9w4tn", "gpus", 3*hour, named("9e:00.0"), named("9f:00.0")),
		dra("storage/nvmeof-gateway-4kq2z", "nvmeof-gateway-rdma", "nic", 17*day, named("cd:00.0")),
		plugin("lab/notebook-mara-0", "nvidia.com/gpu", 30*hour, named("3e:00.0")),
		plugin("vm/virt-launcher-win11-b8f9z", "devices.kubevirt.io/kvm", 16*hour, "kvm", "tun", "vhost-net"))
	facts.Moves = map[string]inventory.Move{named("3e:00.0"): {To: discovery.ModeDRA, Reason: "moves to API DRA once it is free of lab/notebook-mara-0 main"}}
	return facts
}

// partitioned is a machine with two GPUs of eight partitions each.
func partitioned(t *testing.T) inventory.Facts {
	snapshot := (&rules.Rules{}).ApplyTo(scan.ReadHost(discoverytest.ReadHost(t, "../../../discovery/families/amdgpu/testdata/mi300x-cpx.host"), families.All))
	part := func(address string, numbers ...int) (names []string) {
		for _, n := range numbers {
			names = append(names, fmt.Sprintf("%s-xcp-%d", named(address), n))
		}
		return names
	}
	facts := factsOf("mi300x-vm-2", snapshot.Devices,
		dra("serve/mixtral-router-6d9f8-2xkzq", "mixtral-router-parts-lm2tv", "parts", 7*hour, part("05:00.0", 0, 1, 2, 3)...),
		dra("serve/embed-7c5d4-p9wls", "embed-part-8hx2c", "part", 18*time.Minute, part("05:00.0", 5)...),
		plugin("batch/whisper-1880", "amd.com/gpu", 48*time.Minute, part("26:00.0", 0)...),
		plugin("batch/whisper-1881", "amd.com/gpu", 48*time.Minute, part("26:00.0", 1)...))
	facts.Moves = map[string]inventory.Move{named("26:00.0"): {To: discovery.ModeDRA, Reason: "moves"}}
	return facts
}

// virtual is a machine with 64 virtual functions of one adapter.
func virtual() inventory.Facts {
	var devices []rules.Offered
	name := func(i int) string { return fmt.Sprintf("16:%02x.%d", 1+i/8, i%8) }
	for i := range 64 {
		d := pci("nic", "intel", "", 0, "16", "16:00.0", name(i))
		delete(d.Attributes, "model")
		d.Source = "sys/devices/pci0000:16/0000:" + name(i)
		d.Attributes["function"], d.Attributes["vfIndex"], d.Attributes["pfName"] = str("virtual"), number(int64(i)), str("ens1f0np0")
		d.Attributes["pciVendor"], d.Attributes["pciDevice"] = str("8086"), str("1889")
		d.PartOf = &discovery.Silicon{Name: named("16:00.0")}
		if i == 37 {
			sick(&d, discovery.ConditionNodeMissing, "NoSchedule", "device node /dev/vfio/137 is missing", 0)
			d.Health.Since = metav1.Time{}
		}
		devices = append(devices, d)
	}
	some := func(from, to int) (names []string) {
		for i := from; i <= to; i++ {
			names = append(names, named(name(i)))
		}
		return names
	}
	return factsOf("edge-12", devices,
		dra("ran/upf-dataplane-0", "upf-0", "vf", 7*day, some(0, 15)...), dra("ran/upf-dataplane-1", "upf-1", "vf", 7*day, some(16, 23)...),
		plugin("vm/virt-launcher-fw-a-x2ppq", "intel.com/vf", 5*day, some(28, 29)...), plugin("vm/virt-launcher-fw-b-77k4r", "intel.com/vf", 5*day, some(30, 31)...),
		dra("ran/cu-up-5f7c9-mz8jd", "cu-up", "vf", 2*hour, some(48, 53)...), dra("ran/probe-lat-29c8", "probe", "vf", time.Minute, some(60, 60)...))
}

// small is a machine with 512 small devices, 16 on each of 32 physical devices.
func small() inventory.Facts {
	var devices []rules.Offered
	var held []string
	for i := range 32 {
		bus := fmt.Sprintf("%02x", 0x11+6*i)
		for j := range 16 {
			d := pci("crypto", "intel", "4xxx", int64(i/4), bus, fmt.Sprintf("%s:%02x.%d", bus, (j+1)/8, (j+1)%8))
			d.Attributes["function"], d.Attributes["vfIndex"], d.Attributes["profile"] = str("virtual"), number(int64(j)), str([]string{"asym;sym", "dc"}[i/2%2])
			d.PartOf = &discovery.Silicon{Name: named(bus + ":00.0")}
			if i == 21 {
				sick(&d, "", "NoSchedule", "physical function 0000:8f:00.0 does not respond", 0)
			} else if (i*j)%3 == 1 {
				held = append(held, d.Name)
			}
			devices = append(devices, d)
		}
	}
	return factsOf("gw-octo-1", devices, dra("vpn/gateway-0", "crypto", "vf", hour, held...))
}

// requested is a machine with on-demand devices: an adapter whose first two virtual functions
// exist, an adapter without existing virtual functions, and a GPU that can be divided into two
// partitions.
func requested() inventory.Facts {
	var devices []rules.Offered
	function := func(bus string, i int, made bool) {
		d := pci("nic", "intel", "", 0, bus, bus+":00.0", fmt.Sprintf("%s:01.%d", bus, i))
		delete(d.Attributes, "model")
		d.Attributes["function"], d.Attributes["vfIndex"], d.Attributes["pfName"] = str("virtual"), number(int64(i)), str("ens"+bus)
		d.PartOf = &discovery.Silicon{Name: named(bus + ":00.0")}
		if !made {
			d.Creation = &discovery.Creation{Unit: d.PartOf.Name, Of: "sys/devices/pci0000:" + bus}
		}
		devices = append(devices, d)
	}
	for i := range 4 {
		function("16", i, i < 2)
		function("3a", i, false)
	}
	gpu := pci("gpu", "intel", "Max 1100", 0, "5b", "5b:00.0")
	gpu.Creation = &discovery.Creation{Unit: gpu.Name, Of: "sys/devices/pci0000:5b"}
	return factsOf("edge-13", append(devices, gpu), dra("ran/upf-0", "upf", "vf", day, named("16:01.0")))
}

// laptop is a machine with a GPU that four containers can share.
func laptop() inventory.Facts {
	gpu, npu := pci("gpu", "intel", "", -1, "00", "00:02.0"), pci("npu", "intel", "", -1, "00", "00:0b.0")
	for device, d := range map[string]*rules.Offered{"64a0": &gpu, "643e": &npu} {
		delete(d.Attributes, "model")
		d.Attributes["pciVendor"], d.Attributes["pciDevice"] = str("8086"), str(device)
	}
	gpu.Sharing = &rules.Sharing{Capacity: discovery.Shares}
	gpu.Capacity[discovery.Shares] = resourceapi.DeviceCapacity{Value: resource.MustParse("4")}
	return factsOf("mara-t14", []rules.Offered{gpu, npu, open("kvm"), open("tun")},
		plugin("dev/jupyter-0", "gpu.intel.com/xe", hour, gpu.Name), dra("dev/blender-render-1", "render", "gpu", 6*time.Minute, gpu.Name))
}

func TestPrint(t *testing.T) {
	for name, facts := range map[string]inventory.Facts{
		"hgx": hgx(), "parts": partitioned(t), "virtual": virtual(), "small": small(), "laptop": laptop(), "requested": requested(),
		"nothing":  {Name: "n", Families: 23, Functions: 3, ConsumersKnown: true, At: now},
		"problems": {Name: "n", Families: 23, ConsumersKnown: true, At: now, Snapshot: &rules.Snapshot{Problems: discovery.Problems("05:00.0", os.ErrPermission)}},
	} {
		t.Run(name, func(t *testing.T) {
			inv := inventory.Make(facts)
			check(t, inv)
			golden(t, name, printed(t, inv, terminal.Style{Width: 80}))
			golden(t, name+"-120", printed(t, inv, terminal.Style{Width: 120}))
			golden(t, name+"-ascii", printed(t, inv, terminal.Style{Width: 80, ASCII: true}))
			facts.ConsumersKnown = false
			golden(t, name+"-unasked", printed(t, inventory.Make(facts), terminal.Style{Width: 80}))
			for _, c := range inv.Counts {
				if c.Free+c.Held+c.Out != c.All {
					t.Errorf("the numbers do not add up: %+v", c)
				}
			}
		})
	}
}

// Only glyphs and reasons have colours, and colours carry no information beyond the text.
func TestColours(t *testing.T) {
	inv := inventory.Make(hgx())
	coloured := printed(t, inv, terminal.Style{Width: 80, Colour: true})
	if !strings.Contains(coloured, "\x1b[31m✗\x1b[0m") || !strings.Contains(coloured, "\x1b[34m→\x1b[0m") {
		t.Error("the glyphs have no colours")
	}
	plain := coloured
	for _, c := range []terminal.Colour{terminal.Well, terminal.Bad, terminal.Warning, terminal.Moving, terminal.Unknown, terminal.Strong} {
		plain = strings.ReplaceAll(plain, "\x1b["+string(c)+"m", "")
	}
	if diff := cmp.Diff(printed(t, inv, terminal.Style{Width: 80}), strings.ReplaceAll(plain, "\x1b[0m", "")); diff != "" {
		t.Errorf("other text in colour (-plain +coloured):\n%s", diff)
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".txt")
	if update.Value.String() == "true" {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("no golden file, run with -update: %v", err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("not as in %s (-want +got):\n%s", file, diff)
	}
}

// The tree has each problem once and completely, with the name of the partition that has it, and no
// address twice.
func TestProblemsOfRecordedHosts(t *testing.T) {
	for host, test := range map[string]struct {
		has, not []string
	}{
		"rdma/broken": { // several causes, with long paths
			has: []string{"mlx5_7/hca_type: is a directory; attribute fw_ver: read "},
			not: []string{"?attribute", "…"},
		},
		"neuron/broken":      {has: []string{"2 partitions the driver could not reset the device ├"}},
		"nvidia/a100-single": {has: []string{"gi-4-ci-0: XID 94"}},
		"vfio/mdev-broken":   {has: []string{"mdev-00000000-0000-0000-0000-000000000003: mediated device: has no type"}, not: []string{"41:00.4: "}},
		"vfio/broken":        {has: []string{"? other 08:00.0 describe PCI function"}, not: []string{"pci-0000-08-00-0"}},
		"nvidia/gb200":       {has: []string{"nvidia-imex-channel-0", "nvidia-imex-channel-7"}},
		"qat/broken":         {has: []string{"crypto 10:00.0 4xxx ?? 2 VFs"}, not: []string{"partition"}},
		"npu/many":           {has: []string{"no PCIe position"}},
		"amdgpu/broken":      {has: []string{"gpu 0b:00.0 amd 1002:74a1 ? 1 partition"}},
	} {
		file := filepath.Join("../../../discovery/families", strings.Replace(host, "/", "/testdata/", 1)+".host")
		snapshot := (&rules.Rules{}).ApplyTo(scan.ReadHost(discoverytest.ReadHost(t, file), families.All))
		tree := printed(t, inventory.Make(inventory.Facts{Name: "n", Snapshot: snapshot, At: now}), terminal.Style{Width: 80})
		flat := strings.Join(strings.Fields(strings.NewReplacer("│", "", "/\n", "/").Replace(tree)), " ")
		flat = strings.ReplaceAll(flat, "/ ", "/")
		for _, want := range test.has {
			if !strings.Contains(flat, want) {
				t.Errorf("%s: no %q in:\n%s", host, want, tree)
			}
		}
		for _, not := range test.not {
			if strings.Contains(tree, not) {
				t.Errorf("%s: %q in:\n%s", host, not, tree)
			}
		}
	}
}

// The functions of an IOMMU group that are not alike have their names, also without consumers.
func TestFunctionsOfAGroup(t *testing.T) {
	for host, want := range map[string]string{
		"iommufd": "2 functions: 07:00.0 10de:2330, 08:00.0 1912:0014",
		"cdevs":   "2 functions: 01:00.0 10de:2236, 01:00.1 10de:1aef",
	} {
		found := scan.ReadHost(discoverytest.ReadHost(t, "../../../discovery/families/vfio/testdata/"+host+".host"), families.All)
		inv := inventory.Make(inventory.Facts{Snapshot: new(rules.Rules).ApplyTo(found)})
		if out := printed(t, inv, terminal.Style{Width: 80}); !strings.Contains(out, want) {
			t.Errorf("%s: want %q:\n%s", host, want, out)
		}
	}
}
