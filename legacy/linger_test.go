package legacy

import (
	"context"
	"strings"
	"syscall"
	"testing"
	"time"

	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list/listtest"
	"chandler.dev/legacy/sockets"
)

// retired returns an instance that has ended while another waits to take over. Its sockets remain,
// and the kubelet still has its registration.
func retired(t *testing.T, devices ...string) (*kubelettest.Kubelet, *Plugin, *kubelettest.Plugin) {
	t.Helper()
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	config.Kubelet = sockets.New(k.Dir, func() bool { return true })
	p := New(config)
	publish(p, gpus(devices...))
	stop := run(t, p)
	plugin := k.AwaitPlugin(listtest.Resource, 1)
	plugin.AwaitList(t, strings.Join(devices, " "))
	stop()
	return k, p, plugin
}

// allocating starts a call of Allocate, and returns the channel for its error.
func allocating(plugin *kubelettest.Plugin) <-chan error {
	answer := make(chan error, 1)
	go func() {
		_, err := plugin.AllocateIDs("a")
		answer <- err
	}()
	return answer
}

// An instance that is replaced keeps its sockets until the next one has its own, and forwards calls
// in the meantime. The resource always has a socket.
func TestLinger(t *testing.T) {
	k, old, before := retired(t, "a", "b")
	if before.HasEnded() || len(k.Sockets()) != 1 {
		t.Fatalf("after Run the stream is ended: %v; sockets %q", before.HasEnded(), k.Sockets())
	}
	lingered := make(chan struct{})
	go func() { socketsOf(old).Linger(t.Context()); close(lingered) }()
	answer := allocating(before)

	next := New(configFor(k))
	publish(next, gpus("a", "b"))
	run(t, next)
	if err := <-answer; err != nil {
		t.Fatal(err)
	}
	if who, held := holder(next, "gpu-a"); !held {
		t.Errorf("the next instance does not know who holds what it gave out: %q", who)
	}
	k.AwaitPlugin(listtest.Resource, 2).AwaitList(t, "a b")
	<-lingered
	kubelettest.EventuallyTrue(t, before.HasEnded, func() string { return "the old stream has not ended" })
	if sockets := k.Sockets(); len(sockets) != 1 || sockets[0] != socketsOf(next).RegisteredSockets()[listtest.Resource] {
		t.Errorf("sockets %q are left", sockets)
	}
}

// A call waits until the next instance listens. The file of its socket exists a moment before.
func TestLingerUntilTheNextListens(t *testing.T) {
	k, old, before := retired(t, "a")
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	bound := strings.TrimSuffix(k.Sockets()[0], ".sock") + "0.sock"
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: bound}); err != nil {
		t.Fatal(err)
	}
	go socketsOf(old).Linger(t.Context())
	answer := allocating(before)
	select {
	case err := <-answer:
		t.Fatalf("the call ended without a listener: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	next := New(configFor(k))
	publish(next, gpus("a"))
	run(t, next)
	if err := <-answer; err != nil {
		t.Error(err)
	}
}

// If no instance follows, waiting ends with the context, and no socket remains.
func TestLingerInVain(t *testing.T) {
	k, p, plugin := retired(t, "a")
	answer := allocating(plugin)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	socketsOf(p).Linger(ctx)
	if err := <-answer; err == nil {
		t.Error("a device was allocated without an agent")
	}
	if sockets := k.Sockets(); len(sockets) > 0 {
		t.Errorf("sockets %q are left", sockets)
	}
}
