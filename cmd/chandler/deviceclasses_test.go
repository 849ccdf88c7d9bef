package main

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/deployments"
	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
)

// deviceClasses returns the classes in deployments/.
func deviceClasses(t *testing.T) []resourceapi.DeviceClass {
	t.Helper()
	classes, err := deployments.DeviceClasses()
	if err != nil {
		t.Fatal(err)
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
		devices = append(devices, scan.ReadHost(discoverytest.ReadHost(t, host), families.All).Devices...)
	}
	return devices
}

// Each class selects a device of the recorded hosts, each device belongs to a class, and no
// expression fails for any device: an error makes the scheduler skip the node.
func TestDeviceClasses(t *testing.T) {
	devices := recordedDevices(t)
	classed := make([]bool, len(devices))
	names := make(map[string]string)
	for _, class := range deviceClasses(t) {
		t.Run(class.Name, func(t *testing.T) {
			if name := class.Spec.ExtendedResourceName; name != nil {
				if other, taken := names[*name]; taken {
					t.Errorf("has the extended resource name of class %s: %s", other, *name)
				}
				names[*name] = class.Name
			}
			compiled, err := rules.Compile(class.Spec.Selectors[0].CEL.Expression)
			if err != nil {
				t.Fatal(err)
			}
			selects := 0
			for i, d := range devices {
				selected, err := compiled.SelectsDevice(d)
				if err != nil {
					t.Errorf("device %s of family %s: %v", d.Name, d.Family, err)
				}
				if selected {
					selects++
					classed[i] = true
				}
			}
			if selects == 0 {
				t.Error("selects no device of any recorded host")
			}
		})
	}
	for i, d := range devices {
		if !classed[i] {
			t.Errorf("no class selects %s of family %s", d.Name, d.Family)
		}
	}
}

// manifold matches extended resource names that are too numerous for a list. For each pattern,
// examples/ has a class to copy.
var manifold = []*regexp.Regexp{
	regexp.MustCompile(`^fpga\.intel\.com/af-`),                  // for each possible function
	regexp.MustCompile(`^fpga\.intel\.com/region-`),              // for each region
	regexp.MustCompile(`^amd\.com/(xilinx|advantech)_`),          // for each shell and its time
	regexp.MustCompile(`^amd\.com/[a-z]+_nps[0-9]+$`),            // for each partition mode
	regexp.MustCompile(`^nvidia\.com/mig-`),                      // for each profile
	regexp.MustCompile(`^nvidia\.com/GRID_`),                     // for each type
	regexp.MustCompile(`^qat\.intel\.com/(dc-|sym-|asym-).`),     // by the configured order of the services
	regexp.MustCompile(`^(example\.com|squat\.ai|b-com\.com)/.`), // from the administrator's configuration
}

// aCard is a name without a possible class: it stands for two devices.
const aCard = "amd.com/ama_u30"

// A pod that requests an extended resource name gets the device through DRA too. The class with the
// extendedResourceName contains every device with the name, whether built in or configured, and no
// device that has only other names.
func TestExtendedResourceNames(t *testing.T) {
	devices := recordedDevices(t)
	shipped := classesByName(deviceClasses(t))
	data, err := os.ReadFile("../../deployments/examples/deviceclasses-by-name.yaml")
	if err != nil {
		t.Fatal(err)
	}
	byName, err := deployments.ParseDeviceClasses(data)
	if err != nil {
		t.Fatal(err)
	}
	examples := classesByName(byName)
	for name, class := range examples {
		if _, taken := shipped[name]; taken {
			t.Errorf("two classes have the extendedResourceName %s", name)
		}
		checkExact(t, class, devices)
	}
	for _, class := range shipped {
		checkExact(t, class, devices)
	}
	for _, d := range devices {
		for _, name := range namesOf(d) {
			_, has := shipped[name]
			if !has && name != aCard && !slices.ContainsFunc(manifold, func(r *regexp.Regexp) bool { return r.MatchString(name) }) {
				t.Errorf("no class has the extendedResourceName %s of device %s of family %s", name, d.Name, d.Family)
			}
		}
	}
	for _, r := range manifold {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(examples)), r.MatchString) {
			t.Errorf("there is no example of a class for names like %s", r)
		}
	}
}

func classesByName(classes []resourceapi.DeviceClass) map[string]resourceapi.DeviceClass {
	named := make(map[string]resourceapi.DeviceClass)
	for _, class := range classes {
		if name := class.Spec.ExtendedResourceName; name != nil {
			named[*name] = class
		}
	}
	return named
}

// checkExact checks that a class selects the devices with its extended resource name, at least one,
// and no device that has only other names.
func checkExact(t *testing.T, class resourceapi.DeviceClass, devices []discovery.Device) {
	t.Helper()
	resource := *class.Spec.ExtendedResourceName
	compiled, err := rules.Compile(class.Spec.Selectors[0].CEL.Expression)
	if err != nil {
		t.Fatal(err)
	}
	some := false
	for _, d := range devices {
		names := namesOf(d)
		if resource == "nvidia.com/gpu" && d.Attributes.String("function") == "partition" {
			continue // GKE's plugin uses the name for partitions too; the class is for whole GPUs
		}
		selected, err := compiled.SelectsDevice(d)
		if err != nil {
			t.Errorf("%s: device %s of family %s: %v", class.Name, d.Name, d.Family, err)
		}
		some = some || selected
		if len(names) > 0 && selected != slices.Contains(names, resource) {
			t.Errorf("%s: selects device %s of family %s: %t; its classic names are %q", class.Name, d.Name, d.Family, selected, names)
		}
	}
	if !some {
		t.Errorf("%s: selects no device of any recorded host", class.Name)
	}
}

// namesOf returns the names that a device can have, built in or configured.
func namesOf(d discovery.Device) (names []string) {
	for _, offer := range d.PluginOffers {
		if !offer.IsUnnamed() {
			names = append(names, offer.Resource)
		}
	}
	return names
}
