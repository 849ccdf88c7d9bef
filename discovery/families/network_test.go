package families_test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/network"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
)

// selectorRow matches a row of the table of selectors, and shorthand the table's short form of
// Chandler's attributes.
var (
	selectorRow = regexp.MustCompile("(?m)^\\| (`.*) \\| .* \\| `([^`]*)` \\|$")
	shorthand   = regexp.MustCompile(`\ba\.`)
)

func networkFunctions(t *testing.T) *discovery.Snapshot {
	t.Helper()
	all := &discovery.Snapshot{}
	for _, file := range []string{"sriovnet/testdata/e810.host", "sriovnet/testdata/switchdev.host", "rdma/testdata/partitions.host"} {
		for _, d := range scan.ReadHost(discoverytest.ReadHost(t, file), families.All).Devices {
			// The recorded hosts of sriovnet lack some files that the rdma family reads.
			if d.Family == "sriovnet" || d.Family == "rdma" && strings.HasPrefix(file, "rdma/") {
				all.Devices = append(all.Devices, d)
			}
		}
	}
	return all
}

// Every selector that the page on network functions translates selects the same devices as in the
// plugin.
func TestDocumentedSelectors(t *testing.T) {
	page, err := os.ReadFile("../../docs/network-functions.md")
	if err != nil {
		t.Fatal(err)
	}
	all := networkFunctions(t)
	rdma := []string{"0000:18:00.1", "0000:18:00.2", "0000:5d:00.1"}
	want := map[string][]string{
		"`vendors`, `devices`":        {"0000:16:01.0", "0000:16:01.1", "0000:16:01.2", "0000:16:01.3"},
		"`drivers`":                   {"0000:16:01.0", "0000:16:01.1", "0000:0a:00.1"},
		"`pciAddresses`":              {"0000:16:01.0"},
		"`acpiIndexes`":               {"0000:16:01.0", "0000:16:01.1", "0000:16:01.2", "0000:16:01.3"},
		"`auxTypes`":                  {"mlx5_core.sf.4"},
		"`pfNames`":                   {"0000:16:01.0", "0000:16:01.1", "0000:16:01.2", "0000:16:01.3"},
		"`pfNames`, some":             {"0000:16:01.0", "0000:16:01.2", "0000:16:01.3"},
		"`pfNames`, of sub-functions": {"mlx5_core.sf.4"},
		"`rootDevices`":               {"0000:16:01.1"},
		"`ifNames`":                   {"0000:18:00.1"},
		"`linkTypes`":                 {"0000:0a:00.1", "0000:18:00.1", "0000:18:00.2"},
		"`pKeys`":                     {"0000:18:00.1"},
		"`isRdma`":                    rdma,
		"`vdpaType`":                  {"0000:08:00.2"},
	}
	for _, row := range selectorRow.FindAllStringSubmatch(string(page), -1) {
		selector, err := rules.Compile(shorthand.ReplaceAllString(row[2], `device.attributes["chandler.dev"].`))
		if err != nil {
			t.Errorf("%s: %v", row[1], err)
			continue
		}
		var got []string
		for _, d := range all.Devices {
			if d.PoolOnly == discovery.SharedPools {
				continue // in no pool of that plugin
			}
			if selects, err := selector.SelectsDevice(d); selects {
				got = append(got, d.Attributes.String(network.DeviceIDAttribute))
			} else if err != nil {
				t.Errorf("%s: %s: %v", row[1], d.Name, err)
			}
		}
		slices.Sort(got)
		expected := slices.Sorted(slices.Values(want[row[1]]))
		if len(expected) == 0 || !slices.Equal(got, expected) {
			t.Errorf("%s selects %q; want %q", row[1], got, expected)
		}
		delete(want, row[1])
	}
	if len(want) > 0 {
		t.Errorf("not in the table: %v", want)
	}
}

// Each ID of a pool represents all adapters of the pool, and mlx5_1 and mlx5_10 occur once each. In
// DRA each adapter has as many shares.
func TestSharedAdapters(t *testing.T) {
	host := discoverytest.ReadHost(t, "rdma/testdata/connectx7.host")
	selector, err := rules.Compile(`device.attributes["chandler.dev"].family == "rdma"`)
	if err != nil {
		t.Fatal(err)
	}
	wanted := &rules.Rules{Sharing: []rules.Share{{Selector: selector, Resource: "rdma/hca_shared", Replicas: 1000, Pool: true}}}
	shared := wanted.ApplyTo(scan.ReadHost(host, families.All))
	var names []string
	for _, d := range shared.Devices {
		if d.Family != "rdma" {
			continue
		}
		names = append(names, d.Attributes.String("rdmaDevice"))
		if len(d.Offers) != 1 || d.Offers[0].Resource != "rdma/hca_shared" || d.Offers[0].Unit == "" || len(d.Offers[0].IDs) != 1000 {
			t.Errorf("%s: offers %d", d.Name, len(d.Offers))
		}
		if d.Attributes.String(deviceattribute.StandardDeviceAttributePCIeRoot) == "" || d.Sharing == nil {
			t.Errorf("%s: no PCIe root, or not shared", d.Name)
		}
		if len(d.Edits.DeviceNodes) != 4 {
			t.Errorf("%s: %d nodes; want its own three and the connection manager", d.Name, len(d.Edits.DeviceNodes))
		}
	}
	carved := scan.ReadHost(discoverytest.ReadHost(t, "rdma/testdata/mixed.host"), families.All)
	for _, name := range []string{"pci-0000-08-00-0-pool", "pci-0000-08-00-1-pool"} { // with virtual functions, and with a sub-function
		if d, pooled := wanted.ApplyTo(carved).Lookup(name); !pooled || d.Resource() != "rdma/hca_shared" || d.Silicon() != name {
			t.Errorf("%s: offered as %q, of silicon %s", name, d.Resource(), d.Silicon())
		}
		if _, offered := (&rules.Rules{}).ApplyTo(carved).Lookup(name); offered {
			t.Errorf("%s: offered without a pool", name)
		}
	}
	slices.Sort(names)
	if want := strings.Fields("mlx5_0 mlx5_1 mlx5_10 mlx5_2 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_7 mlx5_8 mlx5_9"); !slices.Equal(names, want) {
		t.Errorf("RDMA devices %q; want %q", names, want)
	}
}

// Pools of the SR-IOV plugin under vfio, as documented, have the plugin's IDs and environment
// variables.
func TestPoolsUnderVFIO(t *testing.T) {
	host := scan.ReadHost(discoverytest.ReadHost(t, "vfio/testdata/pools.host"), families.All)
	r := &rules.Rules{}
	for name, cel := range map[string]string{
		"intel.com/fec":    `device.attributes["chandler.dev"].family == "vfio" && device.attributes["chandler.dev"].pciDevice == "0d5c"`,
		"intel.com/dpdk":   `device.attributes["chandler.dev"].family == "vfio" && device.attributes["chandler.dev"].pciDevice == "1572"`,
		"intel.com/virtio": `device.attributes["chandler.dev"].family == "vfio" && device.attributes["chandler.dev"].pciVendor == "1af4"`,
	} {
		selector, err := rules.Compile(cel)
		if err != nil {
			t.Fatal(err)
		}
		r.Resources = append(r.Resources, rules.Resource{Selector: selector, Name: name, SRIOV: &discovery.SRIOVPool{}})
	}
	var got []string
	for _, d := range r.ApplyTo(host).Devices {
		env := discovery.JoinGranters(families.All)([]discovery.Device{d.Device}, discovery.Grant{API: discovery.ModeDevicePlugin, Resource: d.Resource()}).Env
		got = append(got, fmt.Sprint(d.Offers[0].IDs, " ", env[0]))
		for _, f := range d.FilesAs(d.Resource()) {
			got = append(got, f.Path)
		}
	}
	want := []string{
		"[0000:3f:00.0] PCIDEVICE_INTEL_COM_FEC=0000:3f:00.0",
		"[0000:40:00.0] PCIDEVICE_INTEL_COM_DPDK=0000:40:00.0", network.InfoDir + "/intel.com-dpdk-0000:40:00.0-device.json",
		"[0000:41:00.0] PCIDEVICE_INTEL_COM_VIRTIO=0000:41:00.0", network.InfoDir + "/intel.com-virtio-0000:41:00.0-device.json",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// The administrator can exclude an adapter from virtual functions on demand by the name of its
// interface, as documented.
func TestVirtualFunctionsByTheInterface(t *testing.T) {
	for file, name := range map[string]string{"sriovnet/testdata/onrequest.host": "enp3s0f0", "rdma/testdata/onrequest.host": "ens1f0np0"} {
		selector, err := rules.Compile(`device.attributes["chandler.dev"].?pfName.orValue("") != "` + name + `"`)
		if err != nil {
			t.Fatal(err)
		}
		host := discoverytest.ReadHost(t, file)
		all := len(scan.ReadHost(host, families.All).Devices)
		host.VirtualFunctions[0].Selects = selector.SelectsDevice
		left := scan.ReadHost(host, families.All).Devices
		for _, d := range left {
			if d.Creation != nil && d.Attributes.String("pfName") == name {
				t.Errorf("%s: %s would be made", file, d.Name)
			}
		}
		if kept := host.VirtualFunctions[0].Value; len(left) != all-kept {
			t.Errorf("%s: %d devices of %d; want %d fewer", file, len(left), all, kept)
		}
	}
}
