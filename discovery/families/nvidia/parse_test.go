package nvidia

import (
	"slices"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
)

func TestParseInformation(t *testing.T) {
	const uuid = "GPU-0e7d5a3c-1111-2222-3333-444455556666"
	for name, test := range map[string]struct {
		text string
		want information
		fail bool
	}{
		"of a driver without firmware": {
			"Model: \t\t Tesla K80\nGPU UUID: \t " + uuid + "\nBus Location: \t 0000:05:00.0\nDevice Minor: \t 3\n",
			information{"Tesla K80", uuid, 3, false}, false,
		},
		"not initialised": {
			"Model: \t NVIDIA H100\nGPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t 0\nGPU Excluded:\t No\n",
			information{"NVIDIA H100", "", 0, false}, false,
		},
		"excluded":               {"Model: a\nGPU UUID: " + uuid + "\nDevice Minor: 1\nGPU Excluded:\t Yes\n", information{"a", uuid, 1, true}, false},
		"neither Yes nor No":     {"Model: a\nGPU UUID: " + uuid + "\nDevice Minor: 1\nGPU Excluded:\t N", information{"a", uuid, 1, false}, true},
		"half a UUID":            {"Model: a\nGPU UUID: GPU-0e7d5a3c-11\nDevice Minor: 1\n", information{"a", "", 1, false}, true},
		"no model":               {"GPU UUID: " + uuid + "\nDevice Minor: 1\n", information{"", uuid, 1, false}, true},
		"no minor":               {"Model: a\nGPU UUID: " + uuid + "\nDevice Mi", information{"a", uuid, -1, false}, true},
		"the minor of nvidiactl": {"Model: a\nGPU UUID: " + uuid + "\nDevice Minor: 255\n", information{"a", uuid, -1, false}, true},
		"half":                   {"half", information{minor: -1}, true},
		"empty":                  {"", information{minor: -1}, true},
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := parseInformation(test.text); got != test.want || (err != nil) != test.fail {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
}

func TestGrant(t *testing.T) {
	channel := discovery.Device{Attributes: discovery.Attributes{}}
	channel.Attributes.SetString("kind", "other")
	libraries := specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: "/a", ContainerPath: "/a"}}}
	for name, test := range map[string]struct {
		given []discovery.Device
		want  string
	}{
		"in the order given, once each": {[]discovery.Device{{Identity: "GPU-b"}, {Identity: "GPU-a"}, {Identity: "GPU-b"}}, "GPU-b,GPU-a"},
		"not yet known":                 {[]discovery.Device{{}}, "void"},
		"one of them not yet known":     {[]discovery.Device{{}, {Identity: "GPU-a"}}, "GPU-a"},
		"libraries are ours":            {[]discovery.Device{{Identity: "GPU-a", Edits: libraries}, {Identity: "GPU-b"}}, "void"},
		"with a channel":                {[]discovery.Device{channel, {Identity: "GPU-a"}}, "GPU-a"},
	} {
		t.Run(name, func(t *testing.T) {
			got := grant(test.given, discovery.Grant{}).Env
			if len(got) != 1 || got[0] != "NVIDIA_VISIBLE_DEVICES="+test.want {
				t.Errorf("got %q", got)
			}
		})
	}
	byIndex := grant([]discovery.Device{{Identity: "GPU-b", Facts: map[string]string{index: "1"}}, {Identity: "MIG-a", Facts: map[string]string{index: "0:2"}}, {Identity: "GPU-c"}},
		discovery.Grant{Naming: discovery.Naming{Index: true}}).Env
	if !slices.Equal(byIndex, []string{"NVIDIA_VISIBLE_DEVICES=1,0:2,GPU-c"}) {
		t.Errorf("by number: %q", byIndex)
	}
	byMounts := grant([]discovery.Device{{Identity: "GPU-b"}, {Identity: "GPU-a"}}, discovery.Grant{Naming: discovery.Naming{Mounts: true}})
	var mounts []string
	for _, m := range byMounts.Mounts {
		mounts = append(mounts, m.HostPath+" "+m.ContainerPath)
	}
	const dir = "/var/run/nvidia-container-devices"
	if want := []string{"/dev/null " + dir + "/GPU-b", "/dev/null " + dir + "/GPU-a"}; !slices.Equal(mounts, want) || !slices.Equal(byMounts.Env, []string{"NVIDIA_VISIBLE_DEVICES=" + dir}) {
		t.Errorf("by mounts: %q, %q", mounts, byMounts.Env)
	}
	if got := grant([]discovery.Device{{Identity: "GPU-a"}}, discovery.Grant{Naming: discovery.Naming{None: true}}).Env; !slices.Equal(got, []string{"NVIDIA_VISIBLE_DEVICES=void"}) {
		t.Errorf("by CDI: %q", got)
	}
	for name, given := range map[string][]discovery.Device{
		"channels alone":       {channel},
		"Google's installer's": {{Identity: "GPU-a", Edits: specs.ContainerEdits{Mounts: installerMounts("/home/kubernetes/bin/nvidia")}}},
	} {
		if got := grant(given, discovery.Grant{}).Env; len(got) > 0 {
			t.Errorf("%s: got %q, want nothing", name, got)
		}
	}
}

func FuzzInformation(f *testing.F) {
	f.Add("Model: \t\t Tesla K80\nGPU UUID: \t GPU-0e7d5a3c-1111-2222-3333-444455556666\nDevice Minor: \t 3\n")
	f.Add("GPU UUID: GPU-?\nDevice Minor: -1\nGPU Excluded: Yes\n")
	f.Add("DeviceFileMinor: 12\nDeviceFileMode: 292\n")
	f.Add("Character devices:\n195 nvidia\n511 nvidia-uvm\n\nBlock devices:\n  8 sd\n")
	f.Fuzz(func(t *testing.T, text string) {
		info, _ := parseInformation(text)
		if strings.Contains(info.uuid, "?") || info.minor < -1 || info.minor > 253 {
			t.Errorf("%+v", info)
		}
		if minor, err := parseAccess(text); err == nil && (minor < 0 || minor >= 1<<20) {
			t.Errorf("minor %d", minor)
		}
		for name, major := range parseMajors(text) {
			if major < 0 || major > 4095 {
				t.Errorf("major %d of %s", major, name)
			}
		}
	})
}

// The index of a MIG instance consists of the GPU's index and its own, if both are known.
func TestIndexOfInstances(t *testing.T) {
	number := 2
	for _, test := range []struct {
		gpu  map[string]string
		told facts.Instance
		want string
	}{
		{map[string]string{index: "0"}, facts.Instance{Index: &number}, "0:2"},
		{map[string]string{index: "0"}, facts.Instance{}, ""},
		{map[string]string{}, facts.Instance{Index: &number}, ""},
	} {
		if got := instanceFacts(test.gpu, test.told)[index]; got != test.want {
			t.Errorf("%v of a GPU %v: %q, want %q", test.told.Index, test.gpu, got, test.want)
		}
	}
}
