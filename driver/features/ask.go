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

// create returns what the API server would make of a slice.
type create func(resourceapi.ResourceSliceSpec) (*resourceapi.ResourceSliceSpec, error)

// Ask returns what the API server keeps of slices for the node. It creates some
// in a dry run: one with all optional fields but lists, where that is refused one
// for each, and one with a list. An error means that the server has not said what
// it keeps, because it refuses such slices whatever is in them, or did not answer.
func Ask(ctx context.Context, client kubernetes.Interface, nodeName string) (kept Set, err error) {
	create := func(spec resourceapi.ResourceSliceSpec) (*resourceapi.ResourceSliceSpec, error) {
		return dryRun(ctx, client, nodeName, spec)
	}
	refused := func() error {
		// A policy may refuse all that is created in a dry run, and its refusal looks
		// like that of a field: ValidatingAdmissionPolicy answers Invalid unless told
		// otherwise (pkg/admission/plugin/policy/validating/validator.go of
		// k8s.io/apiserver 0.37).
		_, err := create(resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{{Name: "plain"}}})
		return err
	}
	for _, together := range [][]probe{probes(), listProbe()} {
		if err := kept.find(create, refused, together); err != nil {
			return Set{}, fmt.Errorf("create ResourceSlices in a dry run: %w", err)
		}
	}
	if kept.Counters {
		kept.Separate = true
		return kept, nil
	}
	// Before 1.35 counters and who takes of them were of one slice.
	both, err := create(resourceapi.ResourceSliceSpec{
		SharedCounters: []resourceapi.CounterSet{{Name: probeSet, Counters: probeCounters()}},
		Devices:        []resourceapi.Device{probePart("part")},
	})
	switch {
	case err == nil:
		kept.Counters = len(both.SharedCounters) > 0 && slices.ContainsFunc(both.Devices, consumes)
	case !apierrors.IsInvalid(err):
		return Set{}, fmt.Errorf("create ResourceSlices in a dry run: %w", err)
	}
	return kept, nil
}

// dryRun returns what the API server would make of a slice.
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
