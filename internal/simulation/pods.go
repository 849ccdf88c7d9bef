package simulation

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/cluster"
	"chandler.dev/internal/simulation/machine"
	"chandler.dev/internal/simulation/usage"
)

// addStrangers adds, on some nodes, pods that got devices from another plugin before the first
// agent.
func addStrangers(w *World) {
	if w.random.IntN(4) > 0 {
		return
	}
	devices := w.machine.Devices
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		d := devices[name]
		if d.Shareable || len(d.Offers) == 0 || len(d.Offers[0].IDs) > 1 || d.Offers[0].Members > 1 || d.PartOf != nil && d.Name != d.Silicon() || w.random.IntN(2) == 0 {
			continue
		}
		id := d.Offers[0].IDs[0]
		if d.Family == "nvidia" && w.random.IntN(3) == 0 {
			id += usage.StrangerInfix + "0"
		}
		p := w.cluster.NewPod("old")
		p.Requests = map[string]int{d.Offers[0].Resource: 1}
		w.history.Log("pod %s has %s of another plugin's", p, id)
		w.cluster.AddBoundPod(p)
		if err := w.kubelet.AddEarlierPod(p.Pod, map[string][]string{d.Offers[0].Resource: {id}}); err != nil {
			w.history.Fail("pod %s: %v", p, err)
		}
		w.history.CountFault("anotherPlugin")
	}
}

// makePod creates a pod with its own claims, with a claim that other pods may have too, or with
// extended resources.
func (w *World) makePod() {
	p := w.cluster.NewPod("pod")
	if w.random.IntN(3) == 0 {
		p.Life = time.Duration(1+w.random.IntN(40)) * time.Second
		p.Restarts = w.random.IntN(3)
	}
	resources := slices.Sorted(maps.Keys(w.kubelet.AllocatableDevices()))
	switch {
	case len(resources) > 0 && w.random.IntN(2) == 0 || !w.offersDRA():
		if len(resources) == 0 {
			return
		}
		p.Requests = map[string]int{chance.PickOne(w.random, resources...): 1 + w.random.IntN(2)}
		p.Init = w.random.IntN(6) == 0
	case w.random.IntN(3) == 0:
		p.Own = false
		p.Claims = []string{fmt.Sprintf("shared-%d", w.random.IntN(2))}
		if w.minor >= 37 && w.random.IntN(3) == 0 {
			p.Group = "group"
			p.Claims = []string{"of-the-group"}
		}
		if w.server.Claim(cluster.Namespace, p.Claims[0]) == nil {
			w.makeClaim(p.Claims[0])
		}
	case w.random.IntN(10) == 0:
		w.makeMonitor(p)
	default:
		for i := range 1 + w.random.IntN(2) {
			name := fmt.Sprintf("%s-claim-%d", p.Name, i)
			if w.random.IntN(10) == 0 {
				name += "-" + strings.Repeat("long", 60) // fills the name's 253 bytes
				name = name[:253]
			}
			p.Claims = append(p.Claims, name)
			w.makeClaim(name)
		}
	}
	w.cluster.SubmitPod(p)
}

func (w *World) makeClaim(name string) {
	count := int64(1)
	if w.random.IntN(4) == 0 {
		count = 2
	}
	claim := cluster.NewClaim(name, count)
	if shares := w.settings.Rules.Sharing; len(shares) > 0 && w.server.Features().Sharing && w.random.IntN(2) == 0 {
		capacity, amount := shares[0].Capacity, shares[0].Unit
		if shares[0].Replicas > 0 {
			capacity, amount = discovery.Shares, machine.NewQuantity(1)
		}
		amount.Mul(int64(1 + w.random.IntN(2)))
		claim.Spec.Devices.Requests[0].Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{capacity: amount}}
	}
	if w.machine.Joins && w.server.Features().Sharing && w.random.IntN(4) == 0 {
		requested := map[resourceapi.QualifiedName]resource.Quantity{discovery.Shares: machine.NewQuantity(int64(1 + w.random.IntN(2)))}
		claim.Spec.Devices.Requests[0].Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: requested}
	}
	w.specifyFunction(claim, nil)
	specifyDaemon(w, claim)
	w.server.Put(claim)
}

// submitPod creates a pod with a claim of its own for one device, which specify may change.
func (w *World) submitPod(specify func(*resourceapi.ResourceClaim)) *cluster.Pod {
	p := w.cluster.NewPod("pod")
	p.Claims = []string{p.Name + "-claim"}
	claim := cluster.NewClaim(p.Claims[0], 1)
	specify(claim)
	w.server.Put(claim)
	w.cluster.SubmitPod(p)
	return p
}

// waitFor waits until a condition holds, for at most 20 seconds, and reports whether it holds.
func (w *World) waitFor(holds func() bool) bool {
	for range 80 {
		if holds() {
			return true
		}
		time.Sleep(250 * time.Millisecond)
	}
	return false
}

// replacePod ends a pod with the device at an address, and creates another pod for the device, which
// starts as soon as possible.
func (w *World) replacePod(p *cluster.Pod, address string) {
	w.cluster.DeletePod(p, false)
	w.submitForDevice(address, nil)
	for range 20 {
		time.Sleep(500 * time.Millisecond)
		w.tendCluster()
		w.check()
	}
}

// makeMonitor turns a pod into a monitor, which observes all devices regardless of their consumers,
// by a claim with admin access.
func (w *World) makeMonitor(p *cluster.Pod) {
	p.Claims = []string{p.Name + "-claim"}
	claim := cluster.NewClaim(p.Claims[0], 0)
	request := claim.Spec.Devices.Requests[0].Exactly
	request.AllocationMode, request.AdminAccess = resourceapi.DeviceAllocationModeAll, new(true)
	w.server.Put(claim)
}

// restartScheduler restarts the scheduler.
func restartScheduler(w *World) bool {
	if !w.cluster.RestartScheduler() {
		return false
	}
	w.history.CountFault("schedulerRestarted")
	return true
}

// noteAllocation records devices that the scheduler has allocated to a claim.
func (w *World) noteAllocation(claim types.UID, results []resourceapi.DeviceRequestAllocationResult, of []*resourceapi.ResourceSlice) {
	if slices.ContainsFunc(results, machine.IsMovable) {
		w.usage.Writes.SetApart(false)
	}
	w.usage.Parts.NoteAllocation(claim, results, of)
}
