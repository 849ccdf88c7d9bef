package uninstall

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"

	"chandler.dev/internal/removal"
)

// removable returns a cluster with agents that answer each order by the given functions. The agent
// "a" belongs to the DaemonSet chandler, and all others to the DaemonSet of a group of nodes.
func removable(t *testing.T, answers map[string]func(removal.Order) removal.Report, objects ...runtime.Object) *fake.Clientset {
	t.Helper()
	labels := map[string]string{"app.kubernetes.io/name": "chandler"}
	first := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "chandler", Namespace: "ns", UID: "set", Labels: labels}}
	group := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "chandler-gpus", Namespace: "ns", UID: "group", Labels: labels}}
	objects = append(objects, first, group, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: removal.ConfigMap, Namespace: "ns"}})
	for name := range answers {
		set := group
		if name == "a" {
			set = first
		}
		set.Status.DesiredNumberScheduled++
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", Labels: labels}}
		pod.Spec.NodeName = "node-of-" + name
		pod.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("DaemonSet"))}
		objects = append(objects, pod)
	}
	client := fake.NewClientset(objects...)
	ctx, cancel := context.WithCancel(t.Context())
	var agents sync.WaitGroup
	t.Cleanup(agents.Wait)
	t.Cleanup(cancel)
	agents.Go(func() {
		var last removal.Order
		for ctx.Err() == nil {
			time.Sleep(100 * time.Millisecond)
			config, err := client.CoreV1().ConfigMaps("ns").Get(context.Background(), removal.ConfigMap, metav1.GetOptions{})
			if err != nil {
				t.Error(err)
				return
			}
			order := removal.Parse(config.Annotations[removal.Annotation])
			if order == last || order.Phase == removal.None {
				continue
			}
			last = order
			for name, answer := range answers {
				report := answer(order)
				report.ID = order.ID
				if err := removal.Tell(context.Background(), client, "ns", name, report); err != nil {
					t.Error(err)
				}
			}
		}
	})
	return client
}

// obeys is an agent that follows every order.
func obeys(o removal.Order) removal.Report {
	if o.Phase == removal.Remove {
		return removal.Report{State: removal.Removed}
	}
	return removal.Report{State: removal.Withheld}
}

func orderOf(t *testing.T, client *fake.Clientset) removal.Order {
	t.Helper()
	config, err := client.CoreV1().ConfigMaps("ns").Get(t.Context(), removal.ConfigMap, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return removal.Parse(config.Annotations[removal.Annotation])
}

func TestUninstall(t *testing.T) {
	holds := func(removal.Order) removal.Report {
		return removal.Report{State: removal.InUse, Detail: "pod default/kvm"}
	}
	late := func(o removal.Order) removal.Report {
		if o.Phase == removal.Remove {
			return removal.Report{State: removal.InUse, Detail: "claim default/late"}
		}
		return removal.Report{State: removal.Withheld}
	}
	silent := func(removal.Order) removal.Report { return removal.Report{State: removal.Waiting, Detail: "why"} }
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "train", Namespace: "default"}}
	claim.Status.Allocation = &resourceapi.AllocationResult{}
	claim.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{{Driver: "chandler.dev", Pool: "worker", Device: "gpu-1"}, {Driver: "chandler.dev", Pool: "worker/other", Device: "nic-1"}}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "train-0"}}
	other := claim.DeepCopy()
	other.Name = "other"
	for i := range other.Status.Allocation.Devices.Results {
		other.Status.Allocation.Devices.Results[i].Driver = "example.com"
	}
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "slice"}}
	slice.Spec.Driver, slice.Spec.Devices = "chandler.dev", []resourceapi.Device{{Name: "gpu-1"}}

	for name, test := range map[string]struct {
		answers map[string]func(removal.Order) removal.Report
		objects []runtime.Object
		want    []string // in the error
		given   bool     // agents received an order
	}{
		"removed":     {answers: map[string]func(removal.Order) removal.Report{"a": obeys, "b": obeys}, objects: []runtime.Object{other}, given: true},
		"claim":       {answers: map[string]func(removal.Order) removal.Report{"a": obeys}, objects: []runtime.Object{claim}, want: []string{"node worker: pod default/train-0 (claim default/train) has gpu-1, nic-1", "nothing was removed"}},
		"container":   {answers: map[string]func(removal.Order) removal.Report{"a": holds, "b": obeys}, want: []string{"node node-of-a: pod default/kvm"}, given: true},
		"late":        {answers: map[string]func(removal.Order) removal.Report{"a": obeys, "b": late}, want: []string{"node node-of-b: claim default/late"}, given: true},
		"no answer":   {answers: map[string]func(removal.Order) removal.Report{"a": obeys, "b": silent}, want: []string{"did not answer within", "pod b on node node-of-b is Waiting: why"}, given: true},
		"slices stay": {answers: map[string]func(removal.Order) removal.Report{"a": obeys}, objects: []runtime.Object{slice}, want: []string{"ResourceSlice slice still offers 1 device"}, given: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := removable(t, test.answers, test.objects...)
				var out strings.Builder
				err := newUninstaller(client, "ns", &out).run(t.Context(), time.Minute)
				if (err == nil) != (test.want == nil) {
					t.Fatalf("error %v\n%s", err, out.String())
				}
				for _, want := range test.want {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("no %q in %v", want, err)
					}
				}
				if given := strings.Contains(out.String(), "The agents stop offering"); given != test.given {
					t.Errorf("the agents were given an order: %v\n%s", given, out.String())
				}
				if phase := orderOf(t, client).Phase; err == nil && phase != removal.Remove || err != nil && phase != removal.None {
					t.Errorf("the order is now %q", phase)
				}
			})
		})
	}
}

// Without agents, there is nothing to do. A cancelled uninstall revokes its order.
func TestUninstallEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		if err := newUninstaller(fake.NewClientset(), "ns", new(strings.Builder)).run(t.Context(), time.Minute); err != nil {
			t.Errorf("without agents: %v", err)
		}
		client := removable(t, map[string]func(removal.Order) removal.Report{"a": func(removal.Order) removal.Report { return removal.Report{State: removal.Waiting} }})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- newUninstaller(client, "ns", new(strings.Builder)).run(ctx, time.Minute) }()
		time.Sleep(5 * time.Second)
		if orderOf(t, client).Phase != removal.Withhold {
			t.Error("there is no order")
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) || orderOf(t, client) != (removal.Order{}) {
			t.Errorf("%v; the order is %v", err, orderOf(t, client))
		}
	})
}

// No agent is ordered to leave its node until all agents withhold their devices: before that, each
// can continue as if nothing had happened.
func TestUninstallRemovesOnceAllWithhold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		slow := func(removal.Order) removal.Report { return removal.Report{State: removal.Waiting} }
		const until = 25 * time.Second
		var early []removal.Phase
		client := removable(t, map[string]func(removal.Order) removal.Report{
			"a": func(o removal.Order) removal.Report {
				if time.Since(begun) < until {
					early = append(early, o.Phase)
				}
				return obeys(o)
			},
			"b": func(o removal.Order) removal.Report {
				if time.Since(begun) < until {
					return slow(o)
				}
				return obeys(o)
			},
		})
		if err := newUninstaller(client, "ns", new(strings.Builder)).run(t.Context(), time.Minute); err != nil {
			t.Fatal(err)
		}
		if len(early) < 2 || slices.Contains(early, removal.Remove) {
			t.Errorf("while b still offered devices, a was told %q", early)
		}
		if phase := orderOf(t, client).Phase; phase != removal.Remove {
			t.Errorf("at the end the order is %q", phase)
		}
	})
}
