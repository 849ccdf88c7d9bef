package idxd

import (
	"slices"
	"testing"

	"chandler.dev/discovery"
)

func TestGrant(t *testing.T) {
	var given []discovery.Device
	for _, of := range [][2]string{{"vfio-pci", "0000:e7:01.0"}, {"idxd", "0000:f2:01.0"}, {"vfio-pci", "0000:6a:01.0"}} {
		d := discovery.Device{Attributes: discovery.Attributes{}}
		d.Attributes.SetString("driver", of[0])
		d.Attributes.SetString("resource.kubernetes.io/pciBusID", of[1])
		given = append(given, d)
	}
	got := grant(given, discovery.Grant{}).Env
	if want := []string{"VFIO_BDF0=0000:e7:01.0", "VFIO_BDF1=0000:6a:01.0"}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}
