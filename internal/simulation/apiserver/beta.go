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

// unserved is the answer to who asks for a version that is not served.
func unserved() error {
	return apierrors.NewGenericServerResponse(404, "get", slicesResource, "", "the server could not find the requested resource", 0, true)
}

// ResourceV1beta1 implements [kubernetes.Interface]. Its versions are not served.
func (client) ResourceV1beta1() v1beta1.ResourceV1beta1Interface { return beta1{} }

// ResourceV1beta2 implements [kubernetes.Interface]. Its versions are not served.
func (client) ResourceV1beta2() v1beta2.ResourceV1beta2Interface { return beta2{} }

type beta1 struct {
	v1beta1.ResourceV1beta1Interface
}

func (beta1) ResourceSlices() v1beta1.ResourceSliceInterface { return resourceSlices1{} }

type resourceSlices1 struct{ v1beta1.ResourceSliceInterface }

func (resourceSlices1) Get(context.Context, string, metav1.GetOptions) (*v1beta1api.ResourceSlice, error) {
	return nil, unserved()
}
func (resourceSlices1) List(context.Context, metav1.ListOptions) (*v1beta1api.ResourceSliceList, error) {
	return nil, unserved()
}
func (resourceSlices1) Watch(context.Context, metav1.ListOptions) (watch.Interface, error) {
	return nil, unserved()
}
func (resourceSlices1) Create(context.Context, *v1beta1api.ResourceSlice, metav1.CreateOptions) (*v1beta1api.ResourceSlice, error) {
	return nil, unserved()
}
func (resourceSlices1) Update(context.Context, *v1beta1api.ResourceSlice, metav1.UpdateOptions) (*v1beta1api.ResourceSlice, error) {
	return nil, unserved()
}
func (resourceSlices1) Delete(context.Context, string, metav1.DeleteOptions) error { return unserved() }

func (beta1) ResourceClaims(string) v1beta1.ResourceClaimInterface { return resourceClaims1{} }

type resourceClaims1 struct{ v1beta1.ResourceClaimInterface }

func (resourceClaims1) Get(context.Context, string, metav1.GetOptions) (*v1beta1api.ResourceClaim, error) {
	return nil, unserved()
}
func (resourceClaims1) List(context.Context, metav1.ListOptions) (*v1beta1api.ResourceClaimList, error) {
	return nil, unserved()
}
func (resourceClaims1) Watch(context.Context, metav1.ListOptions) (watch.Interface, error) {
	return nil, unserved()
}
func (resourceClaims1) Create(context.Context, *v1beta1api.ResourceClaim, metav1.CreateOptions) (*v1beta1api.ResourceClaim, error) {
	return nil, unserved()
}
func (resourceClaims1) Update(context.Context, *v1beta1api.ResourceClaim, metav1.UpdateOptions) (*v1beta1api.ResourceClaim, error) {
	return nil, unserved()
}
func (resourceClaims1) Delete(context.Context, string, metav1.DeleteOptions) error { return unserved() }

func (beta1) DeviceClasses() v1beta1.DeviceClassInterface { return deviceClasss1{} }

type deviceClasss1 struct{ v1beta1.DeviceClassInterface }

func (deviceClasss1) Get(context.Context, string, metav1.GetOptions) (*v1beta1api.DeviceClass, error) {
	return nil, unserved()
}
func (deviceClasss1) List(context.Context, metav1.ListOptions) (*v1beta1api.DeviceClassList, error) {
	return nil, unserved()
}
func (deviceClasss1) Watch(context.Context, metav1.ListOptions) (watch.Interface, error) {
	return nil, unserved()
}
func (deviceClasss1) Create(context.Context, *v1beta1api.DeviceClass, metav1.CreateOptions) (*v1beta1api.DeviceClass, error) {
	return nil, unserved()
}
func (deviceClasss1) Update(context.Context, *v1beta1api.DeviceClass, metav1.UpdateOptions) (*v1beta1api.DeviceClass, error) {
	return nil, unserved()
}
func (deviceClasss1) Delete(context.Context, string, metav1.DeleteOptions) error { return unserved() }

type beta2 struct {
	v1beta2.ResourceV1beta2Interface
}

func (beta2) ResourceSlices() v1beta2.ResourceSliceInterface { return resourceSlices2{} }

type resourceSlices2 struct{ v1beta2.ResourceSliceInterface }

func (resourceSlices2) Get(context.Context, string, metav1.GetOptions) (*v1beta2api.ResourceSlice, error) {
	return nil, unserved()
}
func (resourceSlices2) List(context.Context, metav1.ListOptions) (*v1beta2api.ResourceSliceList, error) {
	return nil, unserved()
}
func (resourceSlices2) Watch(context.Context, metav1.ListOptions) (watch.Interface, error) {
	return nil, unserved()
}
func (resourceSlices2) Create(context.Context, *v1beta2api.ResourceSlice, metav1.CreateOptions) (*v1beta2api.ResourceSlice, error) {
	return nil, unserved()
}
func (resourceSlices2) Update(context.Context, *v1beta2api.ResourceSlice, metav1.UpdateOptions) (*v1beta2api.ResourceSlice, error) {
	return nil, unserved()
}
func (resourceSlices2) Delete(context.Context, string, metav1.DeleteOptions) error { return unserved() }

func (beta2) ResourceClaims(string) v1beta2.ResourceClaimInterface { return resourceClaims2{} }

type resourceClaims2 struct{ v1beta2.ResourceClaimInterface }

func (resourceClaims2) Get(context.Context, string, metav1.GetOptions) (*v1beta2api.ResourceClaim, error) {
	return nil, unserved()
}
func (resourceClaims2) List(context.Context, metav1.ListOptions) (*v1beta2api.ResourceClaimList, error) {
	return nil, unserved()
}
func (resourceClaims2) Watch(context.Context, metav1.ListOptions) (watch.Interface, error) {
	return nil, unserved()
}
func (resourceClaims2) Create(context.Context, *v1beta2api.ResourceClaim, metav1.CreateOptions) (*v1beta2api.ResourceClaim, error) {
	return nil, unserved()
}
func (resourceClaims2) Update(context.Context, *v1beta2api.ResourceClaim, metav1.UpdateOptions) (*v1beta2api.ResourceClaim, error) {
	return nil, unserved()
}
func (resourceClaims2) Delete(context.Context, string, metav1.DeleteOptions) error { return unserved() }

func (beta2) DeviceClasses() v1beta2.DeviceClassInterface { return deviceClasss2{} }

type deviceClasss2 struct{ v1beta2.DeviceClassInterface }

func (deviceClasss2) Get(context.Context, string, metav1.GetOptions) (*v1beta2api.DeviceClass, error) {
	return nil, unserved()
}
func (deviceClasss2) List(context.Context, metav1.ListOptions) (*v1beta2api.DeviceClassList, error) {
	return nil, unserved()
}
func (deviceClasss2) Watch(context.Context, metav1.ListOptions) (watch.Interface, error) {
	return nil, unserved()
}
func (deviceClasss2) Create(context.Context, *v1beta2api.DeviceClass, metav1.CreateOptions) (*v1beta2api.DeviceClass, error) {
	return nil, unserved()
}
func (deviceClasss2) Update(context.Context, *v1beta2api.DeviceClass, metav1.UpdateOptions) (*v1beta2api.DeviceClass, error) {
	return nil, unserved()
}
func (deviceClasss2) Delete(context.Context, string, metav1.DeleteOptions) error { return unserved() }
