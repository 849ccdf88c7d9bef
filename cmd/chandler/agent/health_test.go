package agent

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"chandler.dev/discovery"
)

// The responses follow the present results of the checks.
func TestHealthMux(t *testing.T) {
	var live, ready atomic.Bool
	check := func(is *atomic.Bool, words string) func(context.Context) error {
		return func(context.Context) error {
			if !is.Load() {
				return errors.New(words)
			}
			return nil
		}
	}
	server := httptest.NewServer(healthMux("v1.2.3", check(&live, "the stove is off"), check(&ready, "the kettle is cold")))
	defer server.Close()
	expect(t, server.URL+"/healthz", http.StatusServiceUnavailable, "the stove is off")
	live.Store(true)
	expect(t, server.URL+"/healthz", http.StatusOK, "ok")
	expect(t, server.URL+"/readyz", http.StatusServiceUnavailable, "the kettle is cold")
	ready.Store(true)
	expect(t, server.URL+"/readyz", http.StatusOK, "ok")
}

func expect(t *testing.T, url string, status int, text string) {
	t.Helper()
	response, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	if name := response.Header.Get("Server"); name != "chandler/v1.2.3" {
		t.Errorf("%s: it is %q", url, name)
	}
	if response.StatusCode != status || !strings.Contains(string(body), text) {
		t.Errorf("%s: %d %s; want %d %s", url, response.StatusCode, body, status, text)
	}
}

// An agent that can read nothing of the host is not ready. After the first scan the agent is ready,
// and the states of devices show which devices are unreadable.
func TestCheckRead(t *testing.T) {
	now := time.Now()
	for name, test := range map[string]struct {
		begun time.Duration // time before now
		read  bool
		fail  bool
	}{
		"not begun":      {},
		"begun":          {begun: 30 * time.Second},
		"nothing read":   {begun: 2 * time.Minute, fail: true},
		"something read": {begun: time.Hour, read: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := &hostWatch{}
			if test.begun > 0 {
				w.firstStarted.Store(new(now.Add(-test.begun)))
			}
			if test.read {
				w.settled.Store(&discovery.Snapshot{})
			}
			if err := w.checkRead(now); (err != nil) != test.fail {
				t.Errorf("got %v", err)
			}
		})
	}
}
