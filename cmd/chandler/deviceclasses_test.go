package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
)

// deviceClasses returns the classes that deployments/ ships.
func deviceClasses(t *testing.T) []resourceapi.DeviceClass {
	t.Helper()
	data, err := os.ReadFile("../../deployments/deviceclasses.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var classes []resourceapi.DeviceClass
	for document := range bytes.SplitSeq(data, []byte("\n---\n")) {
		var class resourceapi.DeviceClass
		if err := yaml.UnmarshalStrict(document, &class); err != nil {
			t.Fatal(err)
		}
		classes = append(classes, class)
	}
	return classes
}

// recordedDevices returns the devices of all recorded hosts.
func recordedDevices(t *testing.T) (devices []discovery.Device) {
	t.Helper()
	hosts, err := filepath.Glob("../../discovery/families/*/testdata/*.host")
	if err != nil || len(hosts) == 0 {
		t.Fatalf("recorded hosts: %q, %v", hosts, err)
	}
	for _, host := range hosts {
		devices = append(devices, discovery.Scan(discoverytest.Layout(t, host), families.All).Devices...)
	}
	return devices
}

// Each class selects a device of the recorded hosts, and none of its
// expressions fails for any device: the scheduler gives a node up for that.
func TestDeviceClasses(t *testing.T) {
	devices := recordedDevices(t)
	names := make(map[string]string)
	for _, class := range deviceClasses(t) {
		t.Run(class.Name, func(t *testing.T) {
			if name := class.Spec.ExtendedResourceName; name != nil {
				if other, taken := names[*name]; taken {
					t.Errorf("has the extended resource name of class %s: %s", other, *name)
				}
				names[*name] = class.Name
			}
			compiled, err := discovery.Compile(class.Spec.Selectors[0].CEL.Expression)
			if err != nil {
				t.Fatal(err)
			}
			selects := 0
			for _, d := range devices {
				selected, err := compiled.Selects(d)
				if err != nil {
					t.Errorf("device %s of family %s: %v", d.Name, d.Family, err)
				}
				if selected {
					selects++
				}
			}
			if selects == 0 {
				t.Error("selects no device of any recorded host")
			}
		})
	}
}
