package legacy

import (
	"context"
	"testing"
	"time"
)

// An instance that is replaced keeps its sockets until the next one has its own,
// and lets that one answer meanwhile. At no time is there none.
func TestLinger(t *testing.T) {
	k := newKubelet(t)
	k.start()
	config := k.config()
	config.Succeeded = func() bool { return true }
	old := New(config)
	old.Publish(gpus("a", "b"))
	stop := run(t, old)
	before := k.plugin(gpuResource, 1)
	before.says(t, "a b")
	stop()
	if before.hasEnded() || len(k.sockets()) != 1 {
		t.Fatalf("after Run the stream is ended: %v; sockets %q", before.hasEnded(), k.sockets())
	}
	lingered := make(chan struct{})
	go func() { old.Linger(t.Context()); close(lingered) }()
	answer := make(chan error, 1)
	go func() {
		_, err := before.allocate("a")
		answer <- err
	}()

	next := New(k.config())
	next.Publish(gpus("a", "b"))
	run(t, next)
	if err := <-answer; err != nil {
		t.Fatal(err)
	}
	if who, held := next.Holder("gpu-a"); !held {
		t.Errorf("the next instance does not know who holds what it gave out: %q", who)
	}
	k.plugin(gpuResource, 2).says(t, "a b")
	<-lingered
	eventually(t, before.hasEnded, func() string { return "the old stream has not ended" })
	if sockets := k.sockets(); len(sockets) != 1 || sockets[0] != next.Registered()[gpuResource] {
		t.Errorf("sockets %q are left", sockets)
	}
}

// If no instance follows after all, nothing is waited for longer than the
// context says, nor left.
func TestLingerInVain(t *testing.T) {
	k := newKubelet(t)
	k.start()
	config := k.config()
	config.Succeeded = func() bool { return true }
	p := New(config)
	p.Publish(gpus("a"))
	stop := run(t, p)
	plugin := k.plugin(gpuResource, 1)
	plugin.says(t, "a")
	stop()
	answer := make(chan error, 1)
	go func() {
		_, err := plugin.allocate("a")
		answer <- err
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	p.Linger(ctx)
	if err := <-answer; err == nil {
		t.Error("a device was given out by nobody")
	}
	if sockets := k.sockets(); len(sockets) > 0 {
		t.Errorf("sockets %q are left", sockets)
	}
}

// A server that leaves waits for calls in flight.
func TestRetire(t *testing.T) {
	s := newServer(gpuResource, grace, nil)
	end, ok := s.begin()
	if !ok {
		t.Fatal("a call is refused")
	}
	idle := s.retire()
	select {
	case <-idle:
		t.Error("it is idle while a call is in flight")
	default:
	}
	if _, ok := s.begin(); ok {
		t.Error("another call is let in")
	}
	end()
	<-idle
}

// The newest socket is that of the resource itself.
func TestNewestSocket(t *testing.T) {
	k := newKubelet(t)
	dir := directory(k.dir)
	var paths []string
	for _, resource := range []string{gpuResource, gpuResource, gpuResource + "-large", "example.com/gp"} {
		listener, err := dir.listen(resource)
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		paths = append(paths, listener.Addr().String())
	}
	if got := dir.newest(gpuResource); got != paths[1] {
		t.Errorf("newest is %s; want %s", got, paths[1])
	}
	if got := dir.newest("example.com/none"); got != "" {
		t.Errorf("newest of none is %s", got)
	}
}
