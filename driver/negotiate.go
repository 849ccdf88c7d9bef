package driver

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
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

// negotiateLoop asks the API server what it keeps of slices: now and then, and
// when it made something else of them than was expected.
func (d *Driver) negotiateLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(d.askInterval*3/4 + rand.N(d.askInterval/2)):
		case <-d.ask:
		}
		d.negotiate(ctx)
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
	if before := d.without.Swap(&without); *before != without {
		logger.Info("The API server keeps other fields of ResourceSlices than was thought; publishing accordingly", "without", without.names())
		d.wakePublisher()
	}
}

// Negotiate returns what the API server drops of slices for the node, or does
// not take. It creates some in a dry run: one with all optional fields, and
// where that is refused one for each.
func Negotiate(ctx context.Context, client kubernetes.Interface, nodeName string) (without Without, err error) {
	create := func(spec resourceapi.ResourceSliceSpec) (*resourceapi.ResourceSliceSpec, error) {
		return dryRun(ctx, client, nodeName, spec)
	}
	if err := without.find(create, probes()); err != nil {
		return Without{}, err
	}
	if !without.Counters {
		return without, nil
	}
	// Before 1.35 counters and who takes of them were of one slice.
	made, err := create(resourceapi.ResourceSliceSpec{
		SharedCounters: []resourceapi.CounterSet{{Name: probeSet, Counters: probeCounters()}},
		Devices:        []resourceapi.Device{probePart("part")},
	})
	switch {
	case err == nil && len(made.SharedCounters) > 0 && slices.ContainsFunc(made.Devices, consumes):
		without.Counters, without.Separate = false, true
	case err != nil && !apierrors.IsInvalid(err):
		return Without{}, fmt.Errorf("counters with their devices: %w", err)
	}
	return without, nil
}

// probe is an optional field that a server keeps, drops or refuses.
type probe struct {
	feature string
	device  resourceapi.Device
	kept    func(resourceapi.Device) bool
}

const probeSet = "silicon"

func probeCounters() map[string]resourceapi.Counter {
	return map[string]resourceapi.Counter{"slices": {Value: resource.MustParse("1")}}
}

func probePart(name string) resourceapi.Device {
	return resourceapi.Device{Name: name, ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: probeSet, Counters: probeCounters()}}}
}

func consumes(d resourceapi.Device) bool { return len(d.ConsumesCounters) > 0 }

// probes returns a device for each optional field.
func probes() []probe {
	taint := func(effect resourceapi.DeviceTaintEffect) []resourceapi.DeviceTaint {
		return []resourceapi.DeviceTaint{{Key: taintKey(discovery.ConditionUnhealthy), Effect: effect}}
	}
	tainted := func(d resourceapi.Device) bool { return len(d.Taints) > 0 }
	one := resource.MustParse("1")
	return []probe{
		{
			"DRANodeAllocatableResources",
			resourceapi.Device{Name: "needy", NodeAllocatableResources: map[corev1.ResourceName]resourceapi.NodeAllocatableResource{
				corev1.ResourceMemory: {Overhead: &resourceapi.NodeAllocatableOverhead{PerPod: &one}},
			}},
			func(d resourceapi.Device) bool {
				return d.NodeAllocatableResources[corev1.ResourceMemory].Overhead != nil
			},
		},
		{"DRADeviceTaints", resourceapi.Device{Name: "sick", Taints: taint(resourceapi.DeviceTaintEffectNoSchedule)}, tainted},
		{"DeviceTaintEffectNone", resourceapi.Device{Name: "told", Taints: taint(resourceapi.DeviceTaintEffectNone)}, tainted},
		{
			"DRAConsumableCapacity",
			resourceapi.Device{Name: "shared", AllowMultipleAllocations: new(true), Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
				discovery.Shares: {Value: one, RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &one}},
			}},
			func(d resourceapi.Device) bool {
				return d.AllowMultipleAllocations != nil && d.Capacity[discovery.Shares].RequestPolicy != nil
			},
		},
		{"DRAPartitionableDevices", probePart("part"), consumes},
	}
}

// find adds the features that the server drops or refuses. Where it refuses
// them together, they are tried one by one.
func (w *Without) find(create func(resourceapi.ResourceSliceSpec) (*resourceapi.ResourceSliceSpec, error), probes []probe) error {
	var spec resourceapi.ResourceSliceSpec
	for _, p := range probes {
		spec.Devices = append(spec.Devices, p.device)
	}
	made, err := create(spec)
	switch {
	case err == nil:
		kept := make(map[string]resourceapi.Device)
		for _, device := range made.Devices {
			kept[device.Name] = device
		}
		for _, p := range probes {
			if !p.kept(kept[p.device.Name]) {
				w.add(p.feature)
			}
		}
	case !apierrors.IsInvalid(err):
		return fmt.Errorf("%s: %w", probes[0].feature, err)
	case len(probes) == 1:
		w.add(probes[0].feature)
	default:
		for _, p := range probes {
			if err := w.find(create, []probe{p}); err != nil {
				return err
			}
		}
	}
	return nil
}

// dryRun returns what the API server would make of a slice.
func dryRun(ctx context.Context, client kubernetes.Interface, nodeName string, spec resourceapi.ResourceSliceSpec) (*resourceapi.ResourceSliceSpec, error) {
	spec.Driver, spec.NodeName = discovery.Domain, &nodeName
	spec.Pool = resourceapi.ResourcePool{Name: nodeName, Generation: 1, ResourceSliceCount: 1}
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{GenerateName: "chandler-dry-run-"}, Spec: spec}
	made, err := draclient.New(client).ResourceSlices().Create(ctx, slice, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return nil, err
	}
	return &made.Spec, nil
}
