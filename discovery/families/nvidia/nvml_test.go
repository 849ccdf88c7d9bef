package nvidia

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
)

func TestArchitecture(t *testing.T) {
	for capability, want := range map[string]string{
		"3.5": "kepler", "6.1": "pascal", "7.0": "volta", "7.2": "volta", "7.5": "turing",
		"8.0": "ampere", "8.6": "ampere", "8.7": "ampere", "8.9": "ada-lovelace", "9.0": "hopper",
		"10.0": "blackwell", "10.3": "blackwell", "12.0": "blackwell", "12.1": "blackwell",
		"13.0": "rubin", "14.0": "", "": "", "0.9": "",
	} {
		if got := architecture(capability); got != want {
			t.Errorf("%q: got %q, want %q", capability, got, want)
		}
	}
}

func TestToldHealth(t *testing.T) {
	at := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	two := 2
	for name, test := range map[string]struct {
		told facts.GPU
		gi   int
		want string
	}{
		"nothing":               {facts.GPU{}, wholeGPU, ""},
		"all done":              {facts.GPU{Recovery: "none"}, wholeGPU, ""},
		"an error":              {facts.GPU{XIDs: []facts.XID{{Code: 79, Time: at}}}, wholeGPU, "XID 79 at 2026-03-04T05:06:07Z"},
		"an error concerns all": {facts.GPU{XIDs: []facts.XID{{Code: 79, Time: at}}}, 2, "XID 79 at 2026-03-04T05:06:07Z"},
		"its own error":         {facts.GPU{XIDs: []facts.XID{{Code: 94, Time: at, GI: &two}}}, 2, "XID 94 at 2026-03-04T05:06:07Z"},
		"another's error":       {facts.GPU{XIDs: []facts.XID{{Code: 94, Time: at, GI: &two}}}, 3, ""},
		"a reset is wanted":     {facts.GPU{Recovery: "gpu-reset"}, wholeGPU, "the driver requires gpu-reset"},
		"lost": {
			facts.GPU{Lost: true, Recovery: "node-reboot"}, wholeGPU,
			"NVML can no longer reach the GPU; the driver requires node-reboot",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := nvmlHealth(test.told, test.gi)
			if got.Reason != test.want || (got.Status == discovery.Healthy) != (test.want == "") {
				t.Errorf("got %+v, want %q", got, test.want)
			}
		})
	}
}

// The fix is the action that the driver requires, and never a reset that bypasses the driver. A MIG
// instance has no fix that would affect the other instances.
func TestRecoveryFix(t *testing.T) {
	for name, test := range map[string]struct {
		told facts.GPU
		gi   int
		want string
	}{
		"reset":           {facts.GPU{Recovery: "gpu-reset"}, wholeGPU, "nvidia-smi --gpu-reset -i 0000:1b:00.0 "},
		"drain and reset": {facts.GPU{Recovery: "drain-and-reset"}, wholeGPU, "nvidia-smi --gpu-reset -i 0000:1b:00.0 "},
		"older driver":    {facts.GPU{XIDs: []facts.XID{{Code: 48}}}, wholeGPU, "nvidia-smi --gpu-reset -i 0000:1b:00.0 "},
		"reboot":          {facts.GPU{Recovery: "node-reboot"}, wholeGPU, "sudo reboot"},
		"lost":            {facts.GPU{Lost: true}, wholeGPU, "sudo reboot"},
		"another action":  {facts.GPU{Recovery: "action-9"}, wholeGPU, "sudo dmesg | grep 0000:1b:00.0 "},
		"MIG instance":    {facts.GPU{Recovery: "gpu-reset"}, 2, ""},
	} {
		test.told.Address = "0000:1b:00.0"
		if fix := nvmlHealth(test.told, test.gi).Fix; !strings.Contains(fix, test.want) || test.want == "" && fix != "" || strings.Contains(fix, "/reset") {
			t.Errorf("%s: %q, want %q", name, fix, test.want)
		}
	}
}

func TestLinks(t *testing.T) {
	gpu := func(peers, switches []string) facts.GPU { return facts.GPU{Peers: peers, Switches: switches} }
	for name, test := range map[string]struct {
		gpus map[string]facts.GPU
		want links
	}{
		"a bridge between two of three": {
			map[string]facts.GPU{"a": gpu([]string{"b"}, nil), "b": gpu([]string{"a"}, nil), "c": {}},
			links{map[string][]string{"a": {"b"}, "b": {"a"}}, map[string]string{"a": "nvlink-a", "b": "nvlink-a"}},
		},
		"only one end says so": {
			map[string]facts.GPU{"a": gpu([]string{"b"}, nil), "b": {}},
			links{map[string][]string{}, map[string]string{}},
		},
		"a row, whose ends do not reach each other": {
			map[string]facts.GPU{"a": gpu([]string{"b"}, nil), "b": gpu([]string{"a", "c"}, nil), "c": gpu([]string{"b"}, nil)},
			links{map[string][]string{"a": {"b"}, "b": {"a", "c"}, "c": {"b"}}, map[string]string{}},
		},
		"switches": {
			map[string]facts.GPU{"a": gpu(nil, []string{"s", "t"}), "b": gpu(nil, []string{"s", "t"}), "c": gpu(nil, []string{"u"})},
			links{map[string][]string{}, map[string]string{"a": "nvlink-a", "b": "nvlink-a"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, linksOf(test.gpus), cmp.AllowUnexported(links{})); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}
