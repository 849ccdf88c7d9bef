package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
)

// secondNode is the name of the node that a test adds.
const secondNode = "second"

// TestMoveNodeByNode moves two nodes to DRA one after the other by their label, and back.
// Meanwhile, a Deployment whose pods have GPUs by limits is under load. Pods that are not deleted
// must keep their GPUs and their containers. No GPU may be in two pods, and no pod of the
// Deployment may be rejected.
//
// The kubelet reports allocatable resources only at times: every ten seconds by default, and every
// second on this cluster (nodeStatusUpdateFrequency; pkg/kubelet/kubelet.go, syncNodeStatus, in
// 1.31 to 1.37). Until then, the scheduler sends pods for GPUs that have moved to DRA, and the
// kubelet rejects these pods. Therefore a node is cordoned while it is moved to DRA. The move begins
// once the scheduler has seen the cordon and every pod that it assigned before runs.
func TestMoveNodeByNode(t *testing.T) {
	if !has(t, "DRAExtendedResource") {
		t.Skip("pods that ask by limits are not served through DRA")
	}
	nodes, second := twoNodes(t)
	for _, name := range nodes {
		moveTo(t, name, "DevicePlugin")
	}
	for _, name := range nodes {
		classicAre(t, name, allGPUs)
	}
	steady := keep(t, "classic", nodes)
	load := startLoad(t, 6)

	began := time.Now()
	for _, name := range nodes {
		cordoned := time.Now()
		load.pause()
		cordon(t, name, true)
		receivesNoPods(t, name)
		load.allRun(t)
		load.goOn()
		moveTo(t, name, "DRA")
		until(t, "no GPU of node "+name+" to be allocatable", func(ctx context.Context) error {
			classic, _, err := gpusOf(ctx, name)
			if err == nil && classic != 0 {
				err = fmt.Errorf("%d are", classic)
			}
			return err
		})
		t.Logf("node %s took no new pods for %s", name, time.Since(cordoned).Round(100*time.Millisecond))
		cordon(t, name, false)
	}
	for _, name := range nodes {
		publishedAre(t, name, allGPUs-1) // all except the one in the kept pod
	}
	t.Logf("%d GPUs of each node moved to DRA within %s", allGPUs-1, time.Since(began).Round(100*time.Millisecond))
	load.settle(t)
	steady.unharmed(t)
	steady.end(t)
	for _, name := range nodes {
		publishedAre(t, name, allGPUs)
	}

	steady = keep(t, "claimed", nodes)
	load.goOn()
	began = time.Now()
	for _, name := range nodes {
		moveTo(t, name, "DevicePlugin")
		classicAre(t, name, allGPUs-1)
	}
	t.Logf("%d GPUs of each node moved back within %s", allGPUs-1, time.Since(began).Round(100*time.Millisecond))
	load.settle(t)
	steady.unharmed(t)
	steady.end(t)
	for _, name := range nodes {
		classicAre(t, name, allGPUs)
	}
	load.end(t)
	remove(t, load.manifest)
	testRemoval(t, second)
}

// twoNodes adds a second node with the same devices and with the agent. It returns the names of
// both nodes, and the added node. The end of the test restores the cluster.
func twoNodes(t *testing.T) (names []string, second *cluster.Node) {
	t.Helper()
	ctx := within(t)
	second, err := node.AddNode(ctx, secondNode)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := node.RemoveNode(within(t), second); err != nil {
			t.Error(err)
		}
		cordon(t, node.NodeName(), false)
		moveTo(t, node.NodeName(), "")
		if err := chandler.WaitForAgent(within(t), kube); err != nil {
			t.Error(err)
		}
		offers(t)
	})
	if err := project.LoadImages(ctx, second); err != nil {
		t.Fatal(err)
	}
	if err := project.Simulate(ctx, second, filepath.Join(project.Dir, eightGPUs)); err != nil {
		t.Fatal(err)
	}
	if err := chandler.WaitForAgent(ctx, kube); err != nil {
		t.Fatal(err)
	}
	return []string{node.NodeName(), secondNode}, second
}

// moveTo labels a node with the API for its devices. An empty mode removes the label.
func moveTo(t *testing.T, name, mode string) {
	t.Helper()
	value := "null"
	if mode != "" {
		value = `"` + mode + `"`
	}
	patch := `{"metadata":{"labels":{"chandler.dev/mode":` + value + `}}}`
	if _, err := kube.CoreV1().Nodes().Patch(within(t), name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s %s: %s", time.Now().Format(time.TimeOnly), name, patch)
}

// cordon excludes a node from scheduling, or includes it again.
func cordon(t *testing.T, name string, unschedulable bool) {
	t.Helper()
	patch := fmt.Sprintf(`{"spec":{"unschedulable":%t}}`, unschedulable)
	if _, err := kube.CoreV1().Nodes().Patch(within(t), name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s %s: %s", time.Now().Format(time.TimeOnly), name, patch)
}

// receivesNoPods waits until the scheduler has seen that a node is cordoned: it does not assign a
// pod that can run only there.
func receivesNoPods(t *testing.T, name string) {
	t.Helper()
	pod := "cordon-of-" + name
	manifest := strings.TrimRight(oneGPU(pod), "\n") + "\n  nodeSelector: {kubernetes.io/hostname: " + name + "}\n"
	apply(t, manifest)
	until(t, "the scheduler to reject pod "+pod, func(ctx context.Context) error {
		p, err := kube.CoreV1().Pods(metav1.NamespaceDefault).Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if p.Spec.NodeName != "" { // by a scheduler that has not seen the cordon
			err := errors.Join(kube.Delete(ctx, manifest), kube.Apply(ctx, manifest))
			return errors.Join(fmt.Errorf("it was assigned to node %s", p.Spec.NodeName), err)
		}
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
				return nil
			}
		}
		return fmt.Errorf("its conditions are %v", p.Status.Conditions)
	})
	remove(t, manifest)
}

// classicAre waits until the wanted number of a node's GPUs is allocatable and no GPU is in a
// slice.
func classicAre(t *testing.T, name string, want int) {
	t.Helper()
	until(t, fmt.Sprintf("%d GPUs of node %s to be allocatable", want, name), func(ctx context.Context) error {
		classic, published, err := gpusOf(ctx, name)
		if err == nil && (classic != want || published != 0) {
			err = fmt.Errorf("%d are, and %d are in slices", classic, published)
		}
		return err
	})
}

// publishedAre waits until the wanted number of a node's GPUs is in slices and no GPU is
// allocatable.
func publishedAre(t *testing.T, name string, want int) {
	t.Helper()
	until(t, fmt.Sprintf("%d GPUs of node %s to be in slices", want, name), func(ctx context.Context) error {
		classic, published, err := gpusOf(ctx, name)
		if err == nil && (published != want || classic != 0) {
			err = fmt.Errorf("%d are, and %d are allocatable", published, classic)
		}
		return err
	})
}

// gpusOf returns the numbers of a node's GPUs that are allocatable by the device plugin API and in
// slices.
func gpusOf(ctx context.Context, name string) (classic, published int, err error) {
	n, err := kube.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return 0, 0, err
	}
	quantity := n.Status.Allocatable["amd.com/gpu"]
	slices, err := kube.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + name})
	if err != nil {
		return 0, 0, err
	}
	for _, slice := range slices.Items {
		for _, device := range slice.Spec.Devices {
			if isGPU(device) {
				published++
			}
		}
	}
	return int(quantity.Value()), published, nil
}

// kept are pods that run while nodes are moved.
type kept struct {
	manifests string
	before    map[string]*corev1.Pod // by name
}

// keep starts a pod with a GPU by limits on each of the nodes.
func keep(t *testing.T, prefix string, nodes []string) *kept {
	t.Helper()
	k := &kept{before: make(map[string]*corev1.Pod)}
	var manifests []string
	for _, name := range nodes {
		pod := prefix + "-on-" + name
		k.before[pod] = nil
		manifests = append(manifests, strings.TrimRight(oneGPU(pod), "\n")+"\n  nodeSelector: {kubernetes.io/hostname: "+name+"}\n")
	}
	k.manifests = strings.Join(manifests, "---\n")
	apply(t, k.manifests)
	for pod := range k.before {
		k.before[pod] = running(t, pod)
	}
	return k
}

// unharmed checks that the pods still run in their first containers.
func (k *kept) unharmed(t *testing.T) {
	t.Helper()
	for name, before := range k.before {
		now := running(t, name)
		if now.UID != before.UID || now.Status.ContainerStatuses[0].ContainerID != before.Status.ContainerStatuses[0].ContainerID {
			t.Errorf("pod %s is another, or its container is", name)
		}
	}
}

func (k *kept) end(t *testing.T) {
	t.Helper()
	remove(t, k.manifests)
}

// load is a Deployment of pods with one GPU each. Its running pods are deleted one after another.
type load struct {
	manifest string
	replicas int
	stop     context.CancelFunc
	group    sync.WaitGroup

	turn     sync.Mutex // held while a pod is chosen and deleted
	deleting bool
	deleted  int

	mu   sync.Mutex
	seen map[types.UID]string // by UID: the reason for which a pod failed, or ""
}

const loadLabel = "app=moved"

func startLoad(t *testing.T, replicas int) *load {
	t.Helper()
	manifest := fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: moved}
spec:
  replicas: %d
  selector: {matchLabels: {app: moved}}
  template:
    metadata: {labels: {app: moved}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: probe
        image: chandler.dev/probe:latest
        imagePullPolicy: Never
        args: [env, devices, wait]
        resources: {limits: {amd.com/gpu: 1}}
`, replicas)
	apply(t, manifest)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	l := &load{manifest: manifest, replicas: replicas, stop: stop, seen: make(map[types.UID]string)}
	t.Cleanup(func() { l.halt() })
	l.allRun(t)
	l.goOn()
	pods, err := kube.CoreV1().Pods(metav1.NamespaceDefault).Watch(ctx, metav1.ListOptions{LabelSelector: loadLabel})
	if err != nil {
		t.Fatal(err)
	}
	l.group.Go(func() { l.look(pods) })
	l.group.Go(func() { l.deleteOneByOne(ctx) })
	l.group.Go(func() {
		<-ctx.Done()
		pods.Stop()
	})
	return l
}

// look records the pods and their failures until the watch ends.
func (l *load) look(pods watch.Interface) {
	for event := range pods.ResultChan() {
		pod, ok := event.Object.(*corev1.Pod)
		if !ok {
			continue
		}
		l.mu.Lock()
		if pod.Status.Phase == corev1.PodFailed && pod.DeletionTimestamp == nil && l.seen[pod.UID] == "" {
			l.seen[pod.UID] = fmt.Sprintf("at %s on %s, of %s: %s: %s", time.Now().Format(time.TimeOnly), pod.Spec.NodeName,
				pod.CreationTimestamp.Format(time.TimeOnly), pod.Status.Reason, pod.Status.Message)
		} else if _, there := l.seen[pod.UID]; !there {
			l.seen[pod.UID] = ""
		}
		l.mu.Unlock()
	}
}

// deleteOneByOne repeatedly deletes the oldest running pod, until ctx ends.
func (l *load) deleteOneByOne(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(300 * time.Millisecond):
		}
		l.deleteOne(ctx)
	}
}

func (l *load) deleteOne(ctx context.Context) {
	l.turn.Lock()
	defer l.turn.Unlock()
	if !l.deleting {
		return
	}
	pods, err := runningPods(ctx)
	if err != nil || len(pods) == 0 {
		return
	}
	oldest := slices.MinFunc(pods, func(a, b *corev1.Pod) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	if err := kube.CoreV1().Pods(metav1.NamespaceDefault).Delete(ctx, oldest.Name, metav1.DeleteOptions{}); err == nil {
		l.deleted++
	}
}

// runningPods returns the pods of the Deployment that run and are not being deleted.
func runningPods(ctx context.Context) (pods []*corev1.Pod, err error) {
	list, err := kube.CoreV1().Pods(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{LabelSelector: loadLabel})
	if err != nil {
		return nil, err
	}
	for i := range list.Items {
		if pod := &list.Items[i]; pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil {
			pods = append(pods, pod)
		}
	}
	return pods, nil
}

// settle stops the deletion of pods, waits until all pods run, and checks that no two pods on a
// node have the same GPU.
func (l *load) settle(t *testing.T) {
	t.Helper()
	l.pause()
	l.allRun(t)
	all, err := kube.CoreV1().Pods(metav1.NamespaceDefault).List(within(t), metav1.ListOptions{FieldSelector: "status.phase=Running"})
	if err != nil {
		t.Fatal(err)
	}
	has := make(map[string]string) // pod by node and device node
	for _, pod := range all.Items {
		if pod.DeletionTimestamp != nil { // The pod may end before its log is read.
			continue
		}
		for _, path := range renderNodes(t, pod.Name) {
			key := pod.Spec.NodeName + " " + path
			if other := has[key]; other != "" {
				t.Errorf("pods %s and %s both have %s", other, pod.Name, key)
			}
			has[key] = pod.Name
		}
	}
	if len(has) < l.replicas {
		t.Errorf("the pods have %d GPUs: %v", len(has), slices.Sorted(maps.Keys(has)))
	}
}

// allRun waits until all pods of the Deployment run.
func (l *load) allRun(t *testing.T) {
	t.Helper()
	until(t, "all pods of the Deployment to run", func(ctx context.Context) error {
		pods, err := runningPods(ctx)
		if err == nil && len(pods) != l.replicas {
			err = fmt.Errorf("%d of %d do", len(pods), l.replicas)
		}
		return err
	})
}

// pause stops the deletion of pods.
func (l *load) pause() {
	l.turn.Lock()
	defer l.turn.Unlock()
	l.deleting = false
}

// goOn resumes the deletion of pods.
func (l *load) goOn() {
	l.turn.Lock()
	defer l.turn.Unlock()
	l.deleting = true
}

func (l *load) halt() {
	l.stop()
	l.group.Wait()
}

// end stops the load, logs the number of pods, and checks that the kubelets rejected none.
func (l *load) end(t *testing.T) {
	t.Helper()
	l.halt()
	failed := 0
	for _, why := range l.seen {
		if why != "" {
			failed++
			t.Errorf("a pod failed: %s", why)
		}
	}
	t.Logf("%d pods ran, of which %d were deleted and %d failed", len(l.seen), l.deleted, failed)
}
