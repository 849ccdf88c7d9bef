package pool

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver/features"
	"chandler.dev/internal/ledger/allocation"
)

// hostDevices returns the devices of the pool of a recorded host.
func hostDevices(t *testing.T, file string, attributes ...resourceapi.QualifiedName) map[string]resourceapi.Device {
	t.Helper()
	settings := &rules.Rules{Attributes: attributes}
	made, problems := BuildPools(Input{Node: "node", Snapshot: settings.ApplyTo(scan.ReadHost(discoverytest.ReadHost(t, file), families.All)), Features: without("DRAPartitionableDevicesType")})
	for _, problem := range problems {
		t.Log(problem)
	}
	return devicesOf(made)
}

// No device of a recorded host has more attributes by default than a small map of the scheduler has
// room for.
func TestAttributesOfRecordedHosts(t *testing.T) {
	files, err := filepath.Glob("../../discovery/families/*/testdata/*.host")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		for name, d := range hostDevices(t, file) {
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
	if got := names(hostDevices(t, file)[name]); got != byDefault {
		t.Errorf("by default: %s\nwant %s", got, byDefault)
	}
	const requested = "architecture driver driverVersion fabric family function group2 group4 kind model pciDevice resource.kubernetes.io/numaNode resource.kubernetes.io/pciBusID resource.kubernetes.io/pcieRoot serial uuid vendor"
	d := hostDevices(t, file, "group2", "group4", "group8", "nearestAdapter", "serial", "pciDevice", "pKey")[name]
	if got := names(d); got != requested {
		t.Errorf("requested: %s\nwant %s", got, requested)
	}
}

// A device that a claim has keeps the attributes of its network interface in the slice, although the
// snapshot lacks them while the interface is in a pod.
func TestInterfaceInPod(t *testing.T) {
	adapter := func(ifName string) []rules.Offered {
		d := rules.Offered{Device: discovery.Device{Name: "adapter", Attributes: discovery.Attributes{}}}
		d.Attributes.SetString("driver", "mlx5_core")
		d.Attributes.SetString("function", "physical")
		if ifName != "" {
			d.Attributes.SetString("ifName", ifName)
			d.Attributes.SetBool("defaultRoute", false)
			d.Attributes.SetString("linkLayer", "Ethernet")
			d.Attributes.SetString("pfName", ifName)
		}
		return []rules.Offered{d}
	}
	build := func(last resourceslice.DriverResources, devices []rules.Offered, claims ...*allocation.Claim) resourceslice.DriverResources {
		snapshot := &rules.Snapshot{Devices: devices, Attributes: []resourceapi.QualifiedName{"defaultRoute"}}
		made, _ := BuildPools(Input{Node: "node", Snapshot: snapshot, Last: last, Claims: claims, Features: features.All()})
		return made
	}
	claim := &allocation.Claim{Namespace: "default", Name: "c", Results: []allocation.Result{{Pool: "node/other", Device: "adapter", Source: "adapter", Silicon: "adapter", Whole: true}}}
	moved := &allocation.Claim{Namespace: "default", Name: "c", Results: slices.Clone(claim.Results)}
	moved.Results[0].Edits.NetDevices = []*specs.LinuxNetDevice{{HostInterfaceName: "ens1", Name: "net1"}}
	free := build(resourceslice.DriverResources{}, adapter("ens1"))
	without := build(resourceslice.DriverResources{}, adapter(""))
	ended, _ := BuildPools(Input{Node: "node",
		Snapshot: &rules.Snapshot{Devices: adapter(""), Attributes: []resourceapi.QualifiedName{"defaultRoute"}},
		Last:     free, Returning: map[string]bool{"adapter": true}, Features: features.All(),
	})
	otherDriver := adapter("")
	otherDriver[0].Attributes.SetString("driver", "vfio-pci")
	restarted := adapter("ens1") // the claim's record has no link layer
	delete(restarted[0].Attributes, "linkLayer")
	for name, test := range map[string]struct{ got, want resourceslice.DriverResources }{
		"a network plugin moved it":          {build(free, adapter(""), claim), free},
		"the claim moved it":                 {build(free, adapter(""), moved), free},
		"the claim moved it by another name": {build(build(resourceslice.DriverResources{}, adapter("ens0")), adapter(""), moved), free},
		"the agent started again":            {build(resourceslice.DriverResources{}, adapter(""), moved), build(resourceslice.DriverResources{}, restarted)},
		"it has another name by now":         {build(free, adapter("ens2"), claim), build(resourceslice.DriverResources{}, adapter("ens2"))},
		"no claim has it":                    {build(free, adapter("")), without},
		"its claim has just ended":           {ended, free},
		"it has another driver":              {build(free, otherDriver, claim), build(resourceslice.DriverResources{}, otherDriver)},
		"it was never published with a name": {build(without, adapter(""), claim), without},
	} {
		if !equality.Semantic.DeepEqual(test.got, test.want) {
			t.Errorf("%s: the pool is %+v, want %+v", name, SlicesOf(test.got)[0].Devices[0].Attributes, SlicesOf(test.want)[0].Devices[0].Attributes)
		}
	}
}
