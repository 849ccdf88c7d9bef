package amdgpu

import (
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// The resource name by partition mode is the plugin's name. There is none if the mode is unknown or
// invalid.
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

// amdgpu refuses some AMD display controllers by a list. The IDs are from both ends of the ranges
// of that list, and from the neighbouring entries of the list of supported IDs.
func TestRadeon(t *testing.T) {
	for _, id := range []string{
		"3150", "3e70", "4136", "4f73", "5144", "515e", "5969", "5e6f", "6700", "677b", "6840", "684c", "6850", "6859", "6880", "689b", "68a0",
		"68fe", "7100", "71f2", "7200", "72b3", "7834", "7835", "791e", "793f", "796f", "9400", "95cf", "9610", "9715", "9802", "980a", "9900", "99a4",
	} {
		if !radeon().MatchString(id) {
			t.Errorf("%s is radeon's", id)
		}
	}
	for _, id := range []string{
		"", "1304", "13fe", "15d8", "1681", "6600", "66af", "6780", "67a0", "67ff", "6800", "683f", "6860", "687f", "6900", "69af", "6fdf",
		"7300", "73ff", "7408", "744c", "74a1", "7550", "75a3", "9830", "985f", "9870", "98e4", "15bf",
	} {
		if radeon().MatchString(id) {
			t.Errorf("%s is amdgpu's", id)
		}
	}
}
