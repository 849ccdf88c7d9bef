package rdma_test

import (
	"slices"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/rdma"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, rdma.Family) }

func TestGrant(t *testing.T) {
	function := discovery.Device{Attributes: discovery.Attributes{}}
	function.Attributes.SetString("resource.kubernetes.io/pciBusID", "0000:08:00.2")
	sub := discovery.Device{Attributes: discovery.Attributes{}, Source: "sys/devices/pci0000:00/0000:08:00.0/mlx5_core.sf.4"}
	sub.Attributes.SetString("function", "partition")
	given := []discovery.Device{function, sub}
	for resource, want := range map[string][]string{
		"":                            nil,
		"nvidia.com/hca-pool":         {"PCIDEVICE_NVIDIA_COM_HCA-POOL=0000:08:00.2,mlx5_core.sf.4"},
		"rdma/hca_shared_devices_a.b": {"PCIDEVICE_RDMA_HCA_SHARED_DEVICES_A_B=0000:08:00.2,mlx5_core.sf.4"},
	} {
		if got := rdma.Family.Grant(given, discovery.Grant{Resource: resource}).Env; !slices.Equal(got, want) {
			t.Errorf("%q: got %q; want %q", resource, got, want)
		}
	}
}
