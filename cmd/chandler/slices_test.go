package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"
)

// slicesOf returns the command's JSON output.
func slicesOf(t *testing.T, args ...string) resourceapi.ResourceSliceList {
	t.Helper()
	var list resourceapi.ResourceSliceList
	if err := json.Unmarshal([]byte(mustRun(t, append([]string{"slices", "-o", "json", "--node-name", "template"}, args...)...)), &list); err != nil {
		t.Fatal(err)
	}
	return list
}

func TestSlices(t *testing.T) {
	var published []string
	list := slicesOf(t, eightGPUs)
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			published = append(published, d.Name)
		}
	}
	slices.Sort(published)
	if found := names(t, eightGPUs); !slices.Equal(found, published) {
		t.Errorf("published %v, found %v", published, found)
	}
	if first := list.Items[0]; first.Name != "00000-chandler.dev-template" || *first.Spec.NodeName != "template" || first.Spec.Driver != "chandler.dev" {
		t.Errorf("slice %s of %s", first.Name, *first.Spec.NodeName)
	}
	documents := strings.Split(mustRun(t, "slices", "--node-name", "template", eightGPUs), "---\n")
	if len(documents) != len(list.Items) {
		t.Errorf("%d documents, %d slices", len(documents), len(list.Items))
	}
	for i, document := range documents {
		var slice resourceapi.ResourceSlice
		if err := yaml.UnmarshalStrict([]byte(document), &slice); err != nil || slice.Kind != "ResourceSlice" || slice.Name != list.Items[i].Name {
			t.Errorf("%v in\n%s", err, document)
		}
	}
}

// The slices depend on the version and the feature gates of the API server.
func TestSlicesForVersions(t *testing.T) {
	const partitioned = "../../discovery/families/nvidia/testdata/h100-mig.host"
	counters := func(args ...string) (sets int) {
		for _, slice := range slicesOf(t, append(args, partitioned)...).Items {
			sets += len(slice.Spec.SharedCounters)
			for _, d := range slice.Spec.Devices {
				sets += len(d.ConsumesCounters)
			}
		}
		return sets
	}
	config := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(config, []byte("apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\nmode: DevicePlugin\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n := len(slicesOf(t, partitioned, "--config", config).Items[0].Spec.Devices); n != 0 {
		t.Errorf("%d devices that the device-plugin API offers", n)
	}
	if n := counters("--kubernetes-version", "1.34"); n != 0 {
		t.Errorf("Kubernetes 1.34 has %d counters", n)
	}
	if off := counters("--feature-gates", "DRAPartitionableDevices=false"); off != 0 {
		t.Errorf("%d counters without their feature", off)
	}
	for _, args := range [][]string{
		{"--kubernetes-version", "1.33"}, {"--kubernetes-version", "1.99"}, {"--kubernetes-version", "new"}, {"--feature-gates", "Nonsense=true"},
		{"--feature-gates", "DRADeviceTaints=maybe"}, {"-o", "table"}, {"--node-name", "Not a name"},
	} {
		if out, _, err := chandler(append([]string{"slices", partitioned}, args...)...); err == nil || out != "" {
			t.Errorf("%v: %v, %q", args, err, out)
		} else if args[0] == "--kubernetes-version" && !strings.Contains(err.Error(), "want 1.34 to ") {
			t.Errorf("%v: %v", args, err)
		}
	}
}
