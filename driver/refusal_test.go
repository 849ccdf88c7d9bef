package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"chandler.dev/internal/ledger"
)

// A refusal has the reason of where it arose, whatever was said around it since.
func TestRefusalOf(t *testing.T) {
	held := &ledger.Blocked{Device: "a"}
	disk := &fs.PathError{Op: "open", Path: "x", Err: fs.ErrPermission}
	for _, test := range []struct {
		err  error
		want Refusal
	}{
		{held, RefusedHeld},
		{because(RefusedConfiguring, fmt.Errorf("configure: %w", held)), RefusedHeld},
		{because(RefusedChanged, disk), RefusedChanged},
		{disk, RefusedDisk},
		{because(RefusedGone, because(RefusedParameters, errors.New("x"))), RefusedParameters},
		{fmt.Errorf("wait: %w", context.DeadlineExceeded), RefusedWaiting},
		{errStopping, RefusedWaiting},
		{errors.New("x"), RefusedOther},
	} {
		if got := RefusalOf(fmt.Errorf("prepare claim: %w", test.err)); got != test.want {
			t.Errorf("%v: %s, want %s", test.err, got, test.want)
		}
	}
	if because(RefusedGone, nil) != nil {
		t.Error("an error of nothing")
	}
	if err := because(RefusedGone, errors.New("device x is gone")); err.Error() != "device x is gone" {
		t.Errorf("another text: %v", err)
	}
}
