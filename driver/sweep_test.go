package driver

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/allocation"
)

func TestSweep(t *testing.T) {
	b := newBench(t)
	var abandoned []types.UID
	var failure error
	b.config.Abandoned = func(_ context.Context, claims []allocation.Owner) ([]types.UID, error) {
		for _, claim := range claims {
			if claim.Namespace != "default" || claim.Name == "" {
				t.Errorf("asked about %v", claim)
			}
		}
		return abandoned, failure
	}
	b.restart().offers(gpu("a", 1), gpu("b", 2))
	kept, lost := claim("kept", "a"), claim("lost", "b")
	mustPrepare(t, b, kept)
	mustPrepare(t, b, lost)
	sweep := func(before map[types.UID]bool) map[types.UID]bool { return b.unprepareAbandoned(t.Context(), before) }

	abandoned = []types.UID{lost.UID}
	suspects := sweep(nil)
	if !exists(b.recordFile(lost)) {
		t.Fatal("let go when it was first seen: the kubelet may be about to unprepare it")
	}
	failure = errors.New("the API server is away")
	suspects = sweep(suspects)
	if !exists(b.recordFile(lost)) {
		t.Fatal("released without an answer of the kubelet or the API server")
	}
	failure = nil
	abandoned = nil
	if again := sweep(suspects); len(again) > 0 {
		t.Errorf("suspected of what is not so any more: %v", again)
	}
	abandoned = []types.UID{lost.UID}
	sweep(sweep(nil))
	if exists(b.recordFile(lost)) || exists(b.specFile(lost)) {
		t.Error("an abandoned claim is kept")
	}
	if !exists(b.recordFile(kept)) || !exists(b.specFile(kept)) {
		t.Error("a claim with a consumer was released")
	}
	mustPrepare(t, b, claim("next", "b"))
}

// While a pod is refused a device of an abandoned claim, the search for abandoned claims runs soon.
// Otherwise it does not.
func TestSweepForAPodThatWaits(t *testing.T) {
	for waits, want := range map[bool]time.Duration{true: 5 * time.Minute, false: 7 * time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			lost, next := claim("lost", "a"), claim("next", "a")
			asked := 0
			b.config.Abandoned = func(context.Context, []allocation.Owner) ([]types.UID, error) {
				asked++
				return []types.UID{lost.UID}, nil
			}
			b.restart().offers(gpu("a", 1))
			mustPrepare(t, b, lost)
			ctx, cancel := context.WithCancel(t.Context())
			go b.sweepLoop(ctx)
			for began := time.Now(); time.Since(began) < want; time.Sleep(20 * time.Second) {
				if waits {
					_, _ = b.try(next)
				}
			}
			if waits == exists(b.recordFile(lost)) || !waits && asked > 0 {
				t.Errorf("a pod waits: %t; asked %d times", waits, asked)
			}
			cancel()
			synctest.Wait()
		})
	}
}

// A claim may be prepared for a pod while the sweep still relies on an earlier answer. Whether it
// is prepared before the sweep has the claim's lock or waits for the lock, the pod has the claim in
// the end.
func TestSweepOfAClaimThatIsPreparedAgain(t *testing.T) {
	for name, device := range map[string]string{"reserved again": "a", "allocated anew": "b"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				before, anew := claim("c", "a"), claim("c", device)
				uids := []types.UID{before.UID}
				var answers []func() []types.UID
				b.config.Abandoned = func(context.Context, []allocation.Owner) ([]types.UID, error) {
					next := answers[0]
					answers = answers[1:]
					return next(), nil
				}
				b.restart().offers(gpu("a", 1), gpu("b", 2))
				expectPrepared := func(when string) {
					t.Helper()
					_, found := b.specOf(anew)["chandler.dev/claim=uid-c-0-"+device]
					if who, _ := b.OwnerOf(device); !found || !exists(b.recordFile(anew)) || who != "claim default/c" {
						t.Errorf("%s: spec %t, record %t, held by %q", when, found, exists(b.recordFile(anew)), who)
					}
				}
				mustPrepare(t, b, before)
				answers = []func() []types.UID{
					func() []types.UID {
						mustUnprepare(t, b, before)
						mustPrepare(t, b, anew)
						return uids // as it was at the time of the request
					},
					func() []types.UID { return nil },
				}
				b.unprepareAbandoned(t.Context(), map[types.UID]bool{before.UID: true})
				expectPrepared("prepared before")

				prepared := make(chan error, 1)
				answers = []func() []types.UID{
					func() []types.UID { return uids },
					func() []types.UID {
						go func() { _, err := b.try(anew); prepared <- err }()
						synctest.Wait()
						if len(prepared) > 0 {
							t.Error("prepared while the sweep has the claim")
						}
						return uids
					},
				}
				b.unprepareAbandoned(t.Context(), map[types.UID]bool{before.UID: true})
				if err := <-prepared; err != nil {
					t.Error(err)
				}
				expectPrepared("prepared while it was swept")
			})
		})
	}
}

// A claim that was prepared in an earlier boot is swept too. Otherwise it would remain permanently.
func TestSweepAsksAboutEarlierBoots(t *testing.T) {
	b := newBench(t)
	b.restart().offers(gpu("a", 1))
	mustPrepare(t, b, claim("old", "a"))
	b.boot = "boot-2"
	b.restart()
	var asked []string
	b.Driver.config.Abandoned = func(_ context.Context, claims []allocation.Owner) ([]types.UID, error) {
		for _, claim := range claims {
			asked = append(asked, claim.Name)
		}
		return nil, nil
	}
	b.unprepareAbandoned(t.Context(), nil)
	if !slices.Equal(asked, []string{"old"}) {
		t.Errorf("asked about %q", asked)
	}
}

// A claim with an unreadable record is checked by its UID alone, and released like any other claim.
func TestSweepOfUnreadableRecords(t *testing.T) {
	b := newBench(t)
	b.restart().offers(gpu("a", 1))
	c := claim("c", "a")
	mustPrepare(t, b, c)
	if err := os.WriteFile(b.recordFile(c), []byte("noise"), 0o600); err != nil {
		t.Fatal(err)
	}
	var asked []allocation.Owner
	b.config.Abandoned = func(_ context.Context, claims []allocation.Owner) ([]types.UID, error) {
		asked = claims
		return []types.UID{c.UID}, nil
	}
	b.restart().offers(gpu("a", 1))
	suspects := b.unprepareAbandoned(t.Context(), nil)
	if !slices.Equal(asked, []allocation.Owner{{API: discovery.ModeDRA, UID: c.UID}}) {
		t.Errorf("asked about %v", asked)
	}
	mustRefuse(t, b, claim("other", "a"), "in use by claim with UID uid-c")
	b.unprepareAbandoned(t.Context(), suspects)
	if left, _ := os.ReadDir(b.records()); len(left) > 0 || exists(b.specFile(c)) {
		t.Errorf("left of it: %v", left)
	}
	mustPrepare(t, b, claim("other", "a"))
}

// An abandoned claim whose devices are under configuration delays the sweep and the other claims no
// longer than a call would.
func TestSweepDoesNotWaitForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, f := newFPGAs(t)
		f.hold = make(chan struct{})
		b.config.Abandoned = func(_ context.Context, claims []allocation.Owner) (uids []types.UID, err error) {
			for _, c := range claims {
				uids = append(uids, c.UID)
			}
			return uids, nil
		}
		b.restart().offers(gpu("a", 1), gpu("b", 2))
		busy, idle := wanting("new", claim("busy", "a")), claim("idle", "b")
		if _, err := b.call(busy); err == nil {
			t.Fatal("prepared")
		}
		mustPrepare(t, b, idle)
		start := time.Now()
		b.unprepareAbandoned(t.Context(), b.unprepareAbandoned(t.Context(), nil))
		if time.Since(start) > callLimit || exists(b.recordFile(idle)) || !exists(b.recordFile(busy)) {
			t.Errorf("after %s: records of idle %t, busy %t", time.Since(start), exists(b.recordFile(idle)), exists(b.recordFile(busy)))
		}
		close(f.hold)
		mustUnprepare(t, b, busy)
	})
}

// The nodes do not sweep at the same time: the pauses vary around the interval.
func TestSweepHasJitter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		var at []time.Time
		b.config.Abandoned = func(context.Context, []allocation.Owner) ([]types.UID, error) {
			at = append(at, time.Now())
			return nil, nil
		}
		b.restart().offers(gpu("a", 1))
		mustPrepare(t, b, claim("c", "a"))
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Hour)
		defer cancel()
		last := time.Now()
		b.sweepLoop(ctx)
		pauses := make(map[time.Duration]bool)
		for _, now := range at {
			pause := now.Sub(last)
			last = now
			if pauses[pause] = true; pause < 7*time.Minute || pause > 13*time.Minute {
				t.Errorf("a pause of %s", pause)
			}
		}
		if len(pauses) < 5 {
			t.Errorf("of %d sweeps the pauses are %v", len(at), pauses)
		}
	})
}

// If only the CDI spec of an ended claim exists, for example from a backup, the claim blocks its
// device for a few minutes. Its release does not wait for the regular sweep of all claims.
func TestSweepOfWhatABackupBroughtBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.restart().offers(gpu("a", 1))
		ended := claim("ended", "a")
		mustPrepare(t, b, ended)
		spec, err := os.ReadFile(b.specFile(ended))
		if err != nil {
			t.Fatal(err)
		}
		mustUnprepare(t, b, ended)
		if err := os.WriteFile(b.specFile(ended), spec, 0o644); err != nil {
			t.Fatal(err)
		}
		asked := 0
		b.config.Abandoned = func(_ context.Context, claims []allocation.Owner) (uids []types.UID, err error) {
			if asked++; asked == 1 {
				return nil, errors.New("the kubelet does not list all pods yet")
			}
			for _, c := range claims {
				uids = append(uids, c.UID)
			}
			return uids, nil
		}
		b.restart().offers(gpu("a", 1))
		mustRefuse(t, b, claim("other", "a"), "in use by claim with UID uid-ended")
		ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
		defer cancel()
		b.sweepLoop(ctx)
		mustPrepare(t, b, claim("other", "a"))
		if exists(b.specFile(ended)) {
			t.Error("the spec is still there")
		}
	})
}
