package fpgaintel_test

import (
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
	given := []discovery.Device{port("0000:d8:00.1"), port("0000:3b:1f.7")}
	got := fpgaintel.Family.Grant(given, discovery.Grant{Resource: "b-com.com/accelerator"}).Env
	if len(got) != 1 || got[0] != "ACCELERATOR_DEVICES=d8:00.1,3b:1f.7" {
		t.Errorf("got %q; want hexadecimal addresses without domain, in the order given", got)
	}
	if got := fpgaintel.Family.Grant(given, discovery.Grant{Resource: "fpga.intel.com/af"}).Env; len(got) > 0 {
		t.Errorf("under another name: got %q", got)
	}
}
