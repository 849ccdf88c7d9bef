package kubelet

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/internal/simulation/apiserver"
)

const driver = "driver.test"

// node is a kubelet with an API server.
type node struct {
	*Kubelet
	server *apiserver.Server
	pods   atomic.Pointer[[]*Pod] // pods in the API server; the list is never modified
}

// set sets the pods in the API server.
func (n *node) set(pods ...*Pod) { n.pods.Store(&pods) }

// start starts a kubelet of a version. The kubelet ends with the test.
func start(t *testing.T, minor int) *node {
	n := &node{server: apiserver.New()}
	n.set()
	n.Kubelet = New(Config{
		Minor: minor, Node: "node", Driver: driver, Client: n.server.Client(nil),
		Pods:  func() ([]*Pod, error) { return *n.pods.Load(), nil },
		Start: func(*Container) error { return nil }, Ended: func(*Container) {}, Done: func(*Pod, error) {}, Wipe: func() {},
		Log: t.Logf, Random: rand.New(rand.NewPCG(1, 1)),
	})
	n.StartKubelet()
	return n
}

// claim creates an allocated claim with a reservation for pods.
func (n *node) claim(name string, pods ...types.UID) {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{Request: "r", Driver: driver, Pool: "node", Device: "d"}}}}
	for _, uid := range pods {
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: string(uid), UID: uid})
	}
	n.server.Put(claim)
}

func (n *node) add(pod *Pod) {
	n.set(append(slices.Clone(*n.pods.Load()), pod)...)
	n.Add(pod)
}

// draPlugin is a driver that records its calls.
type draPlugin struct {
	mu    sync.Mutex
	calls []string
	err   error
}

func (p *draPlugin) note(call string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls = append(p.calls, call)
	return p.err
}

// asked returns the calls so far.
func (p *draPlugin) asked() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.calls)
}

func (p *draPlugin) PrepareResourceClaims(_ context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := make(map[types.UID]kubeletplugin.PrepareResult)
	for _, claim := range claims {
		if err := p.note("prepare " + claim.Name); err != nil {
			results[claim.UID] = kubeletplugin.PrepareResult{Err: err}
			continue
		}
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: []kubeletplugin.Device{{Requests: []string{"r"}, PoolName: "node", DeviceName: "d", CDIDeviceIDs: []string{"cdi=" + claim.Name}}}}
	}
	return results, nil
}

func (p *draPlugin) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := make(map[types.UID]error)
	for _, claim := range claims {
		results[claim.UID] = p.note("unprepare " + claim.Name)
	}
	return results, nil
}

func (p *draPlugin) HandleError(context.Context, error, string) {}

func (p *draPlugin) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

// register registers a driver by the library's helper, and returns a function to end the
// registration.
func (n *node) register(t *testing.T, p *draPlugin) (*Process, func()) {
	process := n.NewProcess("agent")
	helper, err := process.StartDRA(klog.NewContext(context.Background(), klog.Logger{}), p, kubeletplugin.DriverName(driver), kubeletplugin.NodeName("node"),
		kubeletplugin.KubeClient(n.server.Client(nil)), kubeletplugin.PluginDataDirectoryPath("/plugins"), kubeletplugin.RegistrarDirectoryPath("/registry"))
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second) // until the kubelet has searched for sockets
	return process, helper.Stop
}

func TestClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := start(t, 37)
		defer n.StopKubelet()
		p := &draPlugin{}
		_, stop := n.register(t, p)
		defer stop()
		n.claim("own", "1")
		n.claim("both", "1", "2")
		n.add(&Pod{UID: "1", Namespace: "ns", Name: "one", Claims: []string{"own", "both"}})
		time.Sleep(time.Second)
		n.add(&Pod{UID: "2", Namespace: "ns", Name: "two", Claims: []string{"both"}})
		time.Sleep(time.Second)
		if got := n.Containers(); len(got) != 2 || len(got[0].Claims) != 2 {
			t.Fatalf("containers: %v", got)
		}
		n.set((*n.pods.Load())[1:]...)
		n.Delete("1", false)
		time.Sleep(time.Second)
		n.set()
		n.Delete("2", false)
		time.Sleep(time.Second)
		if got, want := fmt.Sprint(p.asked()), "[prepare own prepare both unprepare own unprepare both]"; got != want {
			t.Errorf("the driver was asked %s, want %s", got, want)
		}
		if why, idle := n.IsIdle(); !idle {
			t.Error(why)
		}
	})
}

func TestPrepareIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := start(t, 34)
		defer n.StopKubelet()
		p := &draPlugin{err: errors.New("no")}
		_, stop := n.register(t, p)
		defer stop()
		n.claim("own", "1")
		n.add(&Pod{UID: "1", Namespace: "ns", Name: "one", Claims: []string{"own"}})
		time.Sleep(10 * time.Second)
		n.set()
		n.Delete("1", false)
		time.Sleep(10 * time.Second)
		calls := p.asked()
		if len(calls) < 4 || calls[1] != "prepare own" || calls[len(calls)-1] != "unprepare own" {
			t.Errorf("the driver was asked %v", calls)
		}
		p.mu.Lock()
		p.err = nil
		p.mu.Unlock()
		time.Sleep(time.Minute)
		if why, idle := n.IsIdle(); !idle {
			t.Error(why)
		}
	})
}

// TestForceDelete checks that the kubelet unprepares a claim while the container still runs.
func TestForceDelete(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := start(t, 37)
		defer n.StopKubelet()
		p := &draPlugin{}
		_, stop := n.register(t, p)
		defer stop()
		n.claim("own", "1")
		n.add(&Pod{UID: "1", Namespace: "ns", Name: "one", Claims: []string{"own"}, Grace: 90 * time.Second, Stubborn: true})
		time.Sleep(time.Second)
		n.set()
		n.Delete("1", true)
		time.Sleep(70 * time.Second)
		if len(n.Containers()) != 1 || !slices.Contains(p.asked(), "unprepare own") {
			t.Errorf("%d containers run, and the driver was asked %v", len(n.Containers()), p.asked())
		}
		time.Sleep(time.Minute)
		if why, idle := n.IsIdle(); !idle {
			t.Error(why)
		}
	})
}

// TestUnprepareOfOthers checks that kubelets up to 1.36 unprepare a claim for a pod without a
// prepared claim, although another pod has the claim.
func TestUnprepareOfOthers(t *testing.T) {
	for minor, wrong := range map[int]bool{36: true, 37: false} {
		synctest.Test(t, func(t *testing.T) {
			n := start(t, minor)
			defer n.StopKubelet()
			p := &draPlugin{}
			_, stop := n.register(t, p)
			defer stop()
			n.claim("both", "1")
			n.add(&Pod{UID: "1", Namespace: "ns", Name: "one", Claims: []string{"both"}})
			time.Sleep(time.Second)
			n.add(&Pod{UID: "2", Namespace: "ns", Name: "two", Claims: []string{"both"}}) // the claim has no reservation for the pod
			time.Sleep(time.Second)
			n.Delete("2", false)
			time.Sleep(10 * time.Second)
			if got := slices.Contains(p.asked(), "unprepare both"); got != wrong {
				t.Errorf("1.%d unprepares the claim of another pod: %v, want %v", minor, got, wrong)
			}
			n.set()
			n.Delete("1", false)
			time.Sleep(time.Minute)
		})
	}
}

func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := start(t, 37)
		p := &draPlugin{}
		_, stop := n.register(t, p)
		n.claim("own", "1")
		n.add(&Pod{UID: "1", Namespace: "ns", Name: "one", Claims: []string{"own"}})
		time.Sleep(time.Second)
		n.StopKubelet()
		n.StartKubelet()
		time.Sleep(10 * time.Second)
		if got := p.asked(); len(got) != 1 {
			t.Errorf("after a restart of the kubelet the driver was asked %v", got)
		}
		n.StopKubelet()
		n.Reboot()
		n.StartKubelet()
		time.Sleep(10 * time.Second)
		if got := p.asked(); len(got) != 2 || len(n.Containers()) != 1 {
			t.Errorf("after a reboot the driver was asked %v, and %d containers run", got, len(n.Containers()))
		}
		stop()
		n.StopKubelet()
	})
}

// devices is a device plugin.
type devices struct {
	pluginapi.UnimplementedDevicePluginServer
	lists chan []string
	mu    sync.Mutex
	asked [][]string
}

func (d *devices) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

func (d *devices) ListAndWatch(_ *pluginapi.Empty, to pluginapi.DevicePlugin_ListAndWatchServer) error {
	for {
		select {
		case ids := <-d.lists:
			list := &pluginapi.ListAndWatchResponse{}
			for _, id := range ids {
				list.Devices = append(list.Devices, &pluginapi.Device{ID: id, Health: pluginapi.Healthy})
			}
			if err := to.Send(list); err != nil {
				return err
			}
		case <-to.Context().Done():
			return nil
		}
	}
}

func (d *devices) Allocate(_ context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked = append(d.asked, r.ContainerRequests[0].DevicesIds)
	return &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{{Devices: []*pluginapi.DeviceSpec{{HostPath: "/dev/" + r.ContainerRequests[0].DevicesIds[0]}}}}}, nil
}

func TestClassic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := start(t, 37)
		defer n.StopKubelet()
		process := n.NewProcess("agent")
		d := &devices{lists: make(chan []string)}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); process.Serve(ctx, "test/gpu", d, nil) }()
		d.lists <- []string{"a"}
		synctest.Wait()
		if got := n.AllocatableDevices()["test/gpu"]; got != 1 {
			t.Fatalf("%d devices are allocatable", got)
		}
		n.add(&Pod{UID: "0", Namespace: "ns", Name: "agent"})
		n.add(&Pod{UID: "1", Namespace: "ns", Name: "one", Requests: map[string]int{"test/gpu": 1}, Grace: 20 * time.Second, Stubborn: true})
		n.add(&Pod{UID: "2", Namespace: "ns", Name: "two", Requests: map[string]int{"test/gpu": 1}})
		time.Sleep(time.Second)
		if got := n.Containers(); len(got) != 2 || len(d.asked) != 1 {
			t.Fatalf("containers %v, calls %v", got, d.asked)
		}
		listing, err := process.Pods(t.Context())
		if err != nil || len(listing.Pods) < 2 {
			t.Errorf("PodResources: %v, %v", listing, err)
		}
		n.set((*n.pods.Load())[:1]...)
		for _, c := range n.Containers() {
			n.Delete(c.Pod.UID, c.Pod.UID != "0") // at once, while the container runs
		}
		if _, err = process.Pods(t.Context()); err != nil || len(n.HasDevices("1")) > 0 {
			t.Errorf("the kubelet's books have %v: %v", n.HasDevices("1"), err)
		}
		process.Kill()
		synctest.Wait()
		if got := n.AllocatableDevices()["test/gpu"]; got != 0 {
			t.Errorf("%d devices of a dead plugin are allocatable", got)
		}
		cancel()
		<-done
		time.Sleep(time.Minute)
	})
}

// TestReplacedPlugin replaces one plugin by another. The devices are present throughout, and the kubelet
// notices the end of the second plugin.
func TestReplacedPlugin(t *testing.T) {
	for _, minor := range []int{36, 37} {
		synctest.Test(t, func(t *testing.T) {
			n := start(t, minor)
			defer n.StopKubelet()
			serve := func(name string) (end func()) {
				d := &devices{lists: make(chan []string)}
				ctx, cancel := context.WithCancel(context.Background())
				done := make(chan struct{})
				p := n.NewProcess(name)
				p.Succeeded = func() bool { return name == "first" }
				go func() {
					defer close(done)
					p.Serve(ctx, "test/gpu", d, nil)
					p.Linger(context.Background())
				}()
				d.lists <- []string{"a"}
				synctest.Wait()
				return func() { cancel(); synctest.Wait() }
			}
			endFirst := serve("first")
			endFirst()
			endSecond := serve("second")
			for range 50 {
				time.Sleep(100 * time.Millisecond)
				synctest.Wait()
				if got := n.AllocatableDevices()["test/gpu"]; got != 1 {
					t.Fatalf("1.%d: %d devices are allocatable, want one", minor, got)
				}
			}
			endSecond()
			if got := n.AllocatableDevices()["test/gpu"]; got != 0 {
				t.Errorf("1.%d: %d devices are allocatable after all have ended", minor, got)
			}
		})
	}
}

// TestStreamEnds checks that in kubelets up to 1.36 the end of one plugin's stream disconnects
// another plugin that is unaware of the first.
func TestStreamEnds(t *testing.T) {
	for minor, want := range map[int]int{36: 0, 37: 1} {
		synctest.Test(t, func(t *testing.T) {
			n := start(t, minor)
			defer n.StopKubelet()
			register := func(name string) *endpoint {
				d := &devices{lists: make(chan []string)}
				e := n.NewProcess(name).newEndpoint(context.Background(), "test/gpu", d)
				if err := n.devices.register(e); err != nil {
					t.Fatal(err)
				}
				d.lists <- []string{"a"}
				synctest.Wait()
				return e
			}
			first, second := register("first"), register("second")
			first.endStream()
			synctest.Wait()
			if got := n.AllocatableDevices()["test/gpu"]; got != want {
				t.Errorf("1.%d: %d devices are allocatable, want %d", minor, got, want)
			}
			second.endStream()
			synctest.Wait()
		})
	}
}
