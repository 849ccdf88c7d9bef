package sockets

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/legacy/kubelettest"
)

// instance is an agent that serves one resource until it is ended.
type instance struct {
	*Directory

	end      context.CancelFunc
	lingered chan struct{}
}

// begin starts an instance with a successor. After its end the instance lingers.
func begin(t *testing.T, k *kubelettest.Kubelet) *instance {
	t.Helper()
	i := &instance{Directory: New(k.Dir, func() bool { return true }), lingered: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	i.end = cancel
	go func() {
		defer close(i.lingered)
		i.Serve(ctx, gpuResource, lister{}, nil)
		i.Linger(t.Context())
	}()
	t.Cleanup(func() { cancel(); <-i.lingered })
	return i
}

// bothKubelets runs a test with both kinds of kubelets: some identify plugins by name, others by
// name and socket.
func bothKubelets(t *testing.T, test func(t *testing.T, k *kubelettest.Kubelet)) {
	t.Helper()
	for name, byName := range map[string]bool{"1.36": true, "1.37": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := kubelettest.New(t)
			k.ByName = byName
			k.Start()
			test(t, k)
		})
	}
}

// When an instance follows another, the kubelet always has devices, and notices the end of the new
// instance.
func TestReplacedInstance(t *testing.T) {
	t.Parallel()
	bothKubelets(t, func(t *testing.T, k *kubelettest.Kubelet) {
		now := begin(t, k)
		k.AwaitPlugin(gpuResource, 1).AwaitList(t, "a")
		registrations := 1
		for range 3 {
			now.end()
			next := begin(t, k)
			registrations += 2
			last := k.AwaitPlugin(gpuResource, registrations)
			last.AwaitList(t, "a")
			<-now.lingered
			time.Sleep(100 * time.Millisecond) // time for the kubelet to notice a change
			if list, holes := k.Has(gpuResource); list != "a" || holes > 0 {
				t.Fatalf("the kubelet has %q and had nothing %d times", list, holes)
			}
			if !k.NoticesEnd(last) {
				t.Error("the kubelet would not notice the end of the latest plugin")
			}
			kubelettest.EventuallyTrue(t, func() bool { return len(k.Sockets()) == 1 }, func() string { return fmt.Sprint("sockets: ", k.Sockets()) })
			now = next
		}
		var streaming int
		for _, p := range k.Registrations() {
			if !p.HasEnded() {
				streaming++
			}
		}
		if streaming != 2 {
			t.Errorf("%d streams are left of four instances; want two", streaming)
		}
	})
}

// An endpoint that was replaced by another of the same instance still answers calls.
func TestLateCall(t *testing.T) {
	t.Parallel()
	bothKubelets(t, func(t *testing.T, k *kubelettest.Kubelet) {
		first := begin(t, k)
		k.AwaitPlugin(gpuResource, 1).AwaitList(t, "a")
		first.end()
		begin(t, k)
		k.AwaitPlugin(gpuResource, 3).AwaitList(t, "a")
		for i, p := range k.Registrations()[1:] {
			if _, err := p.API.GetDevicePluginOptions(t.Context(), &pluginapi.Empty{}); err != nil {
				t.Errorf("registration %d: %v", i, err)
			}
		}
	})
}

// A slow kubelet may call an ended instance until the kubelet notices the end, since kubelets from
// 1.37 on call any endpoint (pkg/kubelet/cm/devicemanager/manager.go, PluginDisconnected). The next
// instance answers.
func TestKubeletNoticesLate(t *testing.T) {
	t.Parallel()
	bothKubelets(t, func(t *testing.T, k *kubelettest.Kubelet) {
		k.NoticeEnds = make(chan struct{})
		now := begin(t, k)
		first := k.AwaitPlugin(gpuResource, 1)
		first.AwaitList(t, "a")
		now.end()
		begin(t, k)
		kubelettest.EventuallyTrue(t, first.HasEnded, func() string { return "the stream has not ended" })
		if _, err := first.AllocateIDs("a"); err != nil {
			t.Error(err)
		}
		close(k.NoticeEnds)
		<-now.lingered
		if sockets := k.Sockets(); len(sockets) == 0 {
			t.Error("no socket is left")
		}
	})
}

// A plugin whose socket vanishes is registered again, and the kubelet always has devices.
func TestSocketVanishes(t *testing.T) {
	t.Parallel()
	bothKubelets(t, func(t *testing.T, k *kubelettest.Kubelet) {
		i := begin(t, k)
		for n := range 3 {
			registrations := 1 + 2*n
			p := k.AwaitPlugin(gpuResource, registrations)
			p.AwaitList(t, "a")
			kubelettest.EventuallyTrue(t, func() bool { return i.RegisteredSockets()[gpuResource] == filepath.Join(k.Dir, p.Request.Endpoint) }, func() string { return "it is not registered" })
			if err := os.Remove(filepath.Join(k.Dir, p.Request.Endpoint)); err != nil {
				t.Fatal(err)
			}
		}
		last := k.AwaitPlugin(gpuResource, 7)
		last.AwaitList(t, "a")
		if list, holes := k.Has(gpuResource); list != "a" || holes > 0 || !k.NoticesEnd(last) {
			t.Errorf("the kubelet has %q and had nothing %d times", list, holes)
		}
	})
}

// Only the latest stream sends a changed list.
func TestOneStreamSpeaks(t *testing.T) {
	t.Parallel()
	bothKubelets(t, func(t *testing.T, k *kubelettest.Kubelet) {
		first := begin(t, k)
		k.AwaitPlugin(gpuResource, 1).AwaitList(t, "a")
		first.end()
		changes := &changing{list: []string{"a"}, changed: make(chan struct{})}
		d := New(k.Dir, nil)
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		all.Go(func() { d.Serve(ctx, gpuResource, changes, nil) })
		t.Cleanup(func() { cancel(); all.Wait() })
		last := k.AwaitPlugin(gpuResource, 3)
		last.AwaitList(t, "a")
		before := k.Registrations()[1]
		kubelettest.EventuallyTrue(t, func() bool { return changes.streaming() == 1 }, func() string { return fmt.Sprint(changes.streaming(), " streams") })
		changes.set("b")
		last.AwaitList(t, "b")
		if before.LastList() != "a" || before.HasEnded() {
			t.Errorf("the first stream says %s, ended %v", before.LastList(), before.HasEnded())
		}
	})
}

// changing is a plugin with a list that changes.
type changing struct {
	pluginapi.UnimplementedDevicePluginServer

	mu      sync.Mutex
	list    []string
	changed chan struct{}
	streams int
}

func (c *changing) set(ids ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list = ids
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *changing) streaming() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.streams
}

func (c *changing) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

func (c *changing) ListAndWatch(_ *pluginapi.Empty, to grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	add := func(n int) { c.mu.Lock(); defer c.mu.Unlock(); c.streams += n }
	add(1)
	defer add(-1)
	for {
		c.mu.Lock()
		list, changed := slices.Clone(c.list), c.changed
		c.mu.Unlock()
		response := &pluginapi.ListAndWatchResponse{}
		for _, id := range list {
			response.Devices = append(response.Devices, &pluginapi.Device{ID: id, Health: pluginapi.Healthy})
		}
		if err := to.Send(response); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-to.Context().Done():
			return nil
		}
	}
}

// If a kubelet accepts a registration and does not request the list, the plugin is registered
// again.
func TestListIsNotAskedFor(t *testing.T) {
	t.Parallel()
	k := kubelettest.New(t)
	k.Deaf = true
	k.Start()
	d := New(k.Dir, nil)
	d.patience = 50 * time.Millisecond
	serve(t, d)
	k.AwaitPlugin(gpuResource, 2)
	kubelettest.EventuallyTrue(t, func() bool { return len(k.Sockets()) == 1 }, func() string { return fmt.Sprint("sockets: ", k.Sockets()) })
}
