package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// claimServer is an API server that answers requests for claims with get.
type claimServer struct {
	kubernetes.Interface
	resourceclient.ResourceV1Interface
	resourceclient.ResourceClaimInterface
	namespace string
	get       func(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error)
}

func (s claimServer) ResourceV1() resourceclient.ResourceV1Interface { return s }

func (s claimServer) ResourceClaims(namespace string) resourceclient.ResourceClaimInterface {
	s.namespace = namespace
	return s
}

func (s claimServer) Get(ctx context.Context, name string, _ metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	return s.get(ctx, s.namespace, name)
}

// getAll gets the named claims one by one in a call with the request, like the library's helper.
func getAll(ctx context.Context, server claimServer, request *drapb.NodePrepareResourcesRequest, names ...string) (got []string, err error) {
	ahead := aheadClient{server}
	_, err = getAhead(ctx, request, &grpc.UnaryServerInfo{}, func(ctx context.Context, _ any) (any, error) {
		for _, name := range names {
			claim, err := ahead.ResourceV1().ResourceClaims("default").Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return nil, err
			}
			got = append(got, claim.Name)
		}
		return nil, nil
	})
	return got, err
}

func request(names ...string) *drapb.NodePrepareResourcesRequest {
	r := &drapb.NodePrepareResourcesRequest{}
	for _, name := range names {
		r.Claims = append(r.Claims, &drapb.Claim{Namespace: "default", Name: name})
	}
	return r
}

// TestClaimsAreGotAtOnce has an API server that answers no request before all claims of the call
// are requested.
func TestClaimsAreGotAtOnce(t *testing.T) {
	names := []string{"a", "b", "c", "a"} // "a" is in the call twice
	var asked sync.WaitGroup
	asked.Add(3)
	server := claimServer{get: func(_ context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
		asked.Done() // panics if a claim is requested twice
		asked.Wait()
		return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}, nil
	}}
	got, err := getAll(t.Context(), server, request(names...), names...)
	if err != nil || fmt.Sprint(got) != fmt.Sprint(names) {
		t.Errorf("got %v, %v", got, err)
	}
}

// TestClaimsOutsideACall reads claims that are not in the call, and claims without a call. Both are
// read as usual.
func TestClaimsOutsideACall(t *testing.T) {
	server := claimServer{get: func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) {
		return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name}}, nil
	}}
	if got, err := getAll(t.Context(), server, request("a", "c"), "b"); err != nil || fmt.Sprint(got) != "[b]" {
		t.Errorf("got %v, %v", got, err)
	}
	if claim, err := (aheadClient{server}).ResourceV1().ResourceClaims("default").Get(t.Context(), "a", metav1.GetOptions{}); err != nil || claim.Name != "a" {
		t.Errorf("got %v, %v", claim, err)
	}
}

// TestClaimThatCannotBeGot fails for a single claim. Waiting for the API server ends with the call.
func TestClaimThatCannotBeGot(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	refusal := errors.New("no")
	server := claimServer{get: func(ctx context.Context, _, name string) (*resourceapi.ResourceClaim, error) {
		switch name {
		case "bad":
			return nil, refusal
		case "slow":
			cancel()
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name}}, nil
	}}
	if got, err := getAll(ctx, server, request("a", "bad"), "a", "bad"); !errors.Is(err, refusal) || fmt.Sprint(got) != "[a]" {
		t.Errorf("got %v, %v", got, err)
	}
	if _, err := getAll(ctx, server, request("slow", "a"), "slow"); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
