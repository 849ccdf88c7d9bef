package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
	"chandler.dev/internal/simulation/kubelet"
)

const (
	rescanInterval = 30 * time.Second

	// watchesOfAgent are those of ResourceSlices, of the node, and of the ConfigMap.
	watchesOfAgent = 3

	// quiet is the time without requests after which a situation counts as over.
	quiet = 5 * time.Second

	claimsInMinute = 1000
	claimLife      = 3 * time.Second
)

// A situation is something that happens to a whole fleet.
type situation struct {
	name string
	run  func(*fleet, context.Context) error // returns when the situation is over
}

var situations = []situation{
	{"start", (*fleet).start},
	{"a minute at rest", func(_ *fleet, ctx context.Context) error { return sleep(ctx, time.Minute) }},
	{"1,000 claims in a minute", (*fleet).useClaims},
	{"rolling upgrade, a tenth at a time", (*fleet).upgrade},
	{"all agents restart at once", func(f *fleet, ctx context.Context) error { return f.restart(ctx, f.nodes) }},
	{"restart of the API server", (*fleet).restartServer},
	{"all nodes move to the device plugin API", func(f *fleet, ctx context.Context) error { return f.move(ctx, discovery.ModeDevicePlugin) }},
	{"all nodes move to DRA", func(f *fleet, ctx context.Context) error { return f.move(ctx, discovery.ModeDRA) }},
}

// measure measures the start and the situations with a text in their names, with a number of nodes.
func (f *fleet) measure(ctx context.Context, size int, only string) error {
	if err := f.addNodes(ctx, size); err != nil {
		return err
	}
	if f.idle == (usage{}) {
		if err := f.measureIdle(ctx); err != nil {
			return err
		}
	}
	for i, s := range situations {
		if i > 0 && !strings.Contains(s.name, only) {
			continue
		}
		f.say("%d nodes: %s", size, s.name)
		r, err := f.measureSituation(ctx, s)
		if err != nil {
			return fmt.Errorf("%d nodes: %s: %w", size, s.name, err)
		}
		f.results = append(f.results, r)
		f.say("%s", r)
	}
	return f.removeNodes(ctx)
}

// measureSituation measures one situation, until the agents have sent no request for a while.
func (f *fleet) measureSituation(ctx context.Context, s situation) (result, error) {
	before, err := f.usage()
	if err != nil {
		return result{}, err
	}
	f.traffic.reset()
	begin := time.Now()
	if err := s.run(f, ctx); err != nil {
		return result{}, err
	}
	r := result{situation: s.name, nodes: len(f.nodes), took: time.Since(begin)}
	for f.traffic.sinceLast() < quiet && time.Since(begin) < r.took+time.Minute {
		if err := sleep(ctx, time.Second); err != nil {
			return r, err
		}
	}
	all := time.Since(begin)
	f.traffic.read(&r)
	after, err := f.usage()
	if err != nil {
		return r, err
	}
	if after.server.CPU < before.server.CPU { // another process
		before.server = cluster.Usage{}
	}
	of := func(after, before, idle cluster.Usage) time.Duration {
		return max(0, after.CPU-before.CPU-time.Duration(float64(idle.CPU)*float64(all)/float64(idleTime)))
	}
	r.server, r.serverMB = of(after.server, before.server, f.idle.server), int(after.server.Memory/1e6)
	r.etcd, r.etcdMB = of(after.etcd, before.etcd, f.idle.etcd), int(after.etcd.Memory/1e6)
	return r, nil
}

// usage is the use of the machine by the API server and etcd.
type usage struct{ server, etcd cluster.Usage }

func (f *fleet) usage() (u usage, err error) {
	if u.server, err = f.cluster.Usage("kube-apiserver"); err != nil {
		return u, err
	}
	u.etcd, err = f.cluster.Usage("etcd")
	return u, err
}

// idleTime is how long a cluster without agents is measured, after warmUp.
const (
	warmUp   = 30 * time.Second
	idleTime = 20 * time.Second
)

// measureIdle measures what API server and etcd use in idleTime without agents.
func (f *fleet) measureIdle(ctx context.Context) error {
	if err := sleep(ctx, warmUp); err != nil {
		return err
	}
	before, err := f.usage()
	if err != nil {
		return err
	}
	if err := sleep(ctx, idleTime); err != nil {
		return err
	}
	after, err := f.usage()
	f.idle.server.CPU, f.idle.etcd.CPU = after.server.CPU-before.server.CPU, after.etcd.CPU-before.etcd.CPU
	f.say("without agents, in %s: API server %s, etcd %s", idleTime, f.idle.server.CPU, f.idle.etcd.CPU)
	return err
}

// addNodes adds nodes without agents.
func (f *fleet) addNodes(ctx context.Context, size int) error {
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for i := range size {
		n := newNode(f, i)
		f.nodes = append(f.nodes, n)
		n.kubelet.StartKubelet() //nolint:contextcheck // runs until the node is removed
		group.Go(func() error { return n.inAPIServer(groupCtx) })
	}
	return group.Wait()
}

// removeNodes ends all agents, and removes the nodes and their ResourceSlices.
func (f *fleet) removeNodes(ctx context.Context) error {
	eachNode(f.nodes, func(n *node) {
		n.stopAgent()
		n.kubelet.StopKubelet()
	})
	f.nodes = nil
	if err := f.kube.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		return err
	}
	return f.kube.CoreV1().Nodes().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: fleetLabel})
}

// eachNode calls a function for each node at once, and returns when all have returned.
func eachNode(nodes []*node, do func(*node)) {
	var all sync.WaitGroup
	for _, n := range nodes {
		all.Go(func() { do(n) })
	}
	all.Wait()
}

// start starts all agents at once.
func (f *fleet) start(ctx context.Context) error {
	for _, n := range f.nodes {
		if err := n.startAgent(f.settings); err != nil {
			return err
		}
	}
	return f.settled(ctx)
}

// settled waits until all agents are ready, offer their GPUs by DRA and have all watches.
func (f *fleet) settled(ctx context.Context) error {
	return f.until(ctx, "all agents to offer their GPUs", func() error {
		published, err := f.slices.List(labels.Everything())
		if err != nil {
			return err
		}
		gpus := gpusOf(published)
		for _, n := range f.nodes {
			if !n.isReady() || gpus[n.name] != gpusOfNode {
				return fmt.Errorf("node %s: ready: %t, %d GPUs", n.name, n.isReady(), gpus[n.name])
			}
		}
		if open, want := int(f.traffic.watches.Load()), watchesOfAgent*len(f.nodes); open != want {
			return fmt.Errorf("%d of %d watches are open", open, want)
		}
		return nil
	})
}

// restart ends agents, starts others and waits until all are ready.
func (f *fleet) restart(ctx context.Context, nodes []*node) error {
	eachNode(nodes, (*node).stopAgent)
	for _, n := range nodes {
		if err := n.startAgent(f.settings); err != nil {
			return err
		}
	}
	return f.settled(ctx)
}

func (f *fleet) upgrade(ctx context.Context) error {
	for some := range slices.Chunk(f.nodes, max(1, len(f.nodes)/10)) {
		if err := f.restart(ctx, some); err != nil {
			return err
		}
	}
	return nil
}

// restartServer kills and starts the API server.
func (f *fleet) restartServer(ctx context.Context) error {
	if err := f.cluster.KillAPIServer(); err != nil {
		return err
	}
	if err := f.cluster.StartAPIServer(ctx); err != nil {
		return err
	}
	return f.settled(ctx)
}

// move changes the mode of all nodes at once.
func (f *fleet) move(ctx context.Context, mode discovery.Mode) error {
	settings, err := settingsFor(mode)
	if err != nil {
		return err
	}
	f.settings = settings
	eachNode(f.nodes, func(n *node) {
		select {
		case n.agent.changes <- agent.Change{Settings: settings}:
		case <-n.agent.done:
		}
	})
	if mode == discovery.ModeDRA {
		return f.settled(ctx)
	}
	return f.until(ctx, "all GPUs to be offered by the device plugin API", func() error {
		for _, n := range f.nodes {
			if got := n.kubelet.AllocatableDevices()[gpuResource]; got != gpusOfNode {
				return fmt.Errorf("node %s has %d GPUs", n.name, got)
			}
		}
		return nil
	})
}

// useClaims creates pods with a claim each, evenly in a minute and on all nodes. The scheduler's work
// is done by this program.
func (f *fleet) useClaims(ctx context.Context) error {
	published, err := f.slices.List(labels.Everything())
	if err != nil {
		return err
	}
	group, groupCtx := errgroup.WithContext(ctx)
	ticker := time.NewTicker(time.Minute / claimsInMinute)
	defer ticker.Stop()
	for i := range claimsInMinute {
		n := f.nodes[i%len(f.nodes)]
		devices := devicesOf(published, n.name)
		if len(devices) == 0 {
			return fmt.Errorf("node %s offers no device", n.name)
		}
		device := devices[i/len(f.nodes)%len(devices)]
		group.Go(func() error { return n.useClaim(groupCtx, fmt.Sprintf("claimed-%d", i), device) })
		select {
		case <-ticker.C:
		case <-groupCtx.Done():
			return group.Wait()
		}
	}
	return group.Wait()
}

// useClaim runs a pod with a claim for a device for some seconds.
func (n *node) useClaim(ctx context.Context, name, device string) error {
	claims, pods := n.fleet.kube.ResourceV1().ResourceClaims(metav1.NamespaceDefault), n.fleet.kube.CoreV1().Pods(metav1.NamespaceDefault)
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.chandler.dev"}}}
	claim, err := claims.Create(ctx, claim, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	pod := newPod(name)
	pod.Spec.NodeName = n.name
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}}
	pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	if pod, err = pods.Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return err
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchFields: []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{n.name}}},
	}}}}
	claim.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: chandler.Driver, Pool: n.name, Device: device}}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: pod.UID}}
	if _, err = claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
		return err
	}
	bound := n.addPod(&kubelet.Pod{UID: pod.UID, Namespace: pod.Namespace, Name: name, Claims: []string{name}})
	defer n.removePod(pod.UID)
	n.kubelet.Add(bound.Pod)
	for _, wait := range []struct {
		what    string
		channel <-chan struct{}
	}{{"start", bound.started}, {"end", bound.ended}} {
		select {
		case <-wait.channel:
		case <-time.After(patience):
			return fmt.Errorf("pod %s on %s does not %s", name, n.name, wait.what)
		case <-ctx.Done():
			return ctx.Err()
		}
		if wait.what == "start" {
			if err := sleep(ctx, claimLife); err != nil {
				return err
			}
			n.kubelet.Delete(pod.UID, false)
		}
	}
	now := metav1.DeleteOptions{GracePeriodSeconds: new(int64)}
	if err := pods.Delete(ctx, name, now); err != nil {
		return err
	}
	return claims.Delete(ctx, name, now)
}
