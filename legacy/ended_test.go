package legacy

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list/listtest"
)

// A kubelet that lists a pod without the ID that it has hands that out again. The
// next pod gets it if the first has ended, and waits a moment for the API server to
// say so. It does not get it if the first runs: that kubelet has lost its checkpoint.
func TestKubeletForgetsAnID(t *testing.T) {
	for name, test := range map[string]struct {
		ended func(asked int32) bool
		given bool
	}{
		"the pod runs":                 {func(int32) bool { return false }, false},
		"the pod has ended":            {func(int32) bool { return true }, true},
		"its end is about to be known": {func(asked int32) bool { return asked > 3 }, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := kubelettest.New(t)
			k.Start()
			config := configFor(k)
			config.Poll = kubelettest.Patience // but for what the test signals
			var allocating atomic.Bool
			var asked atomic.Int32
			config.Ended = func(_ context.Context, namespace, pod string) (bool, error) {
				if namespace != "default" || pod != "train" {
					t.Errorf("asked about %s/%s", namespace, pod)
				}
				return allocating.Load() && test.ended(asked.Add(1)), nil
			}
			p := New(config)
			publish(p, gpus("a"))
			run(t, p)
			plugin := k.Plugin(listtest.Resource, 1)
			plugin.Says(t, "a")
			if _, err := plugin.Allocate("a"); err != nil {
				t.Fatal(err)
			}
			k.Hold("train", listtest.Resource, "a")
			signal(p.ask)
			kubelettest.Eventually(t, func() bool { _, held := holder(p, "gpu-a"); return held }, func() string { return "nobody has it" })
			kubelettest.Eventually(t, func() bool {
				grants := p.config.Ledger.View(nil).Ours()
				return len(grants) == 1 && grants[0].Container == "default/train main"
			}, func() string { return "it is not confirmed" })
			k.Lose("train")
			signal(p.ask)
			kubelettest.Eventually(t, func() bool { return len(p.config.Ledger.Lost()) == 1 }, func() string { return "it is not lost" })
			allocating.Store(true)
			if _, err := plugin.Allocate("a"); (err == nil) != test.given {
				t.Errorf("allocated again: %v", err)
			}
		})
	}
}

// between does something once, after a call has waited for pods that have ended and before
// it enters its grants.
type between struct {
	sdktrace.SpanProcessor

	do      atomic.Pointer[func()]
	done    atomic.Bool
	entered atomic.Bool // it was done, and the call has tried to enter its grants since
}

func (*between) OnStart(context.Context, sdktrace.ReadWriteSpan) {}

func (b *between) OnEnd(span sdktrace.ReadOnlySpan) {
	switch span.Name() {
	case "wait for pods that have ended":
		if do := b.do.Swap(nil); do != nil {
			(*do)()
			b.done.Store(true)
		}
	case "write grants and files":
		b.entered.Store(b.done.Load())
	}
}

// A pod comes again under its name, and PodResources lists it without the ID just when the
// call for it has seen that nothing is forgotten. It gets the ID all the same.
func TestKubeletForgetsAnIDMeanwhile(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	config.Poll = kubelettest.Patience
	var b between
	config.Ended = func(context.Context, string, string) (bool, error) { return b.entered.Load(), nil }
	config.Tracer = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(&b)).Tracer("test")
	p := New(config)
	publish(p, gpus("a"))
	run(t, p)
	plugin := k.Plugin(listtest.Resource, 1)
	plugin.Says(t, "a")
	if _, err := plugin.Allocate("a"); err != nil {
		t.Fatal(err)
	}
	k.Hold("train", listtest.Resource, "a")
	signal(p.ask)
	kubelettest.Eventually(t, func() bool {
		grants := p.config.Ledger.View(nil).Ours()
		return len(grants) == 1 && grants[0].Container == "default/train main"
	}, func() string { return "it is not confirmed" })
	forget := func() {
		k.Lose("train")
		said, err := config.Pods(t.Context())
		if err != nil {
			t.Error(err)
		}
		if err := p.config.Ledger.Observe(time.Now(), said, p.host); err != nil {
			t.Error(err)
		}
		if len(p.config.Ledger.Lost()) != 1 {
			t.Error("it is not lost")
		}
	}
	b.do.Store(&forget)
	if _, err := plugin.Allocate("a"); err != nil {
		t.Error(err)
	}
	if !b.entered.Load() {
		t.Error("nothing was forgotten meanwhile")
	}
}
