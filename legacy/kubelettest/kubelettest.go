// Package kubelettest provides a fake kubelet for tests: its registration service, a connection to
// each registered plugin, and PodResources, all at real sockets.
package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/internal/kubeletapi"
)

// Kubelet behaves like pkg/kubelet/cm/devicemanager of k8s.io/kubernetes.
type Kubelet struct {
	pluginapi.UnimplementedRegistrationServer
	podresourcesapi.UnimplementedPodResourcesListerServer

	t    *testing.T
	Dir  string // the device-plugins directory
	Pods string // the socket of PodResources

	// ByName makes the kubelet identify plugins only by the names of their resources, like kubelets
	// up to 1.36; see run.
	ByName bool

	// NoticeEnds, if not nil, delays the kubelet: until the channel is closed, it does not notice the
	// end of any stream.
	NoticeEnds chan struct{}

	// Deaf makes the kubelet never request lists.
	Deaf bool

	podServer *grpc.Server
	Server    *grpc.Server // nil while the kubelet is stopped

	mu       sync.Mutex
	plugins  []*Plugin
	clients  map[string][]*Plugin // plugins whose end the kubelet notices, by resource
	lists    map[string]string    // present lists, by resource; none without a plugin
	holes    map[string]int       // how often a resource has lost its last plugin
	refuse   error                // error from Register; see Refuse
	taken    func()               // called before Register answers; see Taken
	attempts int                  // calls of Register
	listed   []*podresourcesapi.PodResources
	silent   bool // PodResources fails
}

// Plugin is a registration that the kubelet has accepted.
type Plugin struct {
	Request *pluginapi.RegisterRequest
	Options *pluginapi.DevicePluginOptions
	Conn    *grpc.ClientConn
	API     pluginapi.DevicePluginClient
	At      time.Time

	mu    sync.Mutex
	lists []string // lists from ListAndWatch, as text
	ended bool
}

// New returns a stopped kubelet. Its device-plugins directory exists, and PodResources answers.
func New(t *testing.T) *Kubelet {
	t.Helper()
	dir, err := os.MkdirTemp("", "k") // the path of t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	k := &Kubelet{
		t: t, Dir: filepath.Join(dir, "dp"), Pods: filepath.Join(dir, "pods.sock"),
		clients: make(map[string][]*Plugin), lists: make(map[string]string), holes: make(map[string]int),
	}
	k.AddOwnPod()
	if err := os.Mkdir(k.Dir, 0o750); err != nil {
		t.Fatal(err)
	}
	k.podServer = grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(k.podServer, k)
	Serve(t, k.podServer, k.Pods)
	t.Cleanup(k.podServer.Stop)
	t.Cleanup(k.Stop)
	return k
}

// Serve starts a server at a socket.
func Serve(t *testing.T, server *grpc.Server, socket string) {
	t.Helper()
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.Serve(listener) }()
}

// Start starts the kubelet, which removes all sockets and then creates its own.
func (k *Kubelet) Start() {
	k.t.Helper()
	entries, err := os.ReadDir(k.Dir)
	if err != nil {
		k.t.Fatal(err)
	}
	for _, entry := range entries {
		if entry.Type() == os.ModeSocket {
			if err := os.Remove(filepath.Join(k.Dir, entry.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
				k.t.Fatal(err)
			}
		}
	}
	k.Server = grpc.NewServer()
	pluginapi.RegisterRegistrationServer(k.Server, k)
	Serve(k.t, k.Server, filepath.Join(k.Dir, "kubelet.sock"))
}

// Stop stops the kubelet and leaves its socket, like a killed kubelet.
func (k *Kubelet) Stop() {
	if k.Server == nil {
		return
	}
	k.Server.Stop()
	k.Server = nil
	k.forgetAll()
	for _, p := range k.Registrations() {
		p.Conn.Close()
	}
}

// Register implements the kubelet's service. It calls the plugin before it returns.
func (k *Kubelet) Register(ctx context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	k.mu.Lock()
	refuse := k.refuse
	k.attempts++
	k.mu.Unlock()
	if refuse != nil {
		return nil, refuse
	}
	conn, err := kubeletapi.Dial(filepath.Join(k.Dir, r.Endpoint))
	if err != nil {
		return nil, err
	}
	p := &Plugin{Request: r, Conn: conn, API: pluginapi.NewDevicePluginClient(conn), At: time.Now()}
	k.name(p)
	// The kubelet requests the options before it answers. A plugin that registers before it serves
	// fails here.
	if p.Options, err = p.API.GetDevicePluginOptions(ctx, &pluginapi.Empty{}); err != nil {
		k.removeName(p)
		conn.Close()
		return nil, fmt.Errorf("failed to get device plugin options: %v", err) //nolint:errorlint // without its code, as the kubelet answers
	}
	k.mu.Lock()
	k.plugins = append(k.plugins, p)
	taken := k.taken
	k.mu.Unlock()
	if !k.Deaf {
		go k.run(p) //nolint:contextcheck // the stream outlives the registration
	}
	if taken != nil {
		taken()
	}
	return &pluginapi.Empty{}, nil
}

// WatchLists collects the lists of ListAndWatch until the stream ends.
func (p *Plugin) WatchLists(t *testing.T) { p.watchLists(t, func(string) {}) }

func (p *Plugin) watchLists(t *testing.T, said func(list string)) {
	stream, err := p.API.ListAndWatch(t.Context(), &pluginapi.Empty{})
	for err == nil {
		var response *pluginapi.ListAndWatchResponse
		if response, err = stream.Recv(); err == nil {
			said(Text(response.Devices))
			p.mu.Lock()
			p.lists = append(p.lists, Text(response.Devices))
			p.mu.Unlock()
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
}

// Text returns a short form of a list: "a b! c@0", where b is unhealthy and c is on NUMA node 0.
func Text(devices []*pluginapi.Device) string {
	var words []string
	for _, d := range devices {
		var word strings.Builder
		word.WriteString(d.ID)
		if d.Health != pluginapi.Healthy {
			word.WriteString("!")
		}
		for _, node := range d.GetTopology().GetNodes() {
			fmt.Fprintf(&word, "@%d", node.ID)
		}
		words = append(words, word.String())
	}
	return strings.Join(words, " ")
}

// SentLists returns the lists of the plugin, the first one first.
func (p *Plugin) SentLists() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.lists)
}

// LastList returns the last list, or "(nothing)".
func (p *Plugin) LastList() string {
	if lists := p.SentLists(); len(lists) > 0 {
		return lists[len(lists)-1]
	}
	return "(nothing)"
}

// HasEnded reports whether the plugin's stream has ended.
func (p *Plugin) HasEnded() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended
}

// Registrations returns the registrations, the first one first.
func (k *Kubelet) Registrations() []*Plugin {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.plugins)
}

// AwaitPlugin waits until a resource has n registrations, and returns the last one.
func (k *Kubelet) AwaitPlugin(resource string, n int) *Plugin {
	k.t.Helper()
	var own []*Plugin
	EventuallyTrue(k.t, func() bool {
		own = nil
		for _, p := range k.Registrations() {
			if p.Request.ResourceName == resource {
				own = append(own, p)
			}
		}
		return len(own) >= n
	}, func() string { return resource + " is not registered" })
	return own[len(own)-1]
}

// AwaitList waits until the last list equals want.
func (p *Plugin) AwaitList(t *testing.T, want string) {
	t.Helper()
	EventuallyTrue(t, func() bool { return p.LastList() == want }, func() string { return "list is " + p.LastList() + ", want " + want })
}

// AllocateIDs calls Allocate for one container.
func (p *Plugin) AllocateIDs(ids ...string) (*pluginapi.ContainerAllocateResponse, error) {
	r, err := p.API.Allocate(context.Background(), &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if err != nil {
		return nil, err
	}
	return r.ContainerResponses[0], nil
}

// HoldIDs makes PodResources list a container "main" of pod "default/<pod>" with IDs. Without IDs,
// the pod is not listed.
func (k *Kubelet) HoldIDs(pod, resource string, ids ...string) {
	if len(ids) == 0 {
		k.setListed(pod)
		return
	}
	k.setListed(pod, &podresourcesapi.ContainerResources{
		Name:    "main",
		Devices: []*podresourcesapi.ContainerDevices{{ResourceName: resource, DeviceIds: ids}},
	})
}

// LoseIDs makes PodResources list the container without IDs.
func (k *Kubelet) LoseIDs(pod string) {
	k.setListed(pod, &podresourcesapi.ContainerResources{Name: "main"})
}

// setListed makes PodResources list a pod with containers. Without containers, the pod is not
// listed.
func (k *Kubelet) setListed(pod string, containers ...*podresourcesapi.ContainerResources) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.listed = slices.DeleteFunc(slices.Clone(k.listed), func(p *podresourcesapi.PodResources) bool { return p.Name == pod })
	if len(containers) > 0 {
		k.listed = append(k.listed, &podresourcesapi.PodResources{Name: pod, Namespace: "default", Containers: containers})
	}
}

// RefuseRegistration makes Register return an error. With nil, Register accepts plugins again.
func (k *Kubelet) RefuseRegistration(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.refuse = err
}

// OnAccepted makes Register call a function after the kubelet has accepted a plugin and before
// Register returns.
func (k *Kubelet) OnAccepted(then func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.taken = then
}

// Attempts returns the number of calls of Register.
func (k *Kubelet) Attempts() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.attempts
}

// AddOwnPod makes PodResources also list the agent's own pod.
func (k *Kubelet) AddOwnPod() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.listed = append(slices.Clone(k.listed), &podresourcesapi.PodResources{Name: "agent", Namespace: "chandler"})
}

// ForgetPods makes PodResources list no pod, like a kubelet that has not received pods from the API
// server.
func (k *Kubelet) ForgetPods() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.listed = nil
}

// MuteListing makes PodResources fail, or answer again.
func (k *Kubelet) MuteListing(silent bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.silent = silent
}

// List implements PodResources.
func (k *Kubelet) List(context.Context, *podresourcesapi.ListPodResourcesRequest) (*podresourcesapi.ListPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.silent {
		return nil, errors.New("not now")
	}
	return &podresourcesapi.ListPodResourcesResponse{PodResources: k.listed}, nil
}

// Sockets returns the paths of Chandler's sockets.
func (k *Kubelet) Sockets() []string {
	paths, err := filepath.Glob(filepath.Join(k.Dir, "chandler-*"))
	if err != nil {
		k.t.Fatal(err)
	}
	return paths
}

// Patience limits the waiting time in tests, on a busy machine too.
const Patience = time.Minute

// EventuallyTrue waits until a condition is true.
func EventuallyTrue(t *testing.T, condition func() bool, state func() string) {
	t.Helper()
	for deadline := time.Now().Add(Patience); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(state())
		}
	}
}

// NeverTrue checks that a condition stays false for some time.
func NeverTrue(t *testing.T, during time.Duration, condition func() bool, state func() string) {
	t.Helper()
	for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if condition() {
			t.Fatal(state())
		}
	}
}
