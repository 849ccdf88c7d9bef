package simulation

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/passthrough"
	"chandler.dev/internal/simulation/agents"
	"chandler.dev/internal/simulation/cluster"
	"chandler.dev/internal/simulation/kernel"
	"chandler.dev/internal/simulation/machine"
)

// takeStep performs one random action, and lets time pass. It reports whether a fault has struck.
func (w *World) takeStep() (struck bool) {
	w.keepAgent()
	switch n := w.random.IntN(100); {
	case n < 40:
		if w.open() < 8 {
			w.makePod()
		}
	case n < 62:
		if p := w.cluster.PickPod(func(p *cluster.Pod) bool { return !p.Deleted }); p != nil && !w.isDown() {
			w.cluster.DeletePod(p, false)
		}
	default:
		struck = w.drawFault()
	}
	w.pause()
	w.tendCluster()
	return struck
}

// pause lets time pass: usually little, so that many operations overlap.
func (w *World) pause() {
	longest := 20 * time.Millisecond
	switch n := w.random.IntN(100); {
	case n < 30:
	case n < 70:
		longest = 2 * time.Second
	case n < 96:
		longest = 12 * time.Second
	default:
		longest = time.Minute
	}
	time.Sleep(time.Duration(w.random.Int64N(int64(longest))))
}

// drawFault draws a fault and lets it happen. It returns false if the fault is impossible now.
func (w *World) drawFault() bool {
	kinds := faultKinds()
	sum := 0
	for _, f := range kinds {
		sum += f.weight
	}
	n := w.random.IntN(sum)
	for _, f := range kinds {
		if n -= f.weight; n < 0 {
			w.history.Log("fault: %s", f.name)
			return f.strike(w)
		}
	}
	return false
}

// Limits of the time that an agent may need without faults.
const (
	convergeLimit = 7 * time.Minute  // grants that PodResources never listed end after five minutes
	sweepLimit    = 50 * time.Minute // unknown claims are released after two sweeps, about ten minutes apart, found them
	askLimit      = 40 * time.Minute // the agent detects the API server's features every half hour
	look          = 5 * time.Second
)

// convergenceLimit returns the time until the world must have converged. The time is longer if
// there may be claims that only the sweep ends, and if the API server's features may have changed
// since the active agent detected them.
func (w *World) convergenceLimit() time.Duration {
	switch {
	case w.damage.HasLostRecords() || len(w.kubelet.ForgottenClaims()) > 0:
		return sweepLimit
	case featuresOutdated(w):
		return askLimit
	}
	return convergeLimit
}

// featuresOutdated reports whether the API server's features have changed since the active agent
// acquired the node's lock. The active agent detects the features again only after half an hour,
// and the published slices keep fields that new slices would lose. Meanwhile, pods may have to
// wait: a scheduler without DRADeviceCompatibilityGroups ignores the pool of a slice that uses
// compatibility groups (GatherPools in structured/internal of k8s.io/dynamic-resource-allocation
// 0.37.2).
//
// The start of another agent changes nothing. An agent detects the features after it has acquired
// the lock, and an agent with an invalid configuration may end before, while the first agent
// continues.
func featuresOutdated(w *World) bool {
	active, since := w.agents.Lock.Holder()
	return active != nil && w.agents.IsLiving(active) && !active.IsDead() && !w.server.FeaturesChanged().Before(since)
}

// converge ends all faults, and waits for the expected state: first the slices, and then, when all
// pods are gone, no remains of the pods.
func (w *World) converge() {
	w.history.Log("all faults end")
	w.lasting.endFaults(time.Now().Add(24 * time.Hour))
	w.usage.Processes.EndLingering(time.Now().Add(24 * time.Hour))
	for _, c := range w.cards {
		if w.host.HasVanished(c.Address) {
			w.host.ReturnFunction(c.Address, nil)
		}
	}
	if len(w.host.Group(machine.Movable)) > 1 {
		moveDisk(w, 2)
	}
	virtual := w.host.VirtualFunctions(w.machine.Allowed.Creates)
	refused := slices.ContainsFunc(virtual, func(address string) bool {
		driver, _ := w.host.Driver(address)
		return driver == ""
	})
	unrecorded := w.damage.HasLostRecords() && slices.ContainsFunc(w.machine.Allowed.Rebind, func(address string) bool {
		driver, _ := w.host.Driver(address)
		return driver == kernel.VFIO && len(w.host.Group(address)) > 1
	})
	if n := len(virtual); unrecorded || n > 0 && (n < machine.VirtualFunctions || refused) {
		// A driver created fewer functions than requested, or bound to none of them. The functions
		// remain for as long as the device plugin API lists them: the agent cannot know that the
		// driver would succeed now. And after a wipe, the agent has no record of functions that it
		// bound to vfio: functions of one group then stay one unit, as those of an administrator do,
		// also if the agent was returning the group and was killed between two of its functions.
		w.reboot(false)
	}
	w.sendUevent()
	w.kubelet.StartKubelet()
	if w.awaitState(w.convergenceLimit(), checkPublished) && w.awaitState(sweepLimit, remainsOfPods) && w.awaitState(w.convergenceLimit(), checkPublished) && w.lastPods() {
		w.history.Log("all is as it should be")
	}
}

// lastPods starts a pod for each physical device, and checks that all start, and that all start
// again after a reboot, which may be a loss of power.
func (w *World) lastPods() bool {
	for _, p := range newLastPods(w) {
		w.cluster.SubmitPod(p)
	}
	if !w.awaitState(w.convergenceLimit(), podNotRunning) || !monitorsRun(w) {
		return false
	}
	if w.damage.HasLostRecords() && len(w.machine.Functions) > 0 {
		// After a wipe, the agent has no record of functions that it bound to vfio. A claim may
		// then have such a function as one that an administrator bound to vfio. After a reboot the
		// function is not under vfio, and the claim is refused.
		return true
	}
	w.reboot(w.random.IntN(2) == 0)
	return w.awaitState(w.convergenceLimit(), podNotRunning)
}

// monitorsRun checks that a pod with admin access to all devices runs beside the pods that have
// the devices.
func monitorsRun(w *World) bool {
	if w.pluginOnly() || !w.offersDRA() {
		return true
	}
	p := w.cluster.NewPod("monitor")
	p.Grace, p.Stubborn = time.Second, false
	w.makeMonitor(p)
	w.cluster.SubmitPod(p)
	// The scheduler cannot allocate a claim for all devices if some devices compete for a counter,
	// as functions of one IOMMU group do: admin access counts there, too
	// (k8s.io/dynamic-resource-allocation 0.37, checkAvailableCounters).
	if p.Bound && !w.awaitState(w.convergenceLimit(), podNotRunning) {
		return false
	}
	w.cluster.DeletePod(p, false)
	return w.awaitState(w.convergenceLimit(), func(w *World) string {
		if w.cluster.PodOf(p.UID) != nil {
			return fmt.Sprintf("pod %s has not ended", p)
		}
		return ""
	})
}

// podNotRunning returns an error text if some pods do not run.
func podNotRunning(w *World) string {
	running := len(w.kubelet.Containers())
	if all := len(w.cluster.AllPods()); running < all {
		return fmt.Sprintf("of the last %d pods only %d run", all, running)
	}
	return ""
}

// newLastPods returns a pod for each physical device that one consumer has at a time.
func newLastPods(w *World) (pods []*cluster.Pod) {
	wanted := w.wantedForm()
	taken := make(map[string]bool)
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		d := wanted[name]
		silicon := d.Silicon()
		if len(w.machine.Functions) > 0 {
			silicon = passthrough.UnitOf(&d.Device)
		}
		if driver, _ := w.host.Driver(w.machine.FunctionAddress(name)); w.damage.HasLostRecords() && driver == kernel.VFIO && silicon == name {
			// The agent has no record that it bound the virtual function to vfio. It offers the
			// functions of the group as one unit, as if an administrator had bound them to vfio.
			silicon = w.host.Group(w.machine.FunctionAddress(name))[0]
		}
		if d.Shareable || taken[silicon] || silicon == d.Silicon() && d.PartOf != nil && len(d.PartOf.Counters) == 0 {
			continue
		}
		p := w.cluster.NewPod("last")
		p.Grace, p.Stubborn = time.Second, false
		if !w.pluginOnly() {
			taken[silicon] = true
			p.Claims = []string{p.Name + "-claim"}
			claim := cluster.NewClaim(p.Claims[0], 1)
			w.specifyFunction(claim, &d)
			w.server.Put(claim)
			pods = append(pods, p)
			continue
		}
		if d.PartOf != nil && d.Name != silicon || len(d.Offers) == 0 || taken[d.Offers[0].IDs[0]] {
			continue // the room for parts depends on other parts; a unit has one ID
		}
		taken[silicon], taken[d.Offers[0].IDs[0]] = true, true
		p.Requests = map[string]int{d.Offers[0].Resource: 1}
		pods = append(pods, p)
	}
	return pods
}

// missingFile returns an error text if a file of a container's claim is missing, or if a file
// belongs to no claim.
func missingFile(w *World) string {
	if w.damage.MayLackFiles() {
		return ""
	}
	prepared, forgotten := w.kubelet.PreparedClaims(), w.kubelet.ForgottenClaims()
	for _, c := range w.kubelet.Containers() {
		for uid, ids := range c.Claims {
			// The kubelet may have lost the claim, and recorded the claim again for another pod
			// that waits: GetResources in pkg/kubelet/cm/dra/manager.go does not check whether a
			// claim is prepared (1.34 and 1.37).
			if len(ids) == 0 {
				continue
			}
			for _, file := range []string{agents.SpecFile(uid), agents.RecordFile(uid)} {
				if _, there := w.disk.FileContent(file); !there && w.kubelet.HasClaim(c, uid) {
					return fmt.Sprintf("pod %s runs, and %s is missing", c.Pod, file)
				}
			}
		}
	}
	for _, file := range w.disk.Files(agents.CDIRoot) {
		name, ours := strings.CutPrefix(strings.TrimSuffix(file, ".json"), agents.CDIRoot+"/chandler.dev-claim_")
		uid := types.UID(name)
		if _, known := prepared[uid]; ours && !known && !forgotten[uid] {
			return fmt.Sprintf("%s is of no claim that the kubelet knows", file)
		}
	}
	return ""
}

// awaitState waits until wrong returns "", and fails after the limit.
func (w *World) awaitState(limit time.Duration, wrong func(*World) string) bool {
	pause := 250 * time.Millisecond
	for began := time.Now(); ; {
		w.keepAgent()
		w.tendCluster()
		w.check()
		why := wrong(w)
		if why == "" || len(w.history.AllFailures()) > 0 {
			return len(w.history.AllFailures()) == 0
		}
		if time.Since(began) > limit {
			w.history.Fail("after %s without faults: %s", limit, why)
			return false
		}
		time.Sleep(pause)
		pause = min(2*pause, look)
	}
}

// remainsOfPods ends all pods, and returns an error text while anything of them remains.
func remainsOfPods(w *World) string {
	for _, p := range w.cluster.AllPods() {
		if p.Namespace == cluster.Namespace && !p.Deleted {
			w.cluster.DeletePod(p, false)
		}
	}
	if n := w.open(); n > 0 {
		why, _ := w.kubelet.IsIdle()
		return fmt.Sprintf("%d pods have not ended: %s", n, why)
	}
	for _, left := range []string{remainingGrant(w), changedFunction(w), w.supervisor.RemainingWork()} {
		if left != "" {
			return left
		}
	}
	var left []string
	for _, dir := range []string{agents.StateDir + "/claims", agents.StateDir + "/metadata", agents.CDIRoot} {
		left = append(left, w.disk.Files(dir)...)
	}
	if len(left) > 0 {
		return "files are left: " + strings.Join(left, " ")
	}
	return ""
}

// remainingGrant returns an error text if a grant is on disk.
func remainingGrant(w *World) string {
	for _, name := range w.disk.Files(agents.StateDir + "/grants") {
		if data, _ := w.disk.FileContent(name); strings.Contains(string(data), "\"id\"") || !strings.HasSuffix(name, "grants.json") {
			return fmt.Sprintf("%s has %s", name, data)
		}
	}
	return ""
}
