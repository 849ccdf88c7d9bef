package qat

import (
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"k8s.io/apimachinery/pkg/api/validate/content"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

func TestServices(t *testing.T) {
	for name, test := range map[string]struct {
		architecture, text string
		suffix, profile    string
	}{
		"crypto":                   {"4xxx", "sym;asym", "cy", "asym;sym"},
		"crypto, the other order":  {"420xx", "asym;sym", "cy", "asym;sym"},
		"compression":              {"4xxx", "dc", "dc", "dc"},
		"two, in the order told":   {"4xxx", "sym;dc", "sym-dc", "dc;sym"},
		"two, the other order":     {"4xxx", "dc;sym", "dc-sym", "dc;sym"},
		"three":                    {"6xxx", "asym;sym;decomp", "asym-sym-decomp", "asym;decomp;sym"},
		"not configured":           {"4xxx", "", "generic", ""},
		"nothing to be configured": {"c6xx", "sym;asym", "generic", "asym;sym"},
	} {
		t.Run(name, func(t *testing.T) {
			services, err := parseServices(test.text)
			pf := physical{services: services}
			if err != nil || pf.suffix(test.architecture) != test.suffix || pf.profile() != test.profile {
				t.Errorf("got %s and %s, %v", pf.suffix(test.architecture), pf.profile(), err)
			}
		})
	}
}

func TestConfig(t *testing.T) {
	for name, test := range map[string]struct{ text, want string }{
		"as the kernel writes it": {"[GENERAL]\nServicesEnabled = sym;asym\nConfigVersion = 2\n[KERNEL]\nNumberCyInstances = 0\n", "sym;asym"},
		"not the first section":   {"[KERNEL]\n[GENERAL]\nServicesEnabled = dc\n", "dc"},
		"another section's":       {"[KERNEL]\nServicesEnabled = dc\n", ""},
		"none":                    {"[GENERAL]\nServicesEnabled\n", ""},
		"empty":                   {"", ""},
	} {
		if got := parseConfig(test.text); got != test.want {
			t.Errorf("%s: got %q; want %q", name, got, test.want)
		}
	}
}

func FuzzConfig(f *testing.F) {
	f.Add("[GENERAL]\nServicesEnabled = sym;asym\n")
	f.Add("[GENERAL\n=\n[]")
	f.Fuzz(func(t *testing.T, text string) {
		if value := parseConfig(text); strings.ContainsAny(value, "\n") {
			t.Errorf("%q", value)
		}
	})
}

func TestGrant(t *testing.T) {
	given := make([]discovery.Device, 2)
	for i, address := range []string{"0000:6b:00.4", "0000:6b:00.1"} {
		given[i].Attributes = discovery.Attributes{}
		given[i].Attributes.SetString("resource.kubernetes.io/pciBusID", address)
	}
	got := grant(given, discovery.Grant{}).Env
	if want := []string{"QAT0=0000:6b:00.4", "QAT1=0000:6b:00.1"}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

func FuzzServices(f *testing.F) {
	for _, text := range []string{"", "dc", "sym;asym", "sym;", ";", "sym; dc", "SYM", "a;b;c;d", "\xff", strings.Repeat("a", 70)} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		services, err := parseServices(text)
		if err != nil {
			return
		}
		for architecture := range map[string]bool{"4xxx": true, "c6xx": true} {
			pf := physical{services: services}
			if messages := content.IsLabelKey("qat.intel.com/" + pf.suffix(architecture)); len(messages) > 0 {
				t.Errorf("%q: %v", text, messages)
			}
		}
	})
}

// A kernel without auto_reset has no command for a physical function that does not respond.
func TestResetFix(t *testing.T) {
	host := fstest.MapFS{"sys/bus/pci/devices/0000:40:00.0/qat/state": {Data: []byte("up\n")}}
	function := sysfs.At(host, "sys/bus/pci/devices/0000:40:00.0")
	if fix := resetFix(function); strings.Contains(fix, "echo") {
		t.Errorf("without auto_reset: %s", fix)
	}
	host["sys/bus/pci/devices/0000:40:00.0/qat/auto_reset"] = &fstest.MapFile{Data: []byte("off\n")}
	if fix := resetFix(function); !strings.Contains(fix, "echo on > /sys/bus/pci/devices/0000:40:00.0/qat/auto_reset") {
		t.Errorf("with auto_reset: %s", fix)
	}
}
