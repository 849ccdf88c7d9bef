package cluster

import (
	"context"
	"maps"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"
)

// FollowLabels calls tell with the labels of a node, at first and after each change, until the
// context ends. The labels of a deleted node stay in force until a node with the same name appears.
// While the API server does not answer, or there is no such node, tell is not called.
func FollowLabels(ctx context.Context, client metadata.Interface, node string, tell func(map[string]string)) {
	var last map[string]string // the labels of the last call, nil if there was none
	f := follower{
		resource: client.Resource(corev1.SchemeGroupVersion.WithResource("nodes")), name: node, what: "node",
		failureMessage: "The labels of the node cannot be followed; those seen last stay in force",
		receive: func(object *metav1.PartialObjectMetadata) {
			if last != nil && maps.Equal(last, object.Labels) {
				return
			}
			last = maps.Clone(object.Labels)
			if last == nil {
				last = map[string]string{}
			}
			tell(last)
		},
	}
	f.run(ctx)
}
