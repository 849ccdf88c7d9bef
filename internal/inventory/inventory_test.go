package inventory_test

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/inventory"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

// hosts returns the recorded hosts of all families.
func hosts(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("../../discovery/families/*/testdata/*.host")
	if err != nil || len(files) < 100 {
		t.Fatalf("%d recorded hosts (%v)", len(files), err)
	}
	return files
}

func snapshotOf(t *testing.T, file string) *rules.Snapshot {
	t.Helper()
	return (&rules.Rules{}).ApplyTo(scan.ReadHost(discoverytest.ReadHost(t, file), families.All))
}

// Every device of every recorded host is in the tree once, the counts add up, and the CEL for a
// single device selects only that device.
func TestRecordedHosts(t *testing.T) {
	for _, file := range hosts(t) {
		t.Run(filepath.Base(filepath.Dir(filepath.Dir(file)))+"/"+filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			snapshot := snapshotOf(t, file)
			var holders []inventory.Holder
			for i, d := range snapshot.Devices {
				if i%3 == 0 {
					holders = append(holders, inventory.Holder{Device: d.Name, API: discovery.ModeDRA, Namespace: "ml", Pod: "train", Claim: "train", Since: noon})
				}
			}
			inv := inventory.Make(inventory.Facts{Name: "n", Snapshot: snapshot, ConsumersKnown: true, Holders: holders, At: noon})
			names := make(map[string]int)
			for _, s := range inv.Tree.Silicon() {
				for _, name := range s.All() {
					names[name]++
				}
			}
			if len(inv.Devices) != len(snapshot.Devices) {
				t.Errorf("%d devices, want %d", len(inv.Devices), len(snapshot.Devices))
			}
			for _, d := range snapshot.Devices {
				if names[d.Name] != 1 {
					t.Errorf("%s is %d times in the tree", d.Name, names[d.Name])
				}
			}
			for _, c := range inv.Counts {
				if c.Free+c.Held+c.Out != c.All || c.Free < 0 || c.Held < 0 || c.Out < 0 {
					t.Errorf("the numbers do not add up: %+v", c)
				}
			}
			for _, d := range inv.Devices {
				checkSelects(t, inv, d)
			}
			if _, err := json.Marshal(inv); err != nil {
				t.Error(err)
			}
		})
	}
}

func checkSelects(t *testing.T, inv *inventory.Inventory, d *inventory.Device) {
	t.Helper()
	for what, cel := range map[string]string{"any": d.Ask.Any, "this": d.Ask.This} {
		if cel == "" {
			if what == "any" {
				t.Errorf("%s: no CEL selects any like it", d.Name)
			}
			continue
		}
		selector, err := rules.Compile(cel)
		if err != nil {
			t.Fatal(err)
		}
		for _, other := range inv.Devices {
			selected, err := selector.SelectsDevice(other.Offered.Device)
			if err != nil {
				t.Errorf("%s on %s: %v", cel, other.Name, err)
			}
			if other == d && !selected || other != d && selected && what == "this" {
				t.Errorf("%s: %s selects %s: %t", d.Name, cel, other.Name, selected)
			}
		}
	}
}

func number(n int64) discovery.Attribute { return discovery.Attribute{IntValue: &n} }

func text(s string) discovery.Attribute { return discovery.Attribute{StringValue: &s} }

// gpu is a GPU with an address below a switch of a root.
func gpu(address, root, port, bridge string, node int64) rules.Offered {
	name := "pci-" + strings.NewReplacer(":", "-", ".", "-").Replace(address)
	return rules.Offered{
		Device: discovery.Device{
			Name: name, Family: "nvidia", Source: "sys/devices/" + root + "/" + port + "/" + bridge + "/" + address,
			Attributes: discovery.Attributes{
				"kind": text("gpu"), "vendor": text("nvidia"), "model": text("NVIDIA H100 80GB HBM3"), "fabric": text("nvlink-0000:1a:00.0"),
				"resource.kubernetes.io/pciBusID": text(address), "resource.kubernetes.io/pcieRoot": text(root), "resource.kubernetes.io/numaNode": number(node),
			},
			Health: discovery.Health{Status: discovery.Healthy},
		},
		Offers: []discovery.Offer{{Resource: "nvidia.com/gpu", IDs: []string{name}}},
	}
}

func TestPlaces(t *testing.T) {
	devices := []rules.Offered{
		gpu("0000:1a:00.0", "pci0000:17", "0000:17:01.0", "0000:18:00.0", 0),
		gpu("0000:1b:00.0", "pci0000:17", "0000:17:01.0", "0000:18:00.0", 0),
		gpu("0000:9d:00.0", "pci0000:9a", "0000:9a:01.0", "0000:9b:00.0", 1),
	}
	inv := inventory.Make(inventory.Facts{Name: "n", Snapshot: &rules.Snapshot{Devices: devices}, At: noon})
	if len(inv.Tree.Nodes) != 2 || *inv.Tree.Nodes[0].Number != 0 || *inv.Tree.Nodes[1].Number != 1 {
		t.Fatalf("NUMA nodes: %+v", inv.Tree.Nodes)
	}
	forked, single := inv.Tree.Nodes[0].Branch[0], inv.Tree.Nodes[1].Branch[0]
	if forked.Root != "pci0000:17" || forked.Switch != "0000:18:00.0" {
		t.Errorf("the tree forks below %q of root %q", forked.Switch, forked.Root)
	}
	if single.Switch != "" {
		t.Errorf("a bridge is drawn where the tree does not fork: %q", single.Switch)
	}
	if got := inv.Devices[0].Place.Bridges; !slices.Equal(got, []string{"0000:17:01.0", "0000:18:00.0"}) {
		t.Errorf("bridges above the first GPU: %v", got)
	}
	if len(inv.Tree.Fabrics) != 1 || !inv.Tree.Fabrics[0].Complete || len(inv.Tree.Fabrics[0].Members) != 3 || inv.Tree.Fabrics[0].Name != "NVLink" {
		t.Errorf("fabrics: %+v", inv.Tree.Fabrics)
	}
	if state := inv.Devices[0].State; state != inventory.Present {
		t.Errorf("state without known consumers: %s", state)
	}
}

// Pairs of GPUs below nested switches of one root are told apart, and the functions of one adapter are
// not.
func TestNestedSwitches(t *testing.T) {
	const top = "0000:31:01.0/0000:32:00.0/"
	devices := []rules.Offered{
		gpu("0000:34:00.0", "pci0000:31", top+"0000:33:00.0/0000:34:10.0", "0000:35:00.0", 0),
		gpu("0000:36:00.0", "pci0000:31", top+"0000:33:00.0/0000:34:10.0", "0000:35:01.0", 0),
		gpu("0000:39:00.0", "pci0000:31", top+"0000:33:01.0/0000:37:10.0", "0000:38:00.0", 0),
		gpu("0000:3b:00.0", "pci0000:31", top+"0000:33:01.0/0000:37:10.0", "0000:38:01.0", 0),
		gpu("0000:3d:00.0", "pci0000:31", "0000:31:01.0/0000:32:00.0", "0000:33:02.0", 0),
		gpu("0000:3d:00.1", "pci0000:31", "0000:31:01.0/0000:32:00.0", "0000:33:02.0", 0),
	}
	inv := inventory.Make(inventory.Facts{Name: "n", Snapshot: &rules.Snapshot{Devices: devices}, At: noon})
	var got []string
	for _, b := range inv.Tree.Nodes[0].Branch {
		names := []string{b.Switch}
		for _, s := range b.Silicon {
			names = append(names, inventory.ShortAddress(s.Address))
		}
		got = append(got, strings.Join(names, " "))
	}
	want := []string{
		"0000:34:10.0 34:00.0 36:00.0",
		"0000:37:10.0 39:00.0 3b:00.0",
		" 3d:00.0 3d:00.1",
	}
	if !slices.Equal(got, want) {
		t.Errorf("branches\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestStates(t *testing.T) {
	sick := gpu("0000:1b:00.0", "pci0000:17", "0000:17:01.0", "0000:18:00.0", 0)
	sick.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "XID 79"}
	slow := gpu("0000:1c:00.0", "pci0000:17", "0000:17:01.0", "0000:18:00.0", 0)
	slow.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionLinkDegraded, Reason: "its link has 8 lanes of 16"}
	devices := []rules.Offered{
		gpu("0000:1a:00.0", "pci0000:17", "0000:17:01.0", "0000:18:00.0", 0), sick, slow,
		gpu("0000:1d:00.0", "pci0000:17", "0000:17:01.0", "0000:18:00.0", 0),
		gpu("0000:1e:00.0", "pci0000:17", "0000:17:01.0", "0000:18:00.0", 0),
	}
	holder := func(device string) inventory.Holder {
		return inventory.Holder{Device: device, API: discovery.ModeDevicePlugin, Namespace: "ml", Pod: "train", Container: "main", Resource: "nvidia.com/gpu", Since: noon}
	}
	inv := inventory.Make(inventory.Facts{
		Name: "n", Snapshot: &rules.Snapshot{Devices: devices}, At: noon, ConsumersKnown: true,
		Holders: []inventory.Holder{holder("pci-0000-1a-00-0"), holder("pci-0000-1b-00-0"), holder("pci-0000-1d-00-0"), holder("pci-0000-ff-00-0")},
		Moves:   map[string]inventory.Move{"pci-0000-1d-00-0": {To: discovery.ModeDRA, Reason: "moves to API DRA once it is free of ml/train main", For: []string{"ml/train"}}},
	})
	want := map[string]inventory.State{
		"pci-0000-1a-00-0": inventory.Held, "pci-0000-1b-00-0": inventory.Unhealthy, "pci-0000-1c-00-0": inventory.Degraded,
		"pci-0000-1d-00-0": inventory.Moving, "pci-0000-1e-00-0": inventory.Free,
	}
	for name, state := range want {
		if got := inv.Device(name).State; got != state {
			t.Errorf("%s is %s, want %s", name, got, state)
		}
	}
	if got := inv.Device("pci-0000-1c-00-0").Health.Effect; got != resourceapi.DeviceTaintEffectNone {
		t.Errorf("effect of a slow link: %s", got)
	}
	if got, want := inv.Counts[0], (inventory.Count{Kind: "gpu", All: 5, Free: 2, Held: 3, Physical: 5, Devices: 5, Listed: 5, FreeDevices: 2}); got != want {
		t.Errorf("counts %+v, want %+v", got, want)
	}
	if len(inv.Gone) != 1 || inv.Gone[0].Device != "pci-0000-ff-00-0" || inv.Gone[0].Health.Condition != discovery.ConditionGone {
		t.Errorf("gone: %+v", inv.Gone)
	}
	if len(inv.Waiting) != 1 || inv.Waiting[0].To != discovery.ModeDRA {
		t.Errorf("waiting: %+v", inv.Waiting)
	}
	var order []string
	for _, item := range inv.Attention {
		order = append(order, string(item.State))
	}
	if got := strings.Join(order, " "); got != "unhealthy unhealthy degraded moving" {
		t.Errorf("attention: %s", got)
	}
}

// The counts have each physical device once, under the kind that the tree shows, in a fixed order.
func TestCountsOfRecordedHosts(t *testing.T) {
	for host, want := range map[string]string{
		"idxd/spr":            "2 dma (4 devices)",                                 // one queue of each is shared without limit
		"vpu/broken":          "3 npu",                                             // all are shared without limit
		"vfio/cdevs":          "1 gpu (2 devices, 1 at once), 2 other (3 devices)", // the partition of the GPU has another kind
		"generic/workstation": "2 gpu, 1 other",
		"fpgaxilinx/media":    "4 fpga, 2 other",                               // two FPGAs on one card
		"vfio/iommufd":        "1 nic, 4 other",                                // an IOMMU group with functions of two slots
		"vfio/kubevirt":       "1 gpu, 1 nic (3 devices), 2 other (3 devices)", // one with two functions of one slot
		"neuron/trn2":         "16 npu (144 devices, 128 at once)",             // whole devices, or their cores
		"hypervisor/kvm":      "",
	} {
		file := filepath.Join("../../discovery/families", strings.Replace(host, "/", "/testdata/", 1)+".host")
		if got := inventory.Make(inventory.Facts{Snapshot: snapshotOf(t, file)}).CountText(); got != want {
			t.Errorf("%s: %q, want %q", host, got, want)
		}
	}
	facts := inventory.Facts{Snapshot: snapshotOf(t, "../../discovery/families/idxd/testdata/spr.host"), ConsumersKnown: true}
	if got, want := inventory.Make(facts).CountText(), "2 dma (4 devices, 2 free, 2 with unlimited sharing)"; got != want {
		t.Errorf("with consumers: %q, want %q", got, want)
	}
}
