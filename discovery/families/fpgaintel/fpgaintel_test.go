package fpgaintel_test

import (
	"slices"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/fpgaintel"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, fpgaintel.Family) }

func TestGrant(t *testing.T) {
	port := func(address string) discovery.Device {
		attributes := discovery.Attributes{}
		attributes.SetString("resource.kubernetes.io/pciBusID", address)
		return discovery.Device{Attributes: attributes}
	}
	given := []discovery.Device{port("0000:d8:00.1"), port("0000:d8:00.1"), port("0000:3b:1f.7"), port("0001:3b:1f.7")}
	got := fpgaintel.Family.Grant(given, discovery.Grant{Resource: "b-com.com/accelerator"}).Env
	want := []string{"ACCELERATOR_DEVICES=d8:00.1,3b:1f.7,0001:3b:1f.7", "ACCELERATOR_UNITS=d8:00.1,3b:1f.7,0001:3b:1f.7"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q; want each hexadecimal address once, in the order given: %q", got, want)
	}
	if got := fpgaintel.Family.Grant(given, discovery.Grant{Resource: "fpga.intel.com/af"}).Env; len(got) > 0 {
		t.Errorf("under another name: got %q", got)
	}
	if got := fpgaintel.Family.Grant(given, discovery.Grant{API: discovery.ModeDRA, Resource: "b-com.com/accelerator"}).Env; len(got) > 0 {
		t.Errorf("in DRA: got %q", got)
	}
}
