package main

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/hostservice"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// serviceTransport is a transport to a host service in this process, which is missing if it is nil.
type serviceTransport struct{ handler http.Handler }

// RoundTrip implements [http.RoundTripper].
func (s *serviceTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if s.handler == nil {
		return nil, syscall.ECONNREFUSED
	}
	recorder := httptest.NewRecorder()
	s.handler.ServeHTTP(recorder, r)
	return recorder.Result(), nil
}

// grantedLock is a lock without another agent.
type grantedLock struct{ released bool }

// Acquire implements [agent.Lock].
func (l *grantedLock) Acquire(context.Context) (release func(), err error) {
	return func() { l.released = true }, nil
}

// Awaited implements [agent.Lock].
func (l *grantedLock) Awaited() bool { return false }

// An agent becomes the active one after the last write for an earlier agent. A missing host service
// does not delay the agent.
func TestSessionLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const function = "0000:03:00.0"
		k := passthroughtest.New(t)
		k.Add(function, "nvme", "3")
		release := make(chan struct{})
		transport := &serviceTransport{hostservice.NewServer(hostservice.Config{
			Host: k.Host(), Allowed: hostservice.ListAttributes(), Write: func(string, string) error { <-release; return nil },
		}).Handler()}
		killed, written := hostservice.NewClient("/run", transport), make(chan error)
		go func() {
			written <- killed.Write("test", discovery.FunctionKey(k.Host(), passthroughtest.Source(function)), passthroughtest.Source(function)+"/reset", "1")
		}()
		synctest.Wait()
		lock := sessionLock{&grantedLock{}, hostservice.NewClient("/run", transport)}
		ending, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := lock.Acquire(ending); !errors.Is(err, context.DeadlineExceeded) || !lock.Lock.(*grantedLock).released {
			t.Errorf("during a write: %v", err)
		}
		time.AfterFunc(time.Hour, func() { close(release) })
		began := time.Now()
		if _, err := lock.Acquire(t.Context()); err != nil || time.Since(began) != time.Hour {
			t.Errorf("acquired after %s: %v", time.Since(began), err)
		}
		if err := <-written; err != nil {
			t.Error(err)
		}
		transport.handler = nil
		if _, err := lock.Acquire(t.Context()); err != nil {
			t.Errorf("without a service: %v", err)
		}
	})
}
