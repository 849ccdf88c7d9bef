package publish

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"chandler.dev/driver/features"
)

const (
	// negotiateTimeout limits the detection of the API server's features.
	negotiateTimeout = 10 * time.Second

	// refusalPause is the time at the start during which a refused detection is not final. An API
	// server that has just started has not read its roles yet, and the published names of shares
	// depend on its features.
	refusalPause = 30 * time.Second

	// askInterval is the approximate interval of detections, since the API server may have been
	// upgraded or configured with other feature gates. After a failed detection, the interval is
	// shorter.
	askInterval = 30 * time.Minute
	sooner      = 30 // divisor of the interval after a failure

	// featuresFresh is the maximum age of a detection with which the publisher begins.
	featuresFresh = time.Minute
)

// detectFeatures detects the API server's features for the publisher. It returns the reason of a
// failure, and logs the reason if it differs from the last one.
func (p *Publisher) detectFeatures(ctx context.Context, s *schedule, last string) (reason string) {
	fresh := time.Duration(0)
	if !s.featuresKnown {
		fresh = featuresFresh
	}
	err := p.detectUnlessFresh(ctx, fresh)
	if ctx.Err() != nil {
		return last
	}
	interval := p.askInterval
	if err != nil {
		interval /= sooner
		reason = err.Error()
	}
	switch {
	case err == nil:
		p.refusal.Store(nil)
	case IsRejection(err):
		p.refusal.Store(&reason)
	}
	s.recordDetection(err, time.Now(), interval-interval/4+rand.N(interval/2))
	switch {
	case err == nil:
	case !s.waitsForFeatures():
		klog.FromContext(ctx).Info("The API server's support for fields of ResourceSlices is unknown; until it is known, only fields that it has kept are published", "reason", reason, "without", p.KeptFeatures().MissingNames())
	case reason != last:
		klog.FromContext(ctx).Info("Publishing ResourceSlices waits for the API server", "reason", reason)
	}
	return reason
}

// IsRejection reports whether the API server rejected the request. No answer, an internal error or
// a request to slow down is not a rejection.
func IsRejection(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Code < http.StatusInternalServerError && !apierrors.IsTooManyRequests(err)
}

// isStaleWrite reports whether the API server rejected the request only because the slice has
// changed or is gone. The library reads the slice again and repeats the write.
func isStaleWrite(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
}

// Refusal returns the API server's reason for refusing the node's ResourceSlices, such as the
// answer of an admission webhook. It returns "" if the last detection succeeded or there was none.
func (p *Publisher) Refusal() string { return ptr.Deref(p.refusal.Load(), "") }

// DetectFeatures detects the API server's features, unless a detection has succeeded in the last minute. It
// returns a NotFound error if the API server does not serve ResourceSlices in a supported version.
// It may be called before [Publisher.Run], which then begins with the result.
func (p *Publisher) DetectFeatures(ctx context.Context) error {
	return p.detectUnlessFresh(ctx, featuresFresh)
}

// detectUnlessFresh detects the API server's features, unless the last success is more recent than
// the duration. A concurrent call waits for the first one.
func (p *Publisher) detectUnlessFresh(ctx context.Context, fresh time.Duration) error {
	select {
	case p.detecting <- struct{}{}:
		defer func() { <-p.detecting }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if time.Since(p.lastDetection) < fresh {
		return nil
	}
	err := p.negotiateFeatures(ctx)
	if err == nil {
		p.lastDetection = time.Now()
	}
	return err
}

// negotiateFeatures detects the optional fields of ResourceSlices that the API server keeps, by
// creating slices in dry runs. Detection from the published slices would be too late: if the server
// dropped counters, a whole device and its partitions could both be allocated in the meantime.
func (p *Publisher) negotiateFeatures(ctx context.Context) error {
	asking, cancel := context.WithTimeout(ctx, negotiateTimeout)
	defer cancel()
	kept, err := features.DetectFeatures(asking, p.config.KubeClient, p.config.NodeName)
	if err != nil {
		return err
	}
	if before := p.features.Swap(&kept); before == nil || *before != kept {
		klog.FromContext(ctx).Info("The API server's support for fields of ResourceSlices is known; publishing accordingly", "without", kept.MissingNames())
	}
	return nil
}

// disableFeatures removes features that the API server has disabled, and reports whether the set
// has changed.
func (p *Publisher) disableFeatures(disabled []string) bool {
	for {
		before := p.features.Load()
		if before == nil {
			return false // no feature is in use
		}
		after := before.WithoutFeatures(disabled...)
		if after == *before {
			return false
		}
		if p.features.CompareAndSwap(before, &after) {
			return true
		}
	}
}

// Features returns the features of ResourceSlices that the API server keeps or drops, or nil before
// their detection.
func (p *Publisher) Features() []features.Feature {
	kept := p.features.Load()
	if kept == nil {
		return nil
	}
	return kept.AllFeatures()
}

// KeptFeatures returns the known features of the API server, none before their detection.
func (p *Publisher) KeptFeatures() features.Set { return ptr.Deref(p.features.Load(), features.Set{}) }
