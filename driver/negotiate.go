package driver

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
	// negotiateTimeout is how long the API server has to say what it keeps, and
	// negotiatePause how long until one is asked again that is not there.
	negotiateTimeout = 10 * time.Second
	negotiatePause   = 3 * time.Second

	// refusalPause is for how long a refusal to say what it keeps is not taken for
	// the API server's last word. One that has only begun to work has not read its
	// roles yet, and names of shares go by what it keeps.
	refusalPause = 30 * time.Second

	// askInterval is about how often it is asked again: it may have been
	// upgraded, or have other feature gates. One that did not say, as one does
	// not that has only begun to work, is asked sooner.
	askInterval = 30 * time.Minute
	sooner      = 30 // so many times
)

// ask asks the API server what it keeps, for the publisher. It logs why the server
// does not say, where that is another reason than the last, and returns it.
func (d *Driver) ask(ctx context.Context, p *publisher, last string) (reason string) {
	err := d.negotiate(ctx)
	if ctx.Err() != nil {
		return last
	}
	interval := d.askInterval
	if err != nil {
		interval /= sooner
		reason = err.Error()
	}
	switch {
	case err == nil:
		d.refusal.Store(nil)
	case refused(err):
		d.refusal.Store(&reason)
	}
	p.hear(err, time.Now(), interval-interval/4+rand.N(interval/2))
	switch {
	case err == nil:
	case !p.waits():
		klog.FromContext(ctx).Info("The API server does not say what it keeps of ResourceSlices; until it does, they have only what it was seen to keep", "reason", reason, "without", d.kept().Missing())
	case reason != last:
		klog.FromContext(ctx).Info("Publishing ResourceSlices waits for the API server", "reason", reason)
	}
	return reason
}

// refused reports whether the API server said no, and not nothing or that it is
// unwell.
func refused(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Code < http.StatusInternalServerError && !apierrors.IsTooManyRequests(err)
}

// overtaken reports whether the API server said no only because the slice is another by now,
// or is gone. The library looks again and writes anew.
func overtaken(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
}

// Refusal returns why the API server refuses the node's ResourceSlices, such as the answer of
// an admission webhook, "" if it does not, or was not asked since.
func (d *Driver) Refusal() string { return ptr.Deref(d.refusal.Load(), "") }

// negotiate finds out what the API server keeps of the optional fields of a
// ResourceSlice, by creating some in a dry run. To learn it from what it makes
// of real ones would be too late: where it drops counters, a whole device and
// its parts could both be allocated until then.
func (d *Driver) negotiate(ctx context.Context) error {
	asking, cancel := context.WithTimeout(ctx, negotiateTimeout)
	defer cancel()
	kept, err := features.Ask(asking, d.config.KubeClient, d.config.NodeName)
	if err != nil {
		return err
	}
	if before := d.features.Swap(&kept); before == nil || *before != kept {
		klog.FromContext(ctx).Info("The API server said what it keeps of ResourceSlices; publishing accordingly", "without", kept.Missing())
	}
	return nil
}

// learn notes feature gates that the API server has off, and reports whether
// that was news.
func (d *Driver) learn(disabled []string) bool {
	for {
		before := d.features.Load()
		if before == nil {
			return false // nothing is taken for kept
		}
		after := before.Without(disabled...)
		if after == *before {
			return false
		}
		if d.features.CompareAndSwap(before, &after) {
			return true
		}
	}
}

// Features returns what the API server keeps of ResourceSlices, and nothing
// before it has said so.
func (d *Driver) Features() []features.Feature {
	kept := d.features.Load()
	if kept == nil {
		return nil
	}
	return kept.List()
}
