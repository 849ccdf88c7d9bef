package main

import (
	"context"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cdi"
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver"
	"chandler.dev/e2e/chandler"
	"chandler.dev/internal/compile"
	"chandler.dev/internal/removal"
	"chandler.dev/internal/simulation/disk"
	"chandler.dev/internal/simulation/kubelet"
)

// Each node of a fleet has eight GPUs.
const (
	eightGPUs   = "discovery/families/amdgpu/testdata/mi210x8.host"
	gpusOfNode  = 8
	gpuResource = "amd.com/gpu"
)

// Paths of a node.
const (
	kubeletRoot = "/var/lib/kubelet"
	runDir      = "/run/chandler"
	cdiRoot     = "/var/run/cdi"
)

// readHost reads a recorded host into memory. All nodes have the same host.
func readHost(file string) (fs.FS, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	host, err := recorded.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return discoverytest.ReadTree(host.FS())
}

// settingsFor returns the settings of a configuration with a mode.
func settingsFor(mode discovery.Mode) (agent.Settings, error) {
	text := fmt.Appendf(nil, "apiVersion: %s\nkind: DriverConfig\nmode: %s\n", v1alpha1.APIVersion, mode)
	config, err := compile.ForNode(text, v1alpha1.Node{})
	if err != nil {
		return agent.Settings{}, err
	}
	return agent.Settings{Rules: config.Rules, Text: text, Labels: map[string]string{}}, nil
}

// A node is a model of a node's kubelet and disk, with a whole agent.
type node struct {
	fleet   *fleet
	name    string
	kubelet *kubelet.Kubelet
	disk    *disk.Disk
	lock    nodeLock
	agent   *process

	mu   sync.Mutex
	pods map[types.UID]*podOnNode
}

// podOnNode is a pod that is bound to the node.
type podOnNode struct {
	*kubelet.Pod

	started, ended chan struct{} // closed when the container has started, and when the claims are unprepared
	start, end     func()        // close the channels
}

// newNode returns a node without an agent.
func newNode(f *fleet, number int) *node {
	n := &node{
		fleet: f, name: fmt.Sprintf("fleet-%04d", number), lock: make(nodeLock, 1), pods: make(map[types.UID]*podOnNode),
		disk: disk.New(nil, kubeletRoot+"/plugins", kubeletRoot+"/plugins_registry", "/var/run", "/run"),
	}
	n.addPod(&kubelet.Pod{UID: types.UID(n.name), Namespace: chandler.Namespace, Name: n.agentPod(), Static: true})
	n.kubelet = kubelet.New(kubelet.Config{
		Minor: 37, Node: n.name, Driver: discovery.Domain, Client: f.kube, Pods: n.listPods,
		Start: func(c *kubelet.Container) error {
			if p := n.podOf(c.Pod.UID); p != nil {
				p.start()
			}
			return nil
		},
		Done: func(pod *kubelet.Pod, _ error) {
			if p := n.podOf(pod.UID); p != nil {
				p.end()
			}
		},
		Ended: func(*kubelet.Container) {}, Lacks: func(*kubelet.Pod, string, string) {}, Wipe: func() {}, Log: func(string, ...any) {},
		Random: rand.New(rand.NewPCG(uint64(number), 1)), //nolint:gosec // no secret depends on it
	})
	return n
}

func (n *node) agentPod() string { return "agent-of-" + n.name }

func (n *node) addPod(pod *kubelet.Pod) *podOnNode {
	n.mu.Lock()
	defer n.mu.Unlock()
	started, ended := make(chan struct{}), make(chan struct{})
	p := &podOnNode{pod, started, ended, sync.OnceFunc(func() { close(started) }), sync.OnceFunc(func() { close(ended) })}
	n.pods[pod.UID] = p
	return p
}

func (n *node) removePod(uid types.UID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.pods, uid)
}

func (n *node) podOf(uid types.UID) *podOnNode {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.pods[uid]
}

func (n *node) listPods() (pods []*kubelet.Pod, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, p := range n.pods {
		pods = append(pods, p.Pod)
	}
	return pods, nil
}

// nodeLock is the lock of a node, held by one agent at a time.
type nodeLock chan struct{}

// Acquire implements [agent.Lock].
func (l nodeLock) Acquire(ctx context.Context) (release func(), err error) {
	select {
	case l <- struct{}{}:
		return func() { <-l }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Awaited implements [agent.Lock].
func (nodeLock) Awaited() bool { return false }

// A process is one run of an agent.
type process struct {
	cancel  context.CancelFunc
	changes chan agent.Change
	handler atomic.Pointer[http.Handler]
	done    chan struct{} // closed when everything has ended
}

// startAgent starts an agent on the node, with a connection of its own.
func (n *node) startAgent(settings agent.Settings) error {
	p := &process{changes: make(chan agent.Change), done: make(chan struct{})}
	connection := &dialer{traffic: n.fleet.traffic}
	clients, err := n.connect(connection)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.Logger{}))
	p.cancel, n.agent = cancel, p
	instance := n.kubelet.NewProcess(n.name)
	orders := make(chan removal.Order)
	config := agent.Config{
		Version: "fleet", NodeName: n.name, Pod: chandler.Namespace + "/" + n.agentPod(), BootID: "boot",
		FS: n.fleet.host, Families: families.All, Settings: settings, Changes: p.changes, Orders: orders, RescanInterval: rescanInterval,
		Uevents: func(ctx context.Context, events chan scan.Changes) error {
			scan.Changes{Everything: true}.Send(events)
			<-ctx.Done()
			return nil
		},
		AllEvents: true,
		Client:    clients.main, StatusClient: clients.status,
		ServedVersions: func(context.Context) ([]string, error) { return []string{resourceapi.SchemeGroupVersion.Version}, nil },
		Kubelet: agent.Kubelet{
			StartDRA: func(ctx context.Context, plugin kubeletplugin.DRAPlugin, options ...kubeletplugin.Option) (driver.Helper, error) {
				helper, err := instance.StartDRA(ctx, plugin, options...)
				if err != nil {
					return nil, err
				}
				return helper, nil
			},
			DevicePlugins: instance, Pods: instance.Pods, Allocated: instance.AllocatedIDs,
		},
		Lock: n.lock, Disk: n.disk.View(nil), KubeletRoot: kubeletRoot, StateDir: kubeletRoot + "/plugins/" + chandler.Driver, RunDir: runDir,
		CDI:            cdi.Dir{Path: cdiRoot},
		ReadParameters: compile.Parameters,
		Serve: func(ctx context.Context, handler http.Handler) error {
			p.handler.Store(&handler)
			<-ctx.Done()
			return nil
		},
	}
	config.HostFiles.Dirs = discovery.FileDirs(families.All)
	var all sync.WaitGroup
	all.Go(func() { cluster.FollowLabels(ctx, clients.metadata, n.name, func(map[string]string) {}) })
	all.Go(func() {
		cluster.FollowOrders(ctx, clients.metadata, chandler.Namespace, func(order removal.Order) {
			select {
			case orders <- order:
			case <-ctx.Done():
			}
		})
	})
	all.Go(func() {
		if err := agent.Run(ctx, config); err != nil {
			n.fleet.say("the agent of %s ended: %v", n.name, err)
		}
	})
	go func() {
		all.Wait()
		instance.Kill()
		connection.close()
		close(p.done)
	}()
	return nil
}

// clients are the clients of an agent. They share a connection.
type clients struct {
	main, status kubernetes.Interface
	metadata     metadata.Interface
}

// connect creates the clients of the node's agent, as the command run does. The agent has the
// identity of the service account, with the name of the node.
func (n *node) connect(connection *dialer) (c clients, err error) {
	config := rest.CopyConfig(n.fleet.config)
	config.UserAgent = "chandler/fleet"
	config.Dial = connection.dial
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + chandler.Namespace + ":chandler",
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:" + chandler.Namespace, "system:authenticated"},
		Extra:    map[string][]string{"authentication.kubernetes.io/node-name": {n.name}},
	}
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = config.ContentType + ",application/json"
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return transport{n.fleet.traffic, next} })
	shared, err := rest.HTTPClientFor(config)
	if err != nil {
		return c, err
	}
	config.QPS, config.Burst = 100, 200
	if c.main, err = kubernetes.NewForConfigAndClient(config, shared); err != nil {
		return c, err
	}
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = 10, 20
	if c.status, err = kubernetes.NewForConfigAndClient(config, shared); err != nil {
		return c, err
	}
	c.metadata, err = metadata.NewForConfigAndClient(config, shared)
	return c, err
}

// stopAgent ends the agent and waits for its end.
func (n *node) stopAgent() {
	if n.agent == nil {
		return
	}
	n.agent.cancel()
	<-n.agent.done
	n.agent = nil
}

// isReady reports whether the agent is ready.
func (n *node) isReady() bool {
	handler := n.agent.handler.Load()
	if handler == nil {
		return false
	}
	answer := httptest.NewRecorder()
	unlogged := klog.NewContext(context.Background(), klog.Logger{})
	(*handler).ServeHTTP(answer, httptest.NewRequestWithContext(unlogged, http.MethodGet, "/readyz", http.NoBody))
	return answer.Code == http.StatusOK
}

// inAPIServer creates the Node, ready.
func (n *node) inAPIServer(ctx context.Context) error {
	nodes := n.fleet.kube.CoreV1().Nodes()
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name, Labels: map[string]string{fleetLabel: ""}}}
	if _, err := nodes.Create(ctx, object, metav1.CreateOptions{}); err != nil {
		return err
	}
	_, err := nodes.Patch(ctx, n.name, types.StrategicMergePatchType, []byte(nodeStatus), metav1.PatchOptions{}, "status")
	return err
}

const nodeStatus = `{"status": {
	"conditions": [{"type": "Ready", "status": "True", "reason": "Fleet"}], "nodeInfo": {"kubeletVersion": "v1.37.0"},
	"capacity": {"cpu": "64", "memory": "512Gi", "pods": "110"}, "allocatable": {"cpu": "64", "memory": "512Gi", "pods": "110"}
}}`

// gpusOf returns the number of GPUs in the ResourceSlices of each node.
func gpusOf(published []*resourceapi.ResourceSlice) map[string]int {
	gpus := make(map[string]int)
	for _, slice := range published {
		if slice.Spec.Driver != chandler.Driver || slice.Spec.NodeName == nil {
			continue
		}
		for _, device := range slice.Spec.Devices {
			if kind := device.Attributes["kind"].StringValue; kind != nil && *kind == "gpu" {
				gpus[*slice.Spec.NodeName]++
			}
		}
	}
	return gpus
}

// devicesOf returns the names of the GPUs of a node.
func devicesOf(published []*resourceapi.ResourceSlice, node string) (names []string) {
	for _, slice := range published {
		if slice.Spec.Driver == chandler.Driver && slice.Spec.NodeName != nil && *slice.Spec.NodeName == node && slice.Spec.Pool.Name == discovery.PoolName(node, true) {
			for _, device := range slice.Spec.Devices {
				names = append(names, device.Name)
			}
		}
	}
	slices.Sort(names)
	return names
}
