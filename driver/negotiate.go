package driver

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
)

const (
	// negotiateTimeout is how long publishing waits for the API server to say
	// what it keeps. What it drops is learnt from its answers anyhow.
	negotiateTimeout = 10 * time.Second

	// askInterval is about how often it is asked again: it may have been
	// upgraded, or have other feature gates.
	askInterval = 30 * time.Minute
)

// negotiateLoop asks the API server now and then what it keeps of slices.
func (d *Driver) negotiateLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(d.askInterval*3/4 + rand.N(d.askInterval/2)):
			d.negotiate(ctx)
		}
	}
}

// negotiate finds out what the API server keeps of the optional fields of a
// ResourceSlice, by creating some in a dry run. To learn it from what it makes
// of real ones would be too late: where it drops counters, a whole device and
// its parts could both be allocated until then.
func (d *Driver) negotiate(ctx context.Context) {
	logger := klog.FromContext(ctx)
	asking, cancel := context.WithTimeout(ctx, negotiateTimeout)
	defer cancel()
	found, err := Negotiate(asking, d.config.KubeClient, d.config.NodeName)
	if err != nil {
		logger.Info("What the API server keeps of ResourceSlices cannot be asked; it will show", "reason", err.Error())
		return
	}
	without := d.config.Without.or(found)
	before := d.without.Swap(&without)
	logger.Info("Asked the API server what it drops of ResourceSlices",
		"taints", without.Taints, "counters", without.Counters, "sharing", without.Sharing, "toldTaints", without.Told)
	if *before != without {
		d.wakePublisher()
	}
}

// Negotiate returns what the API server drops of slices for the node, or does
// not take. It creates some in a dry run.
func Negotiate(ctx context.Context, client kubernetes.Interface, nodeName string) (Without, error) {
	dryRun := func(spec resourceapi.ResourceSliceSpec) (*resourceapi.ResourceSlice, error) {
		return dryRun(ctx, client, nodeName, spec)
	}
	one := resource.MustParse("1")
	counters := map[string]resourceapi.Counter{"slices": {Value: one}}
	plain := []resourceapi.Device{
		{Name: "sick", Taints: []resourceapi.DeviceTaint{{Key: taintKey(discovery.ConditionUnhealthy), Effect: resourceapi.DeviceTaintEffectNoSchedule}}},
		{Name: "shared", AllowMultipleAllocations: new(true), Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			discovery.Shares: {Value: one, RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &one}},
		}},
	}
	part := resourceapi.Device{Name: "part", ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: "silicon", Counters: counters}}}

	sets, err := dryRun(resourceapi.ResourceSliceSpec{SharedCounters: []resourceapi.CounterSet{{Name: "silicon", Counters: counters}}})
	if err != nil && !apierrors.IsInvalid(err) {
		return Without{}, fmt.Errorf("counters: %w", err)
	}
	separate := err == nil && len(sets.Spec.SharedCounters) > 0
	devices, err := dryRun(resourceapi.ResourceSliceSpec{Devices: append(plain, part)})
	if apierrors.IsInvalid(err) {
		// Before 1.35 counters and who takes of them were of one slice.
		separate = false
		devices, err = dryRun(resourceapi.ResourceSliceSpec{Devices: plain})
	}
	if err != nil {
		return Without{}, fmt.Errorf("devices: %w", err)
	}
	kept := make(map[string]resourceapi.Device)
	for _, device := range devices.Spec.Devices {
		kept[device.Name] = device
	}
	// Before 1.35 a taint had to have an effect.
	_, err = dryRun(resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{
		{Name: "told", Taints: []resourceapi.DeviceTaint{{Key: taintKey(discovery.ConditionUnhealthy), Effect: resourceapi.DeviceTaintEffectNone}}},
	}})
	if err != nil && !apierrors.IsInvalid(err) {
		return Without{}, fmt.Errorf("taints: %w", err)
	}
	shared := kept["shared"]
	return Without{
		Told:     err != nil,
		Taints:   len(kept["sick"].Taints) == 0,
		Counters: !separate || len(kept["part"].ConsumesCounters) == 0,
		Sharing:  shared.AllowMultipleAllocations == nil || shared.Capacity[discovery.Shares].RequestPolicy == nil,
	}, nil
}

// dryRun returns what the API server would make of a slice.
func dryRun(ctx context.Context, client kubernetes.Interface, nodeName string, spec resourceapi.ResourceSliceSpec) (*resourceapi.ResourceSlice, error) {
	spec.Driver, spec.NodeName = discovery.Domain, &nodeName
	spec.Pool = resourceapi.ResourcePool{Name: nodeName, Generation: 1, ResourceSliceCount: 1}
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{GenerateName: "chandler-dry-run-"}, Spec: spec}
	return draclient.New(client).ResourceSlices().Create(ctx, slice, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
}

// or returns what either says is dropped.
func (w Without) or(other Without) Without {
	return Without{w.Taints || other.Taints, w.Told || other.Told, w.Counters || other.Counters, w.Sharing || other.Sharing}
}
