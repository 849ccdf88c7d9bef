package gather

import (
	"os"
	"path/filepath"
	"testing"
)

// The version of the runtime and its configuration show whether CDI is on. Without a readable
// configuration, the answer is not known for versions with a switch.
func TestCDIEnabled(t *testing.T) {
	for name, test := range map[string]struct {
		status, config string
		on, known      bool
	}{
		"too old":          {"containerd://1.6.36", "version = 2\n", false, true},
		"off by default":   {"containerd://1.7.27", "version = 2\n", false, true},
		"turned on":        {"containerd://1.7.27", "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n", true, true},
		"on by default":    {"containerd://2.1.4", "version = 3\n", true, true},
		"turned off":       {"containerd://2.1.4", "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\nenable_cdi = false\n", false, true},
		"always on":        {"containerd://2.4.0", "", true, true},
		"not readable":     {"containerd://1.7.27", "", false, false},
		"CRI-O":            {"cri-o://1.34.0", "", true, true},
		"old CRI-O":        {"cri-o://1.22.5", "", false, true},
		"another runtime":  {"docker://28.1.0", "", false, false},
		"no version":       {"containerd://", "version = 3\n", false, false},
		"no valid content": {"containerd://1.7.27", "version = [\n", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if test.config != "" {
				file := filepath.Join(root, "etc/containerd/config.toml")
				if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, []byte(test.config), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			on, err := CDIEnabled(root, filepath.Join(root, "proc"), test.status)
			if on != test.on || (err == nil) != test.known {
				t.Errorf("on %t, %v", on, err)
			}
		})
	}
}
