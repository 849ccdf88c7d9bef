package publish

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The library's controller reads the UID of the Node that owns the slices only once (syncPool in
// resourceslice/resourceslicecontroller.go of k8s.io/dynamic-resource-allocation 0.37). If an
// administrator deletes the Node and the kubelet creates it again, the garbage collector removes
// all slices with the old UID, each time they are created. The publisher therefore reads the Node
// itself when slices are created. The UID matters only then.

// SetOnCreate replaces the UID of the Node in the library's options, so that the library does not
// read the Node.
const SetOnCreate types.UID = "set-on-create"

// own returns a copy of a slice whose owner has the present UID of the Node.
func (p *Publisher) own(ctx context.Context, slice *resourceapi.ResourceSlice) (*resourceapi.ResourceSlice, error) {
	owned := slice.DeepCopy()
	for i := range owned.OwnerReferences {
		uid, err := p.config.NodeUID(ctx)
		if err != nil {
			// Not wrapped: the library interprets a NotFound error as a server without v1 of the API,
			// and switches to v1beta2 (generic.go in k8s.io/dynamic-resource-allocation/client of
			// 0.37).
			return nil, fmt.Errorf("get the node, which is to own its slices: %v", err) //nolint:errorlint
		}
		owned.OwnerReferences[i].UID = uid
	}
	return owned, nil
}
