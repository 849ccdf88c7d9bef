package driver

import (
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/util/watchlist"
)

// client is the client for the library. It reads all claims of a call concurrently, and creates
// ResourceSlices with the present UID of their Node.
type client struct {
	kubernetes.Interface
	node *nodeUID
}

func (c client) ResourceV1() resourceclient.ResourceV1Interface {
	return resources{c.Interface.ResourceV1(), c}
}

// IsWatchListSemanticsUnSupported returns the answer of the wrapped client, which the library would
// not see otherwise. Only test clients return true; see
// [watchlist.DoesClientNotSupportWatchListSemantics].
func (c client) IsWatchListSemanticsUnSupported() bool {
	return watchlist.DoesClientNotSupportWatchListSemantics(c.Interface)
}

type resources struct {
	resourceclient.ResourceV1Interface
	client client
}

func (r resources) ResourceClaims(namespace string) resourceclient.ResourceClaimInterface {
	return aheadClaims{r.ResourceV1Interface.ResourceClaims(namespace), r.ResourceV1Interface, namespace}
}

func (r resources) ResourceSlices() resourceclient.ResourceSliceInterface {
	return ownedSlices{r.ResourceV1Interface.ResourceSlices(), r.client}
}
