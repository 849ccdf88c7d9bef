package cluster

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"chandler.dev/discovery"
	"chandler.dev/internal/fleet"
)

// A Reading selects the objects that a command needs.
type Reading struct {
	Drivers   bool // of all DRA drivers, not only of Chandler
	Classes   bool
	Templates bool // in the namespace
}

// A View is the part of a cluster that the user may read.
type View struct {
	fleet.Input
	Client    kubernetes.Interface
	Namespace string
	Now       time.Time
	Missing   []string // what could not be read, and the consequences
}

// read reads the selected objects, and notes those that the user may not read. It fails if neither
// slices nor nodes are readable.
func (v *View) read(ctx context.Context, what Reading) error {
	dra := draclient.New(v.Client)
	of := metav1.ListOptions{}
	if !what.Drivers {
		of.FieldSelector = fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorDriver, discovery.Domain).String()
	}
	slices, slicesErr := ListObjects[resourceapi.ResourceSlice](ctx, dra.ResourceSlices().List, of)
	nodes, nodesErr := ListObjects[corev1.Node](ctx, v.Client.CoreV1().Nodes().List, metav1.ListOptions{})
	v.Slices, v.Nodes = slices, nodes
	if slicesErr != nil && nodesErr != nil {
		return fmt.Errorf("list ResourceSlices: %w", slicesErr)
	}
	v.noteUnreadable(slicesErr, "ResourceSlices", "devices that DRA offers are left out")
	v.noteUnreadable(nodesErr, "nodes", "devices that device plugins offer are left out")

	// A user who may read a single namespace sees only the consumers there.
	v.readEverywhere("ResourceClaims", "what claims of other namespaces have counts as free", func(namespace string) (err error) {
		v.Claims, err = ListObjects[resourceapi.ResourceClaim](ctx, dra.ResourceClaims(namespace).List, metav1.ListOptions{})
		return err
	})
	v.readEverywhere("pods", "what pods of other namespaces have by limits counts as free", func(namespace string) (err error) {
		v.Pods, err = ListObjects[corev1.Pod](ctx, v.Client.CoreV1().Pods(namespace).List, metav1.ListOptions{})
		return err
	})
	if what.Classes {
		classes, err := ListObjects[resourceapi.DeviceClass](ctx, dra.DeviceClasses().List, metav1.ListOptions{})
		v.Classes = classes
		v.noteUnreadable(err, "DeviceClasses", "the devices of classes are unknown")
	}
	rules, err := ListObjects[resourceapi.DeviceTaintRule](ctx, dra.DeviceTaintRules().List, metav1.ListOptions{})
	v.noteUnreadable(err, "DeviceTaintRules", "taints that administrators set are left out")
	v.applyTaints(rules)
	if what.Templates {
		templates, err := ListObjects[resourceapi.ResourceClaimTemplate](ctx, dra.ResourceClaimTemplates(v.Namespace).List, metav1.ListOptions{})
		v.Templates = templates
		v.noteUnreadable(err, "ResourceClaimTemplates", "claims that are not created yet are left out")
	}
	return nil
}

// readEverywhere reads the objects of all namespaces or, if that is forbidden, of the user's
// namespace.
func (v *View) readEverywhere(what, then string, read func(namespace string) error) {
	err := read(metav1.NamespaceAll)
	if !apierrors.IsForbidden(err) {
		v.noteUnreadable(err, what, "the consumers of devices are unknown")
		return
	}
	if own := read(v.Namespace); own != nil {
		v.noteUnreadable(own, what, "the consumers of devices are unknown")
		return
	}
	v.Missing = append(v.Missing, fmt.Sprintf("%s of other namespaces than %s: forbidden; %s", what, v.Namespace, then))
}

// noteUnreadable notes what could not be read, and the consequences. An API server without
// resource.k8s.io has no such objects, which is not noted.
func (v *View) noteUnreadable(err error, what, then string) {
	switch {
	case err == nil, apierrors.IsNotFound(err):
	case apierrors.IsForbidden(err):
		v.Missing = append(v.Missing, fmt.Sprintf("%s: forbidden; %s", what, then))
	default:
		v.Missing = append(v.Missing, fmt.Sprintf("%s: %v; %s", what, err, then))
	}
}

// applyTaints applies DeviceTaintRules to the devices, as the scheduler does before it considers
// them (resourceslice/tracker/tracker.go of k8s.io/dynamic-resource-allocation 0.37, applyPatches).
func (v *View) applyTaints(rules []resourceapi.DeviceTaintRule) {
	is := func(wanted *string, name string) bool { return wanted == nil || *wanted == name }
	for i := range rules {
		selector := rules[i].Spec.DeviceSelector
		if selector == nil {
			continue
		}
		for j := range v.Slices {
			spec := &v.Slices[j].Spec
			for k := range spec.Devices {
				if is(selector.Driver, spec.Driver) && is(selector.Pool, spec.Pool.Name) && is(selector.Device, spec.Devices[k].Name) {
					spec.Devices[k].Taints = append(spec.Devices[k].Taints, rules[i].Spec.Taint)
				}
			}
		}
	}
}

// ListObjects lists objects in pages of 500, so that no answer of the API server grows with the
// cluster. If the rest of a list has expired meanwhile, one request reads the whole list.
func ListObjects[T any, L runtime.Object](ctx context.Context, read func(context.Context, metav1.ListOptions) (L, error), options metav1.ListOptions) (items []T, err error) {
	pages := pager.New(func(ctx context.Context, page metav1.ListOptions) (runtime.Object, error) { return read(ctx, page) })
	all, _, err := pages.List(ctx, options)
	if err != nil {
		return nil, err
	}
	items = []T{} // an empty list is not null in JSON
	err = meta.EachListItem(all, func(object runtime.Object) error {
		items = append(items, *any(object).(*T))
		return nil
	})
	return items, err
}

// PodStart returns the start time of a pod, zero if unknown.
func (v *View) PodStart(namespace, name string) (since time.Time) {
	for i := range v.Pods {
		if p := &v.Pods[i]; p.Namespace == namespace && p.Name == name {
			since = p.CreationTimestamp.Time
			if p.Status.StartTime != nil {
				since = p.Status.StartTime.Time
			}
		}
	}
	return since
}
