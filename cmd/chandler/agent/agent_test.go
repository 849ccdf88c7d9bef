package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/metadata"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/cdi"
	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families/hypervisor"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/driver"
	"chandler.dev/driver/pool"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/kubeletapi"
)

// node is a node in memory, without sockets: a recorded host, an API server and a kubelet. The type
// itself implements the kubelet and the lock.
type node struct {
	t       *testing.T
	client  *fake.Clientset
	dir     string
	changes chan Change

	mu        sync.Mutex
	plugin    kubeletplugin.DRAPlugin
	published []string // devices in the slices, in order
	pools     resourceslice.DriverResources
	servers   map[string]pluginapi.DevicePluginServer
	healthy   map[string][]string // IDs by resource
	allocated map[string]string   // one ID by resource
	claimed   map[string]string   // claims by the name of the pod
}

func newNode(t *testing.T) *node {
	n := &node{t: t, client: fake.NewClientset(), dir: t.TempDir(), changes: make(chan Change), servers: make(map[string]pluginapi.DevicePluginServer), healthy: make(map[string][]string), allocated: make(map[string]string)}
	n.client.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		create := action.(clienttesting.CreateActionImpl)
		return len(create.CreateOptions.DryRun) > 0, create.Object, nil
	})
	return n
}

// recordedHost returns the files of a recorded host. The path is relative to the families.
func recordedHost(t testing.TB, path string) fs.FS {
	t.Helper()
	data, err := os.ReadFile("../../../discovery/families/" + path)
	if err != nil {
		t.Fatal(err)
	}
	host, err := recorded.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	return host.FS()
}

// config returns the configuration of an agent on the node.
func (n *node) config(wanted *rules.Rules) Config {
	n.t.Helper()
	return Config{
		NodeName:       "node",
		BootID:         "boot",
		RescanInterval: 30 * time.Second,
		FS:             recordedHost(n.t, "hypervisor/testdata/kvm.host"),
		Families:       []*discovery.Family{hypervisor.Family},
		Settings:       Settings{Rules: wanted},
		Changes:        n.changes,
		Client:         n.client,
		StatusClient:   n.client,
		ServedVersions: func(context.Context) ([]string, error) { return []string{"v1"}, nil },
		Kubelet:        Kubelet{StartDRA: n.start, DevicePlugins: n, Pods: n.pods},
		Lock:           n,
		KubeletRoot:    n.dir,
		StateDir:       filepath.Join(n.dir, "plugins/chandler.dev"),
		RunDir:         filepath.Join(n.dir, "run/chandler"),
		CDI:            cdi.Dir{Path: filepath.Join(n.dir, "cdi")},
		NoMetadata:     true,
	}
}

// Acquire implements Lock.
func (n *node) Acquire(context.Context) (func(), error) { return func() {}, nil }

// Awaited implements Lock.
func (n *node) Awaited() bool { return false }

func (n *node) start(_ context.Context, plugin kubeletplugin.DRAPlugin, _ ...kubeletplugin.Option) (driver.Helper, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.plugin = plugin
	plugin.(*driver.Driver).SetRegistration(driver.Accepted)
	return helper{n}, nil
}

// dra returns the driver that registered last, or nil.
func (n *node) dra() kubeletplugin.DRAPlugin {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.plugin
}

func (n *node) pods(context.Context) (*kubeletapi.Listing, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	container := &podresourcesapi.ContainerResources{Name: "main"}
	for resource, id := range n.allocated {
		container.Devices = append(container.Devices, &podresourcesapi.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}})
	}
	pods := []*podresourcesapi.PodResources{{Namespace: "chandler", Name: "agent"}}
	if len(n.allocated) > 0 {
		pods = append(pods, &podresourcesapi.PodResources{Namespace: "default", Name: "classic", Containers: []*podresourcesapi.ContainerResources{container}})
	}
	for pod, claim := range n.claimed {
		pods = append(pods, &podresourcesapi.PodResources{Namespace: "default", Name: pod, Containers: []*podresourcesapi.ContainerResources{{
			Name: "main", DynamicResources: []*podresourcesapi.DynamicResource{{ClaimNamespace: "default", ClaimName: claim}},
		}}})
	}
	return &kubeletapi.Listing{Pods: pods}, nil
}

// helper replaces the helper of the kubeletplugin library.
type helper struct{ *node }

func (h helper) PublishResources(_ context.Context, resources resourceslice.DriverResources) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.published, h.pools = nil, resources
	for _, slice := range pool.SlicesOf(resources) {
		for _, d := range slice.Devices {
			h.published = append(h.published, d.Name)
		}
	}
	return nil
}

func (h helper) Stop() {}

// Run implements legacy.Kubelet.
func (n *node) Run(ctx context.Context) { <-ctx.Done() }

// Serve implements legacy.Kubelet.
func (n *node) Serve(ctx context.Context, resource string, server pluginapi.DevicePluginServer, gone <-chan struct{}) {
	n.mu.Lock()
	n.servers[resource] = server
	n.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	var listing sync.WaitGroup
	listing.Go(func() { _ = server.ListAndWatch(&pluginapi.Empty{}, list{ctx, n, resource}) })
	select {
	case <-ctx.Done():
	case <-gone:
	}
	cancel()
	listing.Wait()
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.servers, resource)
}

// Linger implements legacy.Kubelet.
func (n *node) Linger(context.Context) {}

// Probe implements legacy.Kubelet.
func (n *node) Probe(context.Context) error { return nil }

// list is the kubelet's side of a ListAndWatch stream.
type list struct {
	ctx      context.Context
	node     *node
	resource string
}

func (l list) Send(told *pluginapi.ListAndWatchResponse) error {
	l.node.mu.Lock()
	defer l.node.mu.Unlock()
	l.node.healthy[l.resource] = nil
	for _, d := range told.Devices {
		if d.Health == pluginapi.Healthy {
			l.node.healthy[l.resource] = append(l.node.healthy[l.resource], d.ID)
		}
	}
	return nil
}
func (l list) Context() context.Context     { return l.ctx }
func (l list) SetHeader(metadata.MD) error  { return nil }
func (l list) SendHeader(metadata.MD) error { return nil }
func (l list) SetTrailer(metadata.MD)       {}
func (l list) SendMsg(any) error            { return errors.ErrUnsupported }
func (l list) RecvMsg(any) error            { return errors.ErrUnsupported }

// offers waits a minute, and then checks the devices in slices and the resources of device plugins.
func (n *node) offers(published, served string) {
	n.t.Helper()
	time.Sleep(time.Minute)
	synctest.Wait()
	n.mu.Lock()
	defer n.mu.Unlock()
	var resources []string
	for resource := range n.servers {
		resources = append(resources, resource)
	}
	slices.Sort(resources)
	if got := strings.Join(n.published, " "); got != published {
		n.t.Errorf("slices have %q, want %q", got, published)
	}
	if got := strings.Join(resources, " "); got != served {
		n.t.Errorf("the kubelet has %q, want %q", got, served)
	}
}

// poolOf returns the pool that has a device, the main pool if none has it.
func (n *node) poolOf(device string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, p := range n.pools.Pools {
		for _, slice := range p.Slices {
			if slices.ContainsFunc(slice.Devices, func(d resourceapi.Device) bool { return d.Name == device }) {
				return name
			}
		}
	}
	return "node"
}

// prepare creates a claim for a device and prepares the claim.
func (n *node) prepare(device string) (*resourceapi.ResourceClaim, error) {
	n.t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim", UID: "uid"}}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Request: "r", Driver: discovery.Domain, Pool: n.poolOf(device), Device: device}},
	}}
	if _, err := n.client.ResourceV1().ResourceClaims("default").Create(n.t.Context(), claim, metav1.CreateOptions{}); err != nil {
		n.t.Fatal(err)
	}
	return claim, n.prepareAgain(claim)
}

func (n *node) prepareAgain(claim *resourceapi.ResourceClaim) error {
	prepared, err := n.dra().PrepareResourceClaims(n.t.Context(), []*resourceapi.ResourceClaim{claim})
	return errors.Join(err, prepared[claim.UID].Err)
}

// unprepare unprepares a claim, and checks that its CDI spec is gone.
func (n *node) unprepare(claim *resourceapi.ResourceClaim) {
	n.t.Helper()
	unprepared, err := n.dra().UnprepareResourceClaims(n.t.Context(), claimNames(claim))
	if err != nil || unprepared[claim.UID] != nil {
		n.t.Errorf("unprepare: %v, %v", unprepared, err)
	}
	if specs, _ := filepath.Glob(filepath.Join(n.dir, "cdi/*"+string(claim.UID)+"*")); len(specs) != 0 {
		n.t.Errorf("CDI specs that are left: %q", specs)
	}
}

func claimNames(claim *resourceapi.ResourceClaim) []kubeletplugin.NamespacedObject {
	return []kubeletplugin.NamespacedObject{{NamespacedName: types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}, UID: claim.UID}}
}

// allocate allocates an ID to a container, and checks that the container gets the device node.
func (n *node) allocate(resource, id, path string) {
	n.t.Helper()
	n.mu.Lock()
	server := n.servers[resource]
	n.mu.Unlock()
	allocated, err := server.Allocate(n.t.Context(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{id}}}})
	if err != nil || len(allocated.ContainerResponses) != 1 || allocated.ContainerResponses[0].Devices[0].HostPath != path {
		n.t.Errorf("allocated %v, %v", allocated, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.allocated[resource] = id
}

// run runs an agent until the caller calls stop.
func (n *node) run(config Config) (stop func()) {
	ctx, cancel := context.WithCancel(n.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, config) }()
	return func() {
		n.t.Helper()
		cancel()
		if err := <-ended; err != nil {
			n.t.Error(err)
		}
	}
}

// A whole agent, without sockets, offers the devices of a host by both APIs, prepares a claim,
// serves an extended resource, and follows the configuration. When the agent ends, all its
// goroutines have ended: synctest waits for every goroutine of its bubble.
func TestAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		dra, classic := discovery.ModeDRA, discovery.ModeDevicePlugin
		tun := rules.Resource{Selector: rulestest.CompileSelector(t, `device.attributes["chandler.dev"].?model.orValue("") == "tun"`), Name: "devices.kubevirt.io/tun", Mode: &classic}
		wanted := &rules.Rules{Mode: dra, Resources: []rules.Resource{tun}}
		stop := n.run(n.config(wanted))
		n.offers("kvm", "devices.kubevirt.io/tun")

		claim, err := n.prepare("kvm")
		if err != nil {
			t.Errorf("prepare: %v", err)
		}
		if specs, _ := filepath.Glob(filepath.Join(n.dir, "cdi/*uid*")); len(specs) != 1 {
			t.Errorf("CDI specs: %q", specs)
		}
		n.allocate("devices.kubevirt.io/tun", "tun0", "/dev/net/tun")

		n.changes <- Change{Err: errors.New("wrong")}
		n.offers("kvm", "devices.kubevirt.io/tun")
		n.changes <- Change{Settings: Settings{Rules: &rules.Rules{Mode: classic}}}
		n.offers("", "devices.kubevirt.io/kvm devices.kubevirt.io/tun")
		n.unprepare(claim)
		stop()
	})
}

// In mode ReportOnly, the agent neither registers the driver nor a resource, publishes nothing and
// writes no labels. It is ready, and its inventory has all devices with the reason. A change of the
// mode takes effect without a restart, and pods keep their devices.
func TestAgentReportsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		var handler http.Handler
		var facts func() (inventory.Facts, bool)
		config := n.config(&rules.Rules{ReportOnly: true})
		config.FeatureDir = t.TempDir()
		config.Serve = func(ctx context.Context, h http.Handler) error { handler = h; <-ctx.Done(); return nil }
		config.ServePage = func(ctx context.Context, f func() (inventory.Facts, bool)) { facts = f; <-ctx.Done() }
		class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "kvm.chandler.dev"}}
		if _, err := n.client.ResourceV1().DeviceClasses().Create(t.Context(), class, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		stop := n.run(config)
		reports := func(devices int) {
			t.Helper()
			answer := httptest.NewRecorder()
			handler.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/readyz", nil))
			if answer.Code != http.StatusOK {
				t.Errorf("the agent is not ready: %s", answer.Body)
			}
			waiting := 0
			all, known := facts()
			for _, move := range all.Moves {
				if move.Reason == "the mode is ReportOnly" {
					waiting++
				}
			}
			if !known || len(all.Snapshot.Devices) != 2 || waiting != devices {
				t.Errorf("the inventory has %d devices, %d of them withheld; want %d", len(all.Snapshot.Devices), waiting, devices)
			}
		}
		n.offers("", "")
		if n.dra() != nil {
			t.Error("the driver is registered")
		}
		reports(2)

		tun := rules.Resource{Selector: rulestest.CompileSelector(t, `device.attributes["chandler.dev"].?model.orValue("") == "tun"`), Name: "devices.kubevirt.io/tun", Mode: new(discovery.ModeDevicePlugin)}
		n.changes <- Change{Settings: Settings{Rules: &rules.Rules{Mode: discovery.ModeDRA, Resources: []rules.Resource{tun}}}}
		n.offers("kvm", "devices.kubevirt.io/tun")
		time.Sleep(2 * firstClasses) // until the classes have been listed
		if all, _ := facts(); all.Installed == nil || !all.Installed("kvm.chandler.dev") || all.Installed("gpu.chandler.dev") {
			t.Error("the inventory does not have the installed DeviceClasses")
		}
		claim, err := n.prepare("kvm")
		if err != nil {
			t.Errorf("prepare: %v", err)
		}
		n.changes <- Change{Settings: Settings{Rules: &rules.Rules{ReportOnly: true, Resources: []rules.Resource{tun}}}}
		n.offers("", "")
		if err := n.prepareAgain(claim); err != nil {
			t.Errorf("the pod of the claim cannot restart: %v", err)
		}
		n.unprepare(claim)
		reports(2)
		stop()
	})
}

// While the agent's directory cannot be read, the agent offers no device and loses no data. It
// retries until the directory is readable, or until the agent has to end.
func TestAgentOpensItsLedgerAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		var failing atomic.Bool
		failing.Store(true)
		broken := func(name string) error {
			if failing.Load() && strings.HasPrefix(name, n.dir) {
				return syscall.EIO
			}
			return nil
		}
		config := n.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Disk = &disktest.Disk{BeforeRead: broken}
		stop := n.run(config)
		n.offers("", "")
		stop()
		stop = n.run(config)
		n.offers("", "")
		failing.Store(false)
		n.offers("kvm tun", "")
		if _, err := n.prepare("kvm"); err != nil {
			t.Errorf("prepare: %v", err)
		}
		stop()
	})
}

// withdrawalLimit is longer than a free device takes to leave DRA.
const withdrawalLimit = 2 * placement.WithdrawalTime

// The CDI spec of a claim is written last and removed first, so that a container gets no device
// before the other outputs are written, or after one of them is removed.
func TestOutputsInOrder(t *testing.T) {
	var order []string
	for _, o := range newAgent(newNode(t).config(&rules.Rules{})).outputs() {
		order = append(order, fmt.Sprintf("%T", o))
	}
	want := []string{"*changes.createdUnits", "*reclaim.Manager", "*sharing.Manager", "ledger.HostFiles", "*outputs.Metadata", "outputs.CDISpecs"}
	if !slices.Equal(order, want) {
		t.Errorf("outputs in the order %v, want %v", order, want)
	}
}
