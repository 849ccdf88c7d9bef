// Package older provides clients of API servers that serve only an older version of DRA, for
// tests.
package older

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	draclient "k8s.io/dynamic-resource-allocation/client"
)

// Client returns a client of an API server with the given objects. The server serves
// resource.k8s.io in one version only, v1beta1 or v1beta2. Other versions of the group are
// not found.
func Client(ctx context.Context, version string, objects ...runtime.Object) (*fake.Clientset, error) {
	var dra, rest []runtime.Object
	for _, object := range objects {
		switch object.(type) {
		case *resourceapi.ResourceSlice, *resourceapi.DeviceClass, *resourceapi.ResourceClaim, *resourceapi.ResourceClaimTemplate:
			dra = append(dra, object)
		default:
			rest = append(rest, object)
		}
	}
	client := fake.NewClientset(rest...)
	client.Resources = []*metav1.APIResourceList{{GroupVersion: resourceapi.GroupName + "/" + version, APIResources: []metav1.APIResource{{Name: "resourceslices"}}}}
	client.PrependReactor("*", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		asked := action.GetResource()
		if asked.Group != resourceapi.GroupName || asked.Version == version {
			return false, nil, nil
		}
		return true, nil, apierrors.NewNotFound(asked.GroupResource(), "")
	})
	converting := draclient.New(client)
	for _, object := range dra {
		var err error
		switch o := object.(type) {
		case *resourceapi.ResourceSlice:
			_, err = converting.ResourceSlices().Create(ctx, o, metav1.CreateOptions{})
		case *resourceapi.DeviceClass:
			_, err = converting.DeviceClasses().Create(ctx, o, metav1.CreateOptions{})
		case *resourceapi.ResourceClaim:
			_, err = converting.ResourceClaims(o.Namespace).Create(ctx, o, metav1.CreateOptions{})
		case *resourceapi.ResourceClaimTemplate:
			_, err = converting.ResourceClaimTemplates(o.Namespace).Create(ctx, o, metav1.CreateOptions{})
		}
		if err != nil {
			return nil, fmt.Errorf("create %T: %w", object, err)
		}
	}
	return client, nil
}
