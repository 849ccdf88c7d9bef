package driver

import (
	"context"
	"sync"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/util/watchlist"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// Before the library's helper calls the driver, it reads the claims of a call from the API server
// one by one (getResourceClaims in k8s.io/dynamic-resource-allocation/kubeletplugin). For a call
// with many claims this is the longest part. The driver therefore starts to read all claims when
// the helper requests the first, and each request of the helper waits for its own claim.

// callClaims are the claims of one kubelet call.
type callClaims struct {
	names   []types.NamespacedName
	answers map[types.NamespacedName]*claimAnswer
	once    sync.Once
}

// claimAnswer is the API server's answer for a claim. The fields are set before done is closed.
type claimAnswer struct {
	done  chan struct{}
	claim *resourceapi.ResourceClaim
	err   error
}

// callKey is the key of the *callClaims in the context of a call.
type callKey struct{}

// getAhead is a gRPC interceptor that stores the claims of a call in its context. It does nothing
// for calls with a single claim and for kubelets with an older API than v1.
func getAhead(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	prepare, ok := request.(*drapb.NodePrepareResourcesRequest)
	if !ok || len(prepare.GetClaims()) == 1 {
		return handler(ctx, request)
	}
	call := &callClaims{answers: make(map[types.NamespacedName]*claimAnswer)}
	for _, claim := range prepare.GetClaims() {
		name := types.NamespacedName{Namespace: claim.GetNamespace(), Name: claim.GetName()}
		if call.answers[name] == nil {
			call.names = append(call.names, name)
			call.answers[name] = &claimAnswer{done: make(chan struct{})}
		}
	}
	return handler(context.WithValue(ctx, callKey{}, call), request)
}

// get returns a claim of the call. The first call of get starts to read all claims, maxAtOnce at a
// time, until the context ends.
func (c *callClaims) get(ctx context.Context, client resourceclient.ResourceV1Interface, answer *claimAnswer) (*resourceapi.ResourceClaim, error) {
	c.once.Do(func() {
		go runEach(len(c.names), func(i int) {
			name := c.names[i]
			answer := c.answers[name]
			answer.claim, answer.err = client.ResourceClaims(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
			close(answer.done)
		})
	})
	select {
	case <-answer.done:
		return answer.claim, answer.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// aheadClient is a client that reads the claims of a call concurrently.
type aheadClient struct{ kubernetes.Interface }

// ResourceV1 returns the client of the API group.
func (c aheadClient) ResourceV1() resourceclient.ResourceV1Interface {
	return aheadResources{c.Interface.ResourceV1()}
}

// IsWatchListSemanticsUnSupported returns the answer of the wrapped client, which the library would
// not see otherwise.
func (c aheadClient) IsWatchListSemanticsUnSupported() bool {
	return watchlist.DoesClientNotSupportWatchListSemantics(c.Interface)
}

type aheadResources struct {
	resourceclient.ResourceV1Interface
}

func (r aheadResources) ResourceClaims(namespace string) resourceclient.ResourceClaimInterface {
	return aheadClaims{r.ResourceV1Interface.ResourceClaims(namespace), r.ResourceV1Interface, namespace}
}

// aheadClaims reads the claims of a call concurrently, if the context comes from [getAhead].
type aheadClaims struct {
	resourceclient.ResourceClaimInterface
	all       resourceclient.ResourceV1Interface
	namespace string
}

// Get returns a claim. It implements [resourceclient.ResourceClaimInterface].
func (c aheadClaims) Get(ctx context.Context, name string, options metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	if call, ok := ctx.Value(callKey{}).(*callClaims); ok {
		if answer := call.answers[types.NamespacedName{Namespace: c.namespace, Name: name}]; answer != nil {
			return call.get(ctx, c.all, answer)
		}
	}
	return c.ResourceClaimInterface.Get(ctx, name, options)
}
