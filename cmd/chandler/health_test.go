package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestServeHealth(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0") // a port that is free
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()

	var live, ready atomic.Bool
	check := func(is *atomic.Bool, words string) func(context.Context) error {
		return func(context.Context) error {
			if !is.Load() {
				return errors.New(words)
			}
			return nil
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- serveHealth(ctx, address, healthMux(check(&live, "the stove is off"), check(&ready, "the kettle is cold")))
	}()
	for {
		if connection, err := net.Dial("tcp", address); err == nil {
			connection.Close()
			break
		}
	}
	expect(t, "http://"+address+"/healthz", http.StatusServiceUnavailable, "the stove is off")
	live.Store(true)
	expect(t, "http://"+address+"/healthz", http.StatusOK, "ok")
	expect(t, "http://"+address+"/readyz", http.StatusServiceUnavailable, "the kettle is cold")
	ready.Store(true)
	expect(t, "http://"+address+"/readyz", http.StatusOK, "ok")
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
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

func TestServeHealthNamesTheAddress(t *testing.T) {
	err := serveHealth(t.Context(), "127.0.0.1:99999", nil)
	if err == nil || !strings.Contains(err.Error(), "99999") {
		t.Errorf("error %v does not name the port", err)
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
			p := &parts{options: runOptions{rescanInterval: time.Minute}}
			if test.begun > 0 {
				p.watching.Store(new(now.Add(-test.begun)))
			}
			if test.last > 0 {
				p.scanned.Store(new(now.Add(-test.last)))
			}
			err := p.checkScan(now)
			if (err == nil) != (test.want == "") || err != nil && !strings.HasPrefix(err.Error(), test.want) {
				t.Errorf("got %v; want %q", err, test.want)
			}
		})
	}
}
