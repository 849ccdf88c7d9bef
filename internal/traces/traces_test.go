package traces

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
)

// receiver is a collector.
type receiver struct {
	collector.UnimplementedTraceServiceServer
	mu       sync.Mutex
	spans    []*trace.Span
	resource map[string]string
}

// Export implements the collector's service.
func (r *receiver) Export(_ context.Context, request *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, of := range request.ResourceSpans {
		for _, a := range of.Resource.Attributes {
			r.resource[a.Key] = a.Value.GetStringValue()
		}
		for _, scope := range of.ScopeSpans {
			r.spans = append(r.spans, scope.Spans...)
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

// tree returns each span's name, preceded by the names of its ancestors.
func (r *receiver) tree() []string {
	byID := make(map[string]*trace.Span)
	for _, s := range r.spans {
		byID[string(s.SpanId)] = s
	}
	var lines []string
	for _, s := range r.spans {
		line := s.Name
		for up := byID[string(s.ParentSpanId)]; up != nil; up = byID[string(up.ParentSpanId)] {
			line = up.Name + " / " + line
		}
		if s.Status.GetMessage() != "" {
			line += ": " + s.Status.Message
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return lines
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// configure sets the environment variables as an administrator would.
func configure(t *testing.T, l net.Listener) {
	t.Helper()
	t.Setenv("OTEL_SDK_DISABLED", "")
	t.Setenv("OTEL_TRACES_EXPORTER", "")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+l.Addr().String())
}

// work has the stages of a call.
func work(ctx context.Context, began func(context.Context) (context.Context, End)) {
	ctx, end := began(ctx)
	_, read := StageSince(ctx, "read", time.Now().Add(-time.Second))
	read(nil)
	claim, done := StartStage(ctx, "claim", attribute.String("name", "c"))
	_ = Do(claim, "look up", func() error { return nil })
	_ = Do(claim, "write", func() error { return errors.New("disk full") })
	done(errors.New("disk full"), attribute.String("chandler.refusal", "disk"))
	end(nil)
}

func TestCollectorIsSentTraces(t *testing.T) {
	l := listen(t)
	configure(t, l)
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
	got := &receiver{resource: make(map[string]string)}
	server := grpc.NewServer()
	collector.RegisterTraceServiceServer(server, got)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)

	tracer, stop, err := Start(t.Context(), "worker", "v1")
	if err != nil || tracer == nil {
		t.Fatalf("%v, %v", tracer, err)
	}
	work(t.Context(), func(ctx context.Context) (context.Context, End) { return Call(ctx, tracer, "prepare") })
	stop() // sends the remaining spans
	want := []string{"prepare", "prepare / claim / look up", "prepare / claim / write: disk full", "prepare / claim: disk full", "prepare / read"}
	if lines := got.tree(); !slices.Equal(lines, want) {
		t.Errorf("got %q, want %q", lines, want)
	}
	for key, value := range map[string]string{"service.name": "chandler", "service.version": "v1", "k8s.node.name": "worker", "deployment.environment.name": "lab"} {
		if got.resource[key] != value {
			t.Errorf("%s is %q, want %q", key, got.resource[key], value)
		}
	}
}

// A collector that never answers or is unreachable does not delay calls, and delays the end of
// the agent for a limited time only.
func TestCollectorIsDown(t *testing.T) {
	silent, closed := listen(t), listen(t)
	_ = closed.Close()
	for name, l := range map[string]net.Listener{"silent": silent, "closed": closed} {
		t.Run(name, func(t *testing.T) {
			configure(t, l)
			// A call that waits for the collector waits for this long.
			t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600000")
			t.Setenv("OTEL_BSP_EXPORT_TIMEOUT", "3600000")
			began := time.Now()
			tracer, stop, err := Start(t.Context(), "worker", "v1")
			if err != nil {
				t.Fatal(err)
			}
			var slowest time.Duration
			for range 5000 { // more than the queue can hold
				before := time.Now()
				work(t.Context(), func(ctx context.Context) (context.Context, End) { return Call(ctx, tracer, "prepare") })
				slowest = max(slowest, time.Since(before))
			}
			if slowest > time.Minute {
				t.Errorf("a call waited %s", slowest)
			}
			before := time.Now()
			stop()
			if took := time.Since(before); took > stopTimeout+time.Minute {
				t.Errorf("the end waited %s", took)
			}
			t.Logf("slowest call %s, all %s", slowest, time.Since(began))
		})
	}
}

// Without a collector there are no traces, and stages allocate no memory.
func TestNotConfigured(t *testing.T) {
	for _, env := range []map[string]string{
		{},
		{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_SDK_DISABLED": "true"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_TRACES_EXPORTER": "none"},
	} {
		t.Run(fmt.Sprint(env), func(t *testing.T) {
			for name := range strings.FieldsSeq("OTEL_EXPORTER_OTLP_ENDPOINT OTEL_EXPORTER_OTLP_TRACES_ENDPOINT OTEL_SDK_DISABLED OTEL_TRACES_EXPORTER") {
				t.Setenv(name, env[name])
			}
			tracer, stop, err := Start(t.Context(), "worker", "v1")
			if tracer != nil || err != nil {
				t.Fatalf("%v, %v", tracer, err)
			}
			stop()
		})
	}
	ctx := t.Context()
	if n := testing.AllocsPerRun(100, func() {
		ctx, end := Call(ctx, nil, "prepare")
		_, done := StartStage(ctx, "claim")
		done(nil)
		end(nil)
	}); n != 0 {
		t.Errorf("%g allocations", n)
	}
}
