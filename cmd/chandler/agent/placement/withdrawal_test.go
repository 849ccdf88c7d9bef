package placement

import (
	"errors"
	"maps"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// preparedClaim is the UID of the only prepared claim.
const preparedClaim types.UID = "prepared"

// withdrawalBench is an API server with the slices, pods and claims of a node whose devices fpga,
// gpu, nic and npu are withdrawn.
type withdrawalBench struct {
	*withdrawals
	t        *testing.T
	client   *fake.Clientset
	failing  bool // requests fail
	requests int
	waiting  map[string]bool
	isNew    bool
}

func newWithdrawalBench(t *testing.T) *withdrawalBench {
	b := &withdrawalBench{t: t, client: fake.NewClientset(), waiting: map[string]bool{"fpga": true, "gpu": true, "nic": true, "npu": true}}
	b.client.PrependReactor("*", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
		b.requests++
		return b.failing, nil, errors.New("timeout")
	})
	b.client.PrependReactor("list", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		object, err := b.client.Tracker().List(corev1.SchemeGroupVersion.WithResource("pods"), corev1.SchemeGroupVersion.WithKind("Pod"), "")
		if err != nil || b.failing {
			return false, nil, nil
		}
		b.requests++
		selected := &corev1.PodList{}
		for _, pod := range object.(*corev1.PodList).Items {
			of := fields.Set{"spec.nodeName": pod.Spec.NodeName, "status.nominatedNodeName": pod.Status.NominatedNodeName}
			if selector := action.(clienttesting.ListAction).GetListRestrictions().Fields; !selector.Empty() && selector.Matches(of) {
				selected.Items = append(selected.Items, pod)
			}
		}
		return true, selected, nil
	})
	b.withdrawals = newWithdrawals(cluster.NewNode("node", b.client, "", nil), func(claim types.UID) bool { return claim == preparedClaim })
	return b
}

func (b *withdrawalBench) add(objects ...runtime.Object) {
	b.t.Helper()
	for _, object := range objects {
		if err := b.client.Tracker().Add(object); err != nil {
			b.t.Fatal(err)
		}
	}
}

// ask returns the present answer for the waiting devices.
func (b *withdrawalBench) ask() *Published {
	adapter, npu := &discovery.Silicon{Name: "adapter"}, &discovery.Silicon{Name: "npu"}
	channel := func(name string) rules.Offered {
		return rules.Offered{Device: discovery.Device{Name: name, Interchangeable: "channels"}}
	}
	s := &rules.Snapshot{Devices: []rules.Offered{
		{Device: discovery.Device{Name: "adapter-vf-0", Interchangeable: "vfs", PartOf: adapter}}, {Device: discovery.Device{Name: "adapter-vf-1", Interchangeable: "vfs", PartOf: adapter}},
		channel("channel-0"), channel("channel-1"), channel("channel-2"),
		{Device: discovery.Device{Name: "fpga"}}, {Device: discovery.Device{Name: "gpu"}}, {Device: discovery.Device{Name: "nic"}}, {Device: discovery.Device{Name: "npu-core-1", PartOf: npu}},
	}}
	return b.published(b.t.Context(), s, b.waiting, func(string) bool { return b.isNew })
}

// expect reports an error if the answer differs.
func (b *withdrawalBench) expect(when string, want map[string]string) {
	b.t.Helper()
	if got := b.ask(); got.Err != nil || !maps.Equal(got.BySilicon, want) {
		b.t.Errorf("%s: got %v, %v; want %v", when, got.BySilicon, got.Err, want)
	}
}

// withPod returns a claim with an allocation on a node, and a pod with the claim.
func withPod(name, pool string, change func(*corev1.Pod), result resourceapi.DeviceRequestAllocationResult) []runtime.Object {
	result.Driver, result.Pool = discovery.Domain, pool
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{result}}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimName: &name}}
	change(pod)
	return []runtime.Object{claim, pod}
}

func bound(p *corev1.Pod)     { p.Spec.NodeName = "node" }
func nominated(p *corev1.Pod) { p.Status.NominatedNodeName = "node" }

// A physical device leaves DRA a minute after the last slice with the device, or with a part or a
// numbered share of it, unless a claim of a pod of the node is allocated it. Pods of the node are
// bound to it, or nominated for it.
func TestWithdrawal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newWithdrawalBench(t)
		b.add(&resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: "slice"},
			Spec:       resourceapi.ResourceSliceSpec{Driver: discovery.Domain, NodeName: new("node"), Devices: []resourceapi.Device{{Name: "gpu-share-03"}, {Name: "npu-core-1"}}},
		})
		ended := func(p *corev1.Pod) { bound(p); p.Status.Phase = corev1.PodSucceeded }
		for _, objects := range [][]runtime.Object{
			withPod("shares", "node", bound, resourceapi.DeviceRequestAllocationResult{Device: "fpga-share-00"}),
			withPod("core", "node", nominated, resourceapi.DeviceRequestAllocationResult{Device: "npu-core-1"}),
			withPod("of-another-node", "other", bound, resourceapi.DeviceRequestAllocationResult{Device: "nic"}),
			withPod("monitor", "node", bound, resourceapi.DeviceRequestAllocationResult{Device: "nic", AdminAccess: new(true)}),
			withPod("ended", "node", ended, resourceapi.DeviceRequestAllocationResult{Device: "nic"}),
			withPod("elsewhere", "node", func(*corev1.Pod) {}, resourceapi.DeviceRequestAllocationResult{Device: "nic"}),
		} {
			b.add(objects...)
		}
		b.expect("at first", map[string]string{"gpu": "ResourceSlice slice", "npu": "ResourceSlice slice", "fpga": stillAllocatable, "nic": stillAllocatable})
		time.Sleep(WithdrawalTime / 2)
		if err := b.client.Tracker().Delete(resourceapi.SchemeGroupVersion.WithResource("resourceslices"), "", "slice"); err != nil {
			t.Fatal(err)
		}
		b.expect("without the slice", map[string]string{"gpu": stillAllocatable, "npu": stillAllocatable, "fpga": stillAllocatable, "nic": stillAllocatable})
		time.Sleep(WithdrawalTime/2 + WithdrawalTime/10)
		b.expect("after a minute", map[string]string{"gpu": stillAllocatable, "npu": "ResourceClaim default/core", "fpga": "ResourceClaim default/shares"})
		delete(b.waiting, "nic")
		time.Sleep(WithdrawalTime)
		b.expect("after another", map[string]string{"npu": "ResourceClaim default/core", "fpga": "ResourceClaim default/shares"})
	})
}

// A pod may wait long after the scheduler has chosen its devices, and its claim is allocated later. While
// the pod is nominated for the node, all devices stay in DRA, until the scheduler has certainly given up.
func TestWithdrawalWaitsForDecisions(t *testing.T) {
	unallocated := withPod("gang", "node", nominated, resourceapi.DeviceRequestAllocationResult{})
	unallocated[0].(*resourceapi.ResourceClaim).Status.Allocation = nil
	byLimits := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "gang"}}
	byLimits.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"amd.com/gpu": resource.MustParse("1")}}}}
	nominated(byLimits)
	ordinary := byLimits.DeepCopy()
	ordinary.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}
	elsewhere := withPod("gang", "node", nominated, resourceapi.DeviceRequestAllocationResult{})
	elsewhere[0].(*resourceapi.ResourceClaim).Status.Allocation = nil
	elsewhere[1].(*corev1.Pod).Spec.NodeName = "other"
	for name, test := range map[string]struct {
		objects []runtime.Object
		waits   bool
	}{
		"a claim":              {unallocated, true},
		"an extended resource": {[]runtime.Object{byLimits}, true},
		"no devices":           {[]runtime.Object{ordinary}, false},
		"on another node":      {elsewhere, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newWithdrawalBench(t)
				b.waiting = map[string]bool{"gpu": true, "nic": true}
				b.add(test.objects...)
				b.expect("at first", map[string]string{"gpu": stillAllocatable, "nic": stillAllocatable})
				time.Sleep(WithdrawalTime + WithdrawalTime/10)
				if !test.waits {
					b.expect("after a minute", map[string]string{})
					return
				}
				const pod = "the choice of the scheduler for pod default/gang"
				b.expect("after a minute", map[string]string{"gpu": pod, "nic": pod})
				if name == "a claim" {
					stored := withPod("gang", "node", nominated, resourceapi.DeviceRequestAllocationResult{Device: "nic"})[0]
					if err := b.client.Tracker().Update(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), stored, "default"); err != nil {
						t.Fatal(err)
					}
					time.Sleep(3 * time.Minute)
					b.expect("the allocation is stored", map[string]string{"nic": "ResourceClaim default/gang"})
					return
				}
				time.Sleep(decisionTime)
				b.expect("after the longest decision", map[string]string{})
			})
		})
	}
}

// An interchangeable device leaves DRA a minute after the last slice whose capacity includes the device,
// unless a claim by the common name is not prepared yet: the claim may get any of them.
func TestWithdrawalOfInterchangeable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newWithdrawalBench(t)
		b.waiting = map[string]bool{"channel-0": true, "channel-1": true} // channel-2 stays
		publish := func(n int64) {
			shares := discovery.Capacity{}
			shares.Set(discovery.Shares, n)
			_ = b.client.Tracker().Delete(resourceapi.SchemeGroupVersion.WithResource("resourceslices"), "", "slice") // not there at first
			b.add(&resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{Name: "slice"},
				Spec:       resourceapi.ResourceSliceSpec{Driver: discovery.Domain, NodeName: new("node"), Devices: []resourceapi.Device{{Name: "channels", Capacity: shares}}},
			})
		}
		publish(3)
		b.expect("at first", map[string]string{"channel-0": "ResourceSlice slice", "channel-1": "ResourceSlice slice"})
		publish(1)
		time.Sleep(WithdrawalTime)
		b.expect("without their capacity", map[string]string{"channel-0": stillAllocatable, "channel-1": stillAllocatable})
		prepared := withPod("prepared", "node", bound, resourceapi.DeviceRequestAllocationResult{Device: "channels"})
		prepared[0].(*resourceapi.ResourceClaim).UID = preparedClaim
		b.add(prepared...)
		b.add(withPod("other", "node", bound, resourceapi.DeviceRequestAllocationResult{Device: "channels"})...)
		time.Sleep(WithdrawalTime + WithdrawalTime/10)
		b.expect("with another claim", map[string]string{"channel-0": "ResourceClaim default/other", "channel-1": "ResourceClaim default/other"})
		if err := b.client.Tracker().Delete(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), "default", "other"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(WithdrawalTime)
		b.expect("with a prepared claim only", map[string]string{})
	})
}

// An adapter with interchangeable functions leaves DRA a minute after the last slice with any of them,
// unless a claim for one of them, by its own or the common name, is not prepared yet.
func TestWithdrawalOfInterchangeableFunctions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newWithdrawalBench(t)
		b.waiting = map[string]bool{"adapter": true}
		shares := discovery.Capacity{}
		shares.Set(discovery.Shares, 2)
		b.add(&resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: "slice"},
			Spec:       resourceapi.ResourceSliceSpec{Driver: discovery.Domain, NodeName: new("node"), Devices: []resourceapi.Device{{Name: "vfs", Capacity: shares}}},
		})
		b.expect("at first", map[string]string{"adapter": "ResourceSlice slice"})
		if err := b.client.Tracker().Delete(resourceapi.SchemeGroupVersion.WithResource("resourceslices"), "", "slice"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(WithdrawalTime)
		b.expect("without the slice", map[string]string{"adapter": stillAllocatable})
		for _, name := range []string{"vfs", "adapter-vf-1"} {
			b.add(withPod(name, "node", bound, resourceapi.DeviceRequestAllocationResult{Device: name})...)
			time.Sleep(WithdrawalTime + WithdrawalTime/10)
			b.expect("with a claim", map[string]string{"adapter": "ResourceClaim default/" + name})
			if err := b.client.Tracker().Delete(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), "default", name); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(WithdrawalTime)
		b.expect("without claims", map[string]string{})
	})
}

// A device that DRA offers again in the meantime is withdrawn from the beginning.
func TestWithdrawalOfDeviceThatReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newWithdrawalBench(t)
		b.waiting = map[string]bool{"gpu": true, "nic": true}
		b.expect("at first", map[string]string{"gpu": stillAllocatable, "nic": stillAllocatable})
		b.forgetOffered(map[string]string{"nic": "moves"})
		time.Sleep(WithdrawalTime + WithdrawalTime/10)
		b.expect("after a minute", map[string]string{"gpu": stillAllocatable})
	})
}

// A device that no API has offered is not withdrawn, unless a slice names it.
func TestNewDeviceIsNotWithdrawn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newWithdrawalBench(t)
		b.isNew = true
		b.add(withPod("c", "node", bound, resourceapi.DeviceRequestAllocationResult{Device: "gpu"})...)
		b.add(&resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: "slice"},
			Spec:       resourceapi.ResourceSliceSpec{Driver: discovery.Domain, NodeName: new("node"), Devices: []resourceapi.Device{{Name: "nic"}}},
		})
		b.expect("at first", map[string]string{"gpu": "ResourceClaim default/c", "nic": "ResourceSlice slice"})
	})
}

// While the API server does not answer, an earlier answer holds for a while, and then no answer.
// Requests become rare, after failures as while a claim keeps a device.
func TestWithdrawalWithoutAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newWithdrawalBench(t)
		b.waiting = map[string]bool{"gpu": true}
		b.failing = true
		if got := b.ask(); got.Err == nil || !got.concerns(b.waiting) {
			t.Errorf("without an answer: %+v", got)
		}
		b.failing = false
		b.add(withPod("c", "node", bound, resourceapi.DeviceRequestAllocationResult{Device: "gpu"})...)
		time.Sleep(10 * time.Second)
		b.expect("an answer", map[string]string{"gpu": stillAllocatable})
		time.Sleep(WithdrawalTime + WithdrawalTime/10)
		b.expect("after a minute", map[string]string{"gpu": "ResourceClaim default/c"})
		b.requests = 0
		poll := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Second) {
				b.ask()
			}
		}
		poll(30 * time.Minute)
		if b.requests < 4*10 || b.requests > 4*25 {
			t.Errorf("%d requests in half an hour while a claim has the device", b.requests)
		}
		b.failing = true
		poll(answerValidity / 2)
		b.expect("silence", map[string]string{"gpu": "ResourceClaim default/c"})
		poll(2*answerValidity + 3*time.Minute)
		if got := b.ask(); got.Err == nil {
			t.Errorf("after a long silence: %+v", got)
		}
		b.requests = 0
		poll(time.Hour)
		if b.requests < 20 || b.requests > 60 {
			t.Errorf("%d requests in an hour of silence", b.requests)
		}
		b.failing = false
		b.hurry()
		b.expect("an answer again", map[string]string{"gpu": "ResourceClaim default/c"})
	})
}

// A device whose claim ends while others wait is withdrawn from then on, and not from the next
// request that is due for the others.
func TestWithdrawalOfFurtherDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newWithdrawalBench(t)
		b.waiting = map[string]bool{"gpu": true}
		b.add(withPod("c", "node", bound, resourceapi.DeviceRequestAllocationResult{Device: "nic"})...)
		b.expect("at first", map[string]string{"gpu": stillAllocatable})
		time.Sleep(WithdrawalTime + WithdrawalTime/10)
		b.expect("after a minute", map[string]string{"nic": "ResourceClaim default/c"})
		if err := b.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "default", "c"); err != nil {
			t.Fatal(err)
		}
		b.waiting = map[string]bool{"nic": true}
		time.Sleep(time.Second)
		b.expect("the claim has ended", map[string]string{"nic": stillAllocatable})
		time.Sleep(WithdrawalTime + WithdrawalTime/10)
		b.expect("after another", map[string]string{})
	})
}
