package pool

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
)

// devicesOf returns the devices of the pool of a recorded host.
func devicesOf(t *testing.T, file string, attributes ...resourceapi.QualifiedName) map[string]resourceapi.Device {
	t.Helper()
	settings := &rules.Rules{Attributes: attributes}
	made, problems := BuildPool(Input{Snapshot: settings.ApplyTo(scan.ReadHost(discoverytest.ReadHost(t, file), families.All)), Features: without("DRAPartitionableDevicesType")})
	for _, problem := range problems {
		t.Log(problem)
	}
	return contentOf(made).devices
}

// No device of a recorded host has more attributes by default than a small map of the scheduler has
// room for.
func TestAttributesOfRecordedHosts(t *testing.T) {
	files, err := filepath.Glob("../../discovery/families/*/testdata/*.host")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		for name, d := range devicesOf(t, file) {
			if len(d.Attributes) > maxAttributes {
				t.Errorf("%s: %s has %d attributes: %v", file, name, len(d.Attributes), slices.Sorted(maps.Keys(d.Attributes)))
			}
		}
	}
}

// The administrator's list adds attributes, also to devices with the maximum.
func TestRequestedAttributes(t *testing.T) {
	const file, name = "../../discovery/families/amdgpu/testdata/mi210x8.host", "pci-0000-23-00-0"
	names := func(d resourceapi.Device) string {
		var names []string
		for _, name := range slices.Sorted(maps.Keys(d.Attributes)) {
			names = append(names, string(name))
		}
		return strings.Join(names, " ")
	}
	const byDefault = "architecture driver driverVersion fabric family function kind model resource.kubernetes.io/numaNode resource.kubernetes.io/pciBusID resource.kubernetes.io/pcieRoot uuid vendor"
	if got := names(devicesOf(t, file)[name]); got != byDefault {
		t.Errorf("by default: %s\nwant %s", got, byDefault)
	}
	const requested = "architecture driver driverVersion fabric family function group2 group4 kind model pciDevice resource.kubernetes.io/numaNode resource.kubernetes.io/pciBusID resource.kubernetes.io/pcieRoot serial uuid vendor"
	d := devicesOf(t, file, "group2", "group4", "group8", "nearestAdapter", "serial", "pciDevice", "pKey")[name]
	if got := names(d); got != requested {
		t.Errorf("requested: %s\nwant %s", got, requested)
	}
}
