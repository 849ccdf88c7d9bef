package driver

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes/fake"
)

// The probe fails if a socket is missing or does not answer.
func TestProbe(t *testing.T) {
	remove := func(t *testing.T, socket string) {
		if err := os.Remove(socket); err != nil {
			t.Fatal(err)
		}
	}
	hang := func(t *testing.T, socket string) {
		remove(t, socket)
		listener, err := net.Listen("unix", socket) // no connection is accepted
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { listener.Close() })
	}
	for name, test := range map[string]struct {
		harm   func(t *testing.T, socket string)
		socket func(d *Driver) string
		want   string
	}{
		"registration removed": {remove, (*Driver).registrarSocket, "DRA registration at "},
		"registration hangs":   {hang, (*Driver).registrarSocket, "DRA registration at "},
		"calls removed":        {remove, draSocket, "DRA calls at "},
		"calls hang":           {hang, draSocket, "DRA calls at "},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.serve(fake.NewClientset())
			eventually(t, "the end of the helper's start", b.serving.Load)
			if err := b.probe(t, 10*time.Second); err != nil {
				t.Fatalf("unharmed: %v", err)
			}
			socket := test.socket(b.Driver)
			test.harm(t, socket)
			if err := b.probe(t, 200*time.Millisecond); err == nil || !strings.HasPrefix(err.Error(), test.want+socket) {
				t.Errorf("got %v; want %q", err, test.want+socket)
			}
		})
	}
}

func draSocket(d *Driver) string { return filepath.Join(d.dataDir(), "dra-pod-uid.sock") }

func (b *bench) probe(t *testing.T, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	return b.Probe(ctx)
}

// The probe succeeds for a driver that does not serve, or waits for the other instance.
func TestProbeOfIdleDriver(t *testing.T) {
	b := newBench(t)
	b.active = make(chan struct{})
	d := b.start()
	if err := d.Probe(t.Context()); err != nil {
		t.Errorf("before it runs: %v", err)
	}
	_, _, stop := b.serve(fake.NewClientset())
	if err := b.probe(t, 10*time.Second); err != nil {
		t.Errorf("while another instance is active: %v", err)
	}
	stop()
	if err := b.Probe(t.Context()); err != nil {
		t.Errorf("after it ran: %v", err)
	}
}

// Without a pod UID the driver registers at the library's default socket.
func TestProbeWithoutPod(t *testing.T) {
	b := newBench(t)
	d := b.start()
	b.open()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	eventually(t, "the registration socket", func() bool { return exists(d.registrarSocket()) })
	eventually(t, "an answer", func() bool { return d.serving.Load() && d.Probe(ctx) == nil })
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
