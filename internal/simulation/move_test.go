package simulation

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/internal/simulation/cluster"
)

// A claim is allocated a GPU, and the scheduler binds the pod some minutes later. In the meantime the
// node moves to the device plugin API, and pods request all its GPUs there. The claim gets its GPU,
// which moves after the claim's end; the others move before.
func TestMoveWaitsForAllocatedClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, slow := startWithSlowPod(t)
		slow.Binding = time.Now().Add(cluster.LongestBinding)
		w.cluster.SubmitPod(slow)
		w.wants(discovery.ModeDevicePlugin, nil)
		resource := w.machine.Devices[allocatedTo(w, "slow")].Offers[0].Resource
		requestEachDevice(w, resource)
		all := len(w.machine.Devices) + 1 // with the agent's own
		w.runFor(cluster.LongestBinding - time.Minute)
		if n := len(w.kubelet.Containers()); n != all-1 {
			t.Errorf("%d containers before the pod with the claim is bound, want %d", n, all-1)
		}
		w.runFor(5 * time.Minute)
		if why := missingContainer(w, slow); why != "" || len(w.kubelet.Containers()) != all {
			t.Errorf("%d containers, want %d; %s", len(w.kubelet.Containers()), all, why)
		}
		w.cluster.DeletePod(slow, false)
		w.runFor(5 * time.Minute)
		if n := len(w.kubelet.Containers()); n != all {
			t.Errorf("%d containers after the end of the claim, want %d", n, all)
		}
		if len(w.history.AllFailures()) > 0 {
			t.Errorf("%q", w.history.AllFailures())
		}
		w.end()
	})
}

// The scheduler chooses a GPU for a pod, and stores the allocation some minutes later, when the other
// pods of its group are scheduled too. In the meantime the node moves to the device plugin API, and pods
// request all its GPUs there. The claim gets its GPU.
func TestMoveWaitsForDecidedClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, slow := startWithSlowPod(t)
		decided := w.server.Claim(cluster.Namespace, "slow")
		open := decided.DeepCopy()
		open.Status = resourceapi.ResourceClaimStatus{}
		w.server.Put(open)
		slow.Binding = time.Now().Add(cluster.LongestBinding)
		w.cluster.SubmitPod(slow)
		w.wants(discovery.ModeDevicePlugin, nil)
		resource := w.machine.Devices[decided.Status.Allocation.Devices.Results[0].Device].Offers[0].Resource
		requestEachDevice(w, resource)
		w.runFor(cluster.LongestBinding - time.Minute)
		w.server.Put(decided)
		w.runFor(8 * time.Minute)
		if why, all := missingContainer(w, slow), len(w.machine.Devices)+1; why != "" || len(w.kubelet.Containers()) != all {
			t.Errorf("%d containers, want %d; %s", len(w.kubelet.Containers()), all, why)
		}
		if len(w.history.AllFailures()) > 0 {
			t.Errorf("%q", w.history.AllFailures())
		}
		w.end()
	})
}

// startWithSlowPod starts a world with an agent, and a pod whose claim "slow" is allocated. The pod is
// not submitted yet.
func startWithSlowPod(t *testing.T) (*World, *cluster.Pod) {
	w := quietWorld(discovery.ModeDRA)
	w.startAgent()
	w.runFor(time.Minute)
	slow := w.cluster.NewPod("slow")
	slow.Grace, slow.Stubborn, slow.Claims = time.Second, false, []string{"slow"}
	w.server.Put(cluster.NewClaim("slow", 1))
	if !w.cluster.SchedulePod(slow) {
		t.Fatal("the claim is not allocated")
	}
	return w, slow
}

// requestEachDevice submits a pod for each device of the machine, by the resource.
func requestEachDevice(w *World, resource string) {
	for n := range slices.Values(slices.Sorted(maps.Keys(w.machine.Devices))) {
		p := w.cluster.NewPod("limits-" + n)
		p.Requests = map[string]int{resource: 1}
		w.cluster.SubmitPod(p)
	}
}

// allocatedTo returns the device that a claim is allocated.
func allocatedTo(w *World, claim string) string {
	return w.server.Claim(cluster.Namespace, claim).Status.Allocation.Devices.Results[0].Device
}

// missingContainer returns an error text if a pod has no container.
func missingContainer(w *World, p *cluster.Pod) string {
	for _, c := range w.kubelet.Containers() {
		if c.Pod == p.Pod {
			return ""
		}
	}
	return fmt.Sprintf("pod %s does not run", p)
}

// runFor lets the cluster work for a time.
func (w *World) runFor(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Second) {
		w.tendCluster()
		w.check()
	}
}
