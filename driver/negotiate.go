package driver

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
)

const (
	// negotiateTimeout is how long the API server has to say what it keeps, and
	// negotiatePause how long until one is asked again that is not there.
	negotiateTimeout = 10 * time.Second
	negotiatePause   = 3 * time.Second

	// askInterval is about how often it is asked again: it may have been
	// upgraded, or have other feature gates. One that did not say, as one does
	// not that has only begun to work, is asked sooner.
	askInterval = 30 * time.Minute
	sooner      = 30 // so many times
)

// negotiateLoop asks the API server what it keeps of slices: now and then, and
// when it made something else of them than was expected.
func (d *Driver) negotiateLoop(ctx context.Context, err error) {
	for {
		interval := d.askInterval
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Info("What the API server keeps of ResourceSlices cannot be asked; it will show", "reason", err.Error())
			interval /= sooner
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(interval*3/4 + rand.N(interval/2)):
		case <-d.ask:
		}
		err = d.negotiate(ctx)
	}
}

// reach waits for the API server: nothing can be published while it is not
// there, and nothing should be before it has said what it keeps. The error is
// its own, or the context's.
func (d *Driver) reach(ctx context.Context) error {
	reason := ""
	for {
		err := d.negotiate(ctx)
		if err == nil || answered(err) {
			return err
		}
		if ctx.Err() == nil && err.Error() != reason {
			reason = err.Error()
			klog.FromContext(ctx).Info("Publishing ResourceSlices waits for the API server", "reason", reason)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(negotiatePause):
		}
	}
}

// answered reports whether the API server said no, and not nothing or that it is
// unwell.
func answered(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Code < http.StatusInternalServerError && !apierrors.IsTooManyRequests(err)
}

// negotiate finds out what the API server keeps of the optional fields of a
// ResourceSlice, by creating some in a dry run. To learn it from what it makes
// of real ones would be too late: where it drops counters, a whole device and
// its parts could both be allocated until then.
func (d *Driver) negotiate(ctx context.Context) error {
	asking, cancel := context.WithTimeout(ctx, negotiateTimeout)
	defer cancel()
	found, err := Negotiate(asking, d.config.KubeClient, d.config.NodeName)
	if err != nil {
		return err
	}
	without := d.config.Without.or(found)
	before, news := d.without.Swap(&without), !d.asked.Swap(true)
	if news || *before != without {
		klog.FromContext(ctx).Info("The API server said what it drops of ResourceSlices; publishing accordingly", "without", without.names())
	}
	if *before != without {
		d.wakePublisher()
	}
	return nil
}

// Features returns what the API server keeps of ResourceSlices, and nothing
// before it has said so.
func (d *Driver) Features() []Feature {
	if !d.asked.Load() {
		return nil
	}
	return d.without.Load().Features()
}

// Negotiate returns what the API server drops of slices for the node, or does
// not take. It creates some in a dry run: one with all optional fields but lists,
// where that is refused one for each, and one with a list.
func Negotiate(ctx context.Context, client kubernetes.Interface, nodeName string) (without Without, err error) {
	create := func(spec resourceapi.ResourceSliceSpec) (*resourceapi.ResourceSliceSpec, error) {
		return dryRun(ctx, client, nodeName, spec)
	}
	for _, together := range [][]probe{probes(), listProbe()} {
		if err := without.find(create, together); err != nil {
			return Without{}, err
		}
	}
	if !without.Counters {
		return without, nil
	}
	// Before 1.35 counters and who takes of them were of one slice.
	both, err := create(resourceapi.ResourceSliceSpec{
		SharedCounters: []resourceapi.CounterSet{{Name: probeSet, Counters: probeCounters()}},
		Devices:        []resourceapi.Device{probePart("part")},
	})
	switch {
	case err == nil && len(both.SharedCounters) > 0 && slices.ContainsFunc(both.Devices, consumes):
		without.Counters, without.Separate = false, true
	case err != nil && !apierrors.IsInvalid(err):
		return Without{}, fmt.Errorf("dry run: %w", err)
	}
	return without, nil
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
