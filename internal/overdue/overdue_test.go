package overdue_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/internal/overdue"
)

// A hanging call is recorded for its object until its end.
func TestCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls overdue.Calls
		failed := errors.New("failed")
		if err := calls.Do(time.Second, "a", "a look", func() error { return failed }); !errors.Is(err, failed) || calls.OverdueCall("a") != nil {
			t.Errorf("%v, %v", err, calls.OverdueCall("a"))
		}
		hangs := make(chan struct{})
		began := time.Now()
		err := calls.Do(time.Second, "a", "a look", func() error { <-hangs; return failed })
		if !errors.Is(err, overdue.Err) || err.Error() != "a look has not ended after 1s" || time.Since(began) != time.Second {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		if err := calls.OverdueCall("a"); !errors.Is(err, overdue.Err) || err.Error() != "a look has not ended yet" {
			t.Error(err)
		}
		if err := calls.OverdueCall("b"); err != nil {
			t.Error(err)
		}
		close(hangs)
		synctest.Wait()
		if err := calls.OverdueCall("a"); err != nil {
			t.Error(err)
		}
	})
}

// Two calls for one object are overdue. Each is recorded until its own end, whichever ends first.
func TestTwoOverdueCalls(t *testing.T) {
	for _, first := range []int{0, 1} {
		synctest.Test(t, func(t *testing.T) {
			var calls overdue.Calls
			names := []string{"a scan", "a write"}
			hangs := []chan struct{}{make(chan struct{}), make(chan struct{})}
			for i, name := range names {
				go func() { _ = calls.Do(time.Second, "a", name, func() error { <-hangs[i]; return nil }) }()
			}
			time.Sleep(2 * time.Second)
			close(hangs[first])
			synctest.Wait()
			if err := calls.OverdueCall("a"); err == nil || err.Error() != names[1-first]+" has not ended yet" {
				t.Errorf("after the end of %s: %v", names[first], err)
			}
			close(hangs[1-first])
			synctest.Wait()
			if err := calls.OverdueCall("a"); err != nil {
				t.Error(err)
			}
		})
	}
}
