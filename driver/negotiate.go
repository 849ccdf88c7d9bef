package driver

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

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

// negotiateLoop asks the API server what it keeps of slices: now and then, and
// when it made something else of them than was expected.
func (d *Driver) negotiateLoop(ctx context.Context, err error) {
	for {
		interval := d.askInterval
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Info("The API server does not say what it keeps of ResourceSlices; until it does, they have only what it was seen to keep", "reason", err.Error(), "without", d.features.Load().Missing())
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
// there, and nothing should be before it has said what it keeps. An API server that
// goes on refusing to say so is not waited for. The error is its own, or the
// context's.
func (d *Driver) reach(ctx context.Context) error {
	reason, start := "", time.Now()
	for {
		err := d.negotiate(ctx)
		if err == nil || answered(err) && (d.asked.Load() || time.Since(start) >= refusalPause) {
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
	kept, err := features.Ask(asking, d.config.KubeClient, d.config.NodeName)
	if err != nil {
		return err
	}
	before, news := d.features.Swap(&kept), !d.asked.Swap(true)
	if news || *before != kept {
		klog.FromContext(ctx).Info("The API server said what it keeps of ResourceSlices; publishing accordingly", "without", kept.Missing())
	}
	if *before != kept {
		d.wakePublisher()
	}
	return nil
}

// Features returns what the API server keeps of ResourceSlices, and nothing
// before it has said so.
func (d *Driver) Features() []features.Feature {
	if !d.asked.Load() {
		return nil
	}
	return d.features.Load().List()
}
