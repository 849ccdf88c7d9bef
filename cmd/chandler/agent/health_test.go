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
)

// The checks answer as they are when they are asked.
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
	server := httptest.NewServer(healthMux(check(&live, "the stove is off"), check(&ready, "the kettle is cold")))
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
	if response.StatusCode != status || !strings.Contains(string(body), text) {
		t.Errorf("%s: %d %s; want %d %s", url, response.StatusCode, body, status, text)
	}
}

// A scan that does not end is told of, the first one too, and one that is not
// due is not.
func TestCheckScan(t *testing.T) {
	now := time.Now()
	for name, test := range map[string]struct {
		begun, last time.Duration // before now
		want        string
	}{
		"not begun":             {},
		"begun":                 {begun: time.Minute},
		"first one hangs":       {begun: 3 * time.Minute, want: "the first scan of the host has not ended since "},
		"ended":                 {begun: time.Hour, last: time.Minute},
		"a later one hangs":     {begun: time.Hour, last: 3 * time.Minute, want: "no scan of the host has ended since "},
		"that one ended at all": {begun: time.Hour, last: 90 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			a := &agent{Config: Config{RescanInterval: time.Minute}}
			if test.begun > 0 {
				a.watching.Store(new(now.Add(-test.begun)))
			}
			if test.last > 0 {
				a.scanned.Store(new(now.Add(-test.last)))
			}
			err := a.checkScan(now)
			if (err == nil) != (test.want == "") || err != nil && !strings.HasPrefix(err.Error(), test.want) {
				t.Errorf("got %v; want %q", err, test.want)
			}
		})
	}
}
