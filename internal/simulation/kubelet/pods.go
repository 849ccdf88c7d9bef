package kubelet

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// worker takes a pod through its life.
type worker struct {
	pod      *Pod
	state    string // as text for messages
	why      error
	known    bool          // the pod manager has the pod: not true after a forced deletion
	terminal bool          // its containers have ended permanently
	orphan   bool          // only its containers are left of the pod
	end      chan struct{} // closed when the pod must end
}

// isEnding reports whether the pod must end.
func (w *worker) isEnding() bool {
	select {
	case <-w.end:
		return true
	default:
		return false
	}
}

// Add gives the kubelet a pod that was bound to the node.
func (k *Kubelet) Add(pod *Pod) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.up {
		k.add(pod)
	}
}

func (k *Kubelet) add(pod *Pod) {
	if k.workers[pod.UID] != nil {
		return
	}
	w := &worker{pod: pod, state: "new", known: true, end: make(chan struct{})}
	k.workers[pod.UID] = w
	ctx := k.ctx
	k.group.Go(func() { k.runPod(ctx, w) })
}

// Delete reports to the kubelet that a pod is being deleted, and with force that the pod is already
// gone from the API server. The kubelet drops such a pod at once: the pod manager no longer has it,
// and every check for active pods relies on the pod manager (pkg/kubelet/kubelet_pods.go,
// GetActivePods).
func (k *Kubelet) Delete(uid types.UID, force bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	w := k.workers[uid]
	if w == nil {
		return
	}
	if force {
		w.known = false
	}
	k.stop(w)
}

func (k *Kubelet) stop(w *worker) {
	if !w.isEnding() {
		close(w.end)
	}
}

// isActive reports whether a pod may still have resources.
func (k *Kubelet) isActive(uid types.UID) bool {
	w := k.workers[uid]
	return w != nil && w.known && !w.terminal
}

// syncPods reads the pods from the API server, and ends pods that no longer exist. Until the first
// answer, the kubelet only has static pods.
func (k *Kubelet) syncPods(ctx context.Context) {
	for {
		pods, err := k.config.Pods()
		k.mu.Lock()
		if err == nil && k.up {
			there := make(map[types.UID]bool)
			for _, pod := range pods {
				there[pod.UID] = true
				k.add(pod) //nolint:contextcheck // a pod's containers outlive this call
			}
			k.ready = true
			for uid, w := range k.workers {
				if !there[uid] && !w.pod.Static {
					w.known = false
					k.stop(w)
				}
			}
			k.endOrphans(ctx, there)
		}
		k.mu.Unlock()
		if !sleep(ctx, 2*time.Second) {
			return
		}
	}
}

// orphanGrace is the grace period for containers of unknown pods.
const orphanGrace = time.Second

// endOrphans ends the containers of unknown pods (pkg/kubelet/kubelet_pods.go, HandlePodCleanups,
// in 1.37).
func (k *Kubelet) endOrphans(ctx context.Context, there map[types.UID]bool) {
	for uid, c := range k.containers {
		if there[uid] || k.workers[uid] != nil {
			continue
		}
		w := &worker{pod: c.Pod, state: "orphan", orphan: true, end: make(chan struct{})}
		k.workers[uid] = w
		k.stop(w)
		k.group.Go(func() { k.runPod(ctx, w) })
	}
}

// runPod takes a pod from its start to its end, unless the kubelet stops first.
func (k *Kubelet) runPod(ctx context.Context, w *worker) {
	if err := k.begin(ctx, w); err != nil && ctx.Err() == nil {
		k.log("pod %s is rejected: %v", w.pod, err)
		k.config.Done(w.pod, err)
	} else if ctx.Err() == nil {
		k.run(ctx, w)
	}
	if ctx.Err() != nil {
		return
	}
	k.set(w, "ends", nil)
	if !k.kill(ctx, w) {
		return
	}
	k.mu.Lock()
	w.terminal = true
	k.mu.Unlock()
	for pause := time.Second; ; pause = min(2*pause, 10*time.Second) {
		err := k.dra.unprepareClaims(ctx, w.pod.UID, w.pod.Namespace, w.pod.Claims)
		k.set(w, "is to be unprepared", err)
		if err == nil {
			break
		}
		k.log("pod %s is not unprepared: %v", w.pod, err)
		if !sleep(ctx, pause) {
			return
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.devices.takeBack()
	delete(k.workers, w.pod.UID)
	k.log("pod %s has ended", w.pod)
	k.config.Done(w.pod, nil)
}

func (k *Kubelet) set(w *worker, state string, why error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	w.state, w.why = state, why
}

// begin admits a pod. A pod with a running container was admitted before: while the sources are not
// ready, the kubelet does not allocate its devices again (pkg/kubelet/cm/devicemanager/manager.go,
// devicesToAllocate).
func (k *Kubelet) begin(ctx context.Context, w *worker) error {
	k.mu.Lock()
	_, running := k.containers[w.pod.UID]
	k.mu.Unlock()
	if running || w.isEnding() {
		return nil
	}
	k.set(w, "admitted", nil)
	k.admission <- struct{}{}
	defer func() { <-k.admission }()
	return k.devices.allocatePod(ctx, w.pod)
}

// run starts the pod's container, and restarts the container when it ends by itself, until the pod
// must end.
func (k *Kubelet) run(ctx context.Context, w *worker) {
	restarts := w.pod.Restarts
	for pause := time.Second; ; pause = min(2*pause, 20*time.Second) {
		if !k.hasContainer(w.pod.UID) {
			err := k.start(ctx, w)
			k.set(w, "starts", err)
			if err != nil && ctx.Err() == nil {
				k.log("pod %s does not start: %v", w.pod, err)
				if !w.wait(ctx, pause) {
					return
				}
				continue
			}
		}
		k.set(w, "runs", nil)
		pause = time.Second
		if w.pod.Life == 0 {
			select {
			case <-ctx.Done():
			case <-w.end:
			}
			return
		}
		if !w.wait(ctx, w.pod.Life) || restarts == 0 {
			return
		}
		restarts--
		k.log("container of pod %s ended and is started again", w.pod)
		k.endContainer(w.pod.UID)
	}
}

// wait waits, and returns false if the pod must end or the context ends.
func (w *worker) wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-w.end:
	case <-timer.C:
		return true
	}
	return false
}

func (k *Kubelet) hasContainer(uid types.UID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.containers[uid] != nil
}

// start starts a pod's container. The claims are prepared with the sandbox, and not again when a
// container is restarted in the sandbox (pkg/kubelet/kuberuntime/kuberuntime_manager.go, SyncPod).
func (k *Kubelet) start(ctx context.Context, w *worker) error {
	k.mu.Lock()
	sandbox := k.sandboxes[w.pod.UID]
	k.mu.Unlock()
	if !sandbox {
		// If the pod must end while its claims are being prepared, the worker still waits for the
		// call.
		if err := k.dra.prepare(ctx, w.pod); err != nil {
			return err
		}
		k.mu.Lock()
		k.sandboxes[w.pod.UID] = true
		k.mu.Unlock()
	}
	if w.isEnding() {
		return errors.New("the pod is to end")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if ctx.Err() != nil || !k.up {
		return context.Canceled
	}
	c := &Container{Pod: w.pod, Again: w.pod.started, Claims: make(map[types.UID][]string), Names: make(map[types.UID]string), Ending: make(map[types.UID]time.Time), Devices: maps.Clone(k.devices.allocated[w.pod.UID]), Listed: maps.Clone(k.devices.lists), unprepared: maps.Clone(k.dra.unprepared), asked: maps.Clone(k.dra.asked)}
	for _, name := range w.pod.Claims {
		if info := k.dra.claims[w.pod.Namespace+"/"+name]; info != nil {
			c.Claims[info.uid], c.Names[info.uid], c.Ending[info.uid] = slices.Clone(info.cdi), name, endingOf(info)
		} else {
			return errors.New("unable to get claim info for ResourceClaim " + name)
		}
	}
	for _, nodes := range k.devices.nodesOf[w.pod.UID] {
		c.Nodes = append(c.Nodes, nodes...)
	}
	for resource, n := range w.pod.Requests {
		if len(c.Devices[resource]) != n {
			return errors.New("devices of " + resource + " are not allocated")
		}
	}
	if err := k.config.Start(c); err != nil {
		return err
	}
	w.pod.started, k.containers[w.pod.UID] = true, c
	k.log("container of pod %s starts: claims %v, devices %v", w.pod, c.Claims, c.Devices)
	return nil
}

// endingOf returns the time of the last Unprepare call for a claim that is still prepared, zero if
// there was none.
func endingOf(info *claimInfo) time.Time {
	if info.unpreparing {
		return info.asked
	}
	return time.Time{}
}

func (k *Kubelet) endContainer(uid types.UID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.containers[uid]; c != nil {
		delete(k.containers, uid)
		k.config.Ended(c)
	}
}

// kill ends a pod's container, which may use the whole grace period. kill returns false if the
// kubelet stops before the container ends.
func (k *Kubelet) kill(ctx context.Context, w *worker) bool {
	if k.hasContainer(w.pod.UID) && w.pod.Stubborn && w.isEnding() {
		grace := w.pod.Grace
		if w.orphan {
			grace = min(grace, orphanGrace)
		}
		if !sleep(ctx, grace) {
			return false
		}
	}
	k.endContainer(w.pod.UID)
	k.mu.Lock()
	delete(k.sandboxes, w.pod.UID)
	k.mu.Unlock()
	return true
}
