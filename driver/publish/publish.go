// Package publish publishes the devices of a node in ResourceSlices, with the fields that the API
// server keeps.
//
// A [Publisher] is one loop around one pure function ([schedule.next]). The arguments of the function
// are the desired slices, the slices published last, the time of the registration by the kubelet,
// the time of the last answer of the API server, and the present time. The result is to publish, to
// detect the features of the server, or to wait for a duration. The loop wakes when any of these
// arguments changes.
//
// At the start, the publisher waits 30 seconds for the features of the API server (package features).
// Without an answer it publishes the required fields only, logs the missing features with the
// reason, and tries again about once a minute.
//
// At no time during a change of features or devices can both a whole device and its partition be
// allocated: the controller of the DRA library writes slices such that the pool is incomplete, and
// therefore not used, until it is completely new. Before competing devices are published for the
// first time, the features are detected once more.
//
// The publisher sets the owner of a slice when it creates the slice: the present Node. It reads the
// Node once for all slices that are created within ten seconds, and never at rest. So the slices
// remain if the Node is deleted and created again by the kubelet.
package publish

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"chandler.dev/discovery"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/internal/backoff"
)

// logInterval is the interval of the log message about an API server that does not answer.
const logInterval = 30 * time.Second

// Config is the configuration of a publisher. All fields are required.
type Config struct {
	NodeName string

	// NodeUID returns the present UID of the Node, which owns the slices.
	NodeUID func(context.Context) (types.UID, error)

	KubeClient kubernetes.Interface

	// PoolInput returns the present input of the pools, without the published pools and the features
	// of the API server. The snapshot is nil before the first scan. The second result is when the
	// input changes without an event, or zero.
	PoolInput func(now time.Time) (in pool.Input, changes time.Time)
}

// Helper is the part of [kubeletplugin.Helper] that the publisher uses.
//
// [kubeletplugin.Helper]: https://pkg.go.dev/k8s.io/dynamic-resource-allocation/kubeletplugin#Helper
type Helper interface {
	PublishResources(context.Context, resourceslice.DriverResources) error
}

// Publisher publishes the slices of one node, and detects the optional fields of slices that the
// API server keeps. Create it with [New].
type Publisher struct {
	config      Config
	askInterval time.Duration // approximate time between detections; replaced in tests

	wake            chan struct{}                                 // receives a value when the loop must check again
	registration    atomic.Pointer[time.Time]                     // time of the kubelet's last registration, nil before the first
	features        atomic.Pointer[features.Set]                  // features of the API server, nil until detected
	detecting       chan struct{}                                 // has a value during a detection of features, and guards lastDetection
	lastDetection   time.Time                                     // time of the last successful detection, zero before the first
	featuresDoubted atomic.Bool                                   // the API server may have been replaced or updated
	writeFailed     atomic.Pointer[time.Time]                     // the time of a failed write of slices, or up to half of retryAfter later; nil if the loop has handled it
	refusal         atomic.Pointer[string]                        // why the API server refuses the slices, nil if it accepts them
	lastPools       atomic.Pointer[resourceslice.DriverResources] // the pools published last, nil before the first publication; see client.adoptDevices
}

// New returns a publisher. New has no side effects.
func New(config Config) *Publisher {
	return &Publisher{config: config, askInterval: askInterval, wake: make(chan struct{}, 1), detecting: make(chan struct{}, 1)}
}

// NoteChange makes the publisher check the input of the pools again.
func (p *Publisher) NoteChange() {
	select {
	case p.wake <- struct{}{}:
	default: // it will check anyway
	}
}

// NoteRegistration tells the publisher that the kubelet has registered the driver: the kubelet may
// have deleted all slices before.
func (p *Publisher) NoteRegistration() {
	p.registration.Store(new(time.Now()))
	p.NoteChange()
}

// Run publishes slices with the helper and detects the API server's features, until the context
// ends or the helper fails.
func (p *Publisher) Run(ctx context.Context, helper Helper) error {
	s := &schedule{startTime: time.Now(), retryPause: backoff.NewPause()}
	reason := ""
	for ctx.Err() == nil {
		problems := p.refresh(s)
		switch do, until := s.next(time.Now()); do {
		case detect:
			reason = p.detectFeatures(ctx, s, reason)
		case publish:
			given := s.nextPools()
			if s.needsEarlier(given) {
				s.wanted, s.earlier = nil, p.readSlices(ctx)
				continue
			}
			if given != s.last {
				for _, problem := range problems {
					klog.FromContext(ctx).Error(problem.Err, "A device is left out of the ResourceSlices", "device", problem.Device)
				}
			}
			s.firstFailure = time.Time{}
			p.lastPools.Store(given)
			if err := p.publishPools(ctx, helper, *given); err != nil {
				return err
			}
			s.last, s.earlier, s.lastPublication, s.featuresConfirmed = given, nil, time.Now(), false
		case idle:
			timer := time.NewTimer(time.Until(until))
			select {
			case <-ctx.Done():
			case <-p.wake:
			case <-timer.C:
			}
			timer.Stop()
		}
	}
	return nil
}

// refresh updates the schedule with the present state.
func (p *Publisher) refresh(s *schedule) []discovery.Problem {
	if p.featuresDoubted.Swap(false) {
		s.nextDetection = time.Time{}
	}
	if at := p.writeFailed.Swap(nil); at != nil && s.firstFailure.IsZero() {
		s.firstFailure = *at
	}
	s.lastRegistration = ptr.Deref(p.registration.Load(), time.Time{})
	if written := p.lastPools.Load(); written != nil {
		s.adopt(written)
	}
	in, changes := p.config.PoolInput(time.Now())
	if in.Snapshot == nil {
		return nil
	}
	in.Last, in.Features = ptr.Deref(cmp.Or(s.last, s.earlier), resourceslice.DriverResources{}), p.KeptFeatures()
	s.nextChange = changes
	if s.wanted != nil && s.lastBeside == s.last && sameInput(s.wantedInput, in) {
		return s.problems
	}
	wanted, problems := pool.BuildPools(in)
	in.Last = resourceslice.DriverResources{} // lastBeside stands for it, and the memory can be freed
	s.wanted, s.problems, s.wantedInput, s.lastBeside = &wanted, problems, in, s.last
	if !s.isUnpublished() {
		s.wanted = s.last // the same pointer makes later comparisons fast
	}
	return problems
}

// readSlices returns the pools of an earlier agent. Devices remain in their slices, so a restart with
// unchanged devices writes no slice. The publisher calls readSlices before its first publication of
// a pool with several slices with devices. The names of slices begin with their index (encodeIndex in
// resourceslice/resourceslicecontroller.go of k8s.io/dynamic-resource-allocation, read in 0.37).
func (p *Publisher) readSlices(ctx context.Context) *resourceslice.DriverResources {
	ctx, cancel := context.WithTimeout(ctx, negotiateTimeout)
	defer cancel()
	earlier := &resourceslice.DriverResources{Pools: make(map[string]resourceslice.Pool)}
	list, err := draclient.New(p.config.KubeClient).ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector:   SelectSlices(p.config.NodeName),
		ResourceVersion: "0", // from the API server's cache, since the agents of a cluster may start together
	})
	if err != nil {
		klog.FromContext(ctx).Info("The published ResourceSlices cannot be read; devices may move between slices", "reason", err.Error())
		return earlier
	}
	slices.SortFunc(list.Items, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	for i := range list.Items {
		spec := &list.Items[i].Spec
		of := earlier.Pools[spec.Pool.Name]
		of.Slices = append(of.Slices, resourceslice.Slice{Devices: spec.Devices, SharedCounters: spec.SharedCounters})
		earlier.Pools[spec.Pool.Name] = of
	}
	return earlier
}

// SelectSlices returns the field selector of a node's ResourceSlices of this driver.
func SelectSlices(node string) string {
	return fields.SelectorFromSet(fields.Set{
		resourceapi.ResourceSliceSelectorDriver: discovery.Domain, resourceapi.ResourceSliceSelectorNodeName: node,
	}).String()
}

// publishPools gives the pools to the helper. Its first call blocks until the API server has listed
// the existing slices, even after the context has ended. To let the driver stop, publishPools does
// not wait for the call then. The call ends with its own context, soon afterwards.
func (p *Publisher) publishPools(ctx context.Context, helper Helper, now resourceslice.DriverResources) error {
	published := make(chan error, 1)
	go func() { published <- helper.PublishResources(ctx, now) }()
	for {
		select {
		case err := <-published:
			if err != nil {
				return fmt.Errorf("publish: %w", err)
			}
			return nil
		case <-ctx.Done():
			return nil
		case <-time.After(logInterval):
			klog.FromContext(ctx).Info("Publishing ResourceSlices waits for the API server to answer")
		}
	}
}

// CountPublished returns the number of ResourceSlices and devices in the last pools given to the
// library. It reports false before the first publication.
func (p *Publisher) CountPublished() (slices, devices int, known bool) {
	last := p.lastPools.Load()
	if last == nil {
		return 0, 0, false
	}
	all := pool.SlicesOf(*last)
	for i := range all {
		devices += len(all[i].Devices)
	}
	return len(all), devices, true
}

// PoolsByDevice returns the names of the pools in which the devices were published last.
func (p *Publisher) PoolsByDevice() map[string]string {
	byDevice := make(map[string]string)
	for name, pool := range ptr.Deref(p.lastPools.Load(), resourceslice.DriverResources{}).Pools {
		for i := range pool.Slices {
			for j := range pool.Slices[i].Devices {
				byDevice[pool.Slices[i].Devices[j].Name] = name
			}
		}
	}
	return byDevice
}

// HandleError handles errors of the library's background work from which the library recovers.
func (p *Publisher) HandleError(ctx context.Context, err error, message string) {
	var dropped *resourceslice.DroppedFieldsError
	switch {
	case errors.As(err, &dropped) && p.disableFeatures(dropped.DisabledFeatures()):
		klog.FromContext(ctx).Info("The API server drops fields of ResourceSlices; publishing without them", "without", p.KeptFeatures().MissingNames())
		p.NoteChange()
		return
	case dropped != nil || IsRejection(err) && !isStaleWrite(err):
		p.featuresDoubted.Store(true)
		p.NoteChange()
	}
	if dropped == nil && !isStaleWrite(err) {
		p.writeFailed.Store(new(time.Now().Add(rand.N(retryAfter / 2)))) // spread the requests of many nodes
		p.NoteChange()
	}
	runtime.HandleErrorWithContext(ctx, err, message)
}
