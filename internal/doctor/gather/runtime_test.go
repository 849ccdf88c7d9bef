package gather

import (
	"slices"
	"testing"

	"chandler.dev/internal/doctor"
	"chandler.dev/internal/doctor/codes"
)

const (
	v2 = "version = 2\n[plugins.'io.containerd.grpc.v1.cri']\n"
	v3 = "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\n"
)

// The configuration of containerd is interpreted as containerd does.
func TestContainerdConfig(t *testing.T) {
	usual := []string{"/etc/cdi", "/var/run/cdi"}
	for name, test := range map[string]struct {
		version string
		files   map[string]string // below /etc/containerd
		on      bool
		dirs    []string
		unknown bool
	}{
		"1.7, by default":             {"1.7.22", map[string]string{"config.toml": v2}, false, usual, false},
		"1.7, on":                     {"1.7.22", map[string]string{"config.toml": v2 + "enable_cdi = true\n"}, true, usual, false},
		"1.7, no file":                {"1.7.22", nil, false, usual, false},
		"1.7, a section in its place": {"1.7.22", map[string]string{"config.toml": "imports = ['conf.d/*.toml']\n" + v2 + "enable_cdi = true\n", "conf.d/a.toml": v2 + "sandbox_image = 'a'\n"}, false, usual, false},
		"1.7, on by an import":        {"1.7.22", map[string]string{"config.toml": "imports = ['/etc/containerd/conf.d/*.toml']\n" + v2, "conf.d/a.toml": v2 + "enable_cdi = true\n"}, true, usual, false},
		"2.1, by default":             {"2.1.4", map[string]string{"config.toml": v3}, true, usual, false},
		"2.1, no file":                {"2.1.4", nil, true, usual, false},
		"2.1, off":                    {"2.1.4", map[string]string{"config.toml": v3 + "enable_cdi = false\n"}, false, usual, false},
		"2.1, an older file":          {"2.1.4", map[string]string{"config.toml": v2 + "enable_cdi = false\n"}, false, usual, false},
		"2.1, imports are merged":     {"2.1.4", map[string]string{"config.toml": "imports = ['conf.d/*.toml']\n" + v3 + "enable_cdi = false\n", "conf.d/a.toml": v3 + "sandbox_image = 'a'\n"}, false, usual, false},
		"2.1, lists grow":             {"2.1.4", map[string]string{"config.toml": "imports = ['conf.d/*.toml']\n" + v3 + "cdi_spec_dirs = ['/etc/cdi']\n", "conf.d/a.toml": v3 + "cdi_spec_dirs = ['/opt/cdi', '/etc/cdi']\n"}, true, []string{"/etc/cdi", "/opt/cdi"}, false},
		"2.1, imports in a circle":    {"2.1.4", map[string]string{"config.toml": "imports = ['config.toml']\n" + v3}, true, usual, false},
		"2.4 cannot be without":       {"2.4.0", map[string]string{"config.toml": v3 + "enable_cdi = false\n"}, true, usual, false},
		"unknown version, new":        {"", map[string]string{"config.toml": v3}, true, usual, false},
		"unknown version, old":        {"", map[string]string{"config.toml": v2}, false, nil, true},
		"no TOML":                     {"2.1.4", map[string]string{"config.toml": "version = = 3"}, false, nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newMadeUp(t)
			n.remove("etc/containerd")
			for file, text := range test.files {
				n.write("etc/containerd/"+file, text)
			}
			config, err := containerdConfig(n.options, nil, test.version)
			if (err != nil) != test.unknown {
				t.Fatalf("error %v", err)
			}
			if err == nil && (config.CDI != test.on || !slices.Equal(config.SpecDirs, test.dirs)) {
				t.Errorf("on %t, directories %v; want %t, %v", config.CDI, config.SpecDirs, test.on, test.dirs)
			}
		})
	}
}

// CRI-O reads its main file and the files in crio.conf.d. The last value wins.
func TestCRIOConfig(t *testing.T) {
	n := newMadeUp(t)
	n.remove("proc/" + runtimePID)
	n.process(runtimePID, "/usr/bin/crio")
	n.write("etc/crio/crio.conf", "[crio.runtime]\ncdi_spec_dirs = ['/etc/cdi']\n")
	if found := doctor.JudgeFacts(n.facts(), codes.Runtime).Codes(); !slices.Equal(found, []string{"CH0203"}) {
		t.Errorf("without the directory: found %v", found)
	}
	n.write("etc/crio/crio.conf.d/10-cdi.conf", "[crio.runtime]\ncdi_spec_dirs = ['/etc/cdi', '/run/cdi', '/var/run/cdi']\n")
	if found := doctor.JudgeFacts(n.facts(), codes.Runtime).Codes(); len(found) > 0 {
		t.Errorf("with it: found %v", found)
	}
}

// In the agent's pod, the runtime's configuration is not readable, so doctor does not report a
// healthy runtime.
func TestRuntimeFromAPod(t *testing.T) {
	n := newMadeUp(t)
	n.options.Root = ""
	if f := n.facts(); f.Runtime.Config.Unknown == "" {
		t.Errorf("it is %+v", f.Runtime.Config.Value)
	}
}
