package legacy

import (
	"context"
	"errors"
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

	"chandler.dev/discovery"
	"chandler.dev/internal/kubeletapi"
)

// kubelet stands in for the kubelet: its registration service, one connection
// for each registered plugin, and PodResources. It keeps to what is in
// pkg/kubelet/cm/devicemanager of k8s.io/kubernetes.
type kubelet struct {
	pluginapi.UnimplementedRegistrationServer
	podresourcesapi.UnimplementedPodResourcesListerServer

	t    *testing.T
	dir  string // device-plugins
	pods string // the socket of PodResources

	podServer *grpc.Server
	server    *grpc.Server

	mu       sync.Mutex
	plugins  []*plugin
	refuse   error // what Register answers
	attempts int   // calls of Register
	listed   []*podresourcesapi.PodResources
	silent   bool // PodResources fails
}

// plugin is a registration that the kubelet has taken.
type plugin struct {
	request *pluginapi.RegisterRequest
	options *pluginapi.DevicePluginOptions
	conn    *grpc.ClientConn
	api     pluginapi.DevicePluginClient
	at      time.Time

	mu    sync.Mutex
	lists []string // what ListAndWatch said, as text
	ended bool
}

func newKubelet(t *testing.T) *kubelet {
	t.Helper()
	dir, err := os.MkdirTemp("", "k") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	k := &kubelet{t: t, dir: filepath.Join(dir, "dp"), pods: filepath.Join(dir, "pods.sock")}
	k.own()
	if err := os.Mkdir(k.dir, 0o750); err != nil {
		t.Fatal(err)
	}
	k.podServer = grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(k.podServer, k)
	serve(t, k.podServer, k.pods)
	t.Cleanup(k.podServer.Stop)
	t.Cleanup(k.stop)
	return k
}

func serve(t *testing.T, server *grpc.Server, socket string) {
	t.Helper()
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.Serve(listener) }()
}

// start does what the kubelet does when it starts: it removes all sockets,
// then makes its own.
func (k *kubelet) start() {
	k.t.Helper()
	entries, err := os.ReadDir(k.dir)
	if err != nil {
		k.t.Fatal(err)
	}
	for _, entry := range entries {
		if entry.Type() == os.ModeSocket {
			if err := os.Remove(filepath.Join(k.dir, entry.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
				k.t.Fatal(err)
			}
		}
	}
	k.server = grpc.NewServer()
	pluginapi.RegisterRegistrationServer(k.server, k)
	serve(k.t, k.server, filepath.Join(k.dir, kubeletSocket))
}

// stop ends the kubelet and leaves its socket, as a kill does.
func (k *kubelet) stop() {
	if k.server == nil {
		return
	}
	k.server.Stop()
	k.server = nil
	for _, p := range k.registered() {
		p.conn.Close()
	}
}

func (k *kubelet) Register(ctx context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	k.mu.Lock()
	refuse := k.refuse
	k.attempts++
	k.mu.Unlock()
	if refuse != nil {
		return nil, refuse
	}
	conn, err := kubeletapi.Dial(filepath.Join(k.dir, r.Endpoint))
	if err != nil {
		return nil, err
	}
	p := &plugin{request: r, conn: conn, api: pluginapi.NewDevicePluginClient(conn), at: time.Now()}
	// The kubelet asks for the options before it answers: a plugin that
	// registers before it serves fails here.
	if p.options, err = p.api.GetDevicePluginOptions(ctx, &pluginapi.Empty{}); err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.plugins = append(k.plugins, p)
	go p.watch(k.t)
	return &pluginapi.Empty{}, nil
}

// watch collects what ListAndWatch says.
func (p *plugin) watch(t *testing.T) {
	stream, err := p.api.ListAndWatch(t.Context(), &pluginapi.Empty{})
	for err == nil {
		var response *pluginapi.ListAndWatchResponse
		if response, err = stream.Recv(); err == nil {
			p.mu.Lock()
			p.lists = append(p.lists, text(response.Devices))
			p.mu.Unlock()
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
}

// text says a list shortly: "a b! c@0" where b is unhealthy and c is on NUMA
// node 0.
func text(devices []*pluginapi.Device) string {
	var words []string
	for _, d := range devices {
		word := d.ID
		if d.Health != pluginapi.Healthy {
			word += "!"
		}
		for _, node := range d.GetTopology().GetNodes() {
			word += "@" + string(rune('0'+node.ID))
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

func (p *plugin) said() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.lists)
}

func (p *plugin) last() string {
	if lists := p.said(); len(lists) > 0 {
		return lists[len(lists)-1]
	}
	return "(nothing)"
}

func (p *plugin) hasEnded() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended
}

func (k *kubelet) registered() []*plugin {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.plugins)
}

// plugin waits until there are n registrations of a resource, and returns the
// last of them.
func (k *kubelet) plugin(resource string, n int) *plugin {
	k.t.Helper()
	var own []*plugin
	eventually(k.t, func() bool {
		own = nil
		for _, p := range k.registered() {
			if p.request.ResourceName == resource {
				own = append(own, p)
			}
		}
		return len(own) >= n
	}, func() string { return resource + " is not registered" })
	return own[len(own)-1]
}

// says waits until the last list is as it should be.
func (p *plugin) says(t *testing.T, want string) {
	t.Helper()
	eventually(t, func() bool { return p.last() == want }, func() string { return "list is " + p.last() + ", want " + want })
}

// allocate calls Allocate for one container.
func (p *plugin) allocate(ids ...string) (*pluginapi.ContainerAllocateResponse, error) {
	r, err := p.api.Allocate(context.Background(), &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if err != nil {
		return nil, err
	}
	return r.ContainerResponses[0], nil
}

// hold makes PodResources list a container of a pod "default/<pod>" called
// "main" that has IDs, or none.
func (k *kubelet) hold(pod, resource string, ids ...string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.listed = slices.DeleteFunc(slices.Clone(k.listed), func(p *podresourcesapi.PodResources) bool { return p.Name == pod })
	if len(ids) > 0 {
		k.listed = append(k.listed, &podresourcesapi.PodResources{
			Name: pod, Namespace: "default",
			Containers: []*podresourcesapi.ContainerResources{{
				Name:    "main",
				Devices: []*podresourcesapi.ContainerDevices{{ResourceName: resource, DeviceIds: ids}},
			}},
		})
	}
}

// own makes PodResources list the agent's own pod too.
func (k *kubelet) own() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.listed = append(slices.Clone(k.listed), &podresourcesapi.PodResources{Name: "agent", Namespace: "chandler"})
}

// forget makes PodResources list no pod, as before the API server has told the
// kubelet of any.
func (k *kubelet) forget() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.listed = nil
}

// mute makes PodResources fail.
func (k *kubelet) mute(silent bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.silent = silent
}

func (k *kubelet) List(context.Context, *podresourcesapi.ListPodResourcesRequest) (*podresourcesapi.ListPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.silent {
		return nil, errors.New("not now")
	}
	return &podresourcesapi.ListPodResourcesResponse{PodResources: k.listed}, nil
}

// sockets returns the names of our sockets.
func (k *kubelet) sockets() []string {
	paths, err := filepath.Glob(filepath.Join(k.dir, socketPrefix+"*"))
	if err != nil {
		k.t.Fatal(err)
	}
	return paths
}

const patience = 10 * time.Second

func eventually(t *testing.T, condition func() bool, state func() string) {
	t.Helper()
	for deadline := time.Now().Add(patience); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(state())
		}
	}
}

// never checks that a condition does not come true for a while.
func never(t *testing.T, during time.Duration, condition func() bool, state func() string) {
	t.Helper()
	for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if condition() {
			t.Fatal(state())
		}
	}
}

// holders is what the other API holds.
type holders struct {
	mu   sync.Mutex
	held map[string]string
}

func (h *holders) Holder(silicon string) (string, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	holder, held := h.held[silicon]
	return holder, held
}

func (h *holders) set(silicon, holder string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held == nil {
		h.held = make(map[string]string)
	}
	if h.held[silicon] = holder; holder == "" {
		delete(h.held, silicon)
	}
}

// grace is short: what must not happen within it is tested in list_test.go
// without a clock.
const grace = 150 * time.Millisecond

// config is for tests: it keeps to the kubelet's directories and is quick.
func (k *kubelet) config() Config {
	return Config{
		Dir:          k.dir,
		PodResources: k.pods,
		StateDir:     filepath.Join(filepath.Dir(k.dir), "state"),
		OwnPod:       "chandler/agent",
		Grace:        grace,
		Retry:        20 * time.Millisecond,
		Poll:         20 * time.Millisecond,
		Unconfirmed:  200 * time.Millisecond,
	}
}

// run runs a plugin and returns how to end it.
func run(t *testing.T, p *Plugin) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { p.Run(ctx); close(ended) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(patience):
			t.Error("run does not end")
		}
	})
	t.Cleanup(stop)
	return stop
}

// gpus returns a snapshot of devices "gpu-<id>" with one ID of example.com/gpu
// each.
func gpus(ids ...string) *discovery.Snapshot {
	s := &discovery.Snapshot{}
	for _, id := range ids {
		s.Devices = append(s.Devices, gpu(id))
	}
	return s
}
