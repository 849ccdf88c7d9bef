// Package karpenter runs the allocator with which Karpenter decides about new nodes, on the
// ResourceSlices that Chandler publishes on recorded hosts.
package karpenter

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"unique"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	karpenter "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/lifecycle"
	"sigs.k8s.io/karpenter/pkg/scheduling"
	"sigs.k8s.io/karpenter/pkg/scheduling/dynamicresources"
)

const (
	root     = "../../"
	families = root + "discovery/families/"
	mi210    = families + "amdgpu/testdata/mi210x8.host" // 8 GPUs
	trn2     = families + "neuron/testdata/trn2.host"    // 16 accelerators of 8 cores each
	e810     = families + "sriovnet/testdata/e810.host"  // 2 virtual functions that are published as one device
	examples = root + "deployments/examples/"
	nodeName = "node"
)

// chandler is the path of the built program.
var chandler string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "chandler-karpenter-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	chandler = filepath.Join(dir, "chandler")
	build := exec.Command("go", "build", "-C", root, "-o", chandler, "./cmd/chandler")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		panic(err)
	}
	m.Run()
}

// publishedSlices returns the ResourceSlices of a node with a recorded host.
func publishedSlices(t *testing.T, host string, flags ...string) (items []resourceapi.ResourceSlice) {
	t.Helper()
	command := exec.CommandContext(t.Context(), chandler, append([]string{"slices", host, "-o", "json", "--node-name", nodeName}, flags...)...)
	var problems bytes.Buffer
	command.Stderr = &problems
	text, err := command.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, &problems)
	}
	var list resourceapi.ResourceSliceList
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// target is an existing node, or a node that Karpenter may create.
type target struct {
	node      string                           // name of an existing node, "" for a new node
	templates []dynamicresources.ResourceSlice // the devices that a provider expects on a new node
}

var instanceType = unique.Make("accelerated")

// The methods implement [dynamicresources.NodeClaim].
func (g target) ID() dynamicresources.NodeClaimID { return unique.Make("node-claim") }

func (g target) NodeName() string { return g.node }

func (g target) NodePoolID() dynamicresources.NodePoolID { return unique.Make("node-pool") }

func (g target) Requirements() scheduling.Requirements { return scheduling.NewRequirements() }

func (g target) InstanceTypes() []dynamicresources.InstanceTypeID {
	return []dynamicresources.InstanceTypeID{instanceType}
}

func (g target) ResourceSlices() map[dynamicresources.InstanceTypeID][]dynamicresources.ResourceSlice {
	if g.node != "" {
		return nil
	}
	return map[dynamicresources.InstanceTypeID][]dynamicresources.ResourceSlice{instanceType: g.templates}
}

// simulation is a simulated allocation of claims by Karpenter.
type simulation struct {
	allocator *dynamicresources.Allocator
	target    target
	claims    int
}

// newSimulation starts a simulation with the DeviceClasses of the project. With asTemplates, the slices
// describe a node that does not exist.
func newSimulation(t *testing.T, items []resourceapi.ResourceSlice, asTemplates bool) *simulation {
	t.Helper()
	s := &simulation{target: target{node: nodeName}}
	var present []dynamicresources.ResourceSlice
	for i := range items {
		present = append(present, dynamicresources.NewAPIServerSlice(&items[i]))
	}
	if asTemplates {
		s.target = target{templates: templatesOf(present)}
		present = nil
	}
	classes := fake.NewClientBuilder().WithScheme(clientscheme.Scheme)
	for _, class := range readAll[resourceapi.DeviceClass](t, examples+"deviceclasses-all.yaml", "DeviceClass") {
		classes = classes.WithObjects(client.Object(&class))
	}
	s.allocator = dynamicresources.NewAllocator(present, dynamicresources.AllocatedDeviceState{}, dynamicresources.AttributeBindings{}, classes.Build(), nil)
	return s
}

// templatesOf returns the slices as the templates of a provider.
func templatesOf(present []dynamicresources.ResourceSlice) (templates []dynamicresources.ResourceSlice) {
	for _, slice := range present {
		templates = append(templates, dynamicresources.NewTemplateSlice(&cloudprovider.ResourceSliceTemplate{
			Driver: slice.Driver(), Pool: slice.Pool(), Devices: slice.Devices(), SharedCounters: slice.SharedCounters(),
		}))
	}
	return templates
}

// allocate allocates a new claim with the requests and constraints.
func (s *simulation) allocate(t *testing.T, requested resourceapi.DeviceClaim) error {
	t.Helper()
	for i := range requested.Requests { // the defaults of the API server
		if exactly := requested.Requests[i].Exactly; exactly != nil && exactly.AllocationMode == "" {
			exactly.AllocationMode, exactly.Count = resourceapi.DeviceAllocationModeExactCount, max(exactly.Count, 1)
		}
	}
	s.claims++
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("claim-%d", s.claims)},
		Spec:       resourceapi.ResourceClaimSpec{Devices: requested},
	}
	result, err := s.allocator.Allocate(t.Context(), s.target, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		return err
	}
	if len(result.InstanceTypes) != 1 {
		t.Fatalf("allocated on %d instance types", len(result.InstanceTypes))
	}
	result.Allocation.Commit(t.Context())
	return nil
}

// count returns how many of the equal claims are allocated, at most limit.
func (s *simulation) count(t *testing.T, limit int, requested func() resourceapi.DeviceClaim) int {
	t.Helper()
	for n := range limit {
		if err := s.allocate(t, requested()); err != nil {
			t.Log(err)
			return n
		}
	}
	return limit
}

// request returns a request for devices of a class.
func request(class string, count int64, expressions ...string) resourceapi.DeviceClaim {
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: class, Count: count}
	for _, expression := range expressions {
		exactly.Selectors = append(exactly.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: expression}})
	}
	return resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "devices", Exactly: exactly}}}
}

// readAll returns the objects of a kind in a file.
func readAll[T any](t *testing.T, file, kind string) (objects []T) {
	t.Helper()
	text, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer text.Close()
	decoder := yaml.NewYAMLOrJSONDecoder(text, 4096)
	for {
		var raw json.RawMessage
		var meta metav1.TypeMeta
		var object T
		err := decoder.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err := errors.Join(err, json.Unmarshal(raw, &meta), json.Unmarshal(raw, &object)); err != nil {
			t.Fatal(err)
		}
		if meta.Kind == kind {
			objects = append(objects, object)
		}
	}
}

// onBoth runs a test on an existing node and on a new node.
func onBoth(t *testing.T, items []resourceapi.ResourceSlice, test func(*testing.T, *simulation)) {
	t.Helper()
	t.Run("existing node", func(t *testing.T) { test(t, newSimulation(t, items, false)) })
	t.Run("new node", func(t *testing.T) { test(t, newSimulation(t, items, true)) })
}

// Karpenter allocates as many GPUs as a node has.
func TestGPUs(t *testing.T) {
	onBoth(t, publishedSlices(t, mi210), func(t *testing.T, s *simulation) {
		if n := s.count(t, 9, func() resourceapi.DeviceClaim { return request("gpu.chandler.dev", 1) }); n != 8 {
			t.Errorf("%d of 8 GPUs are allocated", n)
		}
	})
}

// An aligned group is allocated by matchAttribute.
func TestAlignedGroup(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(config, []byte("apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\nattributes: [group4]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	onBoth(t, publishedSlices(t, mi210, "--config", config), func(t *testing.T, s *simulation) {
		group := func() resourceapi.DeviceClaim {
			four := request("gpu.chandler.dev", 4)
			four.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: new(resourceapi.FullyQualifiedName("chandler.dev/group4"))}}
			return four
		}
		if n := s.count(t, 3, group); n != 2 {
			t.Errorf("%d of 2 groups are allocated", n)
		}
	})
}

// Karpenter counts what partitions leave of a device.
func TestPartitions(t *testing.T) {
	onBoth(t, publishedSlices(t, trn2), func(t *testing.T, s *simulation) {
		core := func() resourceapi.DeviceClaim {
			return request("neuron-core.chandler.dev", 1)
		}
		whole := func() resourceapi.DeviceClaim {
			return request("neuron.chandler.dev", 1)
		}
		if n := s.count(t, 9, core); n != 9 {
			t.Fatalf("%d of 9 cores are allocated", n)
		}
		if n := s.count(t, 16, whole); n != 14 {
			t.Errorf("%d whole devices are allocated beside 9 cores of two devices, want 14", n)
		}
		if n := s.count(t, 9, core); n != 7 {
			t.Errorf("%d more cores are allocated, want 7", n)
		}
	})
}

// A slice with counters and devices, as Kubernetes 1.34 requires, has no devices for Karpenter.
func TestCombinedSlices(t *testing.T) {
	s := newSimulation(t, publishedSlices(t, trn2, "--kubernetes-version", "1.34", "--feature-gates", "DRAPartitionableDevices=true"), false)
	if n := s.count(t, 1, func() resourceapi.DeviceClaim { return request("neuron.chandler.dev", 1) }); n != 0 {
		t.Error("Karpenter reads slices with counters and devices: change docs/autoscaling.md")
	}
}

// Virtual functions that are published as one device are allocated by amount.
func TestVirtualFunctions(t *testing.T) {
	onBoth(t, publishedSlices(t, e810), func(t *testing.T, s *simulation) {
		one := func() resourceapi.DeviceClaim {
			function := request("sriovnet.chandler.dev", 1, `device.allowMultipleAllocations`)
			function.Requests[0].Exactly.Capacity = &resourceapi.CapacityRequirements{
				Requests: map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse("1")},
			}
			return function
		}
		if n := s.count(t, 3, one); n != 2 {
			t.Errorf("%d of 2 functions are allocated", n)
		}
	})
}

// The version of Karpenter that this module requires refuses claims with firstAvailable.
func TestFirstAvailable(t *testing.T) {
	template := readAll[resourceapi.ResourceClaimTemplate](t, examples+"gpus-aligned.yaml", "ResourceClaimTemplate")[0]
	if err := newSimulation(t, publishedSlices(t, mi210), true).allocate(t, template.Spec.Spec.Devices); err == nil {
		t.Error("Karpenter reads firstAvailable: change docs/autoscaling.md")
	}
}

// A new node is initialized once the slices of its pool are complete.
func TestNewNodeIsReady(t *testing.T) {
	claim := &karpenter.NodeClaim{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{karpenter.DRADriversAnnotationKey: "chandler.dev"}}}
	items := publishedSlices(t, trn2)
	if driver, ready := lifecycle.DRADriversPublished(claim, items); !ready {
		t.Errorf("waits for %s", driver)
	}
	if _, ready := lifecycle.DRADriversPublished(claim, items[1:]); ready {
		t.Error("ready without a slice of the pool")
	}
}
