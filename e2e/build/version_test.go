package build

import (
	"os"
	"strings"
	"testing"
)

// The version that the programs call themselves is the one they are built from.
func TestVersion(t *testing.T) {
	module, err := os.ReadFile("../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if want := "k8s.io/kubernetes " + Version + "\n"; !strings.Contains(string(module), want) {
		t.Errorf("go.mod does not require %q", want)
	}
	staging := strings.Replace(Version, "v1.", "v0.", 1)
	if want := "k8s.io/api => k8s.io/api " + staging + "\n"; !strings.Contains(string(module), want) {
		t.Errorf("go.mod does not say %q", want)
	}
}
