package driver

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"chandler.dev/internal/traces"
)

// Observer receives the duration and the error of a stage of a kubelet call. The operation is
// "prepare" or "unprepare". The stage is one of:
//   - "call": the whole call, with any number of claims;
//   - "read": until the library has read the claims of a prepare call from the API server;
//   - "claim": the driver's part for each claim, which is waiting for another call, checks, record,
//     files and CDI spec.
//
// The rest of a call is the library's own part and, for prepare, the metadata files. An Observer
// may be called from several goroutines at once.
type Observer func(operation, stage string, took time.Duration, err error)

// callBegan is the key of the start time of a call in its context.
type callBegan struct{}

// timeCalls is a gRPC interceptor that measures the kubelet's calls. It ignores calls without
// claims, such as those of [Driver.Probe], and calls of kubelets with an older API than v1.
func (d *Driver) timeCalls(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	operation := "prepare"
	if _, ok := request.(*drapb.NodeUnprepareResourcesRequest); ok {
		operation = "unprepare"
	}
	if r, ok := request.(interface{ GetClaims() []*drapb.Claim }); !ok || len(r.GetClaims()) == 0 {
		return handler(ctx, request)
	}
	began := time.Now()
	ctx, end := traces.Call(ctx, d.config.Tracer, operation)
	response, err := handler(context.WithValue(ctx, callBegan{}, began), request)
	end(err)
	d.config.Observe(operation, "call", time.Since(began), err)
	return response, err
}

// timeRead reports the time until the driver received the claims of a call.
func (d *Driver) timeRead(ctx context.Context) {
	if began, ok := ctx.Value(callBegan{}).(time.Time); ok {
		_, end := traces.StageSince(ctx, "read claims from the API server", began)
		end(nil)
		d.config.Observe("prepare", "read", time.Since(began), nil)
	}
}

// timeClaim does the driver's part for one claim and reports its duration.
func (d *Driver) timeClaim(ctx context.Context, operation string, claim kubeletplugin.NamespacedObject, work func(context.Context) error) error {
	began := time.Now()
	ctx, end := traces.StartStage(ctx, "claim",
		attribute.String("k8s.namespace.name", claim.Namespace), attribute.String("k8s.resourceclaim.name", claim.Name), attribute.String("k8s.resourceclaim.uid", string(claim.UID)))
	err := work(ctx)
	if err != nil {
		end(err, attribute.String("chandler.refusal", string(RefusalOf(err))))
	} else {
		end(nil)
	}
	d.config.Observe(operation, "claim", time.Since(began), err)
	return err
}
