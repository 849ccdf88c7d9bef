package driver

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
)

// The library's controller asks once for the UID of the Node that is to own the
// slices, and never again (syncPool in resourceslice/resourceslicecontroller.go of
// k8s.io/dynamic-resource-allocation 0.37). When somebody deletes the Node and the
// kubelet makes it anew, the garbage collector removes all slices of the old UID,
// and would do so for ever. So the driver looks at the Node itself, at the moment
// when slices are created, which is the only one at which the UID matters.

// setOnCreate is what the library is told in place of the UID, so that it does not
// ask for it.
const setOnCreate types.UID = "set-on-create"

// uidFresh is for how long the UID of the Node is taken for true. Slices of a pool
// are created one after another.
const uidFresh = 10 * time.Second

// nodeUID is the UID that a Node was last seen with.
type nodeUID struct {
	name string
	last atomic.Pointer[seenUID]
}

type seenUID struct {
	uid types.UID
	at  time.Time
}

// get returns the UID of the Node.
func (n *nodeUID) get(ctx context.Context, client kubernetes.Interface) (types.UID, error) {
	if last := n.last.Load(); last != nil && time.Since(last.at) < uidFresh {
		return last.uid, nil
	}
	node, err := client.CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
	if err != nil {
		// Not wrapped: of an error that is a NotFound the library takes it that the
		// server has no v1 of the API, and goes on with v1beta2 (generic.go in
		// k8s.io/dynamic-resource-allocation/client of 0.37).
		return "", fmt.Errorf("get node %s, which is to own its slices: %v", n.name, err) //nolint:errorlint
	}
	n.last.Store(&seenUID{node.UID, time.Now()})
	return node.UID, nil
}

// ownedSlices creates slices with the present UID of their Node.
type ownedSlices struct {
	resourceclient.ResourceSliceInterface
	client client
}

// Create creates a slice. It implements [resourceclient.ResourceSliceInterface].
func (s ownedSlices) Create(ctx context.Context, slice *resourceapi.ResourceSlice, options metav1.CreateOptions) (*resourceapi.ResourceSlice, error) {
	slice = slice.DeepCopy()
	for i := range slice.OwnerReferences {
		uid, err := s.client.node.get(ctx, s.client.Interface)
		if err != nil {
			return nil, err
		}
		slice.OwnerReferences[i].UID = uid
	}
	return s.ResourceSliceInterface.Create(ctx, slice, options)
}
