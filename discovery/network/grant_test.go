package network_test

import (
	"slices"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/network"
)

func function(source string, paths ...string) discovery.Device {
	d := discovery.Device{Name: "pci-" + source, Source: "sys/devices/pci0000:00/" + source, Attributes: discovery.Attributes{}}
	for _, path := range paths {
		d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, &specs.DeviceNode{Path: path})
	}
	return d
}

func TestGrant(t *testing.T) {
	rdma := function("0000:08:00.2", "/dev/infiniband/uverbs1", "/dev/infiniband/issm1", "/dev/infiniband/umad1", "/dev/infiniband/rdma_cm")
	rdma.Attributes.SetString("rdmaDevice", "mlx5_1")
	given := []discovery.Device{
		function("0000:16:01.0", "/dev/vfio/40", "/dev/vfio/vfio"),
		function("0000:08:00.1/mlx5_core.sf.4", "/dev/vhost-vdpa-0"),
		function("0000:00:06.0", "/dev/uio0"),
		rdma,
	}
	const ids = "0000:16:01.0,mlx5_core.sf.4,0000:00:06.0,0000:08:00.2"
	const info = `{` +
		`"0000:00:06.0":{"generic":{"deviceID":"0000:00:06.0"},"uio":{"mount":"/dev/uio0"}},` +
		`"0000:08:00.2":{"generic":{"deviceID":"0000:08:00.2"},"rdma":{"issm":"/dev/infiniband/issm1","rdma_cm":"/dev/infiniband/rdma_cm","rdma_dev":"mlx5_1","umad":"/dev/infiniband/umad1","uverbs":"/dev/infiniband/uverbs1"}},` +
		`"0000:16:01.0":{"generic":{"deviceID":"0000:16:01.0"},"vfio":{"dev-mount":"/dev/vfio/40","mount":"/dev/vfio/vfio"}},` +
		`"mlx5_core.sf.4":{"generic":{"deviceID":"mlx5_core.sf.4"},"vdpa":{"mount":"/dev/vhost-vdpa-0"}}}`
	const classic = "PCIDEVICE_INTEL_COM_SRIOV-NET_A"
	for name, test := range map[string]struct {
		given []discovery.Device
		grant discovery.Grant
		want  []string
	}{
		"classic": {given, discovery.Grant{API: discovery.ModeDevicePlugin, Resource: "intel.com/sriov-net.a"},
			[]string{classic + "=" + ids, classic + "_INFO=" + info}},
		"DRA": {given, discovery.Grant{API: discovery.ModeDRA},
			[]string{"PCIDEVICE=" + ids, "PCIDEVICE_INFO=" + info}},
		"DRA with a resource": {given, discovery.Grant{API: discovery.ModeDRA, Resource: "intel.com/net"},
			[]string{"PCIDEVICE=" + ids, "PCIDEVICE_INFO=" + info, "PCIDEVICE_INTEL_COM_NET=" + ids, "PCIDEVICE_INTEL_COM_NET_INFO=" + info}},
	} {
		if got := network.GrantEdits(test.given, test.grant); !slices.Equal(got.Env, test.want) || len(got.NetDevices) > 0 {
			t.Errorf("%s: got %q, %v; want %q", name, got.Env, got.NetDevices, test.want)
		}
	}
}

func TestGrantMovesTheInterface(t *testing.T) {
	d := function("0000:16:01.2")
	d.Attributes.SetString("ifName", "ens1f0v2")
	parameters := discovery.Parameters{network.InterfaceName: "net1"}
	got := network.GrantEdits([]discovery.Device{d}, discovery.Grant{API: discovery.ModeDRA, Parameters: parameters}).NetDevices
	if len(got) != 1 || *got[0] != (specs.LinuxNetDevice{HostInterfaceName: "ens1f0v2", Name: "net1"}) {
		t.Errorf("got %v; want ens1f0v2 as net1", got)
	}
	if got := network.GrantEdits([]discovery.Device{d}, discovery.Grant{API: discovery.ModeDevicePlugin, Resource: "a.b/c", Parameters: parameters}).NetDevices; len(got) > 0 {
		t.Errorf("the device-plugin API gives %v", got)
	}
}

func TestAccept(t *testing.T) {
	with := func(change func(d *discovery.Device)) discovery.Device {
		d := function("0000:16:01.2")
		d.Attributes.SetString("ifName", "ens1f0v2")
		d.Attributes.SetBool("defaultRoute", false)
		change(&d)
		return d
	}
	good := with(func(*discovery.Device) {})
	for name, test := range map[string]struct {
		given []discovery.Device
		want  string
	}{
		"one":      {[]discovery.Device{good}, ""},
		"two":      {[]discovery.Device{good, good}, "2 interfaces cannot have one name"},
		"in a pod": {[]discovery.Device{with(func(d *discovery.Device) { delete(d.Attributes, "ifName") })}, "in a pod still"},
		"route":    {[]discovery.Device{with(func(d *discovery.Device) { d.Attributes.SetBool("defaultRoute", true) })}, "a default route"},
		"unknown":  {[]discovery.Device{with(func(d *discovery.Device) { delete(d.Attributes, "defaultRoute") })}, "not known whether"},
		"shared":   {[]discovery.Device{with(func(d *discovery.Device) { d.Capacity = discovery.Capacity{}; d.Capacity.Set(discovery.Shares, 2) })}, "shared"},
	} {
		err := network.Accept(test.given, discovery.Parameters{network.InterfaceName: "net1"})
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want %q", name, err, test.want)
		}
		if err := network.Accept(test.given, nil); err != nil {
			t.Errorf("%s, no name asked for: %v", name, err)
		}
	}
}

// A pool may add information about its devices, and request the vhost-net nodes.
func TestGrantOfPools(t *testing.T) {
	pool := &discovery.SRIOVPool{NeedVhostNet: true, AdditionalInfo: map[string]map[string]string{
		"*": {"token": "a", "site": "b"}, "0000:16:01.0": {"token": "c"}, "0000:16:01.1": {"token": "d"},
	}}
	given := []discovery.Device{function("0000:16:01.0"), function("0000:16:01.2")}
	given[0].SRIOV, given[1].SRIOV = pool, pool
	const vhost = `"vhost":{"net-mount":"/dev/vhost-net","tun-mount":"/dev/net/tun"}`
	const info = `{"0000:16:01.0":{"extra":{"site":"b","token":"c"},"generic":{"deviceID":"0000:16:01.0"},` + vhost + `},` +
		`"0000:16:01.2":{"extra":{"site":"b","token":"a"},"generic":{"deviceID":"0000:16:01.2"},` + vhost + `}}`
	got := network.GrantEdits(given, discovery.Grant{API: discovery.ModeDevicePlugin, Resource: "intel.com/a"})
	if want := []string{"PCIDEVICE_INTEL_COM_A=0000:16:01.0,0000:16:01.2", "PCIDEVICE_INTEL_COM_A_INFO=" + info}; !slices.Equal(got.Env, want) {
		t.Errorf("got %q; want %q", got.Env, want)
	}
	var nodes []string
	for _, node := range got.DeviceNodes {
		nodes = append(nodes, node.HostPath+" "+node.Permissions)
	}
	if want := []string{"/dev/vhost-net rw", "/dev/net/tun rw"}; !slices.Equal(nodes, want) {
		t.Errorf("nodes %q; want %q", nodes, want)
	}
	given[0].SRIOV, given[1].SRIOV = nil, &discovery.SRIOVPool{AdditionalInfo: map[string]map[string]string{"0000:16:01.3": {"a": "b"}}}
	got = network.GrantEdits(given, discovery.Grant{API: discovery.ModeDevicePlugin, Resource: "intel.com/a"})
	const empty = `PCIDEVICE_INTEL_COM_A_INFO={"0000:16:01.0":{"generic":{"deviceID":"0000:16:01.0"}},"0000:16:01.2":{"extra":{},"generic":{"deviceID":"0000:16:01.2"}}}`
	if len(got.Env) != 2 || got.Env[1] != empty || len(got.DeviceNodes) > 0 {
		t.Errorf("got %q, %v; want %s", got.Env, got.DeviceNodes, empty)
	}
}
