package sockets

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"google.golang.org/grpc"

	"chandler.dev/legacy/kubelettest"
)

const gpuResource = "example.com/gpu"

// lister is a plugin with a constant list.
type lister struct {
	pluginapi.UnimplementedDevicePluginServer
}

func (lister) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

func (lister) ListAndWatch(_ *pluginapi.Empty, to grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	if err := to.Send(&pluginapi.ListAndWatchResponse{Devices: []*pluginapi.Device{{ID: "a", Health: pluginapi.Healthy}}}); err != nil {
		return err
	}
	<-to.Context().Done()
	return nil
}

func (lister) Allocate(_ context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	return &pluginapi.AllocateResponse{ContainerResponses: make([]*pluginapi.ContainerAllocateResponse, len(r.ContainerRequests))}, nil
}

// serve serves a resource until the test ends.
func serve(t *testing.T, d *Directory) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { d.Serve(ctx, gpuResource, lister{}, nil) })
	t.Cleanup(func() { cancel(); all.Wait() })
}

// watch runs the directory until the test ends.
func watch(t *testing.T, d *Directory) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { d.Run(ctx) })
	t.Cleanup(func() { cancel(); all.Wait() })
}

func TestKubeletIsAbsentAtStart(t *testing.T) {
	t.Parallel()
	for name, dir := range map[string]bool{"directory is there": true, "directory is not": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := kubelettest.New(t)
			if !dir {
				os.Remove(k.Dir)
			}
			p := New(k.Dir, nil)
			serve(t, p)
			watch(t, p)
			time.Sleep(300 * time.Millisecond)
			if !dir {
				if err := os.Mkdir(k.Dir, 0o750); err != nil {
					t.Fatal(err)
				}
			}
			k.Start()
			started := time.Now()
			t.Logf("registered %v after the kubelet came", k.AwaitPlugin(gpuResource, 1).At.Sub(started))
		})
	}
}

func TestKubeletRestarts(t *testing.T) {
	t.Parallel()
	for name, inotify := range map[string]bool{"with inotify": true, "by looking": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := kubelettest.New(t)
			k.Start()
			p := New(k.Dir, nil)
			serve(t, p)
			if inotify {
				watch(t, p)
			}
			names := map[string]bool{k.AwaitPlugin(gpuResource, 1).Request.Endpoint: true}
			for n := 2; n <= 4; n++ {
				k.Stop()
				time.Sleep(time.Duration(n) * 150 * time.Millisecond)
				k.Start()
				started := time.Now()
				again := k.AwaitPlugin(gpuResource, n)
				again.AwaitList(t, "a")
				t.Logf("registered %v after the kubelet came back", again.At.Sub(started))
				if names[again.Request.Endpoint] {
					t.Errorf("socket %s was used before", again.Request.Endpoint)
				}
				names[again.Request.Endpoint] = true
			}
			kubelettest.EventuallyTrue(t, func() bool { return len(k.Sockets()) == 1 }, func() string { return fmt.Sprint("sockets: ", k.Sockets()) })
		})
	}
}

func TestRegisterAgain(t *testing.T) {
	t.Parallel()
	tests := map[string]func(t *testing.T, k *kubelettest.Kubelet, first *kubelettest.Plugin){
		"stream ends": func(_ *testing.T, _ *kubelettest.Kubelet, first *kubelettest.Plugin) { first.Conn.Close() },
		"socket vanishes": func(t *testing.T, k *kubelettest.Kubelet, first *kubelettest.Plugin) {
			if err := os.Remove(filepath.Join(k.Dir, first.Request.Endpoint)); err != nil {
				t.Error(err)
			}
		},
		"kubelet's socket is another": func(t *testing.T, k *kubelettest.Kubelet, _ *kubelettest.Plugin) {
			if err := os.Remove(filepath.Join(k.Dir, kubeletSocket)); err != nil {
				t.Error(err)
			}
			kubelettest.Serve(t, k.Server, filepath.Join(k.Dir, kubeletSocket))
		},
	}
	for name, disturb := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := kubelettest.New(t)
			k.Start()
			p := New(k.Dir, nil)
			serve(t, p)
			watch(t, p)
			first := k.AwaitPlugin(gpuResource, 1)
			first.AwaitList(t, "a")
			disturb(t, k, first)
			disturbed := time.Now()
			second := k.AwaitPlugin(gpuResource, 2)
			second.AwaitList(t, "a")
			if second.Request.Endpoint == first.Request.Endpoint {
				t.Error("the socket has the same name")
			}
			t.Logf("took %v", second.At.Sub(disturbed))
			kubelettest.EventuallyTrue(t, first.HasEnded, func() string { return "the first stream has not ended" })
			// On a busy machine one disturbance may be detected twice.
			registrations := 0
			kubelettest.EventuallyTrue(t, func() bool {
				before := registrations
				registrations = len(k.Registrations())
				time.Sleep(300 * time.Millisecond)
				return registrations == before && registrations == len(k.Registrations()) && registrations <= 3
			}, func() string { return fmt.Sprintf("registered %d times, and again", registrations) })
		})
	}
}

func TestRefusedRegistrationIsNotHurried(t *testing.T) {
	t.Parallel()
	k := kubelettest.New(t)
	k.RefuseRegistration(status.Error(codes.Unknown, "no such resource here"))
	k.Start()
	p := New(k.Dir, nil)
	serve(t, p)
	watch(t, p)
	time.Sleep(1600 * time.Millisecond) // attempts at 0, 0.1, 0.3, 0.7 and 1.5 s, or later
	if n := k.Attempts(); n < 1 || n > 5 {
		t.Errorf("%d attempts", n)
	}
	k.Stop()
	k.RefuseRegistration(nil)
	k.Start()
	started := time.Now()
	t.Logf("registered %v after another kubelet came", k.AwaitPlugin(gpuResource, 1).At.Sub(started))
}

func TestNoSocketIsMadeForAKubeletThatIsAway(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := New(file, nil).register(t.Context(), &plugin{resource: gpuResource, server: lister{}})
	if !errors.As(err, new(unavailable)) {
		t.Errorf("register: %v", err)
	}
}

func TestSocketsLeftBehind(t *testing.T) {
	t.Parallel()
	k := kubelettest.New(t)
	leave := func(name string, dead bool) {
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(k.Dir, name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		listener.SetUnlinkOnClose(!dead)
		if dead {
			listener.Close()
		}
		t.Cleanup(func() { listener.Close() })
	}
	leave("chandler-dead-1.sock", true)
	leave("chandler-live-1.sock", false)
	leave("other-dead.sock", true)
	if err := os.WriteFile(filepath.Join(k.Dir, "chandler-file.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	watch(t, New(k.Dir, nil))
	gone := func(name string) bool {
		_, err := os.Lstat(filepath.Join(k.Dir, name))
		return err != nil
	}
	kubelettest.EventuallyTrue(t, func() bool { return gone("chandler-dead-1.sock") }, func() string { return "the dead socket is left" })
	for _, name := range []string{"chandler-live-1.sock", "other-dead.sock", "chandler-file.sock"} {
		if gone(name) {
			t.Errorf("%s was removed", name)
		}
	}
}

func TestSocketNameFits(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", strings.Repeat("d", 40))
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	names := make(map[string]bool)
	for range 3 {
		listener, err := directory(dir).listen("example.com/" + strings.Repeat("long-", 12))
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		name := listener.Addr().String()
		if len(name) > maxSocketPath || names[name] || strings.Count(strings.TrimPrefix(name, dir), "/") != 1 {
			t.Errorf("%s, %d long", name, len(name))
		}
		names[name] = true
	}
}

// A retired endpoint waits for running calls.
func TestRetire(t *testing.T) {
	t.Parallel()
	e := &endpoint{}
	if !e.begin() {
		t.Fatal("a call is refused")
	}
	idle := e.retireEndpoint()
	select {
	case <-idle:
		t.Error("it is idle while a call is in flight")
	default:
	}
	if e.begin() {
		t.Error("another call is let in")
	}
	e.endCall()
	<-idle
}

// The newest socket belongs to the resource itself, not to a resource with a similar name.
func TestNewestSocket(t *testing.T) {
	t.Parallel()
	k := kubelettest.New(t)
	dir := directory(k.Dir)
	var paths []string
	for _, resource := range []string{gpuResource, gpuResource, gpuResource + "-large", "example.com/gp"} {
		listener, err := dir.listen(resource)
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		paths = append(paths, listener.Addr().String())
	}
	if got := dir.newestSocket(gpuResource); got != paths[1] {
		t.Errorf("newest is %s; want %s", got, paths[1])
	}
	if got := dir.newestSocket("example.com/none"); got != "" {
		t.Errorf("newest of none is %s", got)
	}
}

// The probe names a plugin whose socket does not answer. A plugin whose socket was removed is no
// error, since its server creates another.
func TestProbe(t *testing.T) {
	t.Parallel()
	k := kubelettest.New(t)
	k.Start()
	p := New(k.Dir, nil)
	watch(t, p)
	if err := p.Probe(t.Context()); err != nil {
		t.Errorf("with nothing to offer: %v", err)
	}
	serve(t, p)
	k.AwaitPlugin("example.com/gpu", 1)
	kubelettest.EventuallyTrue(t, func() bool { return len(p.RegisteredSockets()) == 1 }, func() string { return "nothing is registered" })
	ctx, cancel := context.WithTimeout(t.Context(), kubelettest.Patience)
	defer cancel()
	if err := p.Probe(ctx); err != nil {
		t.Errorf("unharmed: %v", err)
	}

	k.Stop() // prevents another registration
	socket := p.RegisteredSockets()["example.com/gpu"]
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	if err := p.Probe(t.Context()); err != nil {
		t.Errorf("without its socket: %v", err)
	}
	listener, err := net.Listen("unix", socket) // no connection is accepted
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := p.Probe(ctx); err == nil || !strings.Contains(err.Error(), "example.com/gpu at "+socket) {
		t.Errorf("got %v; want one that names the resource and the socket", err)
	}
}

// A plugin is registered soon after a directory becomes writable.
func TestDirectoryIsNotWritableForAWhile(t *testing.T) {
	t.Parallel()
	k := kubelettest.New(t)
	if err := errors.Join(os.Remove(k.Dir), os.WriteFile(k.Dir, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	p := New(k.Dir, nil)
	serve(t, p)
	time.Sleep(2 * maxUnavailable)
	if err := errors.Join(os.Remove(k.Dir), os.Mkdir(k.Dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	k.Start()
	k.AwaitPlugin(gpuResource, 1).AwaitList(t, "a")

	r := retry{delay: firstRetry}
	for range 20 {
		if wait := r.failed(p.dir, p.dir.explainError(syscall.EROFS)); wait > maxUnavailable {
			t.Fatalf("a read-only directory is tried again after %s", wait)
		}
	}
}

// Earlier versions tested whether the directory is writable, and left a file if they were killed in
// the test.
func TestTrialsLeftBehind(t *testing.T) {
	t.Parallel()
	k := kubelettest.New(t)
	trial, other := filepath.Join(k.Dir, ".chandler-1234"), filepath.Join(k.Dir, ".other-1234")
	if err := errors.Join(os.WriteFile(trial, nil, 0o600), os.WriteFile(other, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	watch(t, New(k.Dir, nil))
	kubelettest.EventuallyTrue(t, func() bool { _, err := os.Lstat(trial); return errors.Is(err, fs.ErrNotExist) }, func() string { return "the file is left" })
	if _, err := os.Lstat(other); err != nil {
		t.Errorf("another's file is removed: %v", err)
	}
}

// An agent that ends while the kubelet answers its registration keeps serving the accepted
// endpoint.
func TestEndWhileRegistering(t *testing.T) {
	t.Parallel()
	k := kubelettest.New(t)
	k.Start()
	ctx, cancel := context.WithCancel(t.Context())
	k.OnAccepted(func() { cancel(); time.Sleep(50 * time.Millisecond) })
	p := New(k.Dir, func() bool { return true })
	p.Serve(ctx, gpuResource, lister{}, nil)
	if taken := k.AwaitPlugin(gpuResource, 1); taken.HasEnded() || len(k.Sockets()) != 1 {
		t.Errorf("the stream is ended: %v; sockets %q", taken.HasEnded(), k.Sockets())
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	p.Linger(ctx)
}

// If the process at the kubelet's socket is not a kubelet, or does not support device plugins,
// registration fails and leaves no socket. The error names the resource, the step and the kubelet's
// socket. The next kubelet is registered with.
func TestWhatIsNoKubelet(t *testing.T) {
	t.Parallel()
	for does, want := range map[kubelettest.Odds]string{
		kubelettest.Gone:    "connection refused",
		kubelettest.Garbage: "Unavailable",
		kubelettest.HangsUp: "Unavailable",
		kubelettest.Silent:  "the kubelet does not answer",
		"not supported":     "the kubelet takes no device plugins of version v1beta1",
	} {
		t.Run(string(does), func(t *testing.T) {
			t.Parallel()
			k := kubelettest.New(t)
			socket := filepath.Join(k.Dir, kubeletSocket)
			var stop func()
			if does == "not supported" {
				server := grpc.NewServer()
				kubelettest.Serve(t, server, socket)
				stop = server.Stop
			} else {
				stop = kubelettest.ServeOdd(t, socket, does)
			}
			d := New(k.Dir, nil)
			limit := kubelettest.Patience
			if does == kubelettest.Silent {
				limit = 200 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			_, err := d.register(ctx, &plugin{resource: gpuResource, server: lister{}})
			if err == nil {
				t.Fatal("registered")
			}
			for _, want := range []string{"register " + gpuResource, socket, want} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is not in: %v", want, err)
				}
			}
			if left := k.Sockets(); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
			serve(t, d)
			watch(t, d)
			time.Sleep(50 * time.Millisecond) // time for an attempt
			stop()
			k.Start()
			if said := k.AwaitPlugin(gpuResource, 1); said.Request.ResourceName != gpuResource {
				t.Errorf("registered: %v", said.Request)
			}
		})
	}
}
