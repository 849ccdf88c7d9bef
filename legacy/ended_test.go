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

// A kubelet that lists a pod without its ID allocates the ID again. The next pod gets the ID if the
// first has ended, and waits a moment for the API server to confirm the end. It does not get the ID
// while the first pod runs. In this case the kubelet has lost its checkpoint.
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
			config.Poll = kubelettest.Patience // longer than the test, which triggers polls itself
			var allocating atomic.Bool
			var asked atomic.Int32
			config.PodEnded = func(_ context.Context, namespace, pod string) (bool, error) {
				if namespace != "default" || pod != "train" {
					t.Errorf("asked about %s/%s", namespace, pod)
				}
				return allocating.Load() && test.ended(asked.Add(1)), nil
			}
			p := New(config)
			publish(p, gpus("a"))
			run(t, p)
			plugin := k.AwaitPlugin(listtest.Resource, 1)
			plugin.AwaitList(t, "a")
			if _, err := plugin.AllocateIDs("a"); err != nil {
				t.Fatal(err)
			}
			k.HoldIDs("train", listtest.Resource, "a")
			signal(p.pollSoon)
			kubelettest.EventuallyTrue(t, func() bool { _, held := holder(p, "gpu-a"); return held }, func() string { return "it has no consumer" })
			kubelettest.EventuallyTrue(t, func() bool {
				grants := p.config.Ledger.View(nil).OwnGrants()
				return len(grants) == 1 && grants[0].Container == "default/train main"
			}, func() string { return "it is not confirmed" })
			k.LoseIDs("train")
			signal(p.pollSoon)
			kubelettest.EventuallyTrue(t, func() bool { return len(p.config.Ledger.Grants.LostGrants()) == 1 }, func() string { return "it is not lost" })
			allocating.Store(true)
			if _, err := plugin.AllocateIDs("a"); (err == nil) != test.given {
				t.Errorf("allocated again: %v", err)
			}
		})
	}
}

// between calls a function once, after a call has waited for ended pods and before it records its
// grants.
type between struct {
	sdktrace.SpanProcessor

	do      atomic.Pointer[func()]
	done    atomic.Bool
	entered atomic.Bool // the function was called, and the call has tried to record its grants afterwards
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

// A pod returns under its name. PodResources lists it without the ID just after the call for the
// pod has found no forgotten ID. The pod gets the ID nevertheless.
func TestKubeletForgetsAnIDMeanwhile(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	config.Poll = kubelettest.Patience
	var b between
	config.PodEnded = func(context.Context, string, string) (bool, error) { return b.entered.Load(), nil }
	config.Tracer = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(&b)).Tracer("test")
	p := New(config)
	publish(p, gpus("a"))
	run(t, p)
	plugin := k.AwaitPlugin(listtest.Resource, 1)
	plugin.AwaitList(t, "a")
	if _, err := plugin.AllocateIDs("a"); err != nil {
		t.Fatal(err)
	}
	k.HoldIDs("train", listtest.Resource, "a")
	signal(p.pollSoon)
	kubelettest.EventuallyTrue(t, func() bool {
		grants := p.config.Ledger.View(nil).OwnGrants()
		return len(grants) == 1 && grants[0].Container == "default/train main"
	}, func() string { return "it is not confirmed" })
	forget := func() {
		k.LoseIDs("train")
		said, err := config.ListPods(t.Context())
		if err != nil {
			t.Error(err)
		}
		if err := p.config.Ledger.Grants.ObserveListing(time.Now(), said, p.hostStock); err != nil {
			t.Error(err)
		}
		if len(p.config.Ledger.Grants.LostGrants()) != 1 {
			t.Error("it is not lost")
		}
	}
	b.do.Store(&forget)
	if _, err := plugin.AllocateIDs("a"); err != nil {
		t.Error(err)
	}
	if !b.entered.Load() {
		t.Error("nothing was forgotten meanwhile")
	}
}
