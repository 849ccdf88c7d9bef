package cluster

import (
	"context"
	"maps"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"
)

// FollowLabels tells the labels of a node when it hears them first and whenever they
// change, until the context ends. Those of a node that was deleted stay until there is
// another of its name. While the API server does not answer, or there is no such node,
// nothing is told.
func FollowLabels(ctx context.Context, client metadata.Interface, node string, tell func(map[string]string)) {
	var last map[string]string // that were told, nil if none were
	f := follower{
		of: client.Resource(corev1.SchemeGroupVersion.WithResource("nodes")), name: node, what: "node",
		lost: "The labels of the node cannot be followed; those seen last stay in force",
		take: func(object *metav1.PartialObjectMetadata) {
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
