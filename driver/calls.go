package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"chandler.dev/internal/traces"
)

// maxAtOnce limits how many claims of one call are processed concurrently.
const maxAtOnce = 16

// PrepareResourceClaims prepares each claim separately, so that one failure does not affect other
// claims. It waits until this instance is active, unless there are no claims, as in [Driver.Probe].
// It implements [kubeletplugin.DRAPlugin] and is not for other callers.
func (d *Driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	if len(claims) == 0 {
		return nil, nil
	}
	d.timeRead(ctx)
	ctx, cancel := inTime(ctx)
	defer cancel()
	done, err := d.calls.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	patient, cancel := context.WithTimeout(ctx, passLimit)
	defer cancel()
	results := make([]kubeletplugin.PrepareResult, len(claims))
	runEach(len(claims), func(i int) {
		var devices []kubeletplugin.Device
		named := kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: claims[i].Namespace, Name: claims[i].Name}, UID: claims[i].UID}
		err := d.timeClaim(ctx, "prepare", named, func(ctx context.Context) (err error) {
			devices, err = d.claims.preparePatiently(ctx, patient, claims[i])
			return err
		})
		if err != nil {
			klog.FromContext(ctx).Info("A claim is not prepared", "claim", klog.KObj(claims[i]), "uid", claims[i].UID, "reason", err.Error())
			if RefusalOf(err) == RefusedHeld {
				notify(d.claimRefused)
			}
			err = fmt.Errorf("prepare claim %s/%s: %w", claims[i].Namespace, claims[i].Name, err)
		}
		results[i] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	})
	notify(d.claimPrepared)
	answer := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for i, claim := range claims {
		answer[claim.UID] = results[i]
	}
	return answer, nil
}

// UnprepareResourceClaims releases each claim separately. It needs neither the API server nor the
// host. It implements [kubeletplugin.DRAPlugin] and is not for other callers.
func (d *Driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	ctx, cancel := inTime(ctx)
	defer cancel()
	done, err := d.calls.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	results := make([]error, len(claims))
	runEach(len(claims), func(i int) {
		err := d.timeClaim(ctx, "unprepare", claims[i], func(ctx context.Context) error { return d.claims.endClaim(ctx, claims[i].UID) })
		if err != nil {
			klog.FromContext(ctx).Info("A claim is not unprepared", "claim", klog.KRef(claims[i].Namespace, claims[i].Name), "uid", claims[i].UID, "reason", err.Error())
			results[i] = fmt.Errorf("unprepare claim %s/%s: %w", claims[i].Namespace, claims[i].Name, err)
		}
	})
	answer := make(map[types.UID]error, len(claims))
	for i, claim := range claims {
		answer[claim.UID] = results[i]
	}
	return answer, nil
}

// runEach calls work for the numbers below n, at most maxAtOnce at a time. For n = 1, as in most
// calls, it calls work directly, since on a busy machine the start of another thread takes as long
// as the work.
func runEach(n int, work func(i int)) {
	if n == 1 {
		work(0)
		return
	}
	var group sync.WaitGroup
	slots := make(chan struct{}, maxAtOnce)
	for i := range n {
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			work(i)
		})
	}
	group.Wait()
}

// callLimit is the longest wait of a call, whatever the reason. The kubelet gives up after 45
// seconds (pkg/kubelet/cm/dra/plugin) and would no longer receive the reason.
const callLimit = 40 * time.Second

// inTime returns a context that ends early enough for the call to return the reason of its wait:
// after eight ninths of the caller's deadline, and at most after callLimit.
func inTime(ctx context.Context) (context.Context, context.CancelFunc) {
	limit := callLimit
	if deadline, ok := ctx.Deadline(); ok {
		limit = min(limit, time.Until(deadline)*8/9)
	}
	return context.WithTimeout(ctx, limit)
}

var errStopping = errors.New("this instance is stopping; another will answer")

// calls holds back the kubelet's calls until the driver is ready, and waits for running calls when
// the driver stops.
type calls struct {
	ready    chan struct{} // closed when calls may proceed
	stopping chan struct{} // closed when no further calls are admitted

	mu         sync.Mutex
	isStopped  bool
	inProgress sync.WaitGroup
}

// begin waits until a call may proceed. The caller must call done when the call has ended, unless
// begin returns an error.
func (c *calls) begin(ctx context.Context) (done func(), err error) {
	c.mu.Lock()
	if c.isStopped {
		c.mu.Unlock()
		return nil, errStopping
	}
	c.inProgress.Add(1)
	c.mu.Unlock()
	if isClosed(c.ready) {
		return c.inProgress.Done, nil
	}
	select {
	case <-c.ready:
		return c.inProgress.Done, nil
	case <-c.stopping:
		err = errStopping
	case <-ctx.Done():
		err = fmt.Errorf("wait for another agent of this node to end, and for the allocation records to be read: %w", ctx.Err())
	}
	c.inProgress.Done()
	return nil, err
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// drainCalls admits no further calls, and returns when all admitted calls have ended.
func (c *calls) drainCalls() {
	c.mu.Lock()
	c.isStopped = true
	close(c.stopping)
	c.mu.Unlock()
	c.inProgress.Wait()
}

// notify sends a value to a channel with a buffer of one, unless the buffer is full.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

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
