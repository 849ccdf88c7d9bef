package amdgpu

import (
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// The name by partition mode is that of the plugin, and there is none where the
// mode is not known, or garbage.
func TestOffers(t *testing.T) {
	for profile, want := range map[string]string{
		"spx_nps1":   "amd.com/spx_nps1",
		"cpx_nps4":   "amd.com/cpx_nps4",
		"":           "",
		"spx":        "",
		"_":          "",
		"a/b_nps1":   "",
		"cpx_nps4\n": "",
	} {
		d := discovery.Device{Attributes: discovery.Attributes{"profile": {StringValue: &profile}}}
		offers := offers(d, sysfs.At(nil, "sys/devices/pci0000:00/0000:05:00.0"))
		got := ""
		if len(offers) > 1 {
			got = offers[1].Resource
		}
		if offers[0].Resource != "amd.com/gpu" || offers[0].Optional || got != want || got != "" && !offers[1].Optional {
			t.Errorf("profile %q: got %+v; want amd.com/gpu and the optional %q", profile, offers, want)
		}
	}
}
