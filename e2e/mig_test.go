package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/discovery/families/nvidia/migtest"
	"chandler.dev/e2e/chandler"
)

// TestMIGOnDemand creates MIG instances on demand. The scheduler packs possible instances, and an
// unprivileged agent creates them by the host service and removes them when no pod has them any more.
func TestMIGOnDemand(t *testing.T) {
	if !has(t, "DRAPartitionableDevices") {
		t.Skip("the API server drops the counters by which the scheduler packs instances")
	}
	standAmongMIG(t, besides(t, migConfig, ""))
	places := countPlaces()
	until(t, "all places to be offered", func(ctx context.Context) error { return offersPlaces(ctx, places) })
	apply(t, migTemplates())

	t.Run("packed", testMIGPacked)
	t.Run("a whole GPU and its instances", testMIGWhole)
	t.Run("by the name of the classic resource", testMIGClassicName)
	t.Run("an agent killed while it cuts", func(t *testing.T) { testMIGKilled(t, "create-ci") })
	t.Run("an agent killed while it removes", func(t *testing.T) { testMIGKilled(t, "destroy-gi") })
	t.Run("without the host service", testMIGWithoutService)
	t.Run("random", testMIGRandom)
	t.Run("for an entry of resources", testMIGResource)
	until(t, "all places to be offered again", func(ctx context.Context) error { return offersPlaces(ctx, places) })
	nothingHeld(t)
}

// countPlaces returns the number of places for instances on both GPUs.
func countPlaces() (places int) {
	for _, model := range models {
		for _, profile := range migtest.Layouts[model] {
			places += len(profile.Placements)
		}
	}
	return places
}

// offersPlaces checks the number of published instances that exist or could be created.
func offersPlaces(ctx context.Context, want int) error {
	devices, err := chandler.Devices(ctx, kube)
	if err != nil {
		return err
	}
	n := 0
	for name, device := range devices {
		if strings.Contains(name, "-mig-") && len(device.Taints) == 0 {
			n++
		}
	}
	if n != want || len(devices) != want {
		return fmt.Errorf("%d of %d devices are", n, len(devices))
	}
	return nil
}

// migTemplates returns a ResourceClaimTemplate for each profile, which any GPU with the profile can
// serve.
func migTemplates() string {
	var all strings.Builder
	seen := make(map[string]bool)
	for _, model := range models {
		for _, profile := range migtest.Layouts[model] {
			if seen[profile.Name] {
				continue
			}
			seen[profile.Name] = true
			fmt.Fprintf(&all, `
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: %s}
spec:
  spec:
    devices:
      requests:
      - name: mig
        exactly:
          deviceClassName: nvidia-mig.chandler.dev
          selectors:
          - cel: {expression: 'device.attributes["chandler.dev"].profile == "%s"'}
---
`, templateOf(profile.Name), profile.Name)
		}
	}
	return all.String()
}

func templateOf(profile string) string {
	return "mig-" + strings.NewReplacer("+", ".").Replace(profile)
}

// migPod returns a pod with an instance of a profile.
func migPod(name, profile string) string {
	return strings.TrimRight(probePod(name, "[env, devices, wait]", "claims: [{name: mig}]"), "\n") +
		fmt.Sprintf("\n  resourceClaims: [{name: mig, resourceClaimTemplateName: %s}]\n", templateOf(profile))
}

// hasInstance waits until a pod runs, and returns the pod's device. It checks that the pod has
// exactly the device nodes of that instance.
func hasInstance(t *testing.T, name string) string {
	t.Helper()
	f := printed(t, metav1.NamespaceDefault, name)
	device := f.variable("CHANDLER_DEVICES")
	if err := opens(device, f.nodes("/dev/nvidia")); err != nil {
		t.Errorf("pod %s: %v", name, err)
	}
	return device
}

// opens returns an error unless the device nodes are those of the device's instance.
func opens(device string, nodes []string) error {
	all, err := cutInstances()
	if err != nil {
		return err
	}
	for gpu, instances := range all {
		for i := range instances {
			if instances[i].device(gpu) != device {
				continue
			}
			if len(instances[i].Parts) != 1 {
				return fmt.Errorf("%d compute instances in %s", len(instances[i].Parts), device)
			}
			want := append(instances[i].nodes(gpu), fmt.Sprintf("/dev/nvidia%d", gpu), "/dev/nvidiactl")
			if slices.Sort(want); !slices.Equal(slices.Sorted(slices.Values(nodes)), want) {
				return fmt.Errorf("the nodes are %q, want %q of %s", nodes, want, device)
			}
			return nil
		}
	}
	return fmt.Errorf("there is no instance for %q: %+v", device, all)
}

// waitsInVain waits until the scheduler reports that a pod's claim cannot be allocated.
func waitsInVain(t *testing.T, name string) {
	t.Helper()
	until(t, "the scheduler's reason why pod "+name+" waits", func(ctx context.Context) error {
		pod, err := kube.CoreV1().Pods(metav1.NamespaceDefault).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range pod.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Reason == corev1.PodReasonUnschedulable && strings.Contains(condition.Message, "cannot allocate all claims") {
				return nil
			}
		}
		return fmt.Errorf("its conditions are %+v", pod.Status.Conditions)
	})
}

// nothingCut waits until all instances and all records of created instances are removed.
func nothingCut(t *testing.T) {
	t.Helper()
	until(t, "no instance to be left", func(context.Context) error {
		left, err := devicesCut()
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("still there: %q", left)
		}
		records, globErr := filepath.Glob(node.NodePath(chandler.RunDir+"/journal/create") + "/*")
		if err = errors.Join(err, globErr); err == nil && len(records) > 0 {
			err = fmt.Errorf("still written down: %q", records)
		}
		return err
	})
}

// testMIGPacked fills a GPU with as many instances as NVIDIA's rules allow. A pod without room must
// wait, and run once there is room.
func testMIGPacked(t *testing.T) {
	pods := map[string]string{"big-0": "3g.40gb", "big-1": "3g.40gb", "small-0": "1g.20gb"} // of the H100's eight slices
	order := []string{"big-0", "big-1"}
	var devices []string
	for _, name := range order {
		apply(t, migPod(name, pods[name]))
	}
	for _, name := range order {
		devices = append(devices, hasInstance(t, name))
	}
	if slices.Sort(devices); !slices.Equal(devices, []string{silicon[0] + "-mig-3g-40gb-at-0", silicon[0] + "-mig-3g-40gb-at-4"}) {
		t.Errorf("they have %q", devices)
	}
	apply(t, migPod("small-0", pods["small-0"]))
	waitsInVain(t, "small-0")
	remove(t, migPod("big-1", pods["big-1"]))
	// The instance that is kept for the next pod of its profile must not block another profile.
	if device := hasInstance(t, "small-0"); !strings.HasPrefix(device, silicon[0]+"-mig-1g-20gb-at-") {
		t.Errorf("it has %s", device)
	}
	remove(t, migPod("small-0", pods["small-0"]))
	remove(t, migPod("big-0", pods["big-0"]))
	nothingCut(t)
}

// testMIGWhole expects that an instance of the whole GPU excludes all smaller instances, and the
// reverse.
func testMIGWhole(t *testing.T) {
	apply(t, migPod("whole", "7g.40gb"))
	hasInstance(t, "whole")
	apply(t, migPod("part", "2g.10gb"))
	waitsInVain(t, "part")
	remove(t, migPod("whole", "7g.40gb"))
	hasInstance(t, "part")
	apply(t, migPod("whole-again", "7g.40gb"))
	waitsInVain(t, "whole-again")
	remove(t, migPod("part", "2g.10gb"))
	hasInstance(t, "whole-again")
	remove(t, migPod("whole-again", "7g.40gb"))
	nothingCut(t)
}

// testMIGClassicName runs a pod with a limit, as written for the NVIDIA device plugin. The limit
// must create an instance too.
func testMIGClassicName(t *testing.T) {
	if !has(t, "DRAExtendedResource") {
		t.Skip("this Kubernetes has no extended resources by DRA")
	}
	pod := probePod("by-limit", "[env, devices, wait]", "limits: {nvidia.com/mig-1g.10gb: 1}")
	apply(t, pod)
	hasInstance(t, "by-limit")
	remove(t, pod)
	nothingCut(t)
}

// testMIGResource configures an entry of resources that selects instances. As many instances as fit
// must be created in advance and offered by the device plugin API. They must be removed with the
// entry.
func testMIGResource(t *testing.T) {
	const resource = "example.com/half-a100"
	const others = `
exclude:
- cel: device.attributes["chandler.dev"].?parent.orValue("") == "pci-0000-01-00-0" && device.attributes["chandler.dev"].profile != "3g.20gb"
`
	const entry = `
- name: ` + resource + `
  mode: DevicePlugin
  cel: device.attributes["chandler.dev"].?profile.orValue("") == "3g.20gb"
`
	reconfigure(t, besides(t, migConfig+strings.TrimLeft(others, "\n"), entry))
	until(t, "both halves to be allocatable", func(ctx context.Context) error {
		n, err := allocatable(ctx, resource)
		if err == nil && n != 2 {
			err = fmt.Errorf("%d are", n)
		}
		return err
	})
	pod := probePod("half", "[env, devices, wait]", "limits: {"+resource+": 1}")
	apply(t, pod)
	f := printed(t, metav1.NamespaceDefault, "half")
	cut, err := devicesCut()
	want := []string{silicon[1] + "-mig-3g-20gb-at-0", silicon[1] + "-mig-3g-20gb-at-4"}
	if err != nil || !slices.Equal(cut, want) {
		t.Errorf("there are %q, %v; want %q", cut, err, want)
	}
	nodes := f.nodes("/dev/nvidia")
	if first, second := opens(want[0], nodes), opens(want[1], nodes); (first == nil) == (second == nil) {
		t.Errorf("the pod has the nodes of neither or both: %v; %v", first, second)
	}
	remove(t, pod)
	reconfigure(t, besides(t, migConfig, ""))
	nothingCut(t)
}

// testMIGKilled kills an agent while it creates or removes an instance, when the GPU instance has
// no compute instance. The next agent must complete the work: a pod can get the instance, and the
// instance is removed in the end.
func testMIGKilled(t *testing.T, step string) {
	held := node.NodePath(kernelDir + "/" + step)
	free := func() {
		if err := os.Remove(held); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	}
	t.Cleanup(free)
	if err := os.WriteFile(held, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	pod := migPod("interrupted", "4g.40gb")
	apply(t, pod)
	if step == "destroy-gi" {
		hasInstance(t, "interrupted")
		remove(t, pod)
	}
	const half = "pci-0000-00-00-0-mig-4g-40gb-at-0?"
	until(t, "an instance to be there in which nothing computes", func(context.Context) error {
		cut, err := devicesCut()
		if err == nil && !slices.Equal(cut, []string{half}) {
			err = fmt.Errorf("there are %q", cut)
		}
		return err
	})
	killAgent(t)
	free()
	if err := chandler.WaitForAgent(within(t), kube); err != nil {
		t.Fatal(err)
	}
	if step == "create-ci" {
		// The kubelet would also retry the first pod, but only after a minute and a half.
		remove(t, pod)
		next := migPod("next", "4g.40gb")
		apply(t, next)
		if device := hasInstance(t, "next"); device+"?" != half {
			t.Errorf("it has %s", device)
		}
		remove(t, next)
	}
	nothingCut(t)
}

// migStreams is the number of concurrent pods. New pods are created for migFor, and until migPods have
// had instances.
const (
	migStreams = 10
	migFor     = 20 * time.Second
	migPods    = 12
)

// testMIGRandom creates and deletes pods at random. All instances must obey NVIDIA's placement
// rules at all times, each pod must have its own instance, and no instance may remain.
func testMIGRandom(t *testing.T) {
	var profiles []string
	for _, model := range models {
		for _, profile := range migtest.Layouts[model] {
			for range profile.Placements { // Small profiles have more placements and are chosen more often.
				profiles = append(profiles, profile.Name)
			}
		}
	}
	watched := watchMIG(t)
	var streams sync.WaitGroup
	var mu sync.Mutex
	began, ran, pods, waited := time.Now(), make(map[string]bool), 0, 0
	isEnough := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return time.Since(began) > migFor && pods >= migPods || time.Since(began) > patience
	}
	for stream := range migStreams {
		random := rand.New(rand.NewPCG(uint64(stream), 13))
		streams.Go(func() {
			for i := 0; !isEnough() && !t.Failed(); i++ {
				name, profile := fmt.Sprintf("random-%d-%d", stream, i), profiles[random.IntN(len(profiles))]
				device, err := runForAWhile(t, name, profile, time.Duration(random.IntN(2500))*time.Millisecond)
				if err != nil {
					t.Errorf("pod %s for %s: %v", name, profile, err)
				}
				mu.Lock()
				if device == "" {
					waited++
				} else {
					ran[device] = true
					pods++
				}
				mu.Unlock()
			}
		})
	}
	streams.Wait()
	nothingCut(t)
	states, most := watched()
	t.Logf("%d pods had instances at %d places, %d had no room; %d states, with up to %d instances at once", pods, len(ran), waited, states, most)
	if pods < migPods {
		t.Errorf("%d pods had instances within %s; want %d", pods, patience, migPods)
	}
}

// runForAWhile creates a pod with an instance of a profile and deletes the pod after a while. It
// returns the pod's device, or "" if there was no room until then.
func runForAWhile(t *testing.T, name, profile string, while time.Duration) (device string, err error) {
	ctx := within(t)
	pod := migPod(name, profile)
	defer func() { err = errors.Join(err, kube.Delete(within(t), pod)) }()
	if err := kube.Apply(ctx, pod); err != nil {
		return "", err
	}
	var f facts
	began := time.Now()
	err = kube.Until(ctx, "pod "+name+" to run", func(ctx context.Context) error {
		now, err := kube.CoreV1().Pods(metav1.NamespaceDefault).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if unschedulable(now) && time.Since(began) > 2*time.Second+while {
			return nil
		}
		if now.Status.Phase != corev1.PodRunning {
			return fmt.Errorf("it is %s: %+v", now.Status.Phase, now.Status.Conditions)
		}
		logs, err := kube.Logs(ctx, metav1.NamespaceDefault, name, "")
		if f = factsOf(logs); err == nil && f["wait"] == nil {
			err = fmt.Errorf("it printed %q so far", logs)
		}
		return err
	})
	if err != nil || f["wait"] == nil {
		return "", err
	}
	device = f.variable("CHANDLER_DEVICES")
	if err := opens(device, f.nodes("/dev/nvidia")); err != nil {
		return device, err
	}
	time.Sleep(while)
	return device, opens(device, f.nodes("/dev/nvidia")) // still the same instance
}

// watchMIG checks continuously that the existing instances are legal. The returned function stops
// the checks. It returns the number of different states, and the highest number of instances at one
// time.
func watchMIG(t *testing.T) func() (states, most int) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	states, most := 0, 0
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		last := ""
		for ctx.Err() == nil {
			all, err := cutInstances()
			if err == nil {
				err = legal(all)
			}
			if err != nil {
				t.Error(err)
				return
			}
			if now := fmt.Sprint(all); now != last {
				last = now
				states++
			}
			most = max(most, len(all[0])+len(all[1]))
			time.Sleep(20 * time.Millisecond)
		}
	}()
	stop := sync.OnceFunc(func() { cancel(); <-ended })
	t.Cleanup(stop)
	return func() (int, int) { stop(); return states, most }
}
