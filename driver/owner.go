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
)

// The library's controller reads the UID of the Node that owns the slices only once (syncPool in
// resourceslice/resourceslicecontroller.go of k8s.io/dynamic-resource-allocation 0.37). If an
// administrator deletes the Node and the kubelet creates it again, the garbage collector removes
// all slices with the old UID, each time they are created. The driver therefore reads the Node
// itself when slices are created. The UID matters only then.

// setOnCreate replaces the UID in the library's options, so that the library does not read the
// Node.
const setOnCreate types.UID = "set-on-create"

// uidFresh is how long a UID that was read remains in use. The slices of a pool are created one
// after another.
const uidFresh = 10 * time.Second

// nodeUID is the last UID of a Node.
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
		// Not wrapped: the library interprets a NotFound error as a server without v1 of the API,
		// and switches to v1beta2 (generic.go in k8s.io/dynamic-resource-allocation/client of
		// 0.37).
		return "", fmt.Errorf("get node %s, which is to own its slices: %v", n.name, err) //nolint:errorlint
	}
	n.last.Store(&seenUID{node.UID, time.Now()})
	return node.UID, nil
}

// own returns a copy of a slice whose owner has the present UID of the Node.
func (n *nodeUID) own(ctx context.Context, client kubernetes.Interface, slice *resourceapi.ResourceSlice) (*resourceapi.ResourceSlice, error) {
	owned := slice.DeepCopy()
	for i := range owned.OwnerReferences {
		uid, err := n.get(ctx, client)
		if err != nil {
			return nil, err
		}
		owned.OwnerReferences[i].UID = uid
	}
	return owned, nil
}
