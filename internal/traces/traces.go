// Package traces creates OpenTelemetry traces of the kubelet's calls and sends them to a
// collector, if the standard environment variables configure a collector. Tracing never blocks
// a call: spans enter a bounded queue, and are dropped when the queue is full.
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

// scope is the instrumentation scope of the spans.
const scope = "chandler.dev"

// stopTimeout limits the time for sending the remaining spans when the agent ends.
const stopTimeout = 2 * time.Second

// IsConfigured reports whether the environment configures a collector.
func IsConfigured() bool {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") || os.Getenv("OTEL_TRACES_EXPORTER") == "none" {
		return false
	}
	return os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}

// Start returns the tracer of an agent, and a function that sends the remaining spans and
// stops tracing. The tracer is nil if no collector is configured. The collector may be
// unavailable.
func Start(ctx context.Context, node, version string) (tracer trace.Tracer, stop func(), err error) {
	if !IsConfigured() {
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
		klog.FromContext(ctx).Error(err, "OTEL_RESOURCE_ATTRIBUTES is invalid; its invalid parts are left out of traces")
	}
	report := &reporter{logger: klog.FromContext(ctx)}
	otel.SetErrorHandler(report)
	provider := sdktrace.NewTracerProvider(sdktrace.WithResource(of), sdktrace.WithBatcher(exporter)) // the queue holds 2,048 spans
	klog.FromContext(ctx).Info("Traces of the kubelet's calls are sent to a collector")
	return provider.Tracer(scope), func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			report.Handle(err)
		}
	}, nil
}

// reporter logs errors of the exporter, but does not repeat the last error.
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

// End ends a span with the result of its stage.
type End func(err error, more ...attribute.KeyValue)

func ignore(error, ...attribute.KeyValue) {}

// Call begins the trace of a call. With a nil tracer, Call and the stages do almost nothing.
func Call(ctx context.Context, tracer trace.Tracer, name string, about ...attribute.KeyValue) (context.Context, End) {
	if tracer == nil {
		return ctx, ignore
	}
	ctx, span := tracer.Start(ctx, name, trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(about...))
	return ctx, endOf(span)
}

// StartStage begins a stage of the traced call in ctx.
func StartStage(ctx context.Context, name string, about ...attribute.KeyValue) (context.Context, End) {
	return StageSince(ctx, name, time.Time{}, about...)
}

// StageSince is like [StartStage] for a stage that began earlier. A zero time means now.
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

// Do runs work as a stage of the traced call.
func Do(ctx context.Context, name string, work func() error) error {
	_, end := StartStage(ctx, name)
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
