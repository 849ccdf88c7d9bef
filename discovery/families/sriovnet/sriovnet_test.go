package sriovnet

import (
	"slices"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, Family) }

func TestGrant(t *testing.T) {
	given := []discovery.Device{
		{Source: "sys/devices/pci0000:00/0000:16:01.0", Edits: nodes("/dev/vfio/40", "/dev/vfio/vfio")},
		{Source: "sys/devices/pci0000:00/0000:08:00.1/mlx5_core.sf.4", Edits: nodes("/dev/vhost-vdpa-0")},
		{Source: "sys/devices/pci0000:00/0000:00:06.0", Edits: nodes("/dev/uio0")},
	}
	want := []string{
		"PCIDEVICE_INTEL_COM_SRIOV-NET_A=0000:16:01.0,mlx5_core.sf.4,0000:00:06.0",
		`PCIDEVICE_INTEL_COM_SRIOV-NET_A_INFO={` +
			`"0000:00:06.0":{"generic":{"deviceID":"0000:00:06.0"},"uio":{"mount":"/dev/uio0"}},` +
			`"0000:16:01.0":{"generic":{"deviceID":"0000:16:01.0"},"vfio":{"dev-mount":"/dev/vfio/40","mount":"/dev/vfio/vfio"}},` +
			`"mlx5_core.sf.4":{"generic":{"deviceID":"mlx5_core.sf.4"},"vdpa":{"mount":"/dev/vhost-vdpa-0"}}}`,
	}
	if got := grant(given, discovery.Grant{API: discovery.ModeDevicePlugin, Resource: "intel.com/sriov-net.a"}).Env; !slices.Equal(got, want) {
		t.Errorf("got %q; want %q", got, want)
	}
	if got := grant(given, discovery.Grant{API: discovery.ModeDRA}).Env; len(got) > 0 {
		t.Errorf("without a resource: got %q", got)
	}
}

func nodes(paths ...string) (edits specs.ContainerEdits) {
	for _, path := range paths {
		edits.DeviceNodes = append(edits.DeviceNodes, &specs.DeviceNode{Path: path})
	}
	return edits
}

func FuzzRoutes(f *testing.F) {
	f.Add("eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0")
	f.Add("Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT")
	f.Add("00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth0")
	f.Add("")
	f.Fuzz(func(t *testing.T, line string) {
		r := make(routes)
		fields := strings.Fields(line)
		four, six := r.addLine(fields), r.addLine6(fields)
		if len(r) > 0 && !four && !six {
			t.Errorf("no route, and yet the interfaces %v", r)
		}
		for name := range r {
			if !slices.Contains(fields, name) {
				t.Errorf("interface %q is not in the line", name)
			}
		}
	})
}
