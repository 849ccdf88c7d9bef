package kubectl

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The error names a file that is not a kubeconfig, without Go types, and gives the reason if a file
// is unreadable.
func TestNoKubeconfig(t *testing.T) {
	for name, text := range map[string]string{
		"passwd":    "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1::/:/bin/sh\n",
		"list":      "- a\n- b\n",
		"pod":       "apiVersion: v1\nkind: Pod\n",
		"not yaml":  "a: [\n",
		"a picture": "\x89PNG\r\n\x1a\n\x00\x00",
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "file")
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			o := newOptions("v1.2.3")
			o.Kubeconfig.ExplicitPath = file
			if _, err := o.NewClient(); err == nil || err.Error() != file+" is not a kubeconfig" {
				t.Errorf("error %v", err)
			}
		})
	}
	o := newOptions("v1.2.3")
	o.Kubeconfig.ExplicitPath = filepath.Join(t.TempDir(), "none")
	if _, err := o.NewClient(); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("of a file that is not there: %v", err)
	}
}
