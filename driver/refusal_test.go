package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"
	"testing/synctest"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/exclusion"
)

// A refusal has the reason of its origin, even after further wrapping.
func TestRefusalOf(t *testing.T) {
	held := &exclusion.Blocked{Device: "a"}
	disk := &fs.PathError{Op: "open", Path: "x", Err: fs.ErrPermission}
	for _, test := range []struct {
		err  error
		want Refusal
	}{
		{held, RefusedHeld},
		{withRefusal(RefusedConfiguring, fmt.Errorf("configure: %w", held)), RefusedHeld},
		{withRefusal(RefusedChanged, disk), RefusedChanged},
		{disk, RefusedDisk},
		{withRefusal(RefusedGone, withRefusal(RefusedParameters, errors.New("x"))), RefusedParameters},
		{fmt.Errorf("wait: %w", context.DeadlineExceeded), RefusedWaiting},
		{errStopping, RefusedWaiting},
		{errors.New("x"), RefusedOther},
	} {
		if got := RefusalOf(fmt.Errorf("prepare claim: %w", test.err)); got != test.want {
			t.Errorf("%v: %s, want %s", test.err, got, test.want)
		}
	}
	if withRefusal(RefusedGone, nil) != nil {
		t.Error("an error of nothing")
	}
	if err := withRefusal(RefusedGone, errors.New("device x is gone")); err.Error() != "device x is gone" {
		t.Errorf("another text: %v", err)
	}
}

// A function without a driver is not allocated, since a container could not use it. It is allocated
// once it has a driver, and remains allocated to its claim.
func TestFunctionWithoutDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t).restart()
		function := gpu("a", 1)
		delete(function.Attributes, "driver")
		nodes := function.Edits.DeviceNodes
		unbound := func() {
			function.Edits.DeviceNodes = nil
			function.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionDriverUnbound, Reason: "no driver is bound to it"}
			b.offers(function)
		}
		unbound()
		c := claim("c", "a")
		if _, err := b.try(c); err == nil || !strings.Contains(err.Error(), "device a: no driver is bound to it") || RefusalOf(err) != RefusedChanged {
			t.Errorf("error %v, reason %s", err, RefusalOf(err))
		}
		function.Edits.DeviceNodes, function.Health = nodes, discovery.Health{Status: discovery.Healthy}
		b.offers(function)
		mustPrepare(t, b, c)
		unbound()
		mustPrepare(t, b, c)
	})
}

// A function was created for a claim, and its driver refuses it. The claim waits, although its
// devices were under configuration.
func TestCreatedFunctionWithoutDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		made := false
		b.config.Configure = func(d discovery.Device, _ discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
			if made {
				return d, nil, nil
			}
			return d, func(context.Context) error { return errors.New("its driver did not take it") }, nil
		}
		function := gpu("a", 1)
		delete(function.Attributes, "driver")
		nodes := function.Edits.DeviceNodes
		b.restart().offers(function)
		c := claim("c", "a")
		mustRefuse(t, b, c, "its driver did not take it")
		if !b.configuring(c) {
			t.Error("forgotten that it was under way")
		}
		made = true
		function.Edits.DeviceNodes = nil
		function.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionDriverUnbound, Reason: "no driver is bound to it"}
		b.offers(function)
		mustRefuse(t, b, c, "no driver is bound to it")
		function.Edits.DeviceNodes, function.Health = nodes, discovery.Health{Status: discovery.Healthy}
		b.offers(function)
		mustPrepare(t, b, c)
	})
}
