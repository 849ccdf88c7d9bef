package legacy

import (
	"context"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

// A plugin whose socket is silent is named; one whose socket the kubelet has
// removed is not, since its server makes another.
func TestProbe(t *testing.T) {
	k := newKubelet(t)
	k.start()
	p := New(k.config())
	run(t, p)
	if err := p.Probe(t.Context()); err != nil {
		t.Errorf("with nothing to offer: %v", err)
	}
	p.Publish(gpus("a"))
	k.plugin("example.com/gpu", 1)
	eventually(t, func() bool { return len(p.Registered()) == 1 }, func() string { return "nothing is registered" })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := p.Probe(ctx); err != nil {
		t.Errorf("unharmed: %v", err)
	}

	k.stop() // so that nothing is registered anew
	socket := p.Registered()["example.com/gpu"]
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	if err := p.Probe(t.Context()); err != nil {
		t.Errorf("without its socket: %v", err)
	}
	listener, err := net.Listen("unix", socket) // nobody accepts
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
