package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/e2e/chandler"
)

// TestAgentUpgradeAndDowngrade replaces the agent by another image of the same version, and back.
// Throughout, pods must start, no call of the kubelet may fail, and no slice may change.
func TestAgentUpgradeAndDowngrade(t *testing.T) {
	other := "chandler.dev/chandler:other"
	if err := project.LoadAgent(within(t), node.Node, other); err != nil {
		t.Fatal(err)
	}
	upgradeAndDowngrade(t, other, slicesStay(t))
}

// TestAgentOfEarlierVersion replaces the agent by an earlier version, and back. Throughout, running
// pods must keep their devices, pods must start, and no call of the kubelet may fail. Each version
// must understand the other version's records of both APIs. The content of slices may differ
// between versions.
func TestAgentOfEarlierVersion(t *testing.T) {
	agent, err := chandler.BuildEarlier(within(t), project.Dir, chandler.Earlier)
	if errors.Is(err, chandler.ErrNoHistory) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	earlier := project
	earlier.Agent = agent
	image := "chandler.dev/chandler:" + chandler.Earlier
	if err := earlier.LoadAgent(within(t), node.Node, image); err != nil {
		t.Fatal(err)
	}
	// The present agent must keep the allocations of the earlier agent.
	t.Cleanup(func() { rollOut(t, chandler.AgentImage) })
	rollOut(t, image)
	offers(t)
	byEarlier := holders(t)
	rollOut(t, chandler.AgentImage)
	byEarlier(t)
	for _, pod := range []string{gpuPod("gpu-holder", "0000:23:00.0"), kvmPod("kvm-holder")} {
		remove(t, pod)
	}
	nothingHeld(t)
	upgradeAndDowngrade(t, image, func(*testing.T) {})
}

// upgradeAndDowngrade replaces the agent's image, and back, while pods have devices and other pods
// start.
func upgradeAndDowngrade(t *testing.T, other string, unchanged func(*testing.T)) {
	t.Helper()
	t.Cleanup(func() { rollOut(t, chandler.AgentImage) })
	unharmed := holders(t)
	kinds := []func(name string) string{gpuOf("0000:43:00.0"), gpuOf("0000:44:00.0")}
	if _, err := os.Stat("/dev/kvm"); err == nil {
		kinds = append(kinds, kvmPod, kvmPod)
	}
	pods := startTraffic(t, kinds...)
	pods.further(t, 1)
	for _, image := range []string{other, chandler.AgentImage} {
		rollOut(t, image)
		pods.further(t, 1)
	}
	pods.end(t)
	pods.noCallFailed(t)
	unchanged(t)
	unharmed(t)
	works(t)
}

// TestAgentCrashLoop kills the agent repeatedly. All pods with claims must start in the end, and no
// slice may change. Pods of the device plugin API are left out: the kubelet rejects them while no
// agent runs, and their controller would create them again.
func TestAgentCrashLoop(t *testing.T) {
	renewAgent(t)
	unharmed := holders(t)
	unchanged := slicesStay(t)
	pods := startTraffic(t, gpuOf("0000:43:00.0"), gpuOf("0000:44:00.0"))
	pods.further(t, 1)
	// The kubelet restarts the agent at once, then after 10 seconds, and then after 20. It deletes the
	// slices after 30 seconds without the driver, which a busy machine may reach the third time.
	for kills := range 3 {
		if kills == 2 {
			unchanged(t)
		}
		killAgent(t)
		until(t, "the kubelet to have the driver again", func(ctx context.Context) error {
			agent, err := chandler.AgentPod(ctx, kube)
			if err == nil && !agent.Status.ContainerStatuses[0].Ready {
				err = errors.New("the agent is not ready")
			}
			return err
		})
	}
	pods.further(t, 1) // The kubelet may retry a pod only after a minute and a half.
	pods.end(t)
	unharmed(t)
	works(t)
}

// rollOut changes the agent's image, and returns when only the agent of this image runs.
func rollOut(t *testing.T, image string) {
	t.Helper()
	patch := fmt.Sprintf(`{"spec": {"template": {"spec": {"containers": [{"name": "chandler", "image": %q}]}}}}`, image)
	_, err := kube.AppsV1().DaemonSets(chandler.Namespace).Patch(within(t), chandler.DaemonSet, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
	if err != nil {
		t.Error(err)
		return
	}
	until(t, "the agent of image "+image, func(ctx context.Context) error {
		agent, err := chandler.AgentPod(ctx, kube)
		if err == nil && agent.Spec.Containers[0].Image != image {
			err = fmt.Errorf("it is %s", agent.Spec.Containers[0].Image)
		}
		return err
	})
	if err := chandler.WaitForAgent(within(t), kube); err != nil {
		t.Error(err)
	}
}

// renewAgent replaces the agent's pod. The kubelet restarts the first crash of a new pod without
// delay.
func renewAgent(t *testing.T) *corev1.Pod {
	t.Helper()
	agent, err := chandler.AgentPod(t.Context(), kube)
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(
		kube.DeletePod(within(t), chandler.Namespace, agent.Name),
		chandler.WaitForAgent(within(t), kube),
	)
	if err != nil {
		t.Fatal(err)
	}
	offers(t)
	if agent, err = chandler.AgentPod(t.Context(), kube); err != nil {
		t.Fatal(err)
	}
	return agent
}

// slicesStay returns a check that none of the agent's slices has been created, changed or deleted
// since.
func slicesStay(t *testing.T) (unchanged func(t *testing.T)) {
	t.Helper()
	options := metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + chandler.Driver}
	list, err := kube.ResourceV1().ResourceSlices().List(t.Context(), options)
	if err != nil || len(list.Items) == 0 {
		t.Fatalf("%d slices, %v", len(list.Items), err)
	}
	options.ResourceVersion = list.ResourceVersion
	watch, err := kube.ResourceV1().ResourceSlices().Watch(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(watch.Stop)
	before := generations(t)
	return func(t *testing.T) {
		t.Helper()
		if after := generations(t); after != before {
			t.Errorf("the slices are %s; were %s", after, before)
		}
		for {
			select {
			case event, more := <-watch.ResultChan():
				if !more {
					t.Error("the watch of the slices has ended")
					return
				}
				t.Errorf("a slice was %s", strings.ToLower(string(event.Type)))
			default:
				return
			}
		}
	}
}

// pods is a stream of pods for each of several kinds. A pod is deleted once it runs, and then the
// next one is created.
type pods struct {
	prefix  string
	stop    context.CancelFunc
	running sync.WaitGroup
	streams []*stream
}

type stream struct {
	started atomic.Int32
	err     atomic.Pointer[error]
}

// gpuOf returns a function that returns pods for one particular GPU.
func gpuOf(address string) func(name string) string {
	return func(name string) string { return gpuPod(name, address) }
}

func startTraffic(t *testing.T, kinds ...func(name string) string) *pods {
	t.Helper()
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	p := &pods{prefix: fmt.Sprintf("traffic-%d-", time.Now().UnixNano()), stop: stop}
	t.Cleanup(func() { p.end(t) })
	for kind, manifest := range kinds {
		s := &stream{}
		p.streams = append(p.streams, s)
		p.running.Go(func() {
			for ctx.Err() == nil {
				name := fmt.Sprintf("%s%d-%d", p.prefix, kind, s.started.Load())
				if err := startAndDelete(context.WithoutCancel(ctx), name, manifest(name)); err != nil {
					s.err.Store(&err)
					return
				}
				s.started.Add(1)
			}
		})
	}
	return p
}

func startAndDelete(ctx context.Context, name, manifest string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	if err := kube.Apply(ctx, manifest); err != nil {
		return err
	}
	_, err := kube.WaitForPod(ctx, metav1.NamespaceDefault, name, corev1.PodRunning)
	return errors.Join(err, kube.Delete(ctx, manifest))
}

// further waits until n more pods of each kind have started.
func (p *pods) further(t *testing.T, n int32) {
	t.Helper()
	for _, s := range p.streams {
		want := s.started.Load() + n
		until(t, "pods to start", func(context.Context) error {
			if err := s.err.Load(); err != nil {
				return *err
			}
			if now := s.started.Load(); now < want {
				return fmt.Errorf("%d of %d", now, want)
			}
			return nil
		})
	}
}

// end stops the streams, and returns when the last pod is deleted.
func (p *pods) end(t *testing.T) {
	t.Helper()
	p.stop()
	p.running.Wait()
	for _, s := range p.streams {
		if err := s.err.Load(); err != nil {
			t.Error(*err)
		}
		t.Logf("%d pods started", s.started.Load())
	}
}

// noCallFailed checks that the pods have no Warning events, except that a pod had to wait for the
// devices of its predecessor.
func (p *pods) noCallFailed(t *testing.T) {
	t.Helper()
	events, err := kube.CoreV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{FieldSelector: "type=Warning"})
	if err != nil {
		t.Fatal(err)
	}
	for _, event := range events.Items {
		if strings.HasPrefix(event.InvolvedObject.Name, p.prefix) && event.Reason != "FailedScheduling" {
			t.Errorf("%s: %s: %s", event.InvolvedObject.Name, event.Reason, event.Message)
		}
	}
}
