package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"sigs.k8s.io/yaml"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/cmd/chandler/settings"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
)

// The claim in the example for node groups without nodes is satisfied by the placeholders of the Cluster
// Autoscaler for the Cluster API, and by the devices of a real node.
func TestGPUsFromZero(t *testing.T) {
	text, err := os.ReadFile("../../deployments/examples/gpu-from-zero.yaml")
	if err != nil {
		t.Fatal(err)
	}
	documents := strings.Split(string(text), "\n---\n")
	var class resourceapi.DeviceClass
	var template resourceapi.ResourceClaimTemplate
	for i, object := range []any{&class, &template} {
		if err := yaml.UnmarshalStrict([]byte(documents[i]), object); err != nil {
			t.Fatal(err)
		}
	}
	request := *template.Spec.Spec.Devices.Requests[0].Exactly
	request.AllocationMode = resourceapi.DeviceAllocationModeExactCount // the default of the API server
	spec := resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpus", Exactly: &request}}}}

	// As in cluster-autoscaler/cloudprovider/clusterapi, InstanceResourceSlices.
	placeholders := resourceslice.Pool{Generation: 1, Slices: []resourceslice.Slice{{}}}
	for i := range 8 {
		placeholders.Slices[0].Devices = append(placeholders.Slices[0].Devices, resourceapi.Device{
			Name: fmt.Sprintf("gpu-%d", i), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": {StringValue: new("gpu")}},
		})
	}
	config, err := settings.LoadHere("", v1alpha1.Node{}, settings.Host{})
	if err != nil {
		t.Fatal(err)
	}
	host, err := readRecorded(eightGPUs)
	if err != nil {
		t.Fatal(err)
	}
	found := scan.ReadHost(settings.ConfiguredHost(host.FS(), config), families.All)
	node, problems := agent.PoolTemplate("node", found, agent.Settings{Rules: config.Rules}, features.Set{})
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	for name, pools := range map[string]resourceslice.DriverResources{"placeholders": {Pools: map[string]resourceslice.Pool{"node": placeholders}}, "a node": node} {
		scheduler := pooltest.NewScheduler(t, features.Set{}).Publish(pools)
		scheduler.Classes = map[string]*resourceapi.DeviceClass{class.Name: &class}
		claim, allocated := scheduler.AllocateClaim("claim", spec)
		if !allocated || len(claim.Status.Allocation.Devices.Results) != 2 {
			t.Errorf("%s: allocated: %t", name, allocated)
		}
	}
}
