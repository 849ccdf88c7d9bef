package features

import (
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"chandler.dev/discovery"
)

// create returns the slice as the API server would store it.
type create func(resourceapi.ResourceSliceSpec) (*resourceapi.ResourceSliceSpec, error)

// DetectFeatures returns the optional ResourceSlice fields that the API server keeps. It creates
// slices of the node in dry runs: one with all optional fields and a list that the server must drop.
// If the server refuses that slice, DetectFeatures creates one without the list, one for each field
// if the server refuses that one too, and one with a valid list. DetectFeatures returns an error if
// the server does not answer, or refuses every slice whatever its fields.
func DetectFeatures(ctx context.Context, client kubernetes.Interface, nodeName string) (kept Set, err error) {
	create := func(spec resourceapi.ResourceSliceSpec) (*resourceapi.ResourceSliceSpec, error) {
		return dryRun(ctx, client, nodeName, spec)
	}
	refused := func() error {
		// A policy may refuse every dry run, and its refusal looks like the refusal of a field:
		// ValidatingAdmissionPolicy answers Invalid unless configured otherwise
		// (pkg/admission/plugin/policy/validating/validator.go of k8s.io/apiserver 0.37).
		_, err := create(resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{{Name: "plain"}}})
		return err
	}
	all := append(fieldProbes(), mixedProbe())
	err = kept.findTogether(create, all)
	if apierrors.IsInvalid(err) {
		err = kept.find(create, refused, fieldProbes())
		if err == nil {
			err = kept.find(create, refused, listProbe())
		}
	}
	if err != nil {
		return Set{}, fmt.Errorf("create ResourceSlices in a dry run: %w", err)
	}
	if kept.Counters {
		kept.Separate = true
		return kept, nil
	}
	// Before 1.35 counters and their consumers had to be in one slice.
	both, err := create(resourceapi.ResourceSliceSpec{
		SharedCounters: []resourceapi.CounterSet{{Name: probeSet, Counters: probeCounters()}},
		Devices:        []resourceapi.Device{probePart("part")},
	})
	switch {
	case err == nil:
		kept.Counters = len(both.SharedCounters) > 0 && slices.ContainsFunc(both.Devices, consumesCounters)
	case !apierrors.IsInvalid(err):
		return Set{}, fmt.Errorf("create ResourceSlices in a dry run: %w", err)
	}
	return kept, nil
}

// dryRun returns the slice as the API server would store it.
func dryRun(ctx context.Context, client kubernetes.Interface, nodeName string, spec resourceapi.ResourceSliceSpec) (*resourceapi.ResourceSliceSpec, error) {
	spec.Driver, spec.NodeName = discovery.Domain, &nodeName
	spec.Pool = resourceapi.ResourcePool{Name: nodeName, Generation: 1, ResourceSliceCount: 1}
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{GenerateName: "chandler-dry-run-"}, Spec: spec}
	created, err := draclient.New(client).ResourceSlices().Create(ctx, slice, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return nil, err
	}
	return &created.Spec, nil
}
