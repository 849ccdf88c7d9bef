package vfio_test

import (
	"slices"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/vfio"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, vfio.Family) }

func TestGrant(t *testing.T) {
	given := make([]discovery.Device, 2)
	for i, address := range []string{"0000:41:00.0", "0000:01:00.1"} {
		given[i].Attributes = discovery.Attributes{}
		given[i].Attributes.SetString("resource.kubernetes.io/pciBusID", address)
	}
	got := vfio.Family.Grant(given, discovery.Grant{Resource: "nvidia.com/GA102GL_A10"}).Env
	if want := []string{"PCI_RESOURCE_NVIDIA_COM_GA102GL_A10=0000:41:00.0,0000:01:00.1"}; !slices.Equal(got, want) {
		t.Errorf("got %q; want %q", got, want)
	}
	vgpu := discovery.Device{Attributes: discovery.Attributes{}}
	vgpu.Attributes.SetString("uuid", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001")
	got = vfio.Family.Grant([]discovery.Device{vgpu}, discovery.Grant{Resource: "nvidia.com/GRID_T4-1Q"}).Env
	if want := []string{"MDEV_PCI_RESOURCE_NVIDIA_COM_GRID_T4-1Q=83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"}; !slices.Equal(got, want) {
		t.Errorf("got %q; want %q", got, want)
	}
	if got := vfio.Family.Grant(given, discovery.Grant{API: discovery.ModeDRA, Resource: "nvidia.com/GA102GL_A10"}).Env; len(got) > 0 {
		t.Errorf("without a resource: got %q", got)
	}
}

// A device in a pool of the SR-IOV network device plugin gets the variables of that plugin, and
// other devices get the variables of KubeVirt.
func TestGrantOfPools(t *testing.T) {
	given := []discovery.Device{
		{Source: "sys/devices/pci0000:3e/0000:3f:00.0", SRIOV: &discovery.SRIOVPool{}, Edits: specs.ContainerEdits{
			DeviceNodes: []*specs.DeviceNode{{Path: "/dev/vfio/12"}, {Path: "/dev/vfio/vfio"}},
		}},
		{Attributes: discovery.Attributes{}},
	}
	given[1].Attributes.SetString("resource.kubernetes.io/pciBusID", "0000:41:00.0")
	const info = `{"0000:3f:00.0":{"generic":{"deviceID":"0000:3f:00.0"},"vfio":{"dev-mount":"/dev/vfio/12","mount":"/dev/vfio/vfio"}}}`
	got := vfio.Family.Grant(given, discovery.Grant{API: discovery.ModeDevicePlugin, Resource: "intel.com/fec"}).Env
	if want := []string{"PCIDEVICE_INTEL_COM_FEC=0000:3f:00.0", "PCIDEVICE_INTEL_COM_FEC_INFO=" + info, "PCI_RESOURCE_INTEL_COM_FEC=0000:41:00.0"}; !slices.Equal(got, want) {
		t.Errorf("got %q; want %q", got, want)
	}
	got = vfio.Family.Grant(given, discovery.Grant{API: discovery.ModeDRA}).Env
	if want := []string{"PCIDEVICE=0000:3f:00.0", "PCIDEVICE_INFO=" + info}; !slices.Equal(got, want) {
		t.Errorf("by DRA: got %q; want %q", got, want)
	}
}
