package driver

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"chandler.dev/driver/pool/pooltest"
)

// Every waiting call returns the reason before the caller's deadline, and ends at once when the
// caller gives up.
func TestCallsSayWhatTheyWaitFor(t *testing.T) {
	c := claim("c", "a")
	prepare := func(ctx context.Context, b *bench) error {
		results, err := b.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{c})
		return errors.Join(err, results[c.UID].Err)
	}
	unprepare := func(ctx context.Context, b *bench) error {
		results, err := b.UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{{UID: c.UID}})
		return errors.Join(err, results[c.UID])
	}
	// Each function makes a driver whose calls for the claim must wait.
	inactive := func(t *testing.T) *bench {
		b := newBench(t)
		b.Driver = b.start() // its Run is not called
		return b.offers(gpu("a", 1))
	}
	blind := func(t *testing.T) *bench { return newBench(t).restart() }
	locked := func(t *testing.T) *bench {
		b := newBench(t).restart().offers(gpu("a", 1))
		if _, err := b.ledger.Lock(t.Context(), string(c.UID)); err != nil {
			t.Fatal(err)
		}
		return b
	}
	configuring := func(t *testing.T) *bench {
		b := newBench(t).restart().offers(gpu("a", 1))
		b.claims.jobs.byUID = map[types.UID]*job{c.UID: {devices: []string{"a"}, startTime: time.Now(), cancel: func() {}, done: make(chan struct{})}}
		return b
	}
	tests := map[string]struct {
		make  func(*testing.T) *bench
		call  func(context.Context, *bench) error
		words string
	}{
		"Prepare, to be active":        {inactive, prepare, "wait for another agent of this node"},
		"Unprepare, to be active":      {inactive, unprepare, "wait for another agent of this node"},
		"Prepare, for the first scan":  {blind, prepare, "wait for the first scan of the host"},
		"Prepare, for another call":    {locked, prepare, "wait for another call for the claim"},
		"Unprepare, for another call":  {locked, unprepare, "wait for another call for the claim"},
		"Prepare, for configuration":   {configuring, prepare, "still configuring a"},
		"Unprepare, for configuration": {configuring, unprepare, "still configuring a"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				for _, patience := range []time.Duration{45 * time.Second, time.Second, 0} {
					ctx, cancel := context.WithCancel(t.Context())
					if patience > 0 {
						ctx, cancel = context.WithTimeout(t.Context(), patience)
					}
					b := test.make(t)
					start := time.Now()
					err := test.call(ctx, b)
					if took := time.Since(start); ctx.Err() != nil || took == 0 || took > callLimit {
						t.Errorf("a caller that waits %s has an answer after %s: %v", patience, took, ctx.Err())
					}
					if err == nil || !strings.Contains(err.Error(), test.words) {
						t.Errorf("error lacks %q: %v", test.words, err)
					}
					cancel()
					start = time.Now()
					if err := test.call(ctx, b); err == nil || time.Since(start) > 0 {
						t.Errorf("a call without a caller ends after %s: %v", time.Since(start), err)
					}
				}
			})
		})
	}
}

// A call that need not wait succeeds even if its context has ended.
func TestCallsThatNeedNotWait(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 { // select chooses a ready case at random
		c := claim("c", "a")
		results, err := b.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{c})
		if err = errors.Join(err, results[c.UID].Err); err != nil {
			t.Fatal(err)
		}
		if err := b.tryUnprepare(c); err != nil {
			t.Fatal(err)
		}
	}
}

// A stopping driver ends a call that waits for a scan.
func TestStoppingEndsWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		stop := b.run(&pooltest.Helper{})
		prepared := make(chan error, 1)
		go func() {
			_, err := b.try(claim("c", "a"))
			prepared <- err
		}()
		synctest.Wait()
		start := time.Now()
		if err := stop(); err != nil || time.Since(start) > 0 {
			t.Errorf("Run ended after %s: %v", time.Since(start), err)
		}
		if err := <-prepared; !errors.Is(err, errStopping) {
			t.Errorf("the call: %v", err)
		}
	})
}
