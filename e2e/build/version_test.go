package build

import (
	"os"
	"strings"
	"testing"
)

// The versions match the go.mod files of all modules.
func TestVersions(t *testing.T) {
	for version, folder := range kubes {
		file := "../" + folder + "/go.mod"
		if version == Version {
			file = "../go.mod"
		}
		module, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if want := "k8s.io/kubernetes " + version + "\n"; !strings.Contains(string(module), want) {
			t.Errorf("%s does not require %q", file, want)
		}
		staging := strings.Replace(version, "v1.", "v0.", 1)
		_, replaced, _ := strings.Cut(string(module), "\nreplace (\n")
		for line := range strings.Lines(replaced) {
			if strings.HasPrefix(line, "\tk8s.io/") && !strings.HasSuffix(line, " "+staging+"\n") {
				t.Errorf("%s says %q", file, line)
			}
		}
		if !strings.Contains(replaced, "k8s.io/api => ") {
			t.Errorf("%s replaces nothing", file)
		}
	}
}
