package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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

// withoutClass are classic names that no class can stand for, as they are.
var withoutClass = []*regexp.Regexp{
	regexp.MustCompile(`^fpga\.intel\.com/af-`),              // one for each function that there may be
	regexp.MustCompile(`^amd\.com/(xilinx|advantech)_`),      // one for each shell and its time
	regexp.MustCompile(`^amd\.com/ama_u30$`),                 // a card, which is two devices
	regexp.MustCompile(`^nvidia\.com/mig-`),                  // one for each profile; there is a class to copy
	regexp.MustCompile(`^qat\.intel\.com/(dc-|sym-|asym-).`), // by the order in which services were written
}

// What a pod asks for by its classic name it gets through DRA as well: a device
// that has the name is of the class with that extendedResourceName, and one with
// other names is not.
func TestExtendedResourceNames(t *testing.T) {
	named := make(map[string]resourceapi.DeviceClass)
	for _, class := range deviceClasses(t) {
		if name := class.Spec.ExtendedResourceName; name != nil {
			named[*name] = class
		}
	}
	devices := recordedDevices(t)
	for resource, class := range named {
		compiled, err := discovery.Compile(class.Spec.Selectors[0].CEL.Expression)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range devices {
			offers := ownNames(d)
			if resource == "nvidia.com/gpu" && d.Attributes.String("function") == "partition" {
				continue // GKE's plugin calls parts so too; the class is for whole GPUs
			}
			selected, _ := compiled.Selects(d) // TestDeviceClasses has looked at the error
			if len(offers) > 0 && selected != slices.Contains(offers, resource) {
				t.Errorf("%s: selects device %s of family %s: %t; its classic names are %q", class.Name, d.Name, d.Family, selected, offers)
			}
		}
	}
	for _, d := range devices {
		for _, name := range ownNames(d) {
			_, has := named[name]
			if !has && !slices.ContainsFunc(withoutClass, func(r *regexp.Regexp) bool { return r.MatchString(name) }) {
				t.Errorf("no class has the extendedResourceName %s of device %s of family %s", name, d.Name, d.Family)
			}
		}
	}
}

// ownNames returns the names that a device has if the administrator gives
// it no other.
func ownNames(d discovery.Device) (names []string) {
	if d.OptIn || d.Family == "paths" { // which the administrator names
		return nil
	}
	for _, offer := range d.Offers {
		if offer.Resource != "" && !offer.Optional {
			names = append(names, offer.Resource)
		}
	}
	return names
}
