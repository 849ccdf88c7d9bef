package main

import (
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/settings"
)

// Every shipped ConfigMap contains a valid configuration.
func TestShippedConfigurations(t *testing.T) {
	files, err := filepath.Glob("../../deployments/examples/config-*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	for _, file := range append(files, "../../deployments/config.yaml") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var manifest corev1.ConfigMap
			if err := yaml.UnmarshalStrict(data, &manifest); err != nil {
				t.Fatal(err)
			}
			config := filepath.Join(t.TempDir(), "config.yaml")
			if err := os.WriteFile(config, []byte(manifest.Data["config.yaml"]), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := settings.LoadHere(config, v1alpha1.Node{Name: "node", Labels: map[string]string{}}, settings.Host{}); err != nil {
				t.Error(err)
			}
		})
	}
}
