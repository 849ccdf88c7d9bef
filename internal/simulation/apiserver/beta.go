package apiserver

import (
	"context"

	v1beta1api "k8s.io/api/resource/v1beta1"
	v1beta2api "k8s.io/api/resource/v1beta2"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/typed/resource/v1beta1"
	"k8s.io/client-go/kubernetes/typed/resource/v1beta2"
)

// errUnserved is the answer to a request for an API version that is not served.
var errUnserved = apierrors.NewGenericServerResponse(404, "get", slicesResource, "", "the server could not find the requested resource", 0, true)

// unserved is a client for a kind in a version that is not served.
type unserved[T, L any] struct{}

func (unserved[T, L]) Get(context.Context, string, metav1.GetOptions) (none T, err error) {
	return none, errUnserved
}
func (unserved[T, L]) List(context.Context, metav1.ListOptions) (none L, err error) {
	return none, errUnserved
}
func (unserved[T, L]) Watch(context.Context, metav1.ListOptions) (watch.Interface, error) {
	return nil, errUnserved
}
func (unserved[T, L]) Create(context.Context, T, metav1.CreateOptions) (none T, err error) {
	return none, errUnserved
}
func (unserved[T, L]) Update(context.Context, T, metav1.UpdateOptions) (none T, err error) {
	return none, errUnserved
}
func (unserved[T, L]) Delete(context.Context, string, metav1.DeleteOptions) error {
	return errUnserved
}

// ResourceV1beta1 implements [kubernetes.Interface].
func (client) ResourceV1beta1() v1beta1.ResourceV1beta1Interface { return beta1{} }

type beta1 struct {
	v1beta1.ResourceV1beta1Interface
}

func (beta1) ResourceSlices() v1beta1.ResourceSliceInterface       { return slices1{} }
func (beta1) ResourceClaims(string) v1beta1.ResourceClaimInterface { return claims1{} }
func (beta1) DeviceClasses() v1beta1.DeviceClassInterface          { return classes1{} }

type (
	slices1 struct {
		unserved[*v1beta1api.ResourceSlice, *v1beta1api.ResourceSliceList]
		restOfSlices1
	}
	claims1 struct {
		unserved[*v1beta1api.ResourceClaim, *v1beta1api.ResourceClaimList]
		restOfClaims1
	}
	classes1 struct {
		unserved[*v1beta1api.DeviceClass, *v1beta1api.DeviceClassList]
		restOfClasses1
	}

	restOfSlices1  struct{ v1beta1.ResourceSliceInterface }
	restOfClaims1  struct{ v1beta1.ResourceClaimInterface }
	restOfClasses1 struct{ v1beta1.DeviceClassInterface }
)

// ResourceV1beta2 implements [kubernetes.Interface].
func (client) ResourceV1beta2() v1beta2.ResourceV1beta2Interface { return beta2{} }

type beta2 struct {
	v1beta2.ResourceV1beta2Interface
}

func (beta2) ResourceSlices() v1beta2.ResourceSliceInterface       { return slices2{} }
func (beta2) ResourceClaims(string) v1beta2.ResourceClaimInterface { return claims2{} }
func (beta2) DeviceClasses() v1beta2.DeviceClassInterface          { return classes2{} }

type (
	slices2 struct {
		unserved[*v1beta2api.ResourceSlice, *v1beta2api.ResourceSliceList]
		restOfSlices2
	}
	claims2 struct {
		unserved[*v1beta2api.ResourceClaim, *v1beta2api.ResourceClaimList]
		restOfClaims2
	}
	classes2 struct {
		unserved[*v1beta2api.DeviceClass, *v1beta2api.DeviceClassList]
		restOfClasses2
	}

	restOfSlices2  struct{ v1beta2.ResourceSliceInterface }
	restOfClaims2  struct{ v1beta2.ResourceClaimInterface }
	restOfClasses2 struct{ v1beta2.DeviceClassInterface }
)
