package legacy

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list/listtest"
)

// Calls and lists are observed with their errors, and Allocate is traced.
func TestCallsAreObserved(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	var mu sync.Mutex
	seen := make(map[string]int)
	config.Observe = func(operation Operation, took time.Duration, err error) {
		mu.Lock()
		defer mu.Unlock()
		what := string(operation)
		switch {
		case took < 0:
			t.Errorf("%s took %s", operation, took)
		case errors.Is(err, ErrUnavailable):
			what += " unavailable"
		case err != nil:
			what += " error"
		}
		seen[what]++
	}
	spans := tracetest.NewSpanRecorder()
	config.Tracer = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("test")
	p := New(config)
	publish(p, listtest.Snapshot(listtest.GPU("a"), listtest.GPU("b")))
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a b")
	if _, err := registered.AllocateIDs("a"); err != nil {
		t.Fatal(err)
	}
	if _, err := registered.AllocateIDs("x"); err == nil {
		t.Error("an unknown ID is given")
	}
	mu.Lock()
	defer mu.Unlock()
	for _, want := range []string{"list-sent", "allocate", "allocate unavailable"} {
		if seen[want] == 0 {
			t.Errorf("%s was not observed: %v", want, seen)
		}
	}
	var names []string
	for _, s := range spans.Ended() {
		names = append(names, s.Name())
	}
	if want := []string{"wait for pods that have ended", "write grants and files", "allocate", "allocate"}; !slices.Equal(names, want) {
		t.Errorf("spans %q, want %q", names, want)
	}
}
