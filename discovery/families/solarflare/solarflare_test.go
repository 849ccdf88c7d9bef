package solarflare_test

import (
	"slices"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/solarflare"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
)

func TestFamily(t *testing.T) { discoverytest.Run(t, solarflare.Family) }

// LD_PRELOAD contains the mounted library, or is unset if no library is mounted.
func TestGrant(t *testing.T) {
	for file, want := range map[string][]string{
		"testdata/x2522.host":  {"LD_PRELOAD=/opt/onload/usr/lib64/libonload.so"},
		"testdata/images.host": nil,
	} {
		given := scan.ReadHost(discoverytest.ReadHost(t, file), []*discovery.Family{solarflare.Family}).Devices[:1]
		if got := solarflare.Family.Grant(given, discovery.Grant{}).Env; !slices.Equal(got, want) {
			t.Errorf("%s: got %q; want %q", file, got, want)
		}
	}
}

// A container that requests the resource of an earlier plugin gets the names of the interfaces, and
// the devices of an Onload of that time.
func TestInterfaces(t *testing.T) {
	classic := discovery.ModeDevicePlugin
	for resource, want := range map[string][]string{
		"solarflare.com/sfc":  {"enp59s0f0", "enp59s0f1"},
		"solarflare/smartNIC": {"enp59s0f0", "enp59s0f1"},
		"amd.com/onload":      nil,
	} {
		all, err := rules.Compile("true")
		if err != nil {
			t.Fatal(err)
		}
		wanted := &rules.Rules{Resources: []rules.Resource{{Selector: all, Name: resource, Mode: &classic}}}
		snapshot := wanted.ApplyTo(scan.ReadHost(discoverytest.ReadHost(t, "testdata/x2522.host"), []*discovery.Family{solarflare.Family}))
		var ids []string
		var given []discovery.Device
		for _, d := range snapshot.Devices {
			if d.OptIn && d.Offers[0].Resource == resource {
				ids, given = append(ids, d.Offers[0].IDs...), append(given, d.Device)
			}
		}
		if !slices.Equal(ids, want) {
			t.Errorf("%s: got the IDs %q; want %q", resource, ids, want)
		}
		if len(given) > 0 && !slices.Contains(solarflare.Family.Grant(given, discovery.Grant{}).Env, "SOLARFLARE_VISIBLE_DEVICES=enp59s0f0,enp59s0f1") {
			t.Errorf("%s: the container is not told its interfaces", resource)
		}
	}
}
