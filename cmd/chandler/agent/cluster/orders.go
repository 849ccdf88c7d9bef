package cluster

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"

	"chandler.dev/internal/removal"
)

// FollowOrders calls tell with the removal orders for the agents of a namespace, at first and after
// each change, until the context ends. The deletion of the ConfigMap is no order, because Chandler
// is deleted with it.
func FollowOrders(ctx context.Context, client metadata.Interface, namespace string, tell func(removal.Order)) {
	var last removal.Order
	f := follower{
		resource: client.Resource(corev1.SchemeGroupVersion.WithResource("configmaps")).Namespace(namespace), name: removal.ConfigMap, what: "ConfigMap",
		failureMessage: "Requests for removal cannot be watched; the agent continues otherwise",
		receive: func(object *metav1.PartialObjectMetadata) {
			if order := removal.Parse(object.Annotations[removal.Annotation]); order != last {
				last = order
				tell(order)
			}
		},
	}
	f.run(ctx)
}
