package driver

import (
	"context"
	"time"

	"google.golang.org/grpc"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// What the kubelet calls for.
const (
	OperationPrepare   = "prepare"
	OperationUnprepare = "unprepare"
)

// The stages of a call. What is left of it are the library's own part and, of
// prepare, the files with metadata.
const (
	StageCall  = "call"  // all of it, whatever the number of claims
	StageRead  = "read"  // of prepare: the library gets the claims of the call from the API server
	StageClaim = "claim" // for each claim: waiting for another call, checks, record, files and CDI spec
)

// Observer is told how long a stage of a call took, and what became of it. It may
// be called from several goroutines at once.
type Observer func(operation, stage string, took time.Duration, err error)

// callBegan is the key of the time at which a call began, in its context.
type callBegan struct{}

// timeCalls times the kubelet's calls. It is a gRPC interceptor, and passes over
// calls without claims, such as [Driver.Probe]'s, and those of kubelets that speak
// an older version than v1.
func (d *Driver) timeCalls(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	operation := ""
	switch request := request.(type) {
	case *drapb.NodePrepareResourcesRequest:
		if len(request.GetClaims()) > 0 {
			operation = OperationPrepare
		}
	case *drapb.NodeUnprepareResourcesRequest:
		if len(request.GetClaims()) > 0 {
			operation = OperationUnprepare
		}
	}
	if operation == "" {
		return handler(ctx, request)
	}
	began := time.Now()
	response, err := handler(context.WithValue(ctx, callBegan{}, began), request)
	d.config.Observe(operation, StageCall, time.Since(began), err)
	return response, err
}

// timeRead says how long it took until the driver was given the claims of a call.
func (d *Driver) timeRead(ctx context.Context) {
	if began, ok := ctx.Value(callBegan{}).(time.Time); ok {
		d.config.Observe(OperationPrepare, StageRead, time.Since(began), nil)
	}
}

// timeClaim does the driver's part for one claim, and says how long it took.
func (d *Driver) timeClaim(operation string, work func() error) error {
	began := time.Now()
	err := work()
	d.config.Observe(operation, StageClaim, time.Since(began), err)
	return err
}
