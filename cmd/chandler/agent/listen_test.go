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
		config := &Config{Uevents: func(_ context.Context, events chan scan.Changes) error {
			<-speak
			events <- scan.Changes{Everything: true}
			<-fail
			return errors.New("no socket")
		}}
		w := newHostWatch(config, nil)
		go w.listen(t.Context())
		synctest.Wait()
		if w.eventsArrive.Load() {
			t.Error("hears before anything was heard")
		}
		close(speak)
		synctest.Wait()
		if !w.eventsArrive.Load() || len(w.events) != 1 {
			t.Errorf("hearing %v, %d events; want the first one handed on", w.eventsArrive.Load(), len(w.events))
		}
		close(fail)
		synctest.Wait()
		if w.eventsArrive.Load() {
			t.Error("hears after the socket failed")
		}
	})
}
