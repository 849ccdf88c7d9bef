// Package traces makes OpenTelemetry traces of the kubelet's calls and sends them to a
// collector, if one is configured by the standard environment variables. It never makes a
// call wait: spans go to a bounded queue, and are dropped when it is full.
package traces

import (
	"context"
	"os"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/klog/v2"
)

// scope names the code that makes the spans.
const scope = "chandler.dev"

// stopTimeout is how long an agent that ends tries to send what it has left.
const stopTimeout = 2 * time.Second

// Configured reports whether the environment names a collector.
func Configured() bool {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") || os.Getenv("OTEL_TRACES_EXPORTER") == "none" {
		return false
	}
	return os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}

// Start returns what makes traces of an agent, and what sends the last of them and stops.
// The tracer is nil if no collector is configured. The collector need not be there.
func Start(ctx context.Context, node, version string) (tracer trace.Tracer, stop func(), err error) {
	if !Configured() {
		return nil, func() {}, nil
	}
	exporter, err := otlptracegrpc.New(ctx)
	if err != nil {
		return nil, nil, err
	}
	of, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithAttributes(
		attribute.String("service.name", "chandler"), attribute.String("service.version", version), attribute.String("k8s.node.name", node),
	), resource.WithFromEnv())
	if err != nil {
		klog.FromContext(ctx).Error(err, "OTEL_RESOURCE_ATTRIBUTES is wrong, and is left out of traces as far as it is")
	}
	report := &reporter{logger: klog.FromContext(ctx)}
	otel.SetErrorHandler(report)
	provider := sdktrace.NewTracerProvider(sdktrace.WithResource(of), sdktrace.WithBatcher(exporter)) // 2,048 spans at most wait
	klog.FromContext(ctx).Info("Traces of the kubelet's calls are sent to a collector")
	return provider.Tracer(scope), func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			report.Handle(err)
		}
	}, nil
}

// reporter logs why traces are not sent, each reason once in a row.
type reporter struct {
	logger klog.Logger
	mu     sync.Mutex
	last   string
}

// Handle implements [otel.ErrorHandler].
func (r *reporter) Handle(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err.Error() != r.last {
		r.last = err.Error()
		r.logger.Info("Traces are not sent", "reason", err.Error())
	}
}

// End ends a span with what became of its stage.
type End func(err error, more ...attribute.KeyValue)

func ignore(error, ...attribute.KeyValue) {}

// Call begins the trace of a call. If the tracer is nil, there is none, and its stages cost
// no more than to find that out.
func Call(ctx context.Context, tracer trace.Tracer, name string, about ...attribute.KeyValue) (context.Context, End) {
	if tracer == nil {
		return ctx, ignore
	}
	ctx, span := tracer.Start(ctx, name, trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(about...))
	return ctx, endOf(span)
}

// Stage begins a part of what is traced.
func Stage(ctx context.Context, name string, about ...attribute.KeyValue) (context.Context, End) {
	return StageSince(ctx, name, time.Time{}, about...)
}

// StageSince is [Stage] for a part that has begun before, now if that is zero.
func StageSince(ctx context.Context, name string, began time.Time, about ...attribute.KeyValue) (context.Context, End) {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return ctx, ignore
	}
	options := []trace.SpanStartOption{trace.WithAttributes(about...)}
	if !began.IsZero() {
		options = append(options, trace.WithTimestamp(began))
	}
	ctx, span := parent.TracerProvider().Tracer(scope).Start(ctx, name, options...)
	return ctx, endOf(span)
}

// Do does a part of what is traced.
func Do(ctx context.Context, name string, work func() error) error {
	_, end := Stage(ctx, name)
	err := work()
	end(err)
	return err
}

func endOf(span trace.Span) End {
	return func(err error, more ...attribute.KeyValue) {
		span.SetAttributes(more...)
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}
