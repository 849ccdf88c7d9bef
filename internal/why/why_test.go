package why_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/fleet"
	"chandler.dev/internal/fleet/fleettest"
	"chandler.dev/internal/why"
)

// On any host and for any claim, the answer is that the claim fits exactly if the scheduler's
// allocator allocates it, and the numbers of each request add up.
func TestFitsWhatTheAllocatorAllocates(t *testing.T) {
	seeds := uint64(400)
	if testing.Short() {
		seeds = 100
	}
	fits, waits := 0, 0
	for seed := range seeds {
		random := rand.New(rand.NewPCG(seed, 42))
		s, spec := randomCase(t, random)
		claim := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim", UID: "probe"}, Spec: spec}
		in := fleet.Input{
			Claims: []resourceapi.ResourceClaim{claim}, Classes: []resourceapi.DeviceClass{{ObjectMeta: metav1.ObjectMeta{Name: "any"}}},
			Nodes: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "node"}}},
		}
		for _, slice := range s.Slices {
			in.Slices = append(in.Slices, *slice)
		}
		for _, held := range s.Claims {
			in.Claims = append(in.Claims, *held)
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "pod"}}
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "devices", ResourceClaimName: &claim.Name}}
		answer, err := why.ExplainPod(t.Context(), in, pod)
		if err != nil {
			t.Fatal(err)
		}
		given := allocates(t, s, &claim)
		if said := len(answer.Fits) > 0; said != given || !answer.Waits {
			t.Fatalf("seed %d: fits on %q, the allocator allocates: %t\n%+v", seed, answer.Fits, given, answer)
		}
		if given {
			fits++
		} else {
			waits++
		}
		check(t, seed, answer)
	}
	t.Logf("%d fit, %d wait", fits, waits)
	if fits < int(seeds)/10 || waits < int(seeds)/10 {
		t.Errorf("%d cases fit and %d wait: the test looks at one side only", fits, waits)
	}
}

// allocates calls the allocator without the code under test. It reports false for an error, since
// the scheduler would give up.
func allocates(t *testing.T, s *pooltest.Scheduler, claim *resourceapi.ResourceClaim) bool {
	state := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	for _, held := range s.Claims {
		for _, r := range held.Status.Allocation.Devices.Results {
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			switch {
			case pooltest.IsAdmin(&r):
			case r.ShareID != nil:
				state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
				state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
			default:
				state.AllocatedDevices.Insert(id)
			}
		}
	}
	gates := structured.Features{AdminAccess: true, PrioritizedList: true, DeviceTaints: true, PartitionableDevices: true, ConsumableCapacity: true, CompatibilityGroups: true, ListTypeAttributes: true}
	allocator, err := structured.NewAllocator(t.Context(), gates, state, s, s.Slices, cel.NewCache(100, cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true}))
	if err != nil {
		t.Fatal(err)
	}
	results, err := allocator.Allocate(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}, []*resourceapi.ResourceClaim{claim})
	return err == nil && len(results) == 1
}

// check checks the consistency of an answer for a single claim.
func check(t *testing.T, seed uint64, answer *why.Answer) {
	t.Helper()
	for i := range answer.Asked {
		r := &answer.Asked[i]
		var sum int64
		for _, step := range r.Steps {
			sum += step.Devices
		}
		if sum != r.Left {
			t.Fatalf("seed %d: the steps of %s make %d, left are %d: %+v", seed, r.Name, sum, r.Left, r.Steps)
		}
		if !r.All && r.Left < r.Count && r.Enough {
			t.Fatalf("seed %d: %d left of %d are enough: %+v", seed, r.Left, r.Count, r)
		}
		if len(answer.Asked) == 1 && r.Enough != (len(answer.Fits) > 0) {
			t.Fatalf("seed %d: the only request is enough: %t, but fits on %q: %+v", seed, r.Enough, answer.Fits, r)
		}
		if !r.Enough && !r.All && len(r.Rules) == 0 && r.Count == 1 && r.Left > 0 {
			t.Fatalf("seed %d: one of %d that are left will not do: %+v", seed, r.Left, r)
		}
		if r.Enough && len(answer.Fits) > 0 && r.But != "" {
			t.Fatalf("seed %d: it fits, but: %+v", seed, r)
		}
	}
	if answer.Nearest != nil && len(answer.Fits) > 0 {
		t.Fatalf("seed %d: nearest miss of what fits", seed)
	}
}

// randomCase returns a scheduler with some allocations on a node, and the spec of a claim.
func randomCase(t *testing.T, random *rand.Rand) (*pooltest.Scheduler, resourceapi.ResourceClaimSpec) {
	made, _ := pool.BuildPools(pool.Input{Node: "node", Snapshot: discoverytest.RandomHost(random, 4+random.IntN(10)), Features: features.All()})
	s := pooltest.NewScheduler(t, features.All()).Publish(made)
	for _, slice := range s.Slices {
		for i := range slice.Spec.Devices {
			d := &slice.Spec.Devices[i]
			d.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				discovery.Domain + "/serial":      {StringValue: &d.Name},
				discovery.Domain + "/n":           {IntValue: new(int64(random.IntN(4)))},
				"resource.kubernetes.io/numaNode": {IntValue: new(int64(random.IntN(2)))},
			}
			if random.IntN(8) == 0 {
				delete(d.Attributes, "resource.kubernetes.io/numaNode")
			}
			d.Taints = nil
			if random.IntN(6) == 0 {
				d.Taints = []resourceapi.DeviceTaint{{Key: discovery.Domain + "/unhealthy", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
			}
		}
	}
	for i := range random.IntN(6) {
		s.AllocateDevice(types.UID(fmt.Sprint("claim-", i)), resourceapi.ExactDeviceRequest{Selectors: atLeast(random.IntN(4)), AdminAccess: new(random.IntN(8) == 0)})
	}
	var spec resourceapi.ResourceClaimSpec
	for i := range 1 + random.IntN(2) {
		spec.Devices.Requests = append(spec.Devices.Requests, randomRequest(random, fmt.Sprint("r", i)))
	}
	numa, n := resourceapi.FullyQualifiedName("resource.kubernetes.io/numaNode"), resourceapi.FullyQualifiedName(discovery.Domain+"/n")
	if random.IntN(3) == 0 {
		spec.Devices.Constraints = append(spec.Devices.Constraints, resourceapi.DeviceConstraint{MatchAttribute: &numa})
	}
	if random.IntN(5) == 0 {
		spec.Devices.Constraints = append(spec.Devices.Constraints, resourceapi.DeviceConstraint{DistinctAttribute: &n, Requests: []string{"r0"}})
	}
	return s, spec
}

func atLeast(n int) []resourceapi.DeviceSelector {
	if n == 0 {
		return nil
	}
	return []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: fmt.Sprintf("device.attributes['chandler.dev'].n >= %d", n)}}}
}

func randomRequest(random *rand.Rand, name string) resourceapi.DeviceRequest {
	exactly := resourceapi.ExactDeviceRequest{DeviceClassName: "any", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1 + int64(random.IntN(4)), Selectors: atLeast(random.IntN(5))}
	switch random.IntN(10) {
	case 0:
		exactly.AdminAccess = new(true)
	case 1:
		exactly.AllocationMode, exactly.Count = resourceapi.DeviceAllocationModeAll, 0
		exactly.Selectors = atLeast(3)
	case 2:
		exactly.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
	case 3:
		exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(fmt.Sprint(1+random.IntN(40), "Gi"))}}
	case 4:
		sub := func(name string, count int64) resourceapi.DeviceSubRequest {
			return resourceapi.DeviceSubRequest{Name: name, DeviceClassName: "any", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count, Selectors: exactly.Selectors}
		}
		return resourceapi.DeviceRequest{Name: name, FirstAvailable: []resourceapi.DeviceSubRequest{sub("many", exactly.Count+2), sub("few", exactly.Count)}}
	}
	return resourceapi.DeviceRequest{Name: name, Exactly: &exactly}
}

const hosts = "../../discovery/families/"

// cluster has two servers of eight GPUs. One GPU of the second server is unhealthy.
func cluster(t *testing.T) *fleettest.Cluster {
	c := fleettest.New(t)
	c.Node("a", hosts+"amdgpu/testdata/mi210x8.host", nil)
	c.Node("b", hosts+"amdgpu/testdata/mi210x8.host", fleettest.MakeUnhealthy(discovery.ConditionUnhealthy, resourceapi.DeviceTaintEffectNoSchedule, 37, "pci-0000-43-00-0"))
	return c
}

func explain(t *testing.T, c *fleettest.Cluster, pod *corev1.Pod) *why.Answer {
	t.Helper()
	answer, err := why.ExplainPod(t.Context(), c.Input, pod)
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

// story returns a short form of a request's steps.
func story(r *why.Request) string {
	var out []string
	for _, step := range r.Steps {
		out = append(out, fmt.Sprintf("%d %s", step.Devices, step.What))
	}
	out = append(out, strings.TrimSpace(fmt.Sprintf("%d left %s", r.Left, r.But)))
	return strings.Join(out, "; ")
}

func TestReasons(t *testing.T) {
	numa := resourceapi.FullyQualifiedName("resource.kubernetes.io/numaNode")
	const large = `device.capacity['chandler.dev'].?memory.orValue(quantity('0')).isGreaterThan(quantity('1Ti'))`
	for name, test := range map[string]struct {
		change func(*fleettest.Cluster, *corev1.Pod)
		claim  resourceapi.DeviceClaim
		want   string
		fix    string
	}{
		"selector": {
			claim: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{fleettest.Request("gpus", "gpu", 1, "device.attributes['chandler.dev'].model == 'None'")}},
			want:  "16 devices of the class; -16 do not pass device.attributes['chandler.dev'].model == 'None'; 0 left",
		},
		"memory without NVML": {
			change: func(c *fleettest.Cluster, _ *corev1.Pod) { c.Node("c", hosts+"nvidia/testdata/h100x8.host", nil) },
			claim:  resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{fleettest.Request("gpus", "gpu", 1, large)}},
			want:   "26 devices of the class; -16 do not pass " + large + "; -10 do not pass " + large + ": their memory is not known without NVML; 0 left",
			fix:    "helm upgrade chandler deployments/helm/chandler --namespace chandler --reset-then-reuse-values --set nvml.enabled=true",
		},
		"class without devices": {
			claim: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{fleettest.Request("nic", "nic", 1)}},
			want:  "0 devices of the class; 0 left",
		},
		"class that is not there": {
			claim: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{fleettest.Request("x", "no-such", 1)}},
			want:  "0 devices of the class; 0 left",
			fix:   "kubectl get deviceclasses   # shows the names that there are",
		},
		"class that fails": {
			change: func(c *fleettest.Cluster, _ *corev1.Pod) {
				c.AddClass("bad", "", "device.driver == 'chandler.dev' && device.attributes['chandler.dev'].nothing == 'x'")
			},
			claim: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{fleettest.Request("x", "bad", 1)}},
			want:  "0 devices of the class; 0 left",
			fix:   `kubectl edit deviceclass bad   # in place of .nothing write .?nothing.orValue("")`,
		},
		"too many": {
			change: func(c *fleettest.Cluster, _ *corev1.Pod) {
				c.AllocateDevices("ml", "x", "a", 5, "gpus", "pci-0000-23-00-0")
			},
			claim: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{fleettest.Request("gpus", "gpu", 9)}},
			want:  "16 devices of the class; -1 unhealthy; -1 allocated; 14 left and nowhere 9 on one node",
		},
		"held": {
			change: func(c *fleettest.Cluster, _ *corev1.Pod) {
				for i, node := range []string{"a", "b"} {
					c.AllocateDevices("ml", fmt.Sprint("worker-", i), node, 5, "gpus", "pci-0000-23-00-0", "pci-0000-24-00-0", "pci-0000-44-00-0", "pci-0000-a3-00-0", "pci-0000-a4-00-0", "pci-0000-c3-00-0", "pci-0000-c4-00-0")
				}
				c.AllocateDevices("ml", "last", "a", 5, "gpu", "pci-0000-43-00-0")
			},
			claim: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{fleettest.Request("gpus", "gpu", 1)}},
			want:  "16 devices of the class; -1 unhealthy; -15 allocated; 0 left",
			fix:   "kubectl -n ml delete pod worker-0   # when that may end",
		},
		"one NUMA node": {
			change: func(c *fleettest.Cluster, _ *corev1.Pod) {
				c.AllocateDevices("ml", "x", "a", 5, "gpus", "pci-0000-23-00-0")
				c.AllocateDevices("ml", "y", "a", 5, "gpus", "pci-0000-a3-00-0")
				c.AllocateDevices("ml", "z", "b", 5, "gpus", "pci-0000-a3-00-0")
			},
			claim: resourceapi.DeviceClaim{
				Requests:    []resourceapi.DeviceRequest{fleettest.Request("gpus", "gpu", 4)},
				Constraints: []resourceapi.DeviceConstraint{{MatchAttribute: &numa}},
			},
			want: "16 devices of the class; -1 unhealthy; -3 allocated; 12 left and nowhere 4 on one NUMA node",
		},
		"node selector": {
			change: func(_ *fleettest.Cluster, pod *corev1.Pod) {
				pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: "c"}
			},
			claim: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{fleettest.Request("gpus", "gpu", 1)}},
			want:  "16 devices of the class; -16 on nodes where the pod may not run; 0 left",
		},
		"a selector that fails": {
			claim: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{fleettest.Request("gpus", "gpu", 1, "device.attributes['chandler.dev'].nothing == 'x'")}},
			want:  "16 devices of the class; -16 the selector fails for them; 0 left",
			fix:   `kubectl -n ml get resourceclaim train-gpus -o yaml   # write it, or its template, anew: in place of .nothing write .?nothing.orValue("")`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := cluster(t)
			pod := c.AddPod("ml", "train", "", 6, nil, "train-gpus").DeepCopy()
			if test.change != nil {
				test.change(c, pod)
			}
			c.AddClaim("ml", "train-gpus", test.claim)
			answer := explain(t, c, pod)
			if len(answer.Asked) != 1 || len(answer.Fits) != 0 {
				t.Fatalf("answer: %+v", answer)
			}
			if got := story(&answer.Asked[0]); got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
			if test.fix == "" && len(answer.Fix) > 0 && name != "one NUMA node" {
				t.Errorf("fix %q, which would not do", answer.Fix)
			}
			if test.fix != "" && !slices.Contains(answer.Fix, test.fix) {
				t.Errorf("fix %q, want %q", answer.Fix, test.fix)
			}
		})
	}
}

// Limits of pods are served by a device plugin that offers the name, or otherwise by a class.
func TestLimits(t *testing.T) {
	const name = "amd.com/gpu"
	two := map[string]int64{name: 2}
	t.Run("of a plugin", func(t *testing.T) {
		c := cluster(t)
		c.AddPlugin("a", name, 8, 7)
		c.AddPod("lab", "nb-1", "a", 5, map[string]int64{name: 6})
		answer := explain(t, c, c.AddPod("lab", "nb-7", "", 2, two))
		want := "8 offered by device plugins under that name; -1 unhealthy or moving to the other API; -6 allocated; 1 left"
		if got := story(&answer.Asked[0]); got != want || len(answer.Fits) > 0 || answer.Reason != "limits amd.com/gpu: 2" {
			t.Errorf("got  %s\nwant %s\n%+v", got, want, answer)
		}
		if !slices.Contains(answer.Fix, "kubectl -n lab delete pod nb-1   # when that may end") {
			t.Errorf("fix: %q", answer.Fix)
		}
	})
	t.Run("without a consumer", func(t *testing.T) {
		c := cluster(t)
		answer := explain(t, c, c.AddPod("lab", "nb-7", "", 2, two))
		if got, want := story(&answer.Asked[0]), "0 offered by device plugins under that name; 0 left and no DeviceClass has that name"; got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
		if !slices.Contains(answer.Fix, "kubectl chandler explain CH0603") {
			t.Errorf("fix: %q", answer.Fix)
		}
	})
	t.Run("misspelt", func(t *testing.T) {
		c := cluster(t)
		c.AddClass("amdgpu", "amd.com/gpus", "true")
		answer := explain(t, c, c.AddPod("lab", "nb-7", "", 2, two))
		if !slices.Contains(answer.Fix, "kubectl -n lab get pod nb-7 -o yaml   # it asks for "+name+": is amd.com/gpus meant?") {
			t.Errorf("fix: %q", answer.Fix)
		}
	})
	t.Run("of a class", func(t *testing.T) {
		c := cluster(t)
		c.AddClass("amdgpu", name, "device.attributes['chandler.dev'].?family.orValue('') == 'amdgpu'")
		answer := explain(t, c, c.AddPod("lab", "nb-7", "", 2, two))
		if !slices.Equal(answer.Fits, []string{"a", "b"}) {
			t.Errorf("answer: %+v", answer)
		}
		many := explain(t, c, c.AddPod("lab", "nb-8", "", 2, map[string]int64{name: 9}))
		if got, want := story(&many.Asked[0]), "16 devices of the class; -1 unhealthy; 15 left and nowhere 9 on one node"; got != want || len(many.Fits) > 0 {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	})
	t.Run("of a plugin on one node and a class on the other", func(t *testing.T) {
		c := cluster(t)
		c.AddClass("amdgpu", name, "device.attributes['chandler.dev'].?family.orValue('') == 'amdgpu'")
		c.AddPlugin("a", name, 8, 1)
		answer := explain(t, c, c.AddPod("lab", "nb-7", "", 2, two))
		if !slices.Equal(answer.Fits, []string{"b"}) {
			t.Errorf("fits on %q: %+v", answer.Fits, answer)
		}
	})
}

// Nodes exclude pods by cordons and taints, and pods exclude nodes by affinity.
func TestNodesThatRefuse(t *testing.T) {
	c := cluster(t)
	c.Nodes[0].Spec.Unschedulable = true
	c.Nodes[1].Spec.Taints = []corev1.Taint{{Key: "dedicated", Value: "x", Effect: corev1.TaintEffectNoSchedule}}
	c.AddClaim("ml", "train-gpus", resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{fleettest.Request("gpus", "gpu", 1)}})
	pod := c.AddPod("ml", "train", "", 6, nil, "train-gpus")
	answer := explain(t, c, pod)
	if want := "kubectl uncordon " + c.Nodes[0].Name; len(answer.Fix) == 0 || !strings.HasPrefix(answer.Fix[0], want) {
		t.Errorf("fix %q, want %q", answer.Fix, want)
	}
	if len(answer.Fits) > 0 || len(answer.Nodes) != 2 || answer.Nodes[0].Why != "cordoned" || !strings.HasPrefix(answer.Nodes[1].Why, "taint dedicated=x") {
		t.Errorf("answer: %+v", answer)
	}
	pod.Spec.Tolerations = []corev1.Toleration{{Key: "dedicated", Operator: corev1.TolerationOpExists}}
	if answer := explain(t, c, pod); !slices.Equal(answer.Fits, []string{"b"}) {
		t.Errorf("with a toleration it fits on %q", answer.Fits)
	}
}

// For a pod whose claim was not created yet, the answer contains the requests in the template.
func TestTemplate(t *testing.T) {
	c := cluster(t)
	template := resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: "gpus"}}
	template.Spec.Spec.Devices.Requests = []resourceapi.DeviceRequest{fleettest.Request("gpus", "gpu", 20)}
	pod := c.AddPod("ml", "train", "", 6, nil)
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpus", ResourceClaimTemplateName: new("gpus")}}
	other, near := *template.DeepCopy(), *template.DeepCopy()
	other.Namespace, near.Name = "other", "gpu"
	list := "kubectl -n ml get resourceclaimtemplates   # shows the names that there are"
	for want, templates := range map[string][]resourceapi.ResourceClaimTemplate{
		list: {other},
		"kubectl -n ml get resourceclaimtemplate gpu   # is this one meant? Then make the pod anew; " + list: {other, near},
	} {
		c.Templates = templates
		if answer := explain(t, c, pod); answer.Reason != "claim template gpus is not there" || strings.Join(answer.Fix, "; ") != want {
			t.Errorf("without the template: %s, fix %q, want %q", answer.Reason, answer.Fix, want)
		}
	}
	c.Templates = nil
	pod.Spec.ResourceClaims[0] = corev1.PodResourceClaim{Name: "gpus", ResourceClaimName: new("mine")}
	if answer := explain(t, c, pod); answer.Reason != "claim mine is not there" || len(answer.Fix) != 1 || answer.Fix[0] != "kubectl -n ml get resourceclaims   # shows the names that there are" {
		t.Errorf("without a claim: %s, fix %q", answer.Reason, answer.Fix)
	}
	pod.Spec.ResourceClaims[0] = corev1.PodResourceClaim{Name: "gpus", ResourceClaimTemplateName: new("gpus")}
	c.Templates = append(c.Templates, template)
	answer := explain(t, c, pod)
	if len(answer.Asked) != 1 || answer.Asked[0].Count != 20 || answer.Reason != "claim train-gpus cannot be allocated" {
		t.Errorf("answer: %+v", answer)
	}
}

// For a pod with a node, the answer contains its devices.
func TestRuns(t *testing.T) {
	c := cluster(t)
	c.AllocateDevices("ml", "train", "a", 180, "gpus", "pci-0000-23-00-0", "pci-0000-24-00-0")
	answer := explain(t, c, &c.Pods[0])
	if answer.Waits || answer.Node != "a" || len(answer.Asked) != 1 || len(answer.Asked[0].Has) != 2 || fleettest.Now.Sub(answer.Since) != 3*time.Hour {
		t.Errorf("answer: %+v", answer)
	}
}

// A claim that a quota refuses is never created. Then the devices are not the reason why the pod
// waits.
func TestClaimThatCannotBeCreated(t *testing.T) {
	c := cluster(t)
	template := resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: "gpus"}}
	template.Spec.Spec.Devices.Requests = []resourceapi.DeviceRequest{fleettest.Request("gpus", "gpu", 1)}
	c.Templates = []resourceapi.ResourceClaimTemplate{template}
	pod := c.AddPod("ml", "train", "", 6, nil)
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpus", ResourceClaimTemplateName: new("gpus")}}
	events := []corev1.Event{
		{Type: corev1.EventTypeWarning, Reason: "FailedScheduling", Message: "waiting for resource claim"},
		{Type: corev1.EventTypeWarning, Reason: "FailedResourceClaimCreation", Message: `PodResourceClaim gpus: failed to create ResourceClaim: resourceclaims.resource.k8s.io "train-gpus" is forbidden: exceeded quota: none`},
	}
	answer := explain(t, c, pod)
	before := answer.Reason
	if answer.AddTemplateProblem(events[:1]); answer.Reason != before || !answer.AwaitsClaim() {
		t.Errorf("while it is being made: %s", answer.Reason)
	}
	answer.AddTemplateProblem(events)
	if answer.Reason != "its claim gpus cannot be made" || !strings.Contains(answer.Warning, "exceeded quota") || strings.Join(answer.Fix, "; ") != "kubectl -n ml describe resourcequota" {
		t.Errorf("%s; %s; fix %q", answer.Reason, answer.Warning, answer.Fix)
	}
}
