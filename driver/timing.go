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

// Observer is told how long a stage of one of the kubelet's calls took, and what
// became of it. The operation is "prepare" or "unprepare". The stage is "call" for all
// of the call, whatever the number of claims; "read" until the library has got the
// claims of a prepare from the API server; or "claim" for the driver's part for each
// claim: waiting for another call, checks, record, files and CDI spec. The rest is the
// library's own part and, of prepare, the files with metadata. It may be called from
// several goroutines at once.
type Observer func(operation, stage string, took time.Duration, err error)

// callBegan is the key of the time at which a call began, in its context.
type callBegan struct{}

// timeCalls times the kubelet's calls. It is a gRPC interceptor, and passes over
// calls without claims, such as [Driver.Probe]'s, and those of kubelets that speak
// an older version than v1.
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

// timeRead says how long it took until the driver was given the claims of a call.
func (d *Driver) timeRead(ctx context.Context) {
	if began, ok := ctx.Value(callBegan{}).(time.Time); ok {
		_, end := traces.StageSince(ctx, "read claims from the API server", began)
		end(nil)
		d.config.Observe("prepare", "read", time.Since(began), nil)
	}
}

// timeClaim does the driver's part for one claim, and says how long it took.
func (d *Driver) timeClaim(ctx context.Context, operation string, claim kubeletplugin.NamespacedObject, work func(context.Context) error) error {
	began := time.Now()
	ctx, end := traces.Stage(ctx, "claim",
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
