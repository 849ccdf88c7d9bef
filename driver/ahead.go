package driver

import (
	"context"
	"sync"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// The library's helper gets the claims of a call from the API server one after
// another, before it calls the driver (getResourceClaims in
// k8s.io/dynamic-resource-allocation/kubeletplugin). That is the longest part of
// a call with many claims. So when it asks for the first, all are asked for, and
// each answer waits for the helper to come to it.

// callClaims are the claims of one call of the kubelet.
type callClaims struct {
	names   []types.NamespacedName
	answers map[types.NamespacedName]*claimAnswer
	once    sync.Once
}

// claimAnswer is what the API server said of a claim, once done is closed.
type claimAnswer struct {
	done  chan struct{}
	claim *resourceapi.ResourceClaim
	err   error
}

// callKey is the key of the *callClaims in the context of a call.
type callKey struct{}

// getAhead notes in the context of a call which claims it has. It is a gRPC
// interceptor. The claims of kubelets that speak an older version than v1 are got
// one after another.
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

// get returns a claim of the call. The first time it begins to get all of them,
// maxAtOnce at a time, as long as the context lasts.
func (c *callClaims) get(ctx context.Context, client resourceclient.ResourceV1Interface, answer *claimAnswer) (*resourceapi.ResourceClaim, error) {
	c.once.Do(func() {
		go each(len(c.names), func(i int) {
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

// aheadClaims gets the claims of a call at the same time, in a context of
// [getAhead].
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
