package driver

import (
	"context"
	"errors"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

func TestSweep(t *testing.T) {
	b := newBench(t)
	var abandoned []types.UID
	var failure error
	b.config.Abandoned = func(_ context.Context, claims []Claim) ([]types.UID, error) {
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
	sweep := func(before map[types.UID]bool) map[types.UID]bool { return b.sweep(t.Context(), before) }

	abandoned = []types.UID{lost.UID}
	suspects := sweep(nil)
	if !exists(b.recordFile(lost)) {
		t.Fatal("let go at the first sight: the kubelet may be about to unprepare it")
	}
	failure = errors.New("the API server is away")
	suspects = sweep(suspects)
	if !exists(b.recordFile(lost)) {
		t.Fatal("let go though nobody could be asked")
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
		t.Error("a claim that somebody has was let go")
	}
	mustPrepare(t, b, claim("next", "b"))
}

// What was prepared in an earlier boot is swept too, or it would stay for ever.
func TestSweepAsksAboutEarlierBoots(t *testing.T) {
	b := newBench(t)
	b.restart().offers(gpu("a", 1))
	mustPrepare(t, b, claim("old", "a"))
	b.config.BootID = "boot-2"
	b.restart()
	var asked []string
	b.Driver.config.Abandoned = func(_ context.Context, claims []Claim) ([]types.UID, error) {
		for _, claim := range claims {
			asked = append(asked, claim.Name)
		}
		return nil, nil
	}
	b.sweep(t.Context(), nil)
	if !slices.Equal(asked, []string{"old"}) {
		t.Errorf("asked about %q", asked)
	}
}
