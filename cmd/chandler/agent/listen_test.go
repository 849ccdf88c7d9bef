package agent

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"chandler.dev/discovery/scan"
)

// The agent records whether it receives the kernel's events: from the first value until Uevents
// fails.
func TestListenKnowsWhetherItHears(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		speak, fail := make(chan struct{}), make(chan struct{})
		a := &agent{events: make(chan scan.Changes, 1)}
		a.Uevents = func(_ context.Context, events chan scan.Changes) error {
			<-speak
			events <- scan.Changes{Everything: true}
			<-fail
			return errors.New("no socket")
		}
		go a.listen(t.Context())
		synctest.Wait()
		if a.eventsArrive.Load() {
			t.Error("hears before anything was heard")
		}
		close(speak)
		synctest.Wait()
		if !a.eventsArrive.Load() || len(a.events) != 1 {
			t.Errorf("hearing %v, %d events; want the first one handed on", a.eventsArrive.Load(), len(a.events))
		}
		close(fail)
		synctest.Wait()
		if a.eventsArrive.Load() {
			t.Error("hears after the socket failed")
		}
	})
}
